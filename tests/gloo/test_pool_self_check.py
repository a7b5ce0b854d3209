"""The start-up check of the pool passes on sound ranks, leaves no trace, and sees a rank unlike the others."""

from __future__ import annotations

from typing import Any

import pytest

from .ranks import call
from .worker import LAYERS

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]

CLEAN = {"said": None, "changed": 0, "workspace": 0, "counters": {}}


def check(size: int, dtype: str = "bfloat16", **arguments: Any) -> list[dict[str, Any]]:
    return call("pool_self_check", size, dtype=dtype, **arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("prefetch", [False, True])
def test_sound_ranks_pass_and_pools_counters_and_forward_are_as_before(size: int, dtype: str, prefetch: bool) -> None:
    for seen in check(size, dtype, prefetch=prefetch):
        assert "outside a forward" in seen.pop("after")
        assert seen == CLEAN


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("physical_pages", [0, 1])
def test_the_smallest_pools_pass(physical_pages: int, layers: int) -> None:
    for seen in check(2, physical_pages=physical_pages, layers=layers):
        assert seen["said"] is None
        assert seen["changed"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_out_of_order_are_seen_in_both_stores_and_both_layers(size: int, dtype: str) -> None:
    for rank, seen in enumerate(check(size, dtype, breaks="order")):
        claimed = {0: 1, 1: 0}.get(rank, rank)
        head, *lines = seen["said"].splitlines()
        assert head.startswith(f"CP shared KV self-check failed on attention-CP rank {claimed}: ")
        assert [line.split(":")[0] for line in lines] == [
            f"  - {store} of layer {layer}, page {page} of rank {page - 1}"
            for layer in (0, LAYERS - 1)
            for store in ("index-K", "MLA KV")
            for page in (1, 2)
        ]
        assert "read 0x200020000000000, written was 0x200010000000000" in lines[0], "page 2 came for page 1"


@pytest.mark.parametrize("size", [2, 4])
def test_one_ranks_owner_formula_that_is_off_is_seen_by_every_rank(size: int) -> None:
    for seen in check(size, breaks="owner"):
        assert "MLA KV of layer 0, page " in seen["said"]
        assert f"index-K of layer {LAYERS - 1}, page " in seen["said"]


def test_a_rank_whose_formula_gives_all_pages_one_owner_stops_before_it_communicates() -> None:
    said = check(2, breaks="owners alike")[1]["said"]
    assert said.endswith("failed on attention-CP rank 1: pages [1, 2] of the pool have the owners [0, 0]")


@pytest.mark.parametrize("size", [2, 4])
def test_one_rank_that_keeps_nothing_of_a_store_is_named_by_every_rank(size: int) -> None:
    for rank, seen in enumerate(check(size, breaks="keep")):
        head, *lines = seen["said"].splitlines()
        assert head.startswith(f"CP shared KV self-check failed on attention-CP rank {rank}: ")
        assert [line.split(": ")[0] for line in lines] == [
            f"  - index-K of layer {layer}, page 2 of rank 1" for layer in (0, LAYERS - 1)
        ]
        assert seen["changed"] == 0, "a failed check does not put the bytes back"
        assert seen["counters"] == {}
        assert "outside a forward" in seen["after"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_gathers_of_one_store_into_one_workspace_that_are_left_out_are_seen(
    size: int, layers: int, prefetch: bool
) -> None:
    for rank, seen in enumerate(check(size, breaks="gather", layers=layers, prefetch=prefetch)):
        seen_layers = [0] if prefetch else range(layers)
        assert [line.split(": ")[0] for line in seen["said"].splitlines()[1:]] == [
            f"  - MLA KV of layer {layer}, page {owner + 1} of rank {owner}"
            for layer in seen_layers
            for owner in range(size)
            if owner != rank
        ]


def test_a_server_checks_its_pool_while_it_builds_it() -> None:
    assert call("build_pools", 2, broken_rank=None) == [(None, 2 * 3 * 64)] * 2
    for said, _ in call("build_pools", 2, broken_rank=1):
        assert f"index-K of layer {LAYERS - 1}, page 2 of rank 1" in said
