"""Faults inside scheduler processes, and what is needed to see that they did no harm.

A prefill rank records every write to decode with its begin and end, a decode rank when a request gets pages and when it
gives them up; ``time.monotonic()`` is the same for both. Hooks are laid on instances, so every class of SGLang is still
what the product patched and attested.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from typing import Any


@dataclasses.dataclass
class Write:
    """One call of the transfer engine.

    Attributes:
        room: the request's bootstrap room.
        kind: "kv", "state" (index-K) or "aux" (metadata).
        begin: when it was asked for; a fault may hold it after that.
        end: when it had ended, or None.
        rc: return code, or None.
        blocks: ``(address, bytes)`` in decode's memory.
    """

    room: int
    kind: str
    begin: float
    blocks: list[tuple[int, int]]
    end: float | None = None
    rc: int | None = None


@dataclasses.dataclass
class Fault:
    """What happens to writes of one kind on one rank.

    Attributes:
        do: "fail" (return -1, nothing written), "raise", "hold" (until the next order about faults) or "slow".
        rank: the rank it happens on.
        kind: as in :class:`Write`; None for all.
        nth: the first write it happens to, counted from 1; "fail" and "raise" happen once, the others from there on.
        seconds: delay of "slow".
    """

    do: str
    rank: int
    kind: str | None = None
    nth: int = 1
    seconds: float = 0.0
    seen: int = 0
    over: threading.Event = dataclasses.field(default_factory=threading.Event)


class PrefillRank:
    """Hooks of a prefill rank: its writes, and the faults that hold."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.disagg_prefill_bootstrap_queue.kv_manager
        self.writes: list[Write] = []
        self.batches_held = False
        self._faults: list[Fault] = []
        self._kinds = self._source_ranges()
        self._lock = threading.Lock()
        self._write = self.manager.engine.batch_transfer_sync
        self.manager.engine.batch_transfer_sync = self.batch_transfer_sync
        self._next_batch = scheduler.get_new_batch_prefill
        scheduler.get_new_batch_prefill = lambda: None if self.batches_held else self._next_batch()

    def _source_ranges(self) -> list[tuple[range, str]]:
        args = self.manager.kv_args
        ranges = [(start, length, "kv") for start, length in zip(args.kv_data_ptrs, args.kv_data_lens, strict=True)]
        for pointers, lengths in zip(args.state_data_ptrs, args.state_data_lens, strict=True):
            ranges += [(start, length, "state") for start, length in zip(pointers, lengths, strict=True)]
        ranges += [(start, length, "aux") for start, length in zip(args.aux_data_ptrs, args.aux_data_lens, strict=True)]
        return [(range(start, start + length), kind) for start, length, kind in ranges]

    def set_faults(self, faults: list[Fault]) -> None:
        """Have these faults hold instead of those before; writes that those held go on."""
        with self._lock:
            rank = self.scheduler.tp_group.rank_in_group
            before, self._faults = self._faults, [fault for fault in faults if fault.rank == rank]
        for fault in before:
            fault.over.set()

    def batch_transfer_sync(self, session: str, source: list[int], destination: list[int], lengths: list[int]) -> int:
        """Stands for the engine's method in the transfer threads."""
        kind = next(kind for addresses, kind in self._kinds if source[0] in addresses)
        blocks = list(zip(destination, lengths, strict=True))
        write = Write(_room_of_this_thread(), kind, time.monotonic(), blocks)
        self.writes.append(write)
        try:
            fault = self._due(kind)
            if fault is not None and fault.do == "raise":
                raise RuntimeError("fault injected by a test")
            if fault is not None and fault.do == "fail":
                write.rc = -1
                return write.rc
            if fault is not None:
                fault.over.wait(fault.seconds or None)
            write.rc = self._write(session, source, destination, lengths)
            return write.rc
        finally:
            write.end = time.monotonic()

    def _due(self, kind: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.kind in (None, kind):
                    fault.seen += 1
                    if fault.seen == fault.nth or (fault.seen > fault.nth and fault.do in ("hold", "slow")):
                        return fault
        return None

    def sender(self, rid: str) -> Any:
        """Sender of a request, wherever the request is."""
        scheduler = self.scheduler
        queues = (
            scheduler.disagg_prefill_bootstrap_queue.queue,
            scheduler.waiting_queue,
            scheduler.disagg_prefill_inflight_queue,
        )
        return next(req.disagg_kv_sender for queue in queues for req in queue if req.rid == rid)

    def state(self) -> dict[str, Any]:
        """See :func:`state`."""
        scheduler, manager = self.scheduler, self.manager
        return {
            "queues": {
                "bootstrap": len(scheduler.disagg_prefill_bootstrap_queue.queue),
                "waiting": len(scheduler.waiting_queue),
                "chunked": int(scheduler.chunked_req is not None),
                "inflight": len(scheduler.disagg_prefill_inflight_queue),
            },
            "rooms": {
                "request_status": sorted(manager.request_status),
                "transfer_infos": sorted(manager.transfer_infos),
                "decode_prefix_len": sorted(manager.req_to_decode_prefix_len),
                "failure_records": sorted(manager.failure_records),
            },
            "transfer_threads": sum("transfer_worker" in thread.name for thread in threading.enumerate()),
            "writes": list(self.writes),
        }


def _room_of_this_thread() -> int:
    """Room of the chunk that a transfer thread is at, as stock's own worker names it."""
    frame = sys._getframe()
    while frame.f_code.co_name != "transfer_worker":
        assert frame.f_back is not None
        frame = frame.f_back
    room: int = frame.f_locals["kv_chunk"].room
    return room


@dataclasses.dataclass
class Holding:
    """What a request holds on decode.

    Attributes:
        room: its bootstrap room.
        pages: its pages.
        slot: its metadata slot.
        pages_released: when the first of its pages was given up, or None.
        slot_released: when its metadata slot was given up, or None.
    """

    room: int
    pages: set[int]
    slot: int | None = None
    pages_released: float | None = None
    slot_released: float | None = None


class DecodeRank:
    """Hooks of a decode rank: who holds what, and until when."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.prealloc = scheduler.disagg_decode_prealloc_queue
        self.manager = self.prealloc.kv_manager
        self.holdings: list[Holding] = []
        allocator, slots = scheduler.token_to_kv_pool_allocator, scheduler.req_to_metadata_buffer_idx_allocator
        self._page_size = allocator.page_size
        self._pre_alloc, self.prealloc._pre_alloc = self.prealloc._pre_alloc, self.pre_alloc
        self._free, allocator.free = allocator.free, self.free
        self._alloc_slot, slots.alloc = slots.alloc, self.alloc_slot
        self._free_slot, slots.free = slots.free, self.free_slot

    def pre_alloc(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Stands for the prealloc queue's method."""
        places = self._pre_alloc(req, *args, **kwargs)
        self.holdings.append(Holding(req.bootstrap_room, set((places // self._page_size).tolist())))
        return places

    def alloc_slot(self) -> Any:
        """Stands for the metadata allocator's method, which stock calls right after the one for pages."""
        self.holdings[-1].slot = self._alloc_slot()
        return self.holdings[-1].slot

    def free(self, places: Any) -> None:
        """Stands for the KV allocator's method."""
        pages = set((places // self._page_size).tolist())
        for holding in self.holdings:
            if holding.pages_released is None and holding.pages & pages:
                holding.pages_released = time.monotonic()
        self._free(places)

    def free_slot(self, slot: int) -> None:
        """Stands for the metadata allocator's method."""
        for holding in self.holdings:
            if holding.slot_released is None and holding.slot == slot:
                holding.slot_released = time.monotonic()
        self._free_slot(slot)

    def make_overdue(self) -> None:
        """Have all requests that are being transferred wait for as long as SGLang does, already."""
        for request in self.scheduler.disagg_decode_transfer_queue.queue:
            request.kv_receiver.init_time -= self.manager.waiting_timeout

    def state(self) -> dict[str, Any]:
        """See :func:`state`."""
        scheduler, manager, args = self.scheduler, self.manager, self.manager.kv_args
        return {
            "queues": {
                "prealloc": len(self.prealloc.queue),
                "pending": len(self.prealloc.pending_reqs),
                "transfer": len(scheduler.disagg_decode_transfer_queue.queue),
                "waiting": len(scheduler.waiting_queue),
                "running": len(scheduler.running_batch.reqs),
            },
            "rooms": {
                "request_status": sorted(manager.request_status),
                "required_responses": sorted(manager.required_prefill_response_num_table),
                "responses": sorted(manager.prefill_response_tracker),
                "failure_records": sorted(manager.failure_records),
            },
            "holdings": list(self.holdings),
            "memory": {
                "kv": list(zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True)),
                "state": [
                    entry
                    for component in zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
                    for entry in zip(*component, strict=True)
                ],
                "aux": list(zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)),
            },
        }


_rank: PrefillRank | DecodeRank | None = None


def _hooks(scheduler: Any) -> PrefillRank | DecodeRank:
    global _rank
    if _rank is None:
        _rank = (PrefillRank if scheduler.server_args.disaggregation_mode == "prefill" else DecodeRank)(scheduler)
    return _rank


def apply(scheduler: Any, orders: dict[str, Any]) -> None:
    """Carry out the orders that concern faults; what is not named stays as it is.

    Orders: ``faults`` (a list of the fields of :class:`Fault`), ``hold_batches`` (prefill starts nothing new),
    ``abort_on_rank`` (``[rank, rid]``: this prefill rank alone aborts the request), ``overdue`` (decode has waited too
    long for what it now waits for), ``flush`` (empty the radix cache of an idle server).
    """
    if "faults" in orders:
        _hooks(scheduler).set_faults([Fault(**fault) for fault in orders["faults"]])
    if "hold_batches" in orders:
        _hooks(scheduler).batches_held = orders["hold_batches"]
    if "abort_on_rank" in orders and orders["abort_on_rank"][0] == scheduler.tp_group.rank_in_group:
        _hooks(scheduler).sender(orders["abort_on_rank"][1]).abort()
    if orders.get("overdue"):
        _hooks(scheduler).make_overdue()
    if orders.get("flush"):
        scheduler.flush_cache()


def state(scheduler: Any) -> dict[str, Any]:
    """Bookkeeping of one rank.

    Returns:
        ``pid``, ``rank``; tokens ``available``, ``evictable``, ``protected`` and ``total``; ``request_slots`` (number
        free), ``metadata_slots`` (sorted list of free ones); ``queues`` (requests by queue); ``rooms`` (by table, what
        the transfer manager keeps). Of prefill also ``transfer_threads`` (alive) and ``writes``;
        of decode ``holdings`` and ``memory`` (by kind, ``(address, bytes, bytes per page or slot)`` of each tensor).
    """
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    return {
        "pid": os.getpid(),
        "rank": scheduler.tp_group.rank_in_group,
        "available": allocator.available_size(),
        "evictable": tree.evictable_size(),
        "protected": tree.protected_size(),
        "total": scheduler.max_total_num_tokens,
        "request_slots": scheduler.req_to_token_pool.available_size(),
        "metadata_slots": sorted(scheduler.req_to_metadata_buffer_idx_allocator.free_slots),
        **_hooks(scheduler).state(),
    }
