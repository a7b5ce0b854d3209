"""Indexer: store index-K in the workspace, whichever of stock's store paths is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cp_shared_kv.patches import Patch, PatchGroup, Wrapper
from cp_shared_kv.releases import installed, named_arguments, symbol


def _storing(seam: str) -> Wrapper:
    """Wrapper of a function of the indexer that stores the index-K of one layer."""

    def store(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from cp_shared_kv.pool import CPSharedNSATokenToKVPool

        given = named_arguments(seam, args, kwargs)
        forward_batch = given["forward_batch"]
        pool = forward_batch.token_to_kv_pool if installed().pools_on_batch else symbol("get_token_to_kv_pool")()
        if not isinstance(pool, CPSharedNSATokenToKVPool):
            return wrapped(*args, **kwargs)
        logical_locs = forward_batch.out_cache_loc
        locs = given.get("out_cache_loc")
        rows = len(logical_locs if locs is None else locs)
        with pool.storing_index_k(given["layer_id"], rows) as slots:
            # Stock takes the slots from the batch where they are not given; later readers of the batch need the
            # logical ones.
            slots = slots.to(logical_locs.dtype)
            forward_batch.out_cache_loc = slots
            if locs is not None:
                given["out_cache_loc"] = slots
            try:
                return wrapped(**given)
            finally:
                forward_batch.out_cache_loc = logical_locs

    return store


GROUP = PatchGroup(
    name="indexer",
    patches=(
        Patch(
            "indexer.store_index_k_cache",
            _storing("indexer.store_index_k_cache"),
            why="the store takes its slots from the batch, and the workspace must hold the layer's prefix before it",
            until="SGLang writes index-K through the pool, or shards the pool itself",
        ),
        Patch(
            "indexer.fused_k_prepare_and_store",
            _storing("indexer.fused_k_prepare_and_store"),
            why="the same, for batches that prefill CP does not split: the store is one kernel with what precedes it",
            until="SGLang writes index-K through the pool, or shards the pool itself",
        ),
    ),
)
