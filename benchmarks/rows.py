"""What a section measures, as plain data, and the table of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: How a value is held against its budget.
BOUNDS = {"at most": "<=", "at least": ">=", "exactly": "="}


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured.
        value: int for counts, float for ratios.
        unit: of the value.
        how: one line on how it was measured.
        budget: None where there is none.
        bound: a key of ``BOUNDS``; without meaning where there is no budget.
    """

    name: str
    value: float
    unit: str
    how: str
    budget: float | None = None
    bound: str = "at most"

    def __post_init__(self) -> None:
        if self.bound not in BOUNDS:
            raise ValueError(f"{self.name}: bound must be one of {', '.join(BOUNDS)}, not {self.bound!r}")
        if not math.isfinite(self.value):
            raise ValueError(f"{self.name}: the value is {self.value}")

    @property
    def holds(self) -> bool:
        """Whether the value keeps to the budget; true where there is none."""
        if self.budget is None:
            return True
        if self.bound == "exactly":
            return self.value == self.budget
        return self.value <= self.budget if self.bound == "at most" else self.value >= self.budget

    def as_json(self) -> dict[str, Any]:
        """All fields and whether the budget holds."""
        return {**asdict(self), "holds": self.holds}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Row:
        """A row from its JSON, or from a module that says ``higher_is_better`` for the bound and may leave out ``how``.

        Raises:
            ValueError: a field is missing.
        """
        missing = [name for name in ("name", "value", "unit") if name not in given]
        if missing:
            raise ValueError(f"a row lacks {', '.join(missing)}: {dict(given)}")
        bound = given.get("bound") or ("at least" if given.get("higher_is_better") else "at most")
        return cls(given["name"], given["value"], given["unit"], given.get("how", ""), given.get("budget"), bound)


@dataclass(frozen=True)
class Curve:
    """Points of one picture.

    Attributes:
        x, y: axis labels with units.
        series: label -> points ``(x, y)``.
        groups: names of x = 0, 1, ..., where the picture has bars; none for lines.
    """

    x: str
    y: str
    series: dict[str, list[tuple[float, float]]]
    groups: tuple[str, ...] = ()


@dataclass
class Measured:
    """What one section measured; curves by the name of their picture."""

    rows: list[Row] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)


def number(value: float) -> str:
    """A value as it is printed: counts as integers, ratios with three decimals."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def cells(row: Row) -> list[str]:
    """A row as text: name, value, unit, budget, whether it holds, how."""
    budget = "" if row.budget is None else f"{BOUNDS[row.bound]} {number(row.budget)}"
    holds = "" if row.budget is None else "yes" if row.holds else "NO"
    return [row.name, number(row.value), row.unit, budget, holds, row.how]


HEAD = ["", "value", "unit", "budget", "holds", "how"]


def table(sections: Mapping[str, Iterable[Row]]) -> str:
    """All rows in one table for a terminal, by section."""
    body: list[Sequence[str]] = [HEAD]
    titles: dict[int, str] = {}
    for name, rows in sections.items():
        titles[len(body)] = name
        body += [cells(row) for row in rows]
    widths = [max(len(line[column]) for line in body) for column in range(len(HEAD) - 1)]
    lines = []
    for index, line in enumerate(body):
        if index in titles:
            lines += ["", titles[index]]
        padded = [line[i].rjust(width) if i in (1, 3) else line[i].ljust(width) for i, width in enumerate(widths)]
        lines.append("  ".join([*padded, line[-1]]).rstrip())
    return "\n".join(lines)
