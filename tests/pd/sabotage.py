"""The transfer broken on purpose, by name, to show that the tests see each kind of fault."""

from __future__ import annotations

from collections.abc import Callable

BREAKS: dict[str, Callable[[], None]] = {}


def apply(name: str | None) -> None:
    """Break this prefill process; ``None`` leaves it sound."""
    if name is not None:
        BREAKS[name]()
