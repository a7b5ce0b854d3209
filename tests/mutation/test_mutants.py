"""The mutants fit the product as it is; running them is ``make mutants``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_still_parses(mutant: Mutant) -> None:
    source = (ROOT / "src" / "cp_shared_kv" / mutant.file).read_text()
    broken = mutant.apply(source)
    ast.parse(broken)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))


def test_mutants_are_named_once_and_their_tests_exist() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert all((ROOT / mutant.tests[0]).exists() for mutant in MUTANTS)
