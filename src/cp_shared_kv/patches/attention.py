"""Attention metadata: plan the forward once, and give the kernels page tables of the workspace.

The tables are not translated page by page: the plan knows the workspace page of every page position, so they are built
anew from it, and padding or stale ids in stock's tables never come into play.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cp_shared_kv.host_pages import Pages, page_table, read_pages
from cp_shared_kv.patches import Patch, PatchGroup, argument
from cp_shared_kv.plan import ForwardPlan, build_inert_plan, build_plan, ceil_div
from cp_shared_kv.releases import installed


def _has_requests(forward_batch: Any) -> bool:
    """Whether this is a prefill of real requests.

    Under MLP sync an idle or decode batch is relabelled EXTEND with made-up lengths; its first mode is then noted, in
    a field that is absent or None otherwise.
    """
    mode = getattr(forward_batch, "_original_forward_mode", None) or forward_batch.forward_mode
    return mode.is_extend_without_speculative() and forward_batch.batch_size > 0


def _plan(pool: Any, forward_batch: Any, req_to_token: torch.Tensor) -> ForwardPlan:
    seq_lens = forward_batch.seq_lens_cpu.tolist()
    if not _has_requests(forward_batch):
        longest = ceil_div(max(seq_lens, default=1), pool.page_size)
        return build_inert_plan(len(forward_batch.req_pool_indices), longest, pool.workspace_page_count)
    prefix_lens = list(forward_batch.extend_prefix_lens_cpu)
    pages = _pages(pool, forward_batch, req_to_token, seq_lens)
    if pool.divergence_guard is not None:
        pool.divergence_guard.observe(pages, prefix_lens, seq_lens)
    tables = page_table(pages, max(len(row) for row in pages), 0)
    return build_plan(pool.layout, tables, prefix_lens, seq_lens, pool.workspace_page_count)


def _pages(pool: Any, forward_batch: Any, req_to_token: torch.Tensor, seq_lens: list[int]) -> list[Pages]:
    """Logical pages of each request."""
    counts = [ceil_div(length, pool.page_size) for length in seq_lens]
    noted: list[Pages] | None = pool.host_pages.of_batch(forward_batch.rids, counts)
    if noted is not None:
        return noted
    first_slots = req_to_token[forward_batch.req_pool_indices, : max(seq_lens) : pool.page_size]
    rows = read_pages(first_slots, pool.page_size)
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _init_forward_metadata(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool

    forward_batch = argument(args, kwargs, 0, "forward_batch")
    holder = forward_batch if installed().pools_on_batch else instance
    pool = holder.token_to_kv_pool
    result = wrapped(*args, **kwargs)
    if not isinstance(pool, CPSharedNSATokenToKVPool):
        return result
    metadata = instance.forward_metadata
    active = pool.begin_forward(_plan(pool, forward_batch, holder.req_to_token_pool.req_to_token))
    flattened = metadata.page_table_1_flattened
    lens = [] if flattened is None else metadata.indexer_seq_lens_cpu.tolist()
    width = metadata.page_table_1.shape[1]
    slots = active.token_slots(max([width, *lens]), len(forward_batch.out_cache_loc))
    if flattened is not None:
        rows = [slots[i, :length] for i, length in enumerate(lens)]
        flattened = rows[0] if len(rows) == 1 else torch.cat(rows)
    instance.forward_metadata = dataclasses.replace(
        metadata,
        page_table_1=slots[:, :width].contiguous(),
        real_page_table=active.page_table[:, : metadata.real_page_table.shape[1]].contiguous(),
        page_table_1_flattened=flattened,
    )
    return result


def _model_forward(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return wrapped(*args, **kwargs)
    finally:
        end = getattr(instance.token_to_kv_pool, "end_forward", None)
        if end is not None:
            end()


GROUP = PatchGroup(
    name="attention",
    patches=(
        Patch(
            "attention.init_forward_metadata",
            _init_forward_metadata,
            why="stock page tables name logical pages; kernels read the workspace",
            until="SGLang shards the NSA KV pool over prefill CP ranks itself",
        ),
        Patch(
            "attention.model_forward",
            _model_forward,
            why="a plan must end with its forward, also when the forward raises, so that nothing reads by an old one",
            until="SGLang offers plugins a hook at the end of a forward",
        ),
    ),
    relies_on=("attention.forward_extend",),
)
