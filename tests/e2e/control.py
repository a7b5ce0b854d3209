"""Test-only switches inside scheduler processes, read from files between two turns of the scheduler.

The control directory holds ``control.ROLE.json``; all ranks of that engine apply it in the same turn, and each writes
``ack.ROLE.RANK.SERIAL``. This is how a test sets a chunk size the command line refuses, breaks one mechanism for one
step, injects a fault (see ``faults``), or gets pools or bookkeeping dumped.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import faults, operations

CONTROL_ENV = "CP_SHARED_KV_TEST_CONTROL"


def rank_of(scheduler: Any) -> int:
    """Number of a scheduler within its engine."""
    return int(scheduler.tp_group.rank_in_group)


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

    if rank_of(scheduler) != 1:
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
    if rank_of(scheduler) == 1:
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
    import importlib

    from cp_shared_kv.releases import installed

    Indexer = importlib.import_module(installed().targets["indexer.store_index_k_cache"].module).Indexer
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
        "cached": scheduler._test_cached(),
    }


class Cached:
    """Which pages a radix cache holds, told by their tokens: what was inserted, as far as it still matches."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._page_size = tree.page_size
        self._keys: list[Any] = []
        self._pages: dict[bytes, int] = {}
        self._insert = tree.insert
        tree.insert = self._note  # of this tree only: the method of the class is one that the product wraps

    def _digests(self, key: Any, pages: int) -> Iterator[bytes]:
        tokens, digest = list(key.token_ids), b""
        for at in range(pages):
            chunk = tokens[at * self._page_size : (at + 1) * self._page_size]
            digest = hashlib.sha256(digest + repr(chunk).encode()).digest()
            yield digest

    def _note(self, params: Any) -> Any:
        pages = [slot // self._page_size for slot in params.value[:: self._page_size].tolist()]
        whole = len(params.key) // self._page_size
        key = copy.copy(params.key)
        result = self._insert(params)
        new = result.prefix_len // self._page_size
        for at, (digest, page) in enumerate(zip(self._digests(key, whole), pages[:whole], strict=True)):
            if at >= new:
                self._pages[digest] = page
        self._keys.append(key)
        return result

    def __call__(self) -> dict[bytes, tuple[int, int]]:
        """Of each cached page, by a digest of the tokens up to its end: its number and that of the one before."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        from cp_shared_kv.releases import installed

        found: dict[bytes, tuple[int, int]] = {}
        for key in self._keys:
            match = self._tree.match_prefix(MatchPrefixParams(key=copy.copy(key)))
            length = match.device_prefix_len if installed().request_prefix_len else len(match.device_indices)
            before = 0
            for digest in self._digests(key, length // self._page_size):
                found[digest] = (self._pages[digest], before)
                before = self._pages[digest]
        return found


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
        path = directory / f"dump.{scheduler.server_args.disaggregation_mode}.{rank_of(scheduler)}"
        path.write_bytes(pickle.dumps(content))


def _agreed_serial(scheduler: Any, path: Path) -> int:
    """Serial number of the orders on file as rank 0 reads it: no rank takes orders a turn before another."""
    import torch

    serial = torch.zeros(1, dtype=torch.int64)
    if rank_of(scheduler) == 0 and path.exists():
        serial[0] = json.loads(path.read_text())["serial"]
    if scheduler.tp_group.world_size > 1:
        torch.distributed.broadcast(serial, scheduler.tp_group.ranks[0], scheduler.tp_cpu_group)
    return int(serial)


def install() -> None:
    """Hook ``Scheduler.process_input_requests``, which every scheduler calls in each turn of its loop."""
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler.process_input_requests

    def process_input_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _serial
        if directory := os.environ.get(CONTROL_ENV):
            if not hasattr(self, "_test_cached") and not self.tree_cache.disable:
                self._test_cached = Cached(self.tree_cache)
            role = self.server_args.disaggregation_mode
            path = Path(directory, f"control.{role}.json")
            if (serial := _agreed_serial(self, path)) != _serial:
                _serial = serial
                _apply(self, Path(directory), json.loads(path.read_text()))
                Path(directory, f"ack.{role}.{rank_of(self)}.{serial}").touch()
        return original(self, *args, **kwargs)

    Scheduler.process_input_requests = process_input_requests
