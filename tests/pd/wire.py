"""The tap on ``MooncakeKVManager._transfer_data``, the one call through which every byte of a prefill rank leaves.

It works on addresses alone: which registered region a source block lies in, hence which kind, layer and physical pages
it carries. So it does not trust what the code above it says that it sends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from cp_shared_kv.releases import installed

from .scenario import KINDS, Region, SlowWrite, Traffic, Write, WriteFault

# No engine of the harness registers this address: far above every heap, page aligned.
UNREGISTERED_ADDRESS = 0x7FFF_0000_0000


def registered_regions(kv_args: Any) -> list[Region]:
    """The regions of a manager of either side, from its KVArgs (one state component: NSA index-K)."""
    state = (kv_args.state_data_ptrs, kv_args.state_data_lens, kv_args.state_item_lens)
    if installed().state_by_component:
        if len(kv_args.state_types) != 1:
            raise AssertionError(f"expected one state component, got {kv_args.state_types}")
        state = tuple(components[0] for components in state)
    lists = {
        "kv": (kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens),
        "state": state,
        "aux": (kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens),
    }
    return [
        Region(kind, layer, base, length, item_len)
        for kind, columns in lists.items()
        for layer, (base, length, item_len) in enumerate(zip(*columns, strict=True))
    ]


class Signals:
    """Flags between the ranks of both sides, in the store that the process group of the prefill side keeps.

    Args:
        port: that of the store, which is up once the prefill side's group is.
    """

    def __init__(self, port: int) -> None:
        import torch

        self._store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def set(self, *name: object) -> None:
        self._store.set(self._key(name), "set")

    def is_set(self, *name: object) -> bool:
        return self._store.check([self._key(name)])

    @staticmethod
    def _key(name: tuple[object, ...]) -> str:
        return "/".join(map(str, ("signal", *name)))


class WireTap:
    """Counts what one prefill rank writes, and lets writes fail or be slow when asked to.

    Args:
        manager: the rank's MooncakeKVManager; its ``_transfer_data`` is replaced on the instance.
        faults: the writes of this rank that fail.
        slow: the writes of this rank that are slow.
        slow_begins: called with the wave when a slow write begins.
    """

    def __init__(
        self,
        manager: Any,
        faults: tuple[WriteFault, ...] = (),
        slow: tuple[SlowWrite, ...] = (),
        slow_begins: Callable[[int], None] = lambda wave: None,
    ) -> None:
        self.traffic = Traffic()
        self._slow = slow
        self._slow_begins = slow_begins
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
        wave, begin = self._wave, time.monotonic()
        fault, slow = self._plan_of_this_write({region.kind for region in regions if region is not None})
        if slow is not None:
            self._slow_begins(wave)
            time.sleep(slow.seconds)
        if fault is not None:
            if fault.how == "error":
                return -1
            if fault.how == "raises":
                raise RuntimeError("a fault of the test")
            return self._write(session_id, [(src, UNREGISTERED_ADDRESS, length) for src, _, length in blocks])
        result = self._write(session_id, blocks)
        with self._lock:
            destinations = tuple((destination, length) for _, destination, length in blocks)
            self.traffic.writes.append(Write(wave, session_id, begin, time.monotonic(), destinations))
            for (source, _, length), region in zip(blocks, regions, strict=True):
                if region is None:
                    self.traffic.outside_registered += 1
                elif result == 0:
                    self._count(region, source, length)
        return result

    def _plan_of_this_write(self, kinds: set[str]) -> tuple[WriteFault | None, SlowWrite | None]:
        with self._lock:
            now = {(self._wave, kind, self._writes[kind]) for kind in kinds}
            self._writes.update(kinds)
            fault = next((each for each in self._faults if (each.wave, each.kind, each.nth) in now), None)
            slow = next((each for each in self._slow if (each.wave, each.kind, each.nth) in now), None)
            self.traffic.faults_fired += [fault] if fault else []
            self.traffic.slowed += [slow] if slow else []
            return fault, slow

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
