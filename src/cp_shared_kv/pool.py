"""The KV pool of one rank: it keeps owned pages and shows the stock kernels a dense workspace.

The stock accessors and writers index ``kv_buffer`` and the index-K buffers, one entry a layer. Here every
entry of both lists is the workspace, so whatever stock code reads or writes by slot, it reads and writes there, and the
persistent tensors are out of its reach. Per layer the order is: gather the prefix pages into the workspace, let stock
code write the chunk over it (with its own quantisation), copy the owned pages, as bytes, into the persistent tensors.
Copying whole pages is right because the gather has filled the page that the prefix ends in, and it carries the split
K/scale layout of an index page along unseen.

The workspace holds one layer, or two where the next layer's prefix is fetched ahead (:mod:`cp_shared_kv.prefetch`). It
is stamped with the layer it holds, and a read of any other is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from cp_shared_kv.collectives import PageGather, page_rows
from cp_shared_kv.divergence import DivergenceGuard
from cp_shared_kv.host_pages import HostPages, PageCheck, to_device
from cp_shared_kv.kernels import copy_pages, expand_page_table
from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.metrics import COUNTERS
from cp_shared_kv.plan import ForwardPlan, build_plan
from cp_shared_kv.prefetch import LayerPrefetch, workspace_count
from cp_shared_kv.releases import installed, symbol

NSATokenToKVPool: Any = symbol("NSATokenToKVPool")


class SharedPoolError(RuntimeError):
    """The pool was used in a way that could have returned stale or foreign data."""


@dataclass
class _Store:
    """One kind of cached data: per-layer pages, one or two workspaces, and the layer that each workspace holds.

    Layers are numbered from 0 here; layer i uses workspace ``i % len(workspaces)``.
    """

    name: str
    layers: list[torch.Tensor]
    layer_rows: list[torch.Tensor]
    workspaces: list[torch.Tensor]
    workspace_rows: list[torch.Tensor]
    holds: list[int | None]

    def rows_for(self, layer: int) -> torch.Tensor:
        """Rows of the workspace that a layer uses, in the plan's order, without the trash page."""
        return self.workspace_rows[layer % len(self.workspaces)]


#: First slot of the trash page, as stock code sees it: page 0, which stock writes nothing to that is ever read, and its
#: later kernels nothing at all. The plan has that page last, so its other pages are seen one further on.
TRASH_SLOT = 0


class ActivePlan:
    """A plan on the device, for the time of one forward.

    Args:
        plan: the host-side plan.
        page_size: tokens per page.
        device: the pool's device.

    Attributes:
        page_table: workspace page of each page position, as stock code sees it, int32 ``(batch, pages)``.
        own_workspace, own_physical: pages that this rank copies from its pool into the plan's workspace, int64.
        keep_workspace, keep_physical: owned pages that were written and where they are kept, int64.
        write_slots: workspace slot of each row of the chunk, int64; set by :meth:`token_slots`.
    """

    def __init__(self, plan: ForwardPlan, page_size: int, device: torch.device | str) -> None:
        self.plan = plan
        self.page_size = page_size
        batch = len(plan.tables)
        spans = np.zeros((3, batch), dtype=np.int64)
        if plan.seq_lens:
            spans[0], spans[1] = plan.prefix_lens, plan.seq_lens
            spans[2, 1:] = np.cumsum(spans[1] - spans[0])[:-1]
        parts = (*plan.own_pages(), plan.keep_workspace, plan.keep_physical, spans.ravel())
        # One upload for all indices: each transfer costs a launch.
        packed = to_device(np.concatenate(parts), device)
        self.own_workspace, self.own_physical, self.keep_workspace, self.keep_physical, spans_packed = packed.split(
            [len(part) for part in parts]
        )
        self.page_table = to_device((plan.tables + np.int32(1)) % np.int32(plan.trash_page + 1), device)
        self._spans = spans_packed.view(3, batch)
        self.write_slots: torch.Tensor | None = None

    def token_slots(self, width: int, rows: int) -> torch.Tensor:
        """Workspace slots of token positions; also fixes where the chunk's rows go.

        Args:
            width: token positions of each request.
            rows: rows that will be written; those beyond the chunk's tokens are padding and go to trash.

        Returns:
            int32 ``(batch, width)``; trash past a request's last page.

        Raises:
            SharedPoolError: the chunk has more tokens than rows.
        """
        tokens = sum(self.plan.seq_lens) - sum(self.plan.prefix_lens)
        if tokens > rows:
            raise SharedPoolError(f"the chunk has {tokens} tokens but only {rows} rows are written")
        slots, self.write_slots = expand_page_table(
            self.page_table, self._spans, self.page_size, width, rows, TRASH_SLOT
        )
        return slots


def _first_difference(read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Of each row: whether it differs, and the first words that do; int64 ``(rows, 3)``."""
    differs = read != written
    where = differs.to(torch.uint8).argmax(1, keepdim=True)
    return torch.cat([differs.any(1, keepdim=True), read.gather(1, where), written.gather(1, where)], 1).to(torch.int64)


class CPSharedNSATokenToKVPool(NSATokenToKVPool):  # type: ignore[misc]
    """NSA/MLA KV pool that holds the pages one attention-CP rank owns.

    Made from a stock pool of the physical size by :meth:`adopt`; ``size`` becomes the logical size, which SGLang
    compares slots with.
    """

    layout: CpSharedKVLayout
    size: int
    kv_buffer: list[torch.Tensor]
    index_k_with_scale_buffer: list[torch.Tensor]
    index_key_cache: Any

    @classmethod
    def adopt(
        cls,
        stock: NSATokenToKVPool,
        *,
        layout: CpSharedKVLayout,
        workspace_pages: int,
        gather: PageGather | None,
        prefetch: bool = False,
    ) -> CPSharedNSATokenToKVPool:
        """Take over a stock pool's tensors and add the workspace.

        Args:
            stock: a pool built by SGLang for this rank's physical capacity; not to be used afterwards.
            layout: placement of the group, with this rank's number.
            workspace_pages: pages of the workspace, trash page included.
            gather: gather over the group; None only where plans never have prefix pages of other ranks.
            prefetch: fetch the next layer's prefix while a layer computes; takes a second workspace.

        Raises:
            TypeError: ``stock`` is not exactly the stock NSA pool.
            ValueError: its page size differs from the layout's.
        """
        if type(stock) is not NSATokenToKVPool:
            wanted = NSATokenToKVPool.__name__
            raise TypeError(f"CP shared KV can adopt only the stock {wanted}, got {type(stock).__name__}")
        if stock.page_size != layout.page_size:
            raise ValueError(f"the pool has page size {stock.page_size}, the layout {layout.page_size}")
        pool = cls.__new__(cls)
        pool.__dict__.update(stock.__dict__)
        pool._share(layout, workspace_pages, gather, prefetch)
        return pool

    def _share(self, layout: CpSharedKVLayout, workspace_pages: int, gather: PageGather | None, prefetch: bool) -> None:
        self.layout = layout
        self.workspace_page_count = workspace_pages
        self._gather = gather
        self._active: ActivePlan | None = None
        self._storing_index_k = False
        #: Set by who builds the pool for a running server.
        self.divergence_guard: DivergenceGuard | None = None
        self.page_check: PageCheck | None = None
        self.host_pages = HostPages()
        self.physical_size = self.size
        self.size = self.physical_size * layout.cp_size
        depth = workspace_count(prefetch)
        if installed().index_key_cache:
            self.index_key_cache = copy.copy(self.index_key_cache)
            self.index_key_cache.pool = self
        kv, index = self.kv_buffer, self.index_k_with_scale_buffer
        kv_workspaces = [kv[0].new_zeros((workspace_pages * self.page_size, *kv[0].shape[1:])) for _ in range(depth)]
        index_workspaces = [index[0].new_zeros((workspace_pages, *index[0].shape[1:])) for _ in range(depth)]
        self._kv = self._make_store("MLA KV", kv, kv_workspaces)
        self._index = self._make_store("index-K", index, index_workspaces)
        self.kv_buffer = [kv_workspaces[i % depth] for i in range(self.layer_num)]
        # Layers that take over another's selection have no index-K: no rows, which stays so.
        self._show_index_k([index_workspaces[i % depth] if len(index[i]) else index[i] for i in range(self.layer_num)])
        # A layer needs its index-K first.
        stores = {store.name: store for store in (self._index, self._kv)}
        streams = torch.get_device_module(self.device) if prefetch else None
        self._prefetch = LayerPrefetch(
            lambda names, layer: self._fetch([stores[name] for name in names], layer),
            tuple(stores),
            self.layer_num,
            streams,
        )

    def _show_index_k(self, buffers: list[torch.Tensor]) -> None:
        """Have stock code find these index-K buffers."""
        if installed().index_key_cache:
            self.index_key_cache.buffer = buffers
        else:
            self.index_k_with_scale_buffer = buffers

    def _make_store(self, name: str, layers: list[torch.Tensor], workspaces: list[torch.Tensor]) -> _Store:
        pages = self.physical_size // self.page_size + 1
        workspace_rows = [page_rows(workspace, self.workspace_page_count)[1:] for workspace in workspaces]
        rows = [page_rows(buffer, pages) if len(buffer) else workspace_rows[0][:0] for buffer in layers]
        return _Store(name, layers, rows, workspaces, workspace_rows, [None] * len(workspaces))

    @property
    def physical_kv_buffer(self) -> list[torch.Tensor]:
        """Persistent MLA KV, one tensor a layer, ``(physical slots + one page, 1, dim)``."""
        return self._kv.layers

    @property
    def physical_index_k_with_scale_buffer(self) -> list[torch.Tensor]:
        """Persistent index-K with scales, one tensor a layer, ``(physical pages + 1, bytes per page)`` uint8."""
        return self._index.layers

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all workspaces."""
        return sum(workspace.nbytes for store in (self._kv, self._index) for workspace in store.workspaces)

    # Start-up.

    def self_check(self) -> None:
        """Keep one known page of every rank and gather all of them back, in both stores; a collective call.

        Every rank writes all pages into its workspace, as it would a chunk, keeps its own, and reads all of them as a
        prefix, in the first and the last layer. Pools, workspace and counters are then what they were. Waits for the
        device once. A pool without a page is left for the allocator to refuse.

        Raises:
            RuntimeError: a page came back with other bytes; names rank, store, layer and page.
        """
        if self.physical_size < self.page_size:
            return
        pages = np.arange(1, self.layout.cp_size + 1)  # physical page 1 of each rank
        stores = (self._index, self._kv)
        kept = {store.name: [i for i, rows in enumerate(store.layer_rows) if len(rows)] for store in stores}
        ends = {(store.name, layer) for store in stores for layer in (kept[store.name][0], kept[store.name][-1])}
        layers = sorted({layer for _, layer in ends})
        checks = [(store, layer) for layer in layers for store in stores if (store.name, layer) in ends]
        held = [store.layer_rows[layer][1].clone() for store, layer in checks]
        counted = COUNTERS.snapshot()
        try:
            places = self._begin_known_pages(pages, read=False)
            for store, layer in checks:
                self._load(store, layer + self.start_layer)
                store.rows_for(layer).index_copy_(0, places, self._known_pages(store, layer, pages))
                self._keep(store, layer + self.start_layer)
                store.rows_for(layer).index_fill_(0, places, 0)  # what is read must come from the gather
            places = self._begin_known_pages(pages, read=True)
            seen = []
            for store, layer in checks:
                self._load(store, layer + self.start_layer)
                rows = store.rows_for(layer).index_select(0, places)
                seen.append(_first_difference(rows, self._known_pages(store, layer, pages)))
            found = torch.stack(seen).tolist()
        finally:
            self.end_forward()
            self._prefetch.forget()
            for (store, layer), row in zip(checks, held, strict=True):
                store.layer_rows[layer][1].copy_(row)
                store.rows_for(layer)[: len(pages)].zero_()
            now = COUNTERS.snapshot()
            COUNTERS.add(**{name: before - now[name] for name, before in counted.items()})
        owners = self.layout.owner_for_logical_pages_np(pages).tolist()
        problems = [
            f"{store.name} of layer {layer + self.start_layer}, page {page} of rank {owner}: "
            f"read {read % 2**64:#x}, written was {written:#x}"
            for (store, layer), rows in zip(checks, found, strict=True)
            for page, owner, (differs, read, written) in zip(pages.tolist(), owners, rows, strict=True)
            if differs
        ]
        if problems:
            raise RuntimeError(
                f"CP shared KV self-check failed on attention-CP rank {self.layout.cp_rank}: the process group is "
                "broken, its ranks are out of order, or a rank does not keep its pages of the pool:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
            )

    def _begin_known_pages(self, pages: np.ndarray, read: bool) -> torch.Tensor:
        """Begin a forward that reads or writes one whole page of each rank; their places in the plan, int64."""
        tokens = len(pages) * self.page_size
        plan = build_plan(self.layout, pages[None], [tokens * read], [tokens], self.workspace_page_count)
        if plan.gathered_pages != len(pages) * read:  # a collective call of another size than the other ranks' hangs
            raise RuntimeError(
                f"CP shared KV self-check failed on attention-CP rank {self.layout.cp_rank}: pages {pages.tolist()} of "
                f"the pool have the owners {self.layout.owner_for_logical_pages_np(pages).tolist()}"
            )
        self.begin_forward(plan)
        return to_device(plan.tables[0, : len(pages)].astype(np.int64), self.device)

    def _known_pages(self, store: _Store, layer: int, pages: np.ndarray) -> torch.Tensor:
        """Rows that tell store, page, layer and place: ``(pages, n)``, as the store's rows are."""
        row = store.layer_rows[layer][0]
        width, itemsize = len(row), row.element_size()
        first = int(pages[0])
        page = torch.arange(first, first + len(pages), device=self.device).unsqueeze(1)
        words = torch.arange(-(-width * itemsize // 8), device=self.device) + (page << 40)
        words += (layer << 24) + ((2 if store is self._index else 1) << 56)
        return words.view(row.dtype)[:, :width]

    # One forward.

    def begin_forward(self, plan: ForwardPlan) -> ActivePlan:
        """Start a forward: from here on reads and writes go by ``plan``."""
        self.end_forward()
        self._active = ActivePlan(plan, self.page_size, self.device)
        if plan.seq_lens:
            COUNTERS.add(forwards=1, prefix_pages=plan.prefix_pages)
        self._prefetch.begin(communicates=plan.gathered_pages > 0)
        return self._active

    def end_forward(self) -> None:
        """End the forward, also after an error; the workspace's content is void from here on."""
        self._prefetch.end()
        self._active = None
        for store in (self._kv, self._index):
            store.holds = [None] * len(store.workspaces)

    def _require_plan(self, what: str) -> ActivePlan:
        if self._active is None:
            raise SharedPoolError(
                f"{what} outside a forward: the shared pool has no plan, so slots cannot be told from pages. "
                "This is a defect of the plugin or an unsupported feature of the server; please report it"
            )
        return self._active

    def _fetch(self, stores: Sequence[_Store], layer: int) -> None:
        """Gather the prefix pages of a layer, and lay out new pages that will not be filled, on the current stream."""
        active = self._require_plan(f"gather of layer {layer + self.start_layer}")
        for store in stores:
            store.holds[layer % len(store.workspaces)] = None
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer)  # a loader may still be writing this layer's pages
        if active.plan.gathered_pages and self._gather is None:
            raise SharedPoolError("this pool was made without a gather but the plan reads prefix pages")
        workspaces = [store.rows_for(layer) for store in stores]
        for store, workspace in zip(stores, workspaces, strict=True):
            copy_pages(workspace, active.own_workspace, store.layer_rows[layer], active.own_physical)
        if self._gather is not None and active.plan.gathered_pages:
            received = self._gather.gather(workspaces, active.plan.base_share, active.plan.surplus)
            COUNTERS.add(gather_calls=len(stores), gathered_bytes=received)

    def _load(self, store: _Store, layer_id: int) -> None:
        """Have the workspace hold the layer's prefix, and stamp it."""
        self._require_plan(f"write of {store.name} of layer {layer_id}")
        layer = layer_id - self.start_layer
        self._prefetch.need(store.name, layer)
        store.holds[layer % len(store.workspaces)] = layer_id

    def _keep(self, store: _Store, layer_id: int) -> None:
        """Copy the owned pages of the chunk from the workspace into the persistent pool."""
        active = self._require_plan(f"write of {store.name} of layer {layer_id}")
        layer = layer_id - self.start_layer
        copy_pages(store.layer_rows[layer], active.keep_physical, store.rows_for(layer), active.keep_workspace)

    def _write_slots(self, rows: int, what: str) -> torch.Tensor:
        slots = self._require_plan(what).write_slots
        if slots is None or len(slots) != rows:
            planned = "none" if slots is None else str(len(slots))
            raise SharedPoolError(f"{what} brings {rows} rows but the plan has {planned}")
        return slots

    def _check_read(self, store: _Store, layer_id: int) -> None:
        self._require_plan(f"read of {store.name} of layer {layer_id}")
        held = store.holds[(layer_id - self.start_layer) % len(store.workspaces)]
        if held != layer_id:
            raise SharedPoolError(
                f"read of {store.name} of layer {layer_id} but the workspace holds layer {held}: "
                "the read would return another layer's data"
            )

    # The two write points; every rank reaches both, so both may communicate.

    def set_mla_kv_buffer(self, layer: Any, loc: Any, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor) -> None:
        """Stock write of one layer's MLA KV, with the gather before it and the keeping after it."""
        unwrap = symbol("unwrap_write_loc")
        rows = len(loc if unwrap is None else unwrap(loc)[0])
        slots = self._write_slots(rows, f"write of MLA KV of layer {layer.layer_id}")
        self._load(self._kv, layer.layer_id)
        super().set_mla_kv_buffer(layer, slots, cache_k_nope, cache_k_rope)
        self._keep(self._kv, layer.layer_id)

    @contextmanager
    def storing_index_k(self, layer_id: int, rows: int) -> Iterator[torch.Tensor]:
        """Around the stock store of one layer's index-K.

        Args:
            layer_id: the layer.
            rows: rows that stock code is about to store.

        Yields:
            the workspace slots to store them at, int64 ``(rows,)``.
        """
        slots = self._write_slots(rows, f"write of index-K of layer {layer_id}")
        if self._storing_index_k:  # one of stock's stores calls another
            yield slots
            return
        self._load(self._index, layer_id)
        self._storing_index_k = True
        try:
            yield slots
        finally:
            self._storing_index_k = False
        self._keep(self._index, layer_id)

    # Reads: stock code on the workspace, once it is known to hold the layer.

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self._check_read(self._kv, layer_id)
        return super().get_key_buffer(layer_id)

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        """Shapes of the key and the value buffer, which stock asks for outside a forward; reads nothing."""
        shape = self.kv_buffer[0].shape
        return shape, torch.Size((*shape[:-1], self.kv_lora_rank))

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self._check_read(self._kv, layer_id)
        return super().get_value_buffer(layer_id)

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        self._check_read(self._index, layer_id)
        return super().get_index_k_with_scale_buffer(layer_id)

    def get_index_k_continuous(self, layer_id: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check_read(self._index, layer_id)
        return super().get_index_k_continuous(layer_id, *args, **kwargs)

    def get_index_k_scale_continuous(self, layer_id: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check_read(self._index, layer_id)
        return super().get_index_k_scale_continuous(layer_id, *args, **kwargs)

    def get_index_k_scale_buffer(self, layer_id: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_read(self._index, layer_id)
        return super().get_index_k_scale_buffer(layer_id, *args, **kwargs)

    def set_index_k_scale_buffer(self, layer_id: int, *args: Any, **kwargs: Any) -> None:
        self._check_read(self._index, layer_id)  # reached only inside `storing_index_k`
        super().set_index_k_scale_buffer(layer_id, *args, **kwargs)

    # Bytes and addresses are those of the persistent tensors.

    @contextmanager
    def _persistent(self) -> Iterator[None]:
        kv, index_k = self.kv_buffer, self.index_k_with_scale_buffer
        self.kv_buffer = self._kv.layers
        self._show_index_k(self._index.layers)
        try:
            yield
        finally:
            self.kv_buffer = kv
            self._show_index_k(index_k)

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        with self._persistent():
            return super().get_contiguous_buf_infos()

    def get_state_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        with self._persistent():
            return super().get_state_buf_infos()

    def get_kv_size_bytes(self) -> int:
        with self._persistent():
            return super().get_kv_size_bytes()

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        del self._kv, self._index, self._prefetch

    # Stock paths that address slots without a plan.

    def _refuse(self, what: str) -> NoReturn:
        raise SharedPoolError(f"{what} is not supported under CP shared KV")

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("set_kv_buffer (a non-MLA write)")

    def get_mla_kv_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("get_mla_kv_buffer (a read by logical slot)")

    def move_kv_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("move_kv_cache (a move between logical slots)")

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("get_cpu_copy (offload of KV to the host)")

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("load_cpu_copy (load of KV from the host)")
