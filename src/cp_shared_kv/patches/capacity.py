"""Pool sizing: charge the workspace, let SGLang build the physical pool, then show the scheduler the logical one.

SGLang profiles, caps and builds for one rank as ever, so memory per rank and the request limit stay those of the
physical figure; only afterwards is the capacity multiplied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from cp_shared_kv.collectives import PageGather, own_communicator
from cp_shared_kv.config import PREFETCH_ENV, prefetch_wanted
from cp_shared_kv.divergence import DivergenceGuard, check_every
from cp_shared_kv.host_pages import PageCheck
from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.metrics import SHARD_POLICY
from cp_shared_kv.patches import Patch, PatchGroup, argument
from cp_shared_kv.plan import ceil_div, workspace_pages
from cp_shared_kv.prefetch import workspace_count
from cp_shared_kv.releases import installed, symbol

logger = logging.getLogger("cp_shared_kv")

#: Attribute of SGLang's group coordinator.
_GATHER = "_cp_shared_kv_gather"


class CapacityError(RuntimeError):
    """Capacity that cannot be shared: no room for the workspace, or ranks that disagree."""


def _workspace_pages(builder: Any, cp_size: int) -> int:
    return workspace_pages(builder.model_config.context_len, builder.page_size, cp_size)


def workspace_bytes_for(builder: Any, cp_size: int) -> int:
    """Bytes of the workspaces: for one context one layer of MLA KV and of index-K, or two layers.

    Args:
        builder: what sizes and builds the pools: SGLang's model runner, or the configurator of its KV cache.
        cp_size: ranks in the attention-CP group.
    """
    index_dim = symbol("get_nsa_index_head_dim")(builder.model_config.hf_config)
    index_bytes = index_dim + index_dim // symbol("NSATokenToKVPool").quant_block_size * 4
    kv_bytes = _mla_kv_cache_dim(builder) * builder.kv_cache_dtype.itemsize
    workspaces = workspace_count(prefetch_wanted())
    return workspaces * _workspace_pages(builder, cp_size) * builder.page_size * (kv_bytes + index_bytes)


def _mla_kv_cache_dim(builder: Any) -> int:
    """Elements of a token's MLA KV in one layer."""
    function = symbol("calculate_mla_kv_cache_dim")
    if function is None:
        dim: int = builder.calculate_mla_kv_cache_dim()
    else:
        names = installed().targets["capacity.mla_kv_cache_dim"].parameters
        dim = function(**{name: getattr(builder, name) for name in names})
    return dim


def _gather_over(group: Any, builder: Any) -> PageGather:
    """The gather over a group; the first call makes and checks it, a collective call."""
    gather: PageGather | None = getattr(group, _GATHER, None)
    if gather is None:
        _agree(group, {"prefetch": prefetch_wanted()})  # or one rank would wait for a communicator that no other makes
        timeout = builder.server_args.dist_timeout
        own = own_communicator(group, timeout and timedelta(seconds=timeout)) if prefetch_wanted() else None
        gather = PageGather(group, own)
        gather.self_check(builder.device)
        setattr(group, _GATHER, gather)
    return gather


def _profile_available_bytes(
    wrapped: Callable[..., int], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    from sglang.srt.distributed.parallel_state import get_attn_cp_group

    group = get_attn_cp_group()
    _gather_over(group, instance)  # before memory is measured: the communicator takes its buffers on first use
    available = wrapped(*args, **kwargs)
    charge = workspace_bytes_for(instance, group.world_size)
    if available <= charge:
        raise CapacityError(
            f"CP shared KV needs {charge} bytes for its workspace ({workspace_count(prefetch_wanted())} layers of one "
            f"context of {instance.model_config.context_len} tokens) but only {available} bytes are left for the KV "
            "cache: raise --mem-fraction-static or lower --context-length"
            + (f", or do without prefetch ({PREFETCH_ENV}=0)" if prefetch_wanted() else "")
        )
    return available - charge


def _agree(group: Any, mine: dict[str, Any]) -> None:
    """Raise unless every rank of the attention-CP group says the same.

    Raises:
        CapacityError: with each rank's figures.
    """
    said: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(said, mine, group=group.cpu_group)
    if any(other != said[0] for other in said):
        figures = "\n".join(f"  - attention-CP rank {rank}: {figures}" for rank, figures in enumerate(said))
        raise CapacityError(
            f"the attention-CP ranks disagree, so they cannot share a KV cache:\n{figures}\n"
            "give every rank the same memory, arguments and environment, or set --max-total-tokens"
        )


def _init_pools(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from sglang.srt.distributed.parallel_state import get_attn_cp_group

    from cp_shared_kv._version import __version__
    from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool

    builder = instance
    if builder.is_draft_worker:
        raise CapacityError("a draft model's pool cannot be shared: remove --speculative-algorithm")
    group = get_attn_cp_group()
    layout = CpSharedKVLayout(page_size=builder.page_size, cp_size=group.world_size, cp_rank=group.rank_in_group)
    pages = _workspace_pages(builder, layout.cp_size)
    result = wrapped(*args, **kwargs)
    built = result if installed().pools_in_result else builder
    _agree(
        group,
        {
            "physical_tokens_per_rank": built.max_total_num_tokens,
            "page_size": layout.page_size,
            "workspace_pages": pages,
            "kv_cache_dtype": str(builder.kv_cache_dtype),
            "plugin": __version__,
            "check_every": check_every(),
        },
    )
    stock_allocator = built.token_to_kv_pool_allocator
    pool = CPSharedNSATokenToKVPool.adopt(
        built.token_to_kv_pool,
        layout=layout,
        workspace_pages=pages,
        gather=_gather_over(group, builder),
        prefetch=prefetch_wanted(),
    )
    pool.self_check()
    if check_every():
        pool.divergence_guard = DivergenceGuard(group, check_every())
        pool.page_check = PageCheck(layout.page_size, pool.device)
    allocator = CPSharedPagedTokenToKVPoolAllocator(
        logical_size=pool.size,
        physical_size=pool.physical_size,
        page_size=stock_allocator.page_size,
        dtype=stock_allocator.dtype,
        device=stock_allocator.device,
        kvcache=pool,
        need_sort=stock_allocator.need_sort,
        cp_size=layout.cp_size,
        cp_rank=layout.cp_rank,
    )
    logger.info(
        "CP shared KV enabled. physical_tokens_per_rank=%d, logical_tokens=%d, cp_size=%d, shard_policy=%s, "
        "workspace_pages=%d, workspace_bytes=%d, prefetch=%s",
        pool.physical_size,
        pool.size,
        layout.cp_size,
        SHARD_POLICY,
        pages,
        pool.workspace_bytes,
        "on" if prefetch_wanted() else "off",
    )
    shared = {"token_to_kv_pool": pool, "token_to_kv_pool_allocator": allocator, "max_total_num_tokens": pool.size}
    if installed().pools_in_result:
        import msgspec

        return msgspec.structs.replace(result, **shared)
    for name, value in shared.items():
        setattr(builder, name, value)
    return result


def _add_one_req(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool

    pool = instance.tree_cache.token_to_kv_pool_allocator.get_kvcache()
    reqs = [*instance.can_run_list, argument(args, kwargs, 0, "req")]
    # A request that is alone fits, whatever its length; its chunks are parts of one context.
    if len(reqs) > 1 and isinstance(pool, CPSharedNSATokenToKVPool):
        lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
        if sum(ceil_div(length, pool.page_size) for length in lengths) >= pool.workspace_page_count:
            return symbol("AddReqResult").OTHER
    return wrapped(*args, **kwargs)


GROUP = PatchGroup(
    name="capacity",
    patches=(
        Patch(
            "capacity.profile_available_bytes",
            _profile_available_bytes,
            why="the workspace must be paid for before pages are counted",
            until="SGLang shards the NSA KV pool over prefill CP ranks itself",
        ),
        Patch(
            "capacity.init_pools",
            _init_pools,
            why="each rank keeps its own pages only, while the scheduler counts those of the whole group",
            until="SGLang shards the NSA KV pool over prefill CP ranks itself",
        ),
        Patch(
            "scheduler.add_one_req",
            _add_one_req,
            why="the requests of a batch must fit in the workspace together",
            until="SGLang shards the NSA KV pool over prefill CP ranks itself",
        ),
    ),
    relies_on=(
        "capacity.mla_kv_cache_dim",
        "allocator.init",
        "allocator.alloc",
        "allocator.alloc_extend",
        "allocator.alloc_decode",
        "allocator.free",
        "allocator.free_segment",
        "allocator.free_page_ids",
        "allocator.get_all_free_pages",
        "allocator.clear",
        "allocator.alloc_extend_kernel",
        "allocator.alloc_decode_kernel",
        "allocator.free_group_begin",
        "allocator.free_group_end",
        "allocator.available_size",
        "allocator.backup_state",
        "allocator.restore_state",
        "allocator.merge_and_sort_free",
        "index_key_cache.init",
        "index_key_cache.get_local_buffer",
        "index_key_cache.get_k_and_scale",
        "index_key_cache.store_quantized",
        "index_key_cache.state_buf_infos",
        "index_key_cache.clear",
        "pool.init",
        "pool.set_mla_kv_buffer",
        "pool.get_key_buffer",
        "pool.get_index_k_with_scale_buffer",
        "pool.get_index_k_continuous",
        "pool.get_index_k_scale_continuous",
        "pool.get_index_k_scale_buffer",
        "pool.set_index_k_scale_buffer",
        "pool.get_contiguous_buf_infos",
        "pool.get_state_buf_infos",
        "pool.get_value_buffer",
        "pool.get_kv_buffer_shape",
        "pool.get_kv_size_bytes",
        "pool.clear_buffers",
        "pool.move_kv_cache",
    ),
)
