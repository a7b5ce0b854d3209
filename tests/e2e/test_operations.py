"""What a forward costs beside stock: launches of a layer, and waits of the host. Counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest

from .harness import run
from .prompts import tokens
from .spec import Report, Spec, Step

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LAUNCHES_A_LAYER = 8
LOGICAL = 8192

_prompt, _other = tokens(1200), tokens(650)
STEPS = (
    Step("three chunks", (_prompt,)),
    Step("cached prefix", (_prompt[:1024] + tokens(300),)),
    Step("cached prefix, chunk shorter than the split", (_prompt[:1024] + tokens(3),)),
    Step("chunks that end inside a page", (_other,), chunk=200),
)


def forwards(report: Report) -> list[list[dict[str, Any]]]:
    """Of each rank, what its forwards counted."""
    assert report.failure is None, f"{report.failure}\n{report.log[-3000:]}"
    return [dump["operations"] for dump in list(report.dumps.values())[-1]]


def pairs(cp_size: int, kv: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each forward of each rank, with shared KV and stock."""
    shared, stock = (
        forwards(run(Spec(STEPS, cp_size, on, LOGICAL // cp_size if on else LOGICAL, kv, dump=True, count=True)))
        for on in (True, False)
    )
    made = [pair for ours, theirs in zip(shared, stock, strict=True) for pair in zip(ours, theirs, strict=True)]
    for ours, theirs in made:
        assert (ours["prefix"], ours["tokens"]) == (theirs["prefix"], theirs["tokens"])
    assert {bool(ours["prefix"]) for ours, _ in made} == {False, True}
    return made


def difference(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    names = ours.keys() | theirs.keys()
    return {name: ours.get(name, 0) - theirs.get(name, 0) for name in names if ours.get(name, 0) != theirs.get(name, 0)}


RUNS = [(2, "bfloat16"), (2, "fp8_e4m3"), (4, "bfloat16")]


@pytest.mark.parametrize(("cp_size", "kv"), RUNS)
def test_a_layer_launches_at_most_eight_operations_more_than_stock(cp_size: int, kv: str) -> None:
    for ours, theirs in pairs(cp_size, kv):
        for mine, stock in zip(ours["layers"], theirs["layers"], strict=True):
            more = difference(mine["operations"], stock["operations"])
            assert sum(more.values()) <= LAUNCHES_A_LAYER, (ours["prefix"], ours["tokens"], more)
            assert more.get("copy_pages", 0) <= 4


@pytest.mark.parametrize(("cp_size", "kv"), RUNS)
def test_no_forward_waits_for_the_device_more_often_than_stock(cp_size: int, kv: str) -> None:
    for ours, theirs in pairs(cp_size, kv):
        assert difference(ours["waits"], theirs["waits"]) == {}, (ours["prefix"], ours["tokens"])
        assert [layer["waits"] for layer in ours["layers"]] == [layer["waits"] for layer in theirs["layers"]]


@pytest.mark.parametrize(("cp_size", "kv"), RUNS)
def test_a_forward_without_a_prefix_communicates_no_more_than_stock(cp_size: int, kv: str) -> None:
    for ours, theirs in pairs(cp_size, kv):
        if not ours["prefix"]:
            for mine, stock in zip(ours["layers"], theirs["layers"], strict=True):
                assert set(difference(mine["operations"], stock["operations"])) <= {"copy_pages"}
