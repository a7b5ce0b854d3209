"""One forward of the real pool and what it costs, and pages drawn from the real allocators; needs SGLang."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

PAGE = 64
#: Tokens that the draws allocate at a time, as chunked prefill does.
CHUNK = 8192


def make_allocator(kind: str, cp_size: int, logical_pages: int) -> Any:
    """The shared allocator of rank 0 (``"shared"``), or stock's (``"stock"``) over as many logical pages."""
    import torch
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator

    tokens = logical_pages * PAGE
    common: dict[str, Any] = {
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "kvcache": None,
        "need_sort": True,
    }
    if kind == "stock":
        return PagedTokenToKVPoolAllocator(size=tokens, **common)
    return CPSharedPagedTokenToKVPoolAllocator(
        logical_size=tokens, physical_size=tokens // cp_size, cp_size=cp_size, cp_rank=0, **common
    )


def allocate(allocator: Any, pages: int) -> Any:
    """Slots of a new request of ``pages`` whole pages, allocated chunk by chunk, int64."""
    import torch

    tokens, parts = pages * PAGE, list[torch.Tensor]()
    for begin in range(0, tokens, CHUNK):
        end = min(begin + CHUNK, tokens)
        prefix, length = torch.tensor([begin]), torch.tensor([end])
        last = parts[-1][-1:] if parts else torch.tensor([-1])
        got = allocator.alloc_extend(prefix, prefix, length, length, last, end - begin)
        if got is None:
            raise RuntimeError(f"no room for {pages} pages, {allocator.available_size() // PAGE} are free")
        parts.append(got)
    return torch.cat(parts)


def draw_pages(kind: str, cp_size: int, logical_pages: int, pages: int, used: bool, seed: int = 1) -> list[int]:
    """Logical pages, by position, of a request of ``pages`` pages.

    Args:
        kind, cp_size, logical_pages: as :func:`make_allocator` takes them.
        used: draw from a pool in which requests of 1 to 24 pages came until it was nearly full, and half of them, or
            more where the request needs it, picked at random, have gone again; otherwise from a fresh one.
    """
    allocator, rng = make_allocator(kind, cp_size, logical_pages), random.Random(seed)
    requests = []
    while used and allocator.available_size() > 24 * PAGE:
        requests.append(allocate(allocator, rng.randint(1, 24)))
    rng.shuffle(requests)
    stay = len(requests) // 2
    while requests and (len(requests) > stay or allocator.available_size() < pages * PAGE):
        allocator.free(requests.pop())
    return (allocate(allocator, pages)[::PAGE] // PAGE).tolist()


def make_shared_pool(rank: int, size: int, physical_pages: int, context_len: int, layers: int) -> Any:
    """The pool of one rank, bf16, with prefetch, workspaces for a context and a gather over the default gloo group."""
    from cp_shared_kv.collectives import PageGather
    from cp_shared_kv.layout import CpSharedKVLayout
    from cp_shared_kv.plan import workspace_pages
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool
    from gloo.worker import group_of, make_pool

    return CPSharedNSATokenToKVPool.adopt(
        make_pool(physical_pages, "bfloat16", layers),
        layout=CpSharedKVLayout(PAGE, size, rank),
        workspace_pages=workspace_pages(context_len, PAGE, size),
        gather=PageGather(group_of(rank, size)),
        prefetch=True,
    )


class Forward:
    """One chunk of one request on a shared pool: what the patched SGLang calls, without the model.

    Args:
        pool: as :func:`make_shared_pool` gives it.
        pages: logical pages of the request.
        prefix_len, seq_len: tokens before and after the chunk.
    """

    def __init__(self, pool: Any, pages: Sequence[int], prefix_len: int, seq_len: int) -> None:
        import torch

        self.pool, self.lens = pool, ([prefix_len], [seq_len])
        self.table = np.array([pages])
        rows = self.rows = seq_len - prefix_len
        self.latent = torch.zeros(rows, 1, 512).bfloat16(), torch.zeros(rows, 1, 64).bfloat16()
        self.key = torch.zeros(rows, 128).to(torch.float8_e4m3fn), torch.ones(rows, 1)
        self.loc = torch.zeros(rows, dtype=torch.int64)

    def plan(self) -> Any:
        """The plan of this forward."""
        from cp_shared_kv.plan import build_plan

        return build_plan(self.pool.layout, self.table, *self.lens, self.pool.workspace_page_count)

    def run(self) -> None:
        """Plan, and per layer: gather, write and keep index-K and MLA KV."""
        pool = self.pool
        active = pool.begin_forward(self.plan())
        active.token_slots(self.lens[1][0], self.rows)
        for layer_id in range(pool.layer_num):
            with pool.storing_index_k(layer_id, self.rows) as slots:
                pool.set_index_k_scale_buffer(layer_id, slots, *self.key)
            pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer_id), self.loc, *self.latent)
        pool.end_forward()


def seconds_of(call: Any) -> float:
    """Wall time of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
