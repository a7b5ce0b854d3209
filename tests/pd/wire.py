"""The tap on ``MooncakeKVManager._transfer_data``, the one call through which every byte of a prefill rank leaves.

It works on addresses alone: which registered region a source block lies in, hence which kind, layer and physical pages
it carries. So it does not trust what the code above it says that it sends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from .scenario import KINDS, Traffic, WriteFault

# No engine of the harness registers this address: far above every heap, page aligned.
UNREGISTERED_ADDRESS = 0x7FFF_0000_0000


@dataclass(frozen=True)
class Region:
    """One registered source buffer: ``pages`` items of ``item_len`` bytes of one kind and layer from ``base`` on."""

    kind: str
    layer: int
    base: int
    length: int
    item_len: int

    def holds(self, address: int, length: int) -> bool:
        return self.base <= address and address + length <= self.base + self.length


def registered_regions(kv_args: Any) -> list[Region]:
    """The source regions of a prefill manager, from its KVArgs (one state component: NSA index-K)."""
    if len(kv_args.state_types) != 1:
        raise AssertionError(f"expected one state component, got {kv_args.state_types}")
    lists = {
        "kv": (kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens),
        "state": (kv_args.state_data_ptrs[0], kv_args.state_data_lens[0], kv_args.state_item_lens[0]),
        "aux": (kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens),
    }
    return [
        Region(kind, layer, base, length, item_len)
        for kind, columns in lists.items()
        for layer, (base, length, item_len) in enumerate(zip(*columns, strict=True))
    ]


class WireTap:
    """Counts what one prefill rank writes, and lets writes fail when asked to.

    Args:
        manager: the rank's MooncakeKVManager; its ``_transfer_data`` is replaced on the instance.
        faults: the writes of this rank that fail.
    """

    def __init__(self, manager: Any, faults: tuple[WriteFault, ...] = ()) -> None:
        self.traffic = Traffic()
        self._regions = registered_regions(manager.kv_args)
        self._write = manager._transfer_data
        self._faults = faults
        self._wave = 0
        self._writes: Counter[str] = Counter()
        self._page_owner: dict[int, tuple[int, int]] = {}
        self._active = 0
        self._queues = manager.transfer_queues
        self._lock = threading.Lock()
        manager._transfer_data = self

    def expect(self, wave: int, page_owner: dict[int, tuple[int, int]]) -> None:
        """Say which wave begins and what the pool holds in it: physical page -> (room, position)."""
        with self._lock:
            self._wave = wave
            self._writes.clear()
            self._page_owner = page_owner

    def wait_quiet(self, timeout_s: float) -> None:
        """Wait until nothing is queued or being written, so that what comes next cannot be blamed on it."""
        deadline = time.monotonic() + timeout_s
        calm = 0
        # A worker holds a chunk for a moment between the queue and the write: ask for several calm looks in a row.
        while calm < 3 and time.monotonic() < deadline:
            calm = 0 if self._active or any(queue._buf for queue in self._queues) else calm + 1
            time.sleep(0.01)

    def __call__(self, session_id: str, blocks: list[tuple[int, int, int]]) -> int:
        with self._lock:
            self._active += 1
        try:
            return self._transfer(session_id, list(blocks))
        finally:
            with self._lock:
                self._active -= 1

    def _transfer(self, session_id: str, blocks: list[tuple[int, int, int]]) -> int:
        if not blocks:
            return self._write(session_id, blocks)
        regions = [next((r for r in self._regions if r.holds(src, length)), None) for src, _, length in blocks]
        fault = self._fault_of_this_write({region.kind for region in regions if region is not None})
        if fault is not None:
            if fault.how == "error":
                return -1
            return self._write(session_id, [(src, UNREGISTERED_ADDRESS, length) for src, _, length in blocks])
        result = self._write(session_id, blocks)
        with self._lock:
            for (source, _, length), region in zip(blocks, regions, strict=True):
                if region is None:
                    self.traffic.outside_registered += 1
                elif result == 0:
                    self._count(region, source, length)
        return result

    def _fault_of_this_write(self, kinds: set[str]) -> WriteFault | None:
        with self._lock:
            now = {(kind, self._writes[kind]) for kind in kinds}
            self._writes.update(kinds)
            for fault in self._faults:
                if fault.wave == self._wave and (fault.kind, fault.nth) in now:
                    self.traffic.faults_fired.append(fault)
                    return fault
            return None

    def _count(self, region: Region, source: int, length: int) -> None:
        self.traffic.bytes[region.kind] += length
        if region.kind not in KINDS:
            return
        first, remainder = divmod(source - region.base, region.item_len)
        if remainder or length % region.item_len:
            raise AssertionError(f"a block of {region.kind} does not begin and end with a page: {source=} {length=}")
        for page in range(first, first + length // region.item_len):
            if page not in self._page_owner:
                self.traffic.unknown_pages.append((region.kind, page))
                continue
            room, position = self._page_owner[page]
            of_room = self.traffic.pages.setdefault(room, {kind: Counter() for kind in KINDS})
            of_room[region.kind][region.layer, position] += 1
