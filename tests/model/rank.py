"""One simulated prefill rank: the product and SGLang's own bookkeeping, called in the order of SGLang's scheduler."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import wrapt
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import kv_to_page_num
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator
from cp_shared_kv.collectives import page_rows
from cp_shared_kv.host_pages import PageCheck
from cp_shared_kv.kernels import copy_pages
from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.patches import page_ids
from cp_shared_kv.patches.attention import _plan
from cp_shared_kv.pool import ActivePlan, CPSharedNSATokenToKVPool
from cp_shared_kv.releases import installed, symbol
from cp_shared_kv.transfer import PagePositions, chunk_problem, split_chunk, split_state
from cp_shared_kv_cpu import triton_twins

from . import bookkeeping
from .collective import Exchange
from .decode import Decode, Destination
from .oracle import INDEX_PAGE_BYTES, KEY_BYTES, KV_BYTES, LAYERS, NOPE, PAGE, ROPE, Bytes, Rows, Slots


def install() -> None:
    """Give SGLang's bookkeeping what it needs, its kernels' torch versions, and the wrappers that note pages."""
    for patch in page_ids.GROUP.patches:
        if patch.seam.startswith("tree.") and patch.seam in installed().targets:
            module, name = bookkeeping.place_of(patch.seam)
            wrapt.wrap_function_wrapper(module, name, patch.wrapper)
    bookkeeping.install(PAGE)
    memory_pool.set_mla_kv_buffer_triton = triton_twins.set_mla_kv_buffer
    memory_pool.set_mla_kv_buffer_dcp_sharded_triton = triton_twins.set_mla_kv_buffer_dcp_sharded
    holder = "sglang.srt.mem_cache.index_key_cache" if installed().index_key_cache else memory_pool.__name__
    importlib.import_module(holder).index_buf_accessor._set_k_and_s_triton = triton_twins.set_k_and_s


@dataclass
class Piece:
    """This rank's part of a chunk, queued for decode."""

    request: str
    pages: npt.NDArray[np.int32]
    positions: PagePositions
    #: Logical pages of the whole request, with the last chunk only.
    state: npt.NDArray[np.integer] | None


class Sender:
    """Stands for SGLang's Mooncake sender and transfer thread: counts whole chunks, sends what this rank owns."""

    def __init__(self, rank: Rank, request: str, tokens: int, destination: Destination) -> None:
        self.rank = rank
        self.request = request
        self.destination = destination
        self.pages = kv_to_page_num(tokens - destination.prefix_pages * PAGE, PAGE)
        self.sent = 0
        self.problem: str | None = None

    def should_send_kv_chunk(self, pages: int, last_chunk: bool) -> bool:
        """As stock: the last chunk is announced even when it is empty."""
        return pages > 0 or last_chunk

    def send(self, kv_indices: npt.NDArray[np.integer], state_indices: list[Any] | None) -> None:
        """Queue this rank's part of a chunk, or fail the request."""
        chunk = slice(self.sent, self.sent + len(kv_indices))
        self.sent = chunk.stop
        assert (self.sent == self.pages) == (state_indices is not None), "the last chunk is not known as the last"
        pages, positions = split_chunk(self.rank.layout, kv_indices, chunk)
        self.problem = self.problem or chunk_problem(positions.stop, state_indices or (), [self.destination])
        if self.problem is None:
            state = None if state_indices is None else state_indices[0]
            self.rank.queue.append(Piece(self.request, pages, positions, state))
        else:
            self.rank.drop(self.request)


class Rank:
    """One rank of the group.

    Args:
        rank: its number.
        size: ranks in the group.
        pages: physical pages of its pool.
        workspace_pages: pages of its workspace, trash page included.
        longest: tokens of the longest request.
        requests: requests that can hold slots at a time.
        need_sort: whether freed pages are sorted before reuse.
        exchange: the group's collective calls.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        pages: int,
        workspace_pages: int,
        longest: int,
        requests: int,
        need_sort: bool,
        exchange: Exchange,
    ) -> None:
        self.number = rank
        self.pages = pages
        self.layout = CpSharedKVLayout(page_size=PAGE, cp_size=size, cp_rank=rank)
        stock = symbol("NSATokenToKVPool")(
            size=pages * PAGE,
            page_size=PAGE,
            kv_lora_rank=NOPE,
            dtype=torch.bfloat16,
            qk_rope_head_dim=ROPE,
            layer_num=LAYERS,
            device="cpu",
            index_head_dim=KEY_BYTES,
            enable_memory_saver=False,
            kv_cache_dim=NOPE + ROPE,
        )
        self.gather = exchange.gather_of(rank)
        self.pool = CPSharedNSATokenToKVPool.adopt(
            stock, layout=self.layout, workspace_pages=workspace_pages, gather=self.gather
        )
        self.allocator = CPSharedPagedTokenToKVPoolAllocator(
            logical_size=self.pool.size,
            physical_size=self.pool.physical_size,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=self.pool,
            need_sort=need_sort,
            cp_size=size,
            cp_rank=rank,
        )
        self.pool.page_check = PageCheck(PAGE, "cpu")
        self.table = ReqToTokenPool(requests, longest + PAGE, "cpu", enable_memory_saver=False)
        self.tree = bookkeeping.make_tree(self.table, self.allocator, PAGE)
        self.reqs: dict[str, Any] = {}
        self.queue: deque[Piece] = deque()
        #: Persistent bytes of each layer by physical page, as views.
        self.kv = [layer.view(torch.uint8).view(pages + 1, -1).numpy() for layer in self.pool.physical_kv_buffer]
        self.index = [layer.numpy() for layer in self.pool.physical_index_k_with_scale_buffer]
        self.scratch = {
            KV_BYTES * PAGE: torch.empty(workspace_pages, KV_BYTES * PAGE // 8, dtype=torch.int64),
            INDEX_PAGE_BYTES: torch.empty(workspace_pages, INDEX_PAGE_BYTES // 8, dtype=torch.int64),
        }
        manager = SimpleNamespace(kv_args=SimpleNamespace(state_types=[StateType(installed().index_k_state)]))
        self.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.table,
            disagg_metadata_buffers=SimpleNamespace(set_buf=lambda req: None),
            disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=manager),
        )

    # A request's life.

    def add(self, name: str, tokens: list[int], destination: Destination) -> None:
        """Put a request, whose destination decode has announced, in the waiting queue."""
        self.reqs[name] = bookkeeping.make_request(name, tokens)
        self._bootstrap(name, destination)

    def _bootstrap(self, name: str, destination: Destination) -> None:
        req = self.reqs[name]
        req.disagg_kv_sender = Sender(self, name, len(req.origin_input_ids), destination)
        req.start_send_idx = destination.prefix_pages * PAGE

    def admit(self, name: str, first: bool) -> int:
        """Look up the cached prefix, hold on to it, and return its length in tokens."""
        req = self.reqs[name]
        if first:
            bookkeeping.match(req, self.tree)
        else:
            req.init_next_round_input(None)
        return bookkeeping.prefix_len(req)

    def refuse(self, name: str, first: bool) -> None:
        """Undo :meth:`admit`."""
        if first:
            bookkeeping.let_go(self.reqs[name], self.tree)

    def budget(self) -> int:
        """Tokens that can be allocated, evicting what is not in use."""
        return self.allocator.available_size() + self.tree.evictable_size()

    def allocate(self, chunks: Sequence[tuple[str, int]]) -> Slots:
        """Logical slots of a batch's new tokens; of each request so many as given."""
        reqs = [self.reqs[name] for name, _ in chunks]
        for req, (_, tokens) in zip(reqs, chunks, strict=True):
            bookkeeping.take_chunk(req, bookkeeping.prefix_len(req) + tokens)
        module, name = bookkeeping.place_of("cache.alloc_for_extend")
        allocate = wrapt.FunctionWrapper(getattr(module, name), page_ids._alloc_for_extend)
        slots: Slots = bookkeeping.allocate(bookkeeping.batch_of(reqs, self.table, self.tree), allocate).numpy()
        return slots

    def after_chunk(self, name: str) -> None:
        """Cache what was computed and send it, as the scheduler does between forwards."""
        req = self.reqs[name]
        last = not req.is_chunked
        bookkeeping.cache_chunk(req, self.tree)
        self.pool.page_check.raise_if_different()
        SchedulerDisaggregationPrefillMixin.send_kv_chunk(self.scheduler, req, last_chunk=last)

    def release(self, name: str, insert: bool) -> None:
        """Give up a request's slots, keeping them in the radix cache or not."""
        self.drop(name)
        bookkeeping.release(self.reqs[name], self.tree, insert)

    def retract(self, name: str, destination: Destination) -> None:
        """Take a request's slots away and put it back in the waiting queue; decode has announced a new destination."""
        self.release(name, insert=False)
        bookkeeping.retract(self.reqs[name])
        self._bootstrap(name, destination)

    def drop(self, name: str) -> None:
        """Forget what is queued for decode of a request."""
        self.queue = deque(piece for piece in self.queue if piece.request != name)

    def evict(self, tokens: int) -> None:
        """Evict at least so many tokens from the radix cache, if it holds them."""
        self.tree.evict(EvictParams(num_tokens=tokens))

    def flush(self) -> None:
        """Forget all that is cached."""
        self.tree.reset()
        self.table.clear()
        self.allocator.clear()

    # One forward.

    def begin(self, names: Sequence[str], rows: int, mode: ForwardMode = ForwardMode.EXTEND) -> ActivePlan:
        """Plan a forward that writes ``rows`` rows, padding included."""
        reqs = [self.reqs[name] for name in names]
        idle = mode.is_idle()
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            _original_forward_mode=mode,
            batch_size=1 if idle else len(reqs),
            # An idle batch is relabelled by SGLang: one made-up request of one token.
            seq_lens_cpu=torch.tensor([1] if idle else [bookkeeping.chunk_end(req) for req in reqs]),
            extend_prefix_lens_cpu=[0] if idle else [bookkeeping.prefix_len(req) for req in reqs],
            req_pool_indices=torch.tensor([0] if idle else [bookkeeping.row_of(req) for req in reqs]),
            rids=[] if idle else names,
        )
        active = self.pool.begin_forward(_plan(self.pool, batch, self.table.req_to_token))
        active.token_slots(PAGE, rows)
        return active

    def bring(self, active: ActivePlan, layers: list[torch.Tensor], layer: int) -> None:
        """This rank's side of the gather that comes next."""
        if active.plan.gathered_pages:
            rows = page_rows(layers[layer], self.pages + 1)
            scratch = self.scratch[rows.shape[1] * rows.element_size()]
            copy_pages(scratch, active.own_workspace, rows, active.own_physical)
            self.gather.gather([scratch], active.plan.base_share, active.plan.surplus)

    def store_index(self, layer: int, slots: Slots, rows: Rows) -> None:
        """The indexer's store of one layer."""
        with self.pool.storing_index_k(layer, len(slots)) as where:
            key = torch.from_numpy(rows.key).view(torch.float8_e4m3fn)
            self.pool.set_index_k_scale_buffer(layer, where, key, torch.from_numpy(rows.scale).view(torch.float32))

    def store_kv(self, layer: int, slots: Slots, rows: Rows) -> None:
        """The attention's store of one layer."""
        row = torch.from_numpy(rows.kv).view(torch.bfloat16).unsqueeze(1)
        logical = torch.from_numpy(slots)
        self.pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), logical, row[..., :NOPE], row[..., NOPE:])

    def read(self, active: ActivePlan, layer: int, request: int, tokens: int) -> tuple[Bytes, Bytes]:
        """What kernels would read of a request: KV rows ``(tokens, KV_BYTES)`` and its index pages."""
        pages = active.page_table[request, : kv_to_page_num(tokens, PAGE)].numpy()
        kv = self.pool.get_key_buffer(layer).view(torch.uint8).view(-1, PAGE * KV_BYTES).numpy()
        index = self.pool.get_index_k_with_scale_buffer(layer).numpy()
        return kv[pages].reshape(-1, KV_BYTES)[:tokens], index[pages]

    # Transfer.

    def deliver(self, decode: Decode) -> Piece:
        """Move the oldest queued piece to decode."""
        piece = self.queue.popleft()
        destination = self.reqs[piece.request].disagg_kv_sender.destination
        self._move(piece.pages, destination.dst_kv_indices[piece.positions], self.kv, decode.kv, decode.kv_writes)
        if piece.state is not None:
            pages, state = split_state(self.layout, piece.state, destination.dst_state_indices[0])
            self._move(pages, np.array(state, dtype=np.int64), self.index, decode.index, decode.index_writes)
        return piece

    @staticmethod
    def _move(
        pages: npt.NDArray[np.integer], to: npt.NDArray[np.integer], layers: list[Bytes], target: Bytes, writes: Slots
    ) -> None:
        for layer, source in enumerate(layers):
            target[layer, to] = source[pages]
        np.add.at(writes, to, 1)

    # What is checked.

    def slots_of(self, name: str) -> Slots:
        """Logical slots that a request holds; none while it waits."""
        req = self.reqs[name]
        row = bookkeeping.row_of(req)
        if row is None:
            return np.empty(0, dtype=np.int64)
        return self.table.req_to_token[row, : bookkeeping.held_tokens(req)].numpy().astype(np.int64)

    def free_pages(self) -> Slots:
        """Logical pages that can be handed out, in the allocator's order."""
        return torch.cat((self.allocator.free_pages, self.allocator.release_pages)).numpy()

    def cached_slots(self) -> Slots:
        """Logical slots that the prefix tree holds."""
        return bookkeeping.tree_slots(self.tree)

    def nodes(self) -> list[Any]:
        """Nodes of the prefix tree but its root; none where the tree does not show them."""
        found: list[Any] = []
        stack = [] if bookkeeping.holds("opaque_tree") else [self.tree.root_node]
        while stack:
            children = list(stack.pop().children.values())
            found += children
            stack += children
        return found
