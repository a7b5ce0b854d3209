"""SGLang's bookkeeping of requests, called as the installed release wants it: chunks, prefix tree, slots, their end.

The model, the scheduler and the server's arguments are stood in for; allocation, tree and requests are SGLang's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cp_shared_kv.releases import installed, supported_versions, symbol

#: Fact -> first release that it holds for.
_SINCE = {
    "fill_len": "0.5.13",
    "extend_range": "0.5.15",
    "kv_in_result_of_allocation": "0.5.16",
    "opaque_tree": "0.5.19",
    "lock_receipt": "0.5.20",
    "extend_end": "0.5.22",
}


#: SGLang's allocation kernel, once it was replaced.
REPLACED: list[Any] = []


def holds(fact: str) -> bool:
    """Whether a fact holds for the installed release."""
    order = supported_versions()
    return order.index(installed().version) >= order.index(_SINCE[fact])


class ExtendKernel:
    """Stands for SGLang's allocation kernel, by SGLang's own torch version: the interpreter takes 10 ms a call."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    @staticmethod
    def run(prefix_lens: Any, seq_lens: Any, last_loc: Any, pages: Any, slots: Any, batch: int, page_size: int) -> None:
        """Write the slots of each request's new tokens to ``slots``."""
        allocator_module().alloc_extend_naive(prefix_lens, seq_lens, last_loc, pages, slots, page_size, "cpu")


def allocator_module() -> Any:
    """Module of SGLang's paged allocator."""
    return sys.modules[symbol("PagedTokenToKVPoolAllocator").__module__]


def place_of(seam: str) -> tuple[Any, str]:
    """Module of a seam, imported, and its name there."""
    target = installed().targets[seam]
    return importlib.import_module(target.module), target.qualname


def install(page_size: int) -> None:
    """Give SGLang's bookkeeping the server's arguments, and its allocation a kernel."""
    # All that it reads of them; with Triton for attention it would copy page tables by a kernel, here torch does so.
    arguments = SimpleNamespace(
        page_size=page_size,
        speculative_algorithm=None,
        strip_thinking_cache=False,
        attention_backend="torch_native",
        attn_dcp_size=1,
        attn_dcp_rank=0,
        dcp_enabled=False,
        backend="torch_native",
    )
    arguments.attn = arguments.kernel = arguments
    answers: dict[str, Any] = {"attention_backends": ("torch_native", "torch_native")}
    for seam in ("cache.alloc_for_extend", "tree.insert", "pool.set_mla_kv_buffer"):
        place_of(seam)
    importlib.import_module("sglang.srt.mem_cache.common")
    importlib.import_module("sglang.srt.managers.schedule_batch")
    sources = ("sglang.srt.server_args", "sglang.srt.runtime_context")
    for name, module in list(sys.modules.items()):
        if name.startswith(("sglang.srt.mem_cache", "sglang.srt.managers.schedule_batch", "sglang.kernels")):
            for key, value in list(vars(module).items()):
                if getattr(value, "__module__", None) in sources and (key.startswith("get_") or key in answers):
                    setattr(module, key, partial(answers.get, key, arguments))
    REPLACED.append(allocator_module().alloc_extend_kernel)
    allocator_module().alloc_extend_kernel = ExtendKernel()


def make_tree(table: Any, allocator: Any, page_size: int, kind: Any = None) -> Any:
    """The prefix tree that a prefill server has by default, or a cache of another kind."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    params = CacheInitParams(
        disable=False, req_to_token_pool=table, token_to_kv_pool_allocator=allocator, page_size=page_size
    )
    if "tree_components" in vars(params) and symbol("prefix_tree").__name__ == "UnifiedRadixCache":
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        params.tree_components = (ComponentType.FULL,)
    return (kind or symbol("prefix_tree"))(params)


def make_request(name: str, tokens: list[int], extra_key: str | None = None) -> Any:
    """A request of one output token."""
    from array import array

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    ids: Any = array("q", tokens) if holds("fill_len") else tokens
    return Req(name, "", ids, SamplingParams(max_new_tokens=1), extra_key=extra_key)


def match(req: Any, tree: Any) -> None:
    """Find a request's prefix in the tree and hold on to it."""
    req.init_next_round_input(tree)
    if holds("extend_end"):
        req.lock = tree.lock(req.last_node)
    else:
        req.lock_result = tree.inc_lock_ref(req.last_node)


def let_go(req: Any, tree: Any) -> None:
    """Undo :func:`match`."""
    if holds("extend_end"):
        tree.unlock(req.lock)
        req.lock = None
    elif holds("lock_receipt"):
        tree.dec_lock_ref(req.last_node, req.lock_result.to_dec_params())
    else:
        tree.dec_lock_ref(req.last_node)


def prefix_len(req: Any) -> int:
    """Tokens that a request has before its next chunk."""
    return int(req.prefix_len if installed().request_prefix_len else len(req.prefix_indices))


def tokens_of(req: Any) -> int:
    """Tokens of the whole request."""
    return len(req.full_untruncated_fill_ids if holds("fill_len") else req.fill_ids)


def take_chunk(req: Any, end: int) -> None:
    """Have the next chunk of a request end at ``end``."""
    req.is_chunked = int(end < tokens_of(req))
    if holds("extend_end"):
        req.extend_end = end
    elif holds("extend_range"):
        req.set_extend_range(prefix_len(req), end)
    else:
        if holds("fill_len"):
            req.fill_len = end
        else:
            req.fill_ids = req.fill_ids[:end]
        req.set_extend_input_len(end - prefix_len(req))


def chunk_end(req: Any) -> int:
    """Tokens that a request has after its chunk."""
    if holds("extend_end"):
        return int(req.extend_end)
    return len(req.get_fill_ids() if holds("fill_len") else req.fill_ids)


def batch_of(reqs: Sequence[Any], table: Any, tree: Any) -> Any:
    """What allocation reads of a batch."""
    ends, prefixes = [chunk_end(req) for req in reqs], [prefix_len(req) for req in reqs]
    extends = [end - prefix for end, prefix in zip(ends, prefixes, strict=True)]
    return SimpleNamespace(
        reqs=reqs,
        prefix_lens=prefixes,
        extend_lens=extends,
        extend_num_tokens=sum(extends),
        seq_lens=torch.tensor(ends),
        seq_lens_cpu=torch.tensor(ends),
        device="cpu",
        req_to_token_pool=table,
        tree_cache=tree,
        token_to_kv_pool_allocator=tree.token_to_kv_pool_allocator,
        maybe_evict_swa=lambda: None,
        is_dllm=lambda: False,
        hisparse_coordinator=None,
    )


def allocate(batch: Any, function: Callable[..., Any] | None = None) -> Any:
    """Slots of a batch's chunks, from SGLang's ``alloc_for_extend`` or a wrapper of it."""
    module, name = place_of("cache.alloc_for_extend")
    slots = (function or getattr(module, name))(batch)[0]
    for req in batch.reqs:
        if not holds("kv_in_result_of_allocation"):
            req.kv_allocated_len = chunk_end(req)
        (req.kv if installed().request_kv else req).kv_committed_len = chunk_end(req)
    return slots


def row_of(req: Any) -> int | None:
    """The row of ``req_to_token`` that a request has."""
    row: int | None = (req.kv if installed().request_kv else req).req_pool_idx
    return row


def held_tokens(req: Any) -> int:
    """Tokens that a request has slots for."""
    return int((req.kv if installed().request_kv else req).kv_committed_len)


def cache_chunk(req: Any, tree: Any) -> None:
    """Put what was computed of a request in the tree."""
    if not req.is_chunked:
        req.output_ids.append(0)
    from sglang.srt.mem_cache import common

    if holds("extend_end"):
        common.checkpoint_kv_cache(req, tree)
    else:
        common.maybe_cache_unfinished_req(req, tree, chunked=req.is_chunked > 0)


def release(req: Any, tree: Any, insert: bool) -> None:
    """Give up a request's slots, keeping them in the tree or not."""
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(req, tree, **{"checkpoint" if holds("extend_end") else "is_insert": insert})


def retract(req: Any) -> None:
    """Make a request whose slots were released one that waits."""
    req.reset_for_retract()
    req.output_ids = req.output_ids[:0]


def tree_slots(tree: Any) -> Any:
    """Slots that the tree holds; none for a cache that is no tree."""
    if not isinstance(tree, symbol("prefix_tree")) or not tree.evictable_size() + tree.protected_size():
        return np.empty(0, dtype=np.int64)
    return tree.all_values_flatten().numpy()


def tree_pages(tree: Any, page_size: int) -> set[int]:
    """Pages that the tree holds."""
    return set((tree_slots(tree) // page_size).tolist())
