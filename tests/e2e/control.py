"""Test-only switches inside scheduler processes, read from files between two turns of the scheduler.

The control directory holds ``control.ROLE.json``; all ranks of that engine apply it in the same turn, and each writes
``ack.ROLE.RANK.SERIAL``. This is how a test sets a chunk size the command line refuses, breaks one mechanism for one
step, injects a fault (see ``faults``), or gets pools or bookkeeping dumped.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import faults, operations

CONTROL_ENV = "CP_SHARED_KV_TEST_CONTROL"


def _break_kv_gather(scheduler: Any) -> Callable[[], None]:
    return _skip_load("MLA KV")


def _break_index_gather(scheduler: Any) -> Callable[[], None]:
    return _skip_load("index-K")


def _skip_load(name: str) -> Callable[[], None]:
    """Leave the pages of other ranks out of one kind of gather."""
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool as Pool

    original = Pool._load

    def load(self: Any, store: Any, layer_id: int) -> None:
        original(self, store, layer_id)
        if store.name == name and self._active.plan.base_share:
            share, rank = self._active.plan.base_share, self.layout.cp_rank
            rows = store.rows_for(layer_id - self.start_layer)
            own = rows[rank * share : (rank + 1) * share].clone()
            rows[: self._active.plan.gathered_pages].zero_()
            rows[rank * share : (rank + 1) * share] = own

    Pool._load = load  # type: ignore[method-assign]
    return lambda: setattr(Pool, "_load", original)


def _break_boundary(scheduler: Any) -> Callable[[], None]:
    """Do not gather the page that the prefix ends in the middle of, nor find it where the last forward left it."""
    import cp_shared_kv.plan as plan
    from cp_shared_kv.pool import CPSharedNSATokenToKVPool as Pool

    original, end_forward = plan._split_request_pages, Pool.end_forward

    def end(self: Any) -> None:
        end_forward(self)
        for store in (self._kv, self._index):
            for rows in store.workspace_rows:
                rows.zero_()

    def split(pages: Any, prefix_len: int, seq_len: int, page_size: int, request: int) -> Any:
        _, _, written = original(pages, prefix_len, seq_len, page_size, request)
        full = prefix_len // page_size
        return pages[:full], pages[full : -(-seq_len // page_size)], written

    def mend() -> None:
        plan._split_request_pages, Pool.end_forward = original, end_forward  # type: ignore[method-assign]

    plan._split_request_pages, Pool.end_forward = split, end  # type: ignore[method-assign]
    return mend


def _break_state(scheduler: Any) -> Callable[[], None]:
    """Send no index-K to decode."""
    import cp_shared_kv.patches.transfer as transfer

    original = transfer.split_state
    transfer.split_state = lambda layout, pages, destination: (original(layout, pages, destination)[0][:0], [])
    return lambda: setattr(transfer, "split_state", original)


def _break_position(scheduler: Any) -> Callable[[], None]:
    """Send every page to the place after its own; the last one, which would not fit, to its own."""
    import cp_shared_kv.patches.transfer as transfer

    original = transfer.split_chunk

    def split(layout: Any, pages: Any, chunk: slice) -> Any:
        physical, positions = original(layout, pages, chunk)
        positions[:] = (positions + 1).clip(max=chunk.stop - 1)
        return physical, positions

    transfer.split_chunk = split
    return lambda: setattr(transfer, "split_chunk", original)


def _break_range(scheduler: Any) -> Callable[[], None]:
    """Have rank 1 send pages to positions beyond decode's list, past the check of the chunk's end."""
    import cp_shared_kv.patches.transfer as transfer

    if scheduler.tp_rank != 1:
        return lambda: None
    original = transfer.split_chunk

    def split(layout: Any, pages: Any, chunk: slice) -> Any:
        physical, positions = original(layout, pages, chunk)
        positions += 1000
        return physical, positions

    transfer.split_chunk = split
    return lambda: setattr(transfer, "split_chunk", original)


def _break_allocation(scheduler: Any) -> Callable[[], None]:
    """Have rank 1 draw free pages in another order than the others."""
    allocator = scheduler.token_to_kv_pool_allocator
    if scheduler.tp_rank == 1:
        allocator.merge_and_sort_free()
        allocator.free_pages = allocator.free_pages.flip(0)
    return lambda: None


BREAKS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "kv_gather": _break_kv_gather,
    "index_gather": _break_index_gather,
    "boundary": _break_boundary,
    "state": _break_state,
    "position": _break_position,
    "range": _break_range,
    "allocation": _break_allocation,
}


def patch_seam_as_another_plugin_would() -> None:
    """Replace a method that the product wraps."""
    from sglang.srt.layers.attention.nsa.nsa_indexer import Indexer

    stock = Indexer._store_index_k_cache
    Indexer._store_index_k_cache = lambda self, *args, **kwargs: stock(self, *args, **kwargs)


def dump(scheduler: Any) -> dict[str, Any]:
    """Persistent pools and bookkeeping of one rank.

    Returns:
        ``kv`` and ``index``: per layer, uint8 ``(pages, bytes per page)``, page 0 included; ``pool_bytes``,
        ``free_pages`` (sorted list), ``available`` and ``evictable`` tokens, ``counters``, ``max_requests``;
        ``cached``: of each page in the radix cache, by a digest of the tokens up to its end, its logical page and the
        one before it, 0 if there is none; ``operations``: of each forward that was counted.
    """
    import torch

    allocator = scheduler.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    kv = getattr(pool, "physical_kv_buffer", None) or pool.kv_buffer
    index = getattr(pool, "physical_index_k_with_scale_buffer", None) or pool.index_k_with_scale_buffer

    def pages(tensor: Any) -> Any:
        return tensor.contiguous().view(torch.uint8).view(len(index[0]), -1).numpy().copy()

    counters: dict[str, int] = {}
    if hasattr(pool, "layout"):
        from cp_shared_kv.metrics import COUNTERS

        counters = dict(COUNTERS.snapshot())
    return {
        "kv": [pages(layer) for layer in kv],
        "index": [pages(layer) for layer in index],
        "pool_bytes": pool.get_kv_size_bytes(),
        "free_pages": sorted(torch.cat([allocator.free_pages, allocator.release_pages]).tolist()),
        "available": allocator.available_size(),
        "evictable": scheduler.tree_cache.evictable_size(),
        "max_requests": scheduler.max_running_requests,
        "counters": counters,
        "operations": scheduler._test_probe.forwards if hasattr(scheduler, "_test_probe") else [],
        "cached": dict(_cached(scheduler.tree_cache.root_node, b"", 0, allocator.page_size)),
    }


def _cached(node: Any, digest: bytes, before: int, page_size: int) -> Iterator[tuple[bytes, tuple[int, int]]]:
    for child in node.children.values():
        path, last, tokens = digest, before, list(child.key.token_ids)
        for at, slot in enumerate(child.value[::page_size].tolist()):
            path = hashlib.sha256(path + repr(tokens[at * page_size : (at + 1) * page_size]).encode()).digest()
            yield path, (slot // page_size, last)
            last = slot // page_size
        yield from _cached(child, path, last, page_size)


_serial = 0
_undo: Callable[[], None] | None = None


def _apply(scheduler: Any, directory: Path, orders: dict[str, Any]) -> None:
    global _undo
    if _undo is not None:
        _undo()
        _undo = None
    if orders.get("breaks"):
        _undo = BREAKS[orders["breaks"]](scheduler)
    if not hasattr(scheduler, "_test_chunk"):
        scheduler._test_chunk = scheduler.chunked_prefill_size
    scheduler.chunked_prefill_size = orders.get("chunk") or scheduler._test_chunk
    if orders.get("count") and not hasattr(scheduler, "_test_probe"):
        scheduler._test_probe = operations.Probe(scheduler)
    faults.apply(scheduler, orders)
    content = dump(scheduler) if orders.get("dump") else faults.state(scheduler) if orders.get("state") else None
    if content is not None:
        path = directory / f"dump.{scheduler.server_args.disaggregation_mode}.{scheduler.tp_rank}"
        path.write_bytes(pickle.dumps(content))


def _agreed_serial(scheduler: Any, path: Path) -> int:
    """Serial number of the orders on file as rank 0 reads it: no rank takes orders a turn before another."""
    import torch

    serial = torch.zeros(1, dtype=torch.int64)
    if scheduler.tp_rank == 0 and path.exists():
        serial[0] = json.loads(path.read_text())["serial"]
    if scheduler.tp_size > 1:
        torch.distributed.broadcast(serial, scheduler.tp_group.ranks[0], scheduler.tp_cpu_group)
    return int(serial)


def install() -> None:
    """Hook ``Scheduler.recv_requests``, which every scheduler calls in each turn of its loop."""
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler.recv_requests

    def recv_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _serial
        if directory := os.environ.get(CONTROL_ENV):
            role = self.server_args.disaggregation_mode
            path = Path(directory, f"control.{role}.json")
            if (serial := _agreed_serial(self, path)) != _serial:
                _serial = serial
                _apply(self, Path(directory), json.loads(path.read_text()))
                Path(directory, f"ack.{role}.{self.tp_rank}.{serial}").touch()
        return original(self, *args, **kwargs)

    Scheduler.recv_requests = recv_requests
