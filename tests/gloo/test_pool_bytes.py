"""What the shared pool reads and keeps is what one unsharded stock pool would, byte for byte."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .ranks import call
from .worker import LAYERS, PAGE, Chunk

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]

LOGICAL_PAGES = 48
WORKSPACE = 40


def _pages(seed: int) -> dict[str, list[int]]:
    """Fragmented, unordered pages; ``b`` shares five with ``a``; all of ``lopsided`` lie on rank 0 at CP 4."""
    free = list(range(2, LOGICAL_PAGES + 1))
    lopsided = [page for page in free if page % 4 == 1][:6]
    free = [page for page in free if page not in lopsided]
    random.Random(seed).shuffle(free)
    a, b, c = free[:12], free[12:20], free[20:26]
    return {"a": a, "b": a[:5] + b, "c": c, "lopsided": lopsided}


FORWARDS = {
    "no prefix": [[Chunk("a", 0, 500)]],
    "whole-page prefix": [[Chunk("a", 0, 320)], [Chunk("a", 320, 700)]],
    "partial-page prefix": [[Chunk("a", 0, 200)], [Chunk("a", 200, 333)], [Chunk("a", 333, 700)]],
    "chunk inside one page": [[Chunk("a", 0, 70)], [Chunk("a", 70, 71)], [Chunk("a", 71, 100)]],
    "chunk that ends a page": [[Chunk("a", 0, 70)], [Chunk("a", 70, 128)], [Chunk("a", 128, 192)]],
    "shared prefix, one batch": [
        [Chunk("a", 0, 5 * PAGE)],
        [Chunk("b", 5 * PAGE, 500), Chunk("a", 5 * PAGE, 7 * PAGE + 1), Chunk("c", 0, 90)],
        [Chunk("b", 500, 640), Chunk("c", 90, 200)],
    ],
    "single tokens": [[Chunk("c", 0, 1)], [Chunk("c", 1, 2)], [Chunk("a", 0, 3), Chunk("c", 2, 66)]],
    "one owner": [[Chunk("lopsided", 0, 250)], [Chunk("lopsided", 250, 6 * PAGE)], [Chunk("a", 0, 64)]],
    "a page's next tenant": [[Chunk("a", 0, 300)], [Chunk("c", 0, 300)], [Chunk("a", 0, 131)], [Chunk("a", 131, 150)]],
}


def run(
    name: str,
    size: int,
    dtype: str = "bfloat16",
    workspace: int = WORKSPACE,
    breaks: str | None = None,
    prefetch: bool = True,
    apart: bool = False,
) -> list[Any]:
    return call(
        "run_forwards",
        size,
        dtype=dtype,
        logical_pages=LOGICAL_PAGES,
        workspace=workspace,
        pages=_pages(size),
        forwards=FORWARDS[name],
        breaks=breaks,
        prefetch=prefetch,
        apart=apart,
    )


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "prefetch"), [("bfloat16", True), ("fp8_e4m3", True), ("fp8_e4m3", False)])
def test_reads_and_persistent_bytes_equal_an_unsharded_pool(name: str, size: int, dtype: str, prefetch: bool) -> None:
    for seen in run(name, size, dtype, prefetch=prefetch):
        assert seen["reads"] > 0
        assert seen["wrong"] == 0
        assert seen["pages"] == 2 * LAYERS * LOGICAL_PAGES // size
        assert seen["wrong_pages"] == 0
        assert seen["outside"] == 0


@pytest.mark.parametrize("size", [2, 4])
def test_stores_that_are_gathered_by_a_call_each_equal_an_unsharded_pool(size: int) -> None:
    for seen in run("partial-page prefix", size, apart=True):
        assert seen["wrong"] == 0
        assert seen["wrong_pages"] == 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_workspace_without_room_for_padding_is_filled_by_the_owners_surplus(size: int, prefetch: bool) -> None:
    # Six pages of one owner fit without padding: 6 prefix pages + trash.
    for seen in run("one owner", size, workspace=7, prefetch=prefetch):
        assert seen["wrong"] == 0
        assert seen["wrong_pages"] == 0


@pytest.mark.parametrize("breaks", ["kv", "index", "boundary"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_skipped_gather_or_boundary_page_is_seen(breaks: str, size: int, prefetch: bool) -> None:
    assert any(seen["wrong"] > 0 for seen in run("partial-page prefix", size, breaks=breaks, prefetch=prefetch))
