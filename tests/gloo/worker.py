"""Scenarios on forked gloo ranks: real pools, real allocator, real collectives; the model is replaced by random rows.

Run as ``python -m gloo.worker FD``: reads ``(function name, ranks, arguments)`` from the socket FD, answers with the
list of what the ranks returned, or a traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from .forked import on_ranks

PAGE = 64
LAYERS = 3
POISON = 0xD7


@dataclass(frozen=True)
class Chunk:
    """One request's part of a forward: request name, prefix length and length afterwards, in tokens."""

    request: str
    prefix: int
    end: int


def group_of(rank: int, size: int) -> Any:
    """What ``PageGather`` uses of SGLang's group coordinator."""
    import torch.distributed as dist

    return SimpleNamespace(
        device_group=dist.group.WORLD,
        cpu_group=dist.group.WORLD,
        ranks=list(range(size)),
        rank_in_group=rank,
        world_size=size,
    )


def make_pool(pages: int, dtype: str, layers: int = LAYERS, skip: list[int] | None = None) -> Any:
    """A stock NSA pool of ``pages`` pages, every byte of it poisoned; layers ``skip`` have no index-K."""
    import torch

    from cp_shared_kv.releases import symbol

    fp8 = dtype == "fp8_e4m3"
    pool = symbol("NSATokenToKVPool")(
        size=pages * PAGE,
        page_size=PAGE,
        kv_lora_rank=512,
        dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=656 if fp8 else 576,
        **({} if skip is None else {"skip_topk_layers": [layer in skip for layer in range(layers)]}),
    )
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        buffer.view(torch.uint8).fill_(POISON)
    return pool


def page_bytes(buffer: Any, pages: int) -> Any:
    import torch

    return buffer.contiguous().view(torch.uint8).view(pages + 1, -1)


def run_forwards(
    rank: int,
    size: int,
    dtype: str,
    logical_pages: int,
    workspace: int,
    pages: dict[str, list[int]],
    forwards: list[list[Chunk]],
    breaks: str | None,
    prefetch: bool = True,
    apart: bool = False,
) -> dict[str, Any]:
    """Run forwards on the shared pool and, with the same rows, on an unsharded stock pool; compare everything.

    Args:
        pages: logical pages of each request, by position.
        forwards: chunks of each forward.
        breaks: mechanism to break: ``kv``, ``index`` or ``boundary``; or None.
        prefetch: whether the next layer is fetched ahead, over a communicator of its own.
        apart: whether the stores are gathered by a call each, as large shares are on gloo.

    Returns:
        ``reads``: comparisons of read data made and ``wrong`` of them; ``pages`` of the persistent pools compared and
        ``wrong_pages`` of them; ``outside``: rows that changed though this rank does not own them.
    """
    import torch

    import cp_shared_kv.collectives as collectives
    import cp_shared_kv.plan as plan_module
    from cp_shared_kv.collectives import PageGather, own_communicator
    from cp_shared_kv.layout import CpSharedKVLayout
    from cp_shared_kv.plan import build_plan
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool
    from cp_shared_kv.releases import installed

    layout = CpSharedKVLayout(PAGE, size, rank)
    # Later releases read keys and scales together only.
    readers = {"get_index_k_continuous", "get_index_k_scale_continuous"}
    readers -= {seam.removeprefix("pool.") for seam in installed().absent}
    if apart:
        collectives.GLOO_ONE_CALL_UP_TO = 0
    group = group_of(rank, size)
    gather = PageGather(group, own_communicator(group) if prefetch else None)
    gather.self_check("cpu")
    oracle = make_pool(logical_pages, dtype)
    shared = CPSharedNSATokenToKVPool.adopt(
        make_pool(logical_pages // size, dtype),
        layout=layout,
        workspace_pages=workspace,
        gather=gather,
        prefetch=prefetch,
    )
    assert shared.size == oracle.size
    if breaks == "boundary":
        split = plan_module._split_request_pages

        def without_boundary(row: Any, prefix: int, seq: int, page: int, request: int) -> Any:
            _, _, write = split(row, prefix, seq, page, request)
            return row[: prefix // page], row[prefix // page : -(-seq // page)], write

        plan_module._split_request_pages = without_boundary
    if breaks in ("kv", "index"):
        broken = shared._kv if breaks == "kv" else shared._index
        stock_gather = gather.gather

        def skip(workspaces: Any, *shares: Any) -> int:
            sound = [rows for rows in workspaces if all(rows is not each for each in broken.workspace_rows)]
            return stock_gather(sound, *shares) if sound else 0

        gather.gather = skip  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(5)
    out = {"reads": 0, "wrong": 0, "pages": 0, "wrong_pages": 0, "outside": 0}

    def same(a: Any, b: Any) -> None:
        out["reads"] += 1
        out["wrong"] += not torch.equal(a, b)

    for chunks in forwards:
        width = max(-(-chunk.end // PAGE) for chunk in chunks)
        tables = torch.full((len(chunks), width + 2), 777, dtype=torch.int64)  # stale ids past each request's end
        for i, chunk in enumerate(chunks):
            row = pages[chunk.request][: -(-chunk.end // PAGE)]
            tables[i, : len(row)] = torch.tensor(row)
        logical = (tables[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
        padding = -sum(chunk.end - chunk.prefix for chunk in chunks) % size
        loc = torch.cat([logical[i, c.prefix : c.end] for i, c in enumerate(chunks)] + [torch.zeros(padding).long()])
        active = shared.begin_forward(
            build_plan(layout, tables.numpy(), [c.prefix for c in chunks], [c.end for c in chunks], workspace)
        )
        slots = active.token_slots(width * PAGE, len(loc)).long()
        for layer_id in range(LAYERS):
            layer = SimpleNamespace(layer_id=layer_id)
            nope = torch.randn(len(loc), 1, 512, generator=generator).bfloat16()
            rope = torch.randn(len(loc), 1, 64, generator=generator).bfloat16()
            key = torch.randn(len(loc), 128, generator=generator).clamp(-400, 400).to(torch.float8_e4m3fn)
            scale = torch.rand(len(loc), 1, generator=generator)
            oracle.set_index_k_scale_buffer(layer_id, loc, key, scale)
            with shared.storing_index_k(layer_id, len(loc)) as where:
                shared.set_index_k_scale_buffer(layer_id, where, key, scale)
            oracle.set_mla_kv_buffer(layer, loc, nope, rope)
            shared.set_mla_kv_buffer(layer, loc, nope, rope)
            for i, chunk in enumerate(chunks):
                end, table, local = chunk.end, tables[i].int(), active.page_table[i]
                read, expected = shared.get_key_buffer(layer_id), oracle.get_key_buffer(layer_id)
                same(read[slots[i, :end]].view(torch.uint8), expected[logical[i, :end]].view(torch.uint8))
                for name in readers:
                    same(getattr(shared, name)(layer_id, end, local), getattr(oracle, name)(layer_id, end, table))
            ends = torch.tensor([c.end for c in chunks])
            fused = (ends, int(ends.sum()), int(ends.max()))
            got = shared.get_index_k_scale_buffer(layer_id, fused[0], active.page_table, *fused[1:])
            expected = oracle.get_index_k_scale_buffer(layer_id, fused[0], tables.int(), *fused[1:])
            same(got[0], expected[0])
            same(got[1], expected[1])
        shared.end_forward()
    for held, whole in (
        (shared.physical_kv_buffer, oracle.kv_buffer),
        (shared.physical_index_k_with_scale_buffer, oracle.index_k_with_scale_buffer),
    ):
        for layer_id in range(LAYERS):
            mine = page_bytes(held[layer_id], logical_pages // size)
            theirs = page_bytes(whole[layer_id], logical_pages)
            out["pages"] += len(mine) - 1
            out["wrong_pages"] += int((mine[1:] != theirs[1 + rank :: size]).any(1).sum())
            out["outside"] += int((mine[0] != POISON).any())
    return out


def collectives_self_check(rank: int, size: int, order: list[int]) -> str | None:
    """Outcome of the gather's self-check where the ranks think they are in ``order``."""
    from cp_shared_kv.collectives import PageGather

    try:
        PageGather(group_of(order[rank], size)).self_check("cpu")
    except RuntimeError as error:
        return str(error)
    return None


def pool_self_check(
    rank: int,
    size: int,
    dtype: str,
    breaks: str | None = None,
    physical_pages: int = 3,
    layers: int = LAYERS,
    prefetch: bool = False,
    skip: list[int] | None = None,
) -> dict[str, Any]:
    """Outcome of the pool's self-check where one rank or the order of the ranks is broken.

    Args:
        breaks: ``order`` swaps the first two ranks, ``owner`` and ``owners alike`` give rank 1 another owner formula,
            ``keep`` makes it keep nothing of index-K, ``gather`` leaves out what goes to the first MLA KV workspace; or
            None.

    Returns:
        ``said``: the error's text, None if there is none; ``changed``: persistent bytes that are not those from before;
        ``workspace``: bytes of the workspaces that are not 0; ``counters`` that moved; ``after``: what a read says.
    """
    import numpy as np
    import torch

    from cp_shared_kv.collectives import PageGather
    from cp_shared_kv.layout import CpSharedKVLayout
    from cp_shared_kv.metrics import COUNTERS
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool, SharedPoolError

    class Rotated(CpSharedKVLayout):
        def owner_for_logical_pages_np(self, pages: Any) -> Any:
            return np.asarray(pages) % self.cp_size

    class Constant(CpSharedKVLayout):
        def owner_for_logical_pages_np(self, pages: Any) -> Any:
            return np.zeros_like(pages)

    claimed = {0: 1, 1: 0}.get(rank, rank) if breaks == "order" else rank
    layout_type = {"owner": Rotated, "owners alike": Constant}.get(breaks or "") if rank == 1 else None
    gather = PageGather(group_of(claimed, size))
    pool = CPSharedNSATokenToKVPool.adopt(
        make_pool(physical_pages, dtype, layers, skip),
        layout=(layout_type or CpSharedKVLayout)(PAGE, size, claimed),
        workspace_pages=2 * size + 1,
        gather=gather,
        prefetch=prefetch,
    )
    if breaks == "keep" and rank == 1:
        keep = pool._keep
        pool._keep = lambda store, layer_id: None if store is pool._index else keep(store, layer_id)  # type: ignore
    if breaks == "gather":
        stock_gather = gather.gather

        def skip_one(workspaces: Any, *shares: Any) -> int:
            sound = [rows for rows in workspaces if rows is not pool._kv.workspace_rows[0]]
            return stock_gather(sound, *shares) if sound else 0

        gather.gather = skip_one  # type: ignore[method-assign]
    persistent = [*pool.physical_kv_buffer, *pool.physical_index_k_with_scale_buffer]
    before = [buffer.clone() for buffer in persistent]
    COUNTERS.add(forwards=3, gathered_bytes=7)
    counted = COUNTERS.snapshot()
    out: dict[str, Any] = {"said": None}
    try:
        pool.self_check()
    except RuntimeError as error:
        out["said"] = str(error)
    out["changed"] = sum(
        int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(persistent, before, strict=True)
    )
    shown = (*pool.kv_buffer, *pool.index_k_with_scale_buffer)
    out["workspace"] = sum(int(buffer.view(torch.uint8).count_nonzero()) for buffer in shown)
    out["counters"] = {name: value for name, value in COUNTERS.snapshot().items() if value != counted[name]}
    try:
        pool.get_key_buffer(0)
    except SharedPoolError as error:
        out["after"] = str(error)
    return out


def index_store(rank: int, size: int, seam: str, given: bool) -> dict[str, Any]:
    """What a store of the indexer, called through its wrapper, is given; it calls the other store inside."""
    import numpy as np
    import torch

    from cp_shared_kv.collectives import PageGather
    from cp_shared_kv.layout import CpSharedKVLayout
    from cp_shared_kv.metrics import COUNTERS
    from cp_shared_kv.patches import indexer
    from cp_shared_kv.plan import build_plan
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool
    from cp_shared_kv.releases import installed

    layout = CpSharedKVLayout(PAGE, size, rank)
    gather = PageGather(group_of(rank, size))
    pool = CPSharedNSATokenToKVPool.adopt(make_pool(4, "bfloat16"), layout=layout, workspace_pages=8, gather=gather)
    indexer.symbol = lambda name: lambda: pool  # type: ignore[assignment]
    logical = torch.arange(3 * PAGE, 3 * PAGE + 40)
    batch = SimpleNamespace(token_to_kv_pool=pool, out_cache_loc=logical)
    pool.begin_forward(build_plan(layout, np.array([[1, 2, 3]]), [2 * PAGE], [2 * PAGE + 40], 8)).token_slots(PAGE, 40)
    wrappers = {patch.seam: patch.wrapper for patch in indexer.GROUP.patches}
    seen: dict[str, Any] = {"logical slots": logical.tolist(), "workspace slots": pool._active.write_slots.tolist()}
    before = COUNTERS.gather_calls

    def stock(**named: Any) -> None:
        locs = named.get("out_cache_loc")
        seen["slots"] = (named["forward_batch"].out_cache_loc if locs is None else locs).tolist()

    def outer(**named: Any) -> None:
        named = {name: named[name] for name in ("forward_batch", "layer_id", "out_cache_loc") if name in named}
        wrappers["indexer.store_index_k_cache"](stock, None, (), named)

    function = stock if seam == "indexer.store_index_k_cache" else outer
    known = {"forward_batch": batch, "layer_id": 0, "out_cache_loc": logical if given else None}
    names = installed().targets[seam].parameters[1:]
    wrappers[seam](function, None, (), {name: known[name] for name in names if name in known})
    seen["batch afterwards"] = batch.out_cache_loc.tolist()
    seen["gathers"] = COUNTERS.gather_calls - before
    return seen


def admission(rank: int, size: int, admitted: list[int], tokens: int) -> str:
    """Whether a request may join a batch of requests of so many tokens, where the workspace has 7 pages."""
    from cp_shared_kv.layout import CpSharedKVLayout
    from cp_shared_kv.patches.capacity import _add_one_req
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool

    layout = CpSharedKVLayout(PAGE, size, rank)
    pool = CPSharedNSATokenToKVPool.adopt(make_pool(4, "bfloat16"), layout=layout, workspace_pages=8, gather=None)
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    first, *others = [SimpleNamespace(origin_input_ids=[1] * n, output_ids=[]) for n in (tokens, *admitted)]
    adder = SimpleNamespace(can_run_list=others, tree_cache=SimpleNamespace(token_to_kv_pool_allocator=allocator))
    said = _add_one_req(lambda *args: "asked stock", adder, (first, False, None), {})
    return said if isinstance(said, str) else str(said.name)


def build_pools(rank: int, size: int, broken_rank: int | None) -> tuple[str | None, int]:
    """What building the pools says where one rank keeps nothing, and the capacity that SGLang then has."""
    import sglang.srt.distributed.parallel_state as parallel_state
    import torch

    from cp_shared_kv.patches.capacity import _init_pools
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool
    from cp_shared_kv.releases import installed, symbol

    group = group_of(rank, size)
    parallel_state.get_attn_cp_group = lambda: group
    if rank == broken_rank:
        CPSharedNSATokenToKVPool._keep = lambda self, store, layer_id: None  # type: ignore[method-assign]
    builder = SimpleNamespace(
        device="cpu",
        is_draft_worker=False,
        page_size=PAGE,
        server_args=SimpleNamespace(dist_timeout=None),
        model_config=SimpleNamespace(context_len=300),
        kv_cache_dtype=torch.bfloat16,
    )
    pool = make_pool(3, "bfloat16")
    allocator = symbol("PagedTokenToKVPoolAllocator")(pool.size, PAGE, torch.bfloat16, "cpu", pool, need_sort=True)
    stock = {"token_to_kv_pool": pool, "token_to_kv_pool_allocator": allocator, "max_total_num_tokens": pool.size}

    def stock_init_pools() -> Any:
        if not installed().pools_in_result:
            vars(builder).update(stock)
            return None
        from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigResult

        fields = dict.fromkeys(KVCacheConfigResult.__struct_fields__)
        return KVCacheConfigResult(**{**fields, **stock})

    try:
        result = _init_pools(stock_init_pools, builder, (), {})
    except RuntimeError as error:
        return str(error), pool.size
    built = result if installed().pools_in_result else builder
    assert type(built.token_to_kv_pool) is CPSharedNSATokenToKVPool
    assert built.token_to_kv_pool_allocator.size == built.max_total_num_tokens
    return None, built.max_total_num_tokens


def communicator_timeout(rank: int, size: int, seconds: float | None) -> float:
    """Seconds after which a collective call of the gather's own communicator is given up."""
    from datetime import timedelta

    import torch

    from cp_shared_kv.collectives import own_communicator

    group = own_communicator(group_of(rank, size), seconds and timedelta(seconds=seconds))
    torch.distributed.barrier(group)  # rank 0 holds the store by which the others still find each other
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def agreement(rank: int, size: int, figures: list[int]) -> str | None:
    """What the capacity check says where rank r brings ``figures[r]`` physical tokens."""
    from cp_shared_kv.patches.capacity import CapacityError, _agree

    try:
        _agree(group_of(rank, size), {"physical_tokens_per_rank": figures[rank]})
    except CapacityError as error:
        return str(error)
    return None


def charge(rank: int, size: int, available: int, dtype: str, context_len: int, prefetch: bool) -> tuple[int | str, int]:
    """Bytes left for pages after the workspace was charged, or the refusal; and the bytes a workspace really takes."""
    import sglang.srt.distributed.parallel_state as parallel_state
    import torch

    from cp_shared_kv.config import PREFETCH_ENV
    from cp_shared_kv.layout import CpSharedKVLayout
    from cp_shared_kv.patches import capacity
    from cp_shared_kv.patches.capacity import CapacityError, _profile_available_bytes, _workspace_pages
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool

    group = group_of(rank, size)
    parallel_state.get_attn_cp_group = lambda: group
    fp8 = dtype == "fp8_e4m3"
    hf_config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=64, index_head_dim=128)
    capacity._mla_kv_cache_dim = lambda builder: 656 if fp8 else 576
    runner = SimpleNamespace(
        device="cpu",
        page_size=PAGE,
        server_args=SimpleNamespace(dist_timeout=None),
        model_config=SimpleNamespace(context_len=context_len, hf_config=hf_config),
        kv_cache_dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16,
    )
    pool = CPSharedNSATokenToKVPool.adopt(
        make_pool(4, dtype),
        layout=CpSharedKVLayout(PAGE, size, rank),
        workspace_pages=_workspace_pages(runner, size),
        gather=None,
        prefetch=prefetch,
    )
    os.environ[PREFETCH_ENV] = "1" if prefetch else "0"
    try:
        left: int | str = _profile_available_bytes(lambda *args, **kwargs: available, runner, (0,), {})
    except CapacityError as error:
        left = str(error)
    return left, pool.workspace_bytes


def misuse(rank: int, size: int) -> dict[str, str]:
    """What the pool and the forward's wrapper say to each wrong use; "" where they say nothing."""
    import torch

    from cp_shared_kv.layout import CpSharedKVLayout
    from cp_shared_kv.patches.attention import _model_forward
    from cp_shared_kv.plan import build_inert_plan, build_plan
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool, SharedPoolError

    layout = CpSharedKVLayout(PAGE, size, rank)
    pool = CPSharedNSATokenToKVPool.adopt(make_pool(4, "bfloat16"), layout=layout, workspace_pages=8, gather=None)
    said: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        said[name] = ""
        try:
            call()
        except SharedPoolError as error:
            said[name] = str(error)

    def write(layer_id: int, rows: int) -> None:
        nope, rope = torch.zeros(rows, 1, 512).bfloat16(), torch.zeros(rows, 1, 64).bfloat16()
        pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer_id), torch.zeros(rows).long(), nope, rope)

    def begin() -> None:
        import numpy as np

        active = pool.begin_forward(build_plan(layout, np.array([[1, 2]]), [0], [100], 8))
        active.token_slots(PAGE, 100)

    attempt("read outside a forward", lambda: pool.get_key_buffer(0))
    attempt("index read outside a forward", lambda: pool.get_index_k_with_scale_buffer(0))
    attempt("write outside a forward", lambda: write(0, 1))
    attempt("shape of the buffers outside a forward", pool.get_kv_buffer_shape)
    begin()
    attempt("read before the layer is written", lambda: pool.get_key_buffer(0))
    attempt("write of other rows", lambda: write(0, 99))
    attempt("write", lambda: write(0, 100))
    attempt("read", lambda: pool.get_key_buffer(0))
    attempt("read of another layer", lambda: pool.get_key_buffer(1))
    attempt("index read of a layer whose KV alone is there", lambda: pool.get_index_k_with_scale_buffer(0))
    attempt("write of non-MLA rows", lambda: pool.set_kv_buffer(None, None, None, None))
    attempt("read by logical slot", lambda: pool.get_mla_kv_buffer(None, None))
    attempt("copy to the host", lambda: pool.get_cpu_copy(None))
    attempt("move between slots", lambda: pool.move_kv_cache(None, None))

    def raising(*args: Any, **kwargs: Any) -> None:
        raise KeyError("kernel")

    try:
        _model_forward(raising, SimpleNamespace(token_to_kv_pool=pool), (), {})
    except KeyError:
        said["the forward's own error"] = "KeyError"
    attempt("read after a forward that raised", lambda: pool.get_key_buffer(0))
    before = [layer.clone() for layer in pool.physical_kv_buffer]
    active = pool.begin_forward(build_inert_plan(3, 2, 8))
    active.token_slots(PAGE, 5)
    attempt("write of a batch without requests", lambda: write(0, 5))
    said["rows kept of a batch without requests"] = str(
        sum(not torch.equal(a, b) for a, b in zip(before, pool.physical_kv_buffer, strict=True))
    )
    return said


def divergence(rank: int, size: int, pages: list[list[list[int]]], every: int) -> tuple[int, str | None]:
    """Forward at which the guard of a rank that sees ``pages[rank]`` stops, and what it says; 0 if it never does."""
    import numpy as np

    from cp_shared_kv.divergence import DivergenceError, DivergenceGuard

    guard = DivergenceGuard(group_of(rank, size), every)
    for i, used in enumerate(pages[rank], 1):
        try:
            guard.observe([np.array(used)], [0], [len(used) * PAGE])
        except DivergenceError as error:
            return i, str(error)
    return 0, None


def run(function: str, size: int, arguments: dict[str, Any]) -> list[Any] | str:
    """Run a function of this module on ``size`` forked ranks; their results in rank order, or a traceback."""
    try:
        return on_ranks(globals()[function], size, **arguments)
    except RuntimeError as error:
        return str(error)


def main() -> None:
    channel = Connection(int(sys.argv[1]))
    try:
        import sglang.srt.mem_cache.memory_pool  # noqa: F401
        import torch

        from cp_shared_kv_cpu import activate
        from model import bookkeeping

        activate()
        bookkeeping.install(PAGE)
        torch.set_num_threads(1)
    except BaseException:
        channel.send(traceback.format_exc())
        return
    channel.send(None)
    try:
        while True:
            channel.send(run(*channel.recv()))
    except EOFError:
        pass


if __name__ == "__main__":
    main()
