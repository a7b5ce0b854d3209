"""``docs/faults.md`` is complete, and what it refers to exists."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from cp_shared_kv.gate import RULES

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS.parent / "docs" / "faults.md"

NUMBERS: dict[str, tuple[int, ...]] = {
    "sglang": (
        *(28718, 19119, 37909, 36928, 24527, 22811, 24230, 27666, 30609, 31182, 29725),
        *(18280, 33197, 29161, 30992, 20360, 24560, 32553, 40109, 30505, 37712, 35201, 36941, 22692, 14498),
        *(19897, 19796),
        *(30321, 38031, 38161, 38212, 39156, 39698, 28895, 28896, 32176, 37149, 26670, 31425, 28429),
        *(38324, 37122, 37234),
        38464,
    ),
    "vllm-ascend": (13965, 16144, 8050),
    "tpu-inference": (3344,),
    "ROCm/ATOM": (234,),
    "vllm-plugin-das": (21,),
    "TRT-LLM": (19273, 17866),
    "DingoCache": (355,),
}
REPORTS = [f"{project}#{number}" for project, numbers in NUMBERS.items() for number in numbers]


@dataclass(frozen=True)
class Row:
    """One row of a table: its report numbers, the verdict, and the cell that names the tests."""

    reports: tuple[str, ...]
    verdict: str
    cell: str

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.cell)


def rows() -> list[Row]:
    """Rows of all tables of the document, headings and rules left out."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| report "):
            report, _, verdict, cell = (part.strip() for part in line.strip("|").split(" | "))
            found.append(Row(tuple(re.findall(r"[\w/-]+#\d+", report)), verdict, cell))
    return found


ROWS = rows()


@cache
def defined(path: Path) -> tuple[set[str], set[str]]:
    """Tests of a file as ``function`` or ``Class::function``, and every string in it; the file is not imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for outer in tree.body:
        if isinstance(outer, ast.ClassDef):
            functions |= {f"{outer.name}::{node.name}" for node in outer.body if isinstance(node, ast.FunctionDef)}
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return functions, {value for value in constants if isinstance(value, str)}


def exists(test: str) -> bool:
    """Whether ``file::function`` or ``file::Class::function`` is there; a parameter must be a string of the file."""
    name, _, parameter = test.partition("[")
    path, _, function = name.partition("::")
    if not (TESTS / path).is_file() or not function.rpartition("::")[2].startswith("test_"):
        return False
    functions, strings = defined(TESTS / path)
    return function in functions and (not parameter or parameter.removesuffix("]") in strings)


def test_every_report_has_one_row() -> None:
    assert sorted(report for row in ROWS for report in row.reports) == sorted(REPORTS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.reports[0])
def test_a_row_names_its_tests_or_says_why_there_are_none(row: Row) -> None:
    assert row.verdict
    assert row.tests or row.cell.startswith("none: ")


def test_every_test_that_the_table_names_exists() -> None:
    named = {test for row in ROWS for test in row.tests}
    assert {test for test in named if not exists(test)} == set()


@pytest.mark.parametrize("row", [row for row in ROWS if "refused [" in row.verdict], ids=lambda row: row.reports[0])
def test_a_rule_that_the_table_names_exists_and_its_refusal_is_tested(row: Row) -> None:
    assert set(re.findall(r"\[([^]]+)\]", row.verdict)) <= {rule.name for rule in RULES}
    assert any("test_the_server_of_a_report_is_refused_by_name[" in test for test in row.tests)
