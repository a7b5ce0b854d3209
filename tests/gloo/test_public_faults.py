"""Inputs of public bug reports that need real ranks; ``docs/faults.md`` lists all reports."""

from __future__ import annotations

import random

import pytest

from .ranks import call
from .worker import LAYERS, PAGE, Chunk

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]

LOGICAL_PAGES = 48
WORKSPACE = 40


def _pages() -> dict[str, list[int]]:
    """Fragmented, unordered pages of the requests below; ``a`` and ``b`` share their first two."""
    free = list(range(1, LOGICAL_PAGES + 1))
    random.Random(7).shuffle(free)
    return {"a": free[:6], "b": [*free[:2], *free[6:10]], **{str(n): free[10 + n : 12 + n] for n in (1, 3, 5, 7)}}


def _extends(request: str, start: int, lengths: tuple[int, ...]) -> list[list[Chunk]]:
    """One forward for each length, one after the other from ``start`` tokens on."""
    forwards = []
    for length in lengths:
        forwards.append([Chunk(request, start, start + length)])
        start += length
    return forwards


SHORT = (1, 2, 3, 4, 5, 6, 7)
FORWARDS = {
    # sglang#18280, sglang#33197: an extend of fewer tokens than ranks, which belongs to no rank; 2 tokens on 8 ranks.
    "short extends after a prefix inside a page": [[Chunk("a", 0, 130)], *_extends("a", 130, SHORT)],
    "short extends after a prefix of whole pages": [
        [Chunk("a", 0, 2 * PAGE)],
        *[[Chunk("b", 2 * PAGE, 2 * PAGE + n)] for n in SHORT],
    ],
    "short extends across a page's end": [[Chunk("a", 0, 2 * PAGE - 1)], *_extends("a", 2 * PAGE - 1, SHORT)],
    "a short extend beside a long one": [
        [Chunk("a", 0, 130)],
        [Chunk("a", 130, 132), Chunk("7", 0, 100)],
    ],
    # vllm-plugin-das#21: whole prompts of odd lengths, and the next token of each.
    "prompts of 1, 3, 5 and 7 tokens": [
        *[[Chunk(str(n), 0, n)] for n in (1, 3, 5, 7)],
        *[[Chunk(str(n), n, n + 1)] for n in (1, 3, 5, 7)],
    ],
    # sglang#20360: lengths that the ranks do not divide.
    "lengths that the ranks do not divide": [[Chunk("a", 0, 101)], [Chunk("a", 101, 204)], [Chunk("b", 128, 333)]],
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_reads_and_persistent_bytes_equal_an_unsharded_pool(name: str, size: int, dtype: str) -> None:
    for seen in call(
        "run_forwards",
        size,
        dtype=dtype,
        logical_pages=LOGICAL_PAGES,
        workspace=WORKSPACE,
        pages=_pages(),
        forwards=FORWARDS[name],
        breaks=None,
    ):
        assert seen["reads"] > 0
        assert seen["pages"] == 2 * LAYERS * LOGICAL_PAGES // size
        assert (seen["wrong"], seen["wrong_pages"], seen["outside"]) == (0, 0, 0)


def test_a_rank_that_could_allocate_less_than_the_others_stops_the_group() -> None:
    """sglang#31425: the second forward of rank 2 is a page short, as if its pool were full."""
    same, short = [[1, 2, 3], [4, 5], [6]], [[1, 2, 3], [4], [6]]
    for forward, text in call("divergence", 4, pages=[same, same, short, same], every=1):
        assert forward == 2
        assert "attention-CP rank 2" in text
        assert "1 pages where rank 0 has 2, lengths different" in text
