"""The wrappers of the indexer's stores: slots of the workspace, however stock is given them, and one gather a layer."""

from __future__ import annotations

import pytest

from cp_shared_kv.releases import installed

from .ranks import call

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]

STORES = [
    pytest.param(
        seam,
        marks=pytest.mark.skipif(seam in installed().absent, reason=f"this release has no {seam}"),
    )
    for seam in ("indexer.store_index_k_cache", "indexer.fused_k_prepare_and_store")
]


@pytest.mark.parametrize("seam", STORES)
@pytest.mark.parametrize("given", [False, True])
def test_a_store_gets_workspace_slots_and_the_batch_its_own_back(seam: str, given: bool) -> None:
    for seen in call("index_store", 2, seam=seam, given=given):
        assert seen["slots"] == seen["workspace slots"]
        assert seen["batch afterwards"] == seen["logical slots"]
        assert seen["gathers"] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_a_layer_without_index_k_has_no_pages_of_it_and_the_others_pass_the_self_check(dtype: str) -> None:
    if not installed().index_key_cache:
        pytest.skip("every layer has index-K in this release")
    for seen in call("pool_self_check", 2, dtype=dtype, layers=4, skip=[1, 3]):
        assert seen["said"] is None
        assert seen["changed"] == 0
