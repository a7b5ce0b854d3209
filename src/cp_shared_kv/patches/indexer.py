"""Indexer: store index-K in the workspace, whichever of stock's store paths is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cp_shared_kv.patches import Patch, PatchGroup, argument


def _store_index_k_cache(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool

    forward_batch = argument(args, kwargs, 0, "forward_batch")
    layer_id = argument(args, kwargs, 1, "layer_id")
    pool = forward_batch.token_to_kv_pool
    if not isinstance(pool, CPSharedNSATokenToKVPool):
        return wrapped(*args, **kwargs)
    logical_locs = forward_batch.out_cache_loc
    with pool.storing_index_k(layer_id, len(logical_locs)) as slots:
        # The fused store reads the slots from the batch itself; later readers of the batch need the logical ones.
        forward_batch.out_cache_loc = slots.to(logical_locs.dtype)
        try:
            return wrapped(*args, **kwargs)
        finally:
            forward_batch.out_cache_loc = logical_locs


GROUP = PatchGroup(
    name="indexer",
    patches=(
        Patch(
            "indexer.store_index_k_cache",
            _store_index_k_cache,
            why="the store takes its slots from the batch, and the workspace must hold the layer's prefix before it",
            until="SGLang writes index-K through the pool, or shards the pool itself",
        ),
    ),
)
