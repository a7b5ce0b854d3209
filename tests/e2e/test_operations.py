"""What a forward costs beside stock: launches of a layer, and waits of the host. Counted, not timed."""

from __future__ import annotations

import pytest

from .counted import difference, pairs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LAUNCHES_A_LAYER = 8
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
