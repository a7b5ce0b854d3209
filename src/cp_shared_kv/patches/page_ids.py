"""Page ids: follow on the host what SGLang does with them on the device, so that no forward has to ask for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from cp_shared_kv.host_pages import note_inserted, note_split, noted_pages
from cp_shared_kv.patches import Patch, PatchGroup, argument

logger = logging.getLogger("cp_shared_kv")


def _alloc_for_extend(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.radix_cache import RadixCache

    from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator

    batch = argument(args, kwargs, 0, "batch")
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not isinstance(allocator, CPSharedPagedTokenToKVPoolAllocator):
        return wrapped(*args, **kwargs)
    if type(batch.tree_cache) not in (RadixCache, ChunkCache):
        _warn_of_cache(type(batch.tree_cache).__name__)
        return wrapped(*args, **kwargs)
    pool = allocator.get_kvcache()
    host_pages, check = pool.host_pages, pool.page_check
    if check is not None:
        check.raise_if_different()
    prefixes = [host_pages.prefix_pages(req, allocator.page_size) for req in batch.reqs]
    allocator.continue_after([int(pages[-1]) if len(pages) else 0 for pages in prefixes])
    try:
        result = wrapped(*args, **kwargs)
    finally:
        allocator.continue_after(None)
    host_pages.note_batch(batch.reqs, prefixes, allocator.drawn)
    if check is not None:
        _, indices, _ = result
        longest = max(batch.seq_lens_cpu.tolist())
        first_slots = batch.req_to_token_pool.req_to_token[indices, : longest : allocator.page_size]
        check.compare(first_slots, host_pages.latest)
    return result


@cache
def _warn_of_cache(name: str) -> None:
    """Once a cache: what it does with pages is not followed."""
    logger.warning(
        "CP shared KV does not follow the pages of a %s: every forward will wait for the device to read its page ids. "
        "SGLang's RadixCache does without",
        name,
    )


def _send_kv_chunk(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    check = getattr(instance.token_to_kv_pool_allocator.get_kvcache(), "page_check", None)
    if check is not None:
        check.raise_if_different()
    return wrapped(*args, **kwargs)


def _cache_unfinished_req(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode

    first_new_node = TreeNode.counter
    result = wrapped(*args, **kwargs)
    if type(instance) is RadixCache and not instance.disable:
        note_inserted(argument(args, kwargs, 0, "req"), first_new_node, instance.page_size)
    return result


def _split_node(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    child = argument(args, kwargs, 1, "child")
    pages = noted_pages(child)
    front = wrapped(*args, **kwargs)
    note_split(pages, front, child, instance.page_size)
    return front


_UNTIL = "SGLang keeps page ids on the host, or shards the NSA KV pool over prefill CP ranks itself"

GROUP = PatchGroup(
    name="page_ids",
    patches=(
        Patch(
            "cache.alloc_for_extend",
            _alloc_for_extend,
            why="the pages of a batch must be known on the host to plan its forward; reading them from the device "
            "would wait for all that is queued there",
            until=_UNTIL,
        ),
        Patch(
            "radix_cache.cache_unfinished_req",
            _cache_unfinished_req,
            why="a chunk's pages go into the tree here, or give way to pages that the tree had already",
            until=_UNTIL,
        ),
        Patch(
            "radix_cache.split_node",
            _split_node,
            why="a node's pages must be divided with its slots",
            until=_UNTIL,
        ),
        Patch(
            "prefill.send_kv_chunk",
            _send_kv_chunk,
            why="what a forward with wrong pages computed must not be sent",
            until=_UNTIL,
        ),
    ),
    relies_on=(
        "radix_cache.tree_node_init",
        "radix_cache.insert_helper",
        "radix_cache.match_prefix_helper",
        "chunk_cache.cache_unfinished_req",
    ),
)
