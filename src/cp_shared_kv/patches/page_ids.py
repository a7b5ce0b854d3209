"""Page ids: follow on the host what SGLang does with them on the device, so that no forward has to ask for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from cp_shared_kv.host_pages import Noted
from cp_shared_kv.patches import Patch, PatchGroup, argument
from cp_shared_kv.releases import installed, symbol

logger = logging.getLogger("cp_shared_kv")


def _prefix(batch: Any, req: Any, page_size: int) -> Noted:
    """Pages of what a request of the next batch has already."""
    release = installed()

    def slots() -> Any:
        return symbol("prefix_kv_indices")(batch, req) if release.request_prefix_len else req.prefix_indices

    length = req.prefix_len if release.request_prefix_len else len(req.prefix_indices)
    place = (req.kv if release.request_kv else req).req_pool_idx
    host_pages = batch.tree_cache.token_to_kv_pool_allocator.get_kvcache().host_pages
    noted: Noted = host_pages.prefix_pages(req, length, place is not None, slots, page_size)
    return noted


def _alloc_for_extend(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator

    batch = argument(args, kwargs, 0, "batch")
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not isinstance(allocator, CPSharedPagedTokenToKVPoolAllocator):
        return wrapped(*args, **kwargs)
    if type(batch.tree_cache) not in (symbol("prefix_tree"), symbol("chunk_cache")):
        _warn_of_cache(type(batch.tree_cache).__name__, symbol("prefix_tree").__name__)
        return wrapped(*args, **kwargs)
    pool = allocator.get_kvcache()
    host_pages, check = pool.host_pages, pool.page_check
    if check is not None:
        check.raise_if_different()
    prefixes = [_prefix(batch, req, allocator.page_size) for req in batch.reqs]
    allocator.continue_after([int(prefix.pages[-1]) if len(prefix.pages) else 0 for prefix in prefixes])
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
def _warn_of_cache(name: str, followed: str) -> None:
    """Once a cache: what it does with pages is not followed."""
    logger.warning(
        "CP shared KV does not follow the pages of a %s: every forward will wait for the device to read its page ids. "
        "SGLang's %s does without",
        name,
        followed,
    )


def _send_kv_chunk(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    check = getattr(instance.token_to_kv_pool_allocator.get_kvcache(), "page_check", None)
    if check is not None:
        check.raise_if_different()
    return wrapped(*args, **kwargs)


def _cache_req(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    host_pages = _followed(instance)
    if host_pages is None:
        return wrapped(*args, **kwargs)
    with host_pages.caching(argument(args, kwargs, 0, "req")):
        return wrapped(*args, **kwargs)


def _insert(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    params = argument(args, kwargs, 0, "params")
    result = wrapped(*args, **kwargs)
    host_pages = _followed(instance)
    if host_pages is not None:
        host_pages.note_inserted(len(params.key), result.prefix_len, instance.page_size)
    return result


def _followed(tree: Any) -> Any:
    """What is to follow the pages of a tree; None if that is not followed."""
    if type(tree) is not symbol("prefix_tree") or tree.disable:
        return None
    return getattr(tree.token_to_kv_pool_allocator.get_kvcache(), "host_pages", None)


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
            "tree.cache_unfinished_req",
            _cache_req,
            why="what is inserted meanwhile are this request's pages, or give way to pages that the tree had already",
            until=_UNTIL,
        ),
        Patch(
            "tree.cache_finished_req",
            _cache_req,
            why="as for a request that goes on",
            until=_UNTIL,
        ),
        Patch(
            "tree.insert",
            _insert,
            why="the pages of what is new in the tree must be noted, and it says from where on that is",
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
        "tree.match_prefix",
        "cache.prefix_kv_indices",
        "chunk_cache.cache_unfinished_req",
    ),
)
