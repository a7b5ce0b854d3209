"""Runs whose forwards are counted (``operations.Probe``), with shared KV and stock, forward beside forward."""

from __future__ import annotations

from typing import Any

from .harness import run
from .prompts import tokens
from .spec import Report, Spec, Step

LOGICAL = 8192

_prompt, _other = tokens(1200), tokens(650)
STEPS = (
    Step("three chunks", (_prompt,)),
    Step("cached prefix", (_prompt[:1024] + tokens(300),)),
    Step("cached prefix, chunk shorter than the split", (_prompt[:1024] + tokens(3),)),
    Step("chunks that end inside a page", (_other,), chunk=200),
)


def _forwards(report: Report) -> list[list[dict[str, Any]]]:
    """Of each rank, what its forwards counted."""
    assert report.failure is None, f"{report.failure}\n{report.log[-3000:]}"
    return [dump["operations"] for dump in list(report.dumps.values())[-1]]


def pairs(cp_size: int, kv: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each forward of each rank, with shared KV and stock, as ``operations.Probe`` counted it."""
    shared, stock = (
        _forwards(run(Spec(STEPS, cp_size, on, LOGICAL // cp_size if on else LOGICAL, kv, dump=True, count=True)))
        for on in (True, False)
    )
    made = [pair for ours, theirs in zip(shared, stock, strict=True) for pair in zip(ours, theirs, strict=True)]
    for ours, theirs in made:
        assert (ours["prefix"], ours["tokens"]) == (theirs["prefix"], theirs["tokens"])
    assert {bool(ours["prefix"]) for ours, _ in made} == {False, True}
    return made


def difference(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    """How many more of each operation there are with shared KV; those that are as often in both are left out."""
    names = ours.keys() | theirs.keys()
    return {name: ours.get(name, 0) - theirs.get(name, 0) for name in names if ours.get(name, 0) != theirs.get(name, 0)}
