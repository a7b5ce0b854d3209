"""In scheduler processes: what the soak wants to know beyond ``e2e.faults``. Installed before engines are forked."""

from __future__ import annotations

import ctypes
import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any

from e2e import faults

#: An idle scheduler of SGLang takes a whole core, which here the busy ones need.
IDLE_S = 0.003

_evicted_tokens = 0


def _count_evictions(tree: Any) -> None:
    evict = tree.evict

    def counted(*args: Any, **kwargs: Any) -> Any:
        global _evicted_tokens
        before = tree.evictable_size()
        result = evict(*args, **kwargs)
        _evicted_tokens += before - tree.evictable_size()
        return result

    tree.evict = counted


def wrong_pages(scheduler: Any) -> int:
    """Pages of an idle server that are not exactly once either free or in the radix cache."""
    import torch

    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    free = torch.cat([allocator.free_pages, allocator.release_pages]).tolist()
    cached: set[int] = set()
    if tree.evictable_size():
        cached = set((tree.all_values_flatten() // allocator.page_size).tolist())
    found = Counter(free) + Counter(cached)
    return sum(found[page] != 1 for page in range(1, scheduler.max_total_num_tokens // allocator.page_size + 1))


def memory_bytes() -> int:
    """Resident memory of this process less what is only waiting to be collected or given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def kept_by_the_plugin(manager: Any) -> dict[str, int]:
    """Sizes of the plugin's tables of requests on a transfer manager; an idle server has nothing in them.

    Left out are requests that decode has yet to announce itself for: they are kept for a time.
    """
    from cp_shared_kv.patches.decode import answers_of
    from cp_shared_kv.patches.transfer import sending_of

    owners = (sending_of(manager), answers_of(manager), getattr(manager, "transfer_infos", None))
    return {
        f"{type(owner).__name__}.{name}": len(table)
        for owner in owners
        for name, table in getattr(owner, "__dict__", {}).items()
        if isinstance(table, dict | set)
    }


def _forget_records(hooks: Any) -> None:
    records = hooks.writes if isinstance(hooks, faults.PrefillRank) else hooks.holdings
    records.clear()


def install() -> None:
    """Extend the orders of ``e2e.control`` by ``at_rest`` (of an idle server): records of writes and holdings are
    dropped, and the state also has ``wrong_pages``, ``kept`` and ``memory_bytes``. Every state has ``evicted_tokens``.
    """
    from sglang.srt.managers.scheduler import Scheduler

    state, apply, on_idle = faults.state, faults.apply, Scheduler.on_idle
    extra: dict[str, Any] = {}
    counted: list[Any] = []

    def apply_and_probe(scheduler: Any, orders: dict[str, Any]) -> None:
        apply(scheduler, orders)
        extra.clear()
        if orders.get("at_rest"):
            hooks = faults._hooks(scheduler)
            _forget_records(hooks)
            extra.update(
                wrong_pages=wrong_pages(scheduler),
                kept=kept_by_the_plugin(hooks.manager),
                memory_bytes=memory_bytes(),
            )

    def state_and_probe(scheduler: Any) -> dict[str, Any]:
        if not counted:
            counted.append(scheduler)
            _count_evictions(scheduler.tree_cache)
        return {**state(scheduler), **extra, "evicted_tokens": _evicted_tokens}

    def on_idle_and_sleep(self: Any) -> None:
        on_idle(self)
        time.sleep(IDLE_S)

    faults.apply, faults.state = apply_and_probe, state_and_probe
    Scheduler.on_idle = on_idle_and_sleep
