"""Bytes that the gather of a layer receives, beside the bound for a dense view and beside an all-reduce."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gloo.forked import on_ranks

from .forward import PAGE, Forward, draw_pages, make_shared_pool, seconds_of
from .processes import bytes_written, sglang_process
from .rows import Curve, Measured, Row

#: Bytes of one page in one layer, bf16: MLA KV and index-K.
PAGE_BYTES = (PAGE * 576 * 2, PAGE * 132)
PREFIXES = (*(2**k for k in range(12)), 3, 7, 63, 65, 100, 333, 1000, 1999)
#: From so many prefix pages on the gather must be within 2 % of the bound.
BOUND_FROM, AT_BOUND = 64, 1.02
#: Logical pages of the pools that pages are drawn from.
POOL = 8192


@dataclass(frozen=True)
class Planned:
    """What the plan of one prefix length makes of the pages of one request.

    Attributes:
        bytes: received, mean over the ranks, over the bound.
        padded: the same where one all-gather has to do, so that all ranks pad to the largest share.
        spread: pages of the largest share less those of the smallest.
    """

    bytes: float
    padded: float
    spread: int


def planned(kind: str, cp_size: int, prefixes: Sequence[int], pool: int) -> list[Planned]:
    """The plans of a request drawn from a used pool, for each prefix length in pages; needs SGLang.

    Every gathered page, padding or not, goes from one rank to all others, as every prefix page must: so gathered pages
    over prefix pages is bytes over bound.
    """
    import numpy as np

    from cp_shared_kv.layout import CpSharedKVLayout
    from cp_shared_kv.plan import build_plan, workspace_pages

    pages = np.array([draw_pages(kind, cp_size, pool, max(prefixes) + 1, used=True)])
    layout = CpSharedKVLayout(PAGE, cp_size, 0)
    capacity = workspace_pages(2 * max(prefixes) * PAGE, PAGE, cp_size)
    found = []
    for count in prefixes:
        plan = build_plan(layout, pages, [count * PAGE], [(count + 1) * PAGE], capacity)
        shares = np.bincount(layout.owner_for_logical_pages_np(pages[0, :count]), minlength=cp_size)
        padded, spread = cp_size * shares.max() / count, int(np.ptp(shares))
        found.append(Planned(plan.gathered_pages / plan.prefix_pages, float(padded), spread))
    return found


def received(rank: int, size: int, prefix: int, layers: int) -> dict[str, int]:
    """One forward on a gloo rank: bytes the product counts as received, and bytes this process sent."""
    import torch.distributed as dist

    from cp_shared_kv.metrics import COUNTERS

    physical = prefix + 64
    pages = draw_pages("shared", size, physical * size, prefix + 1, used=True)
    pool = make_shared_pool(rank, size, physical, (prefix + 1) * PAGE, layers)
    forward = Forward(pool, pages, prefix * PAGE, (prefix + 1) * PAGE)
    forward.run()  # connections are made on first use
    dist.barrier()
    counted, sent = COUNTERS.snapshot()["gathered_bytes"], bytes_written()
    forward.run()
    return {
        "counted": COUNTERS.snapshot()["gathered_bytes"] - counted,
        "sent": bytes_written() - sent,
        "planned": layers * sum(PAGE_BYTES) * forward.plan().gathered_pages * (size - 1) // size,
    }


def beside_all_reduce(rank: int, size: int, prefix: int, layers: int, times: int) -> dict[str, Any]:
    """Our forward and an all-reduce of zero-filled views of the same prefix, in turn; the collectives alone too."""
    import torch
    import torch.distributed as dist

    pages = draw_pages("shared", size, prefix * size, prefix + 1, used=False)
    pool = make_shared_pool(rank, size, prefix, (prefix + 1) * PAGE, layers)
    forward = Forward(pool, pages, prefix * PAGE, (prefix + 1) * PAGE)
    owned = torch.from_numpy(pool.layout.owner_for_logical_pages_np(pages[:prefix]) == rank)
    views = [torch.zeros(prefix, size // 8, dtype=torch.int64) for size in PAGE_BYTES]
    held = [torch.ones(int(owned.sum()), view.shape[1], dtype=torch.int64) for view in views]

    def all_reduce() -> None:
        for _ in range(layers):
            for view, mine in zip(views, held, strict=True):
                view.zero_()
                view[owned] = mine
                dist.all_reduce(view)

    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    half = slice(rank * prefix // size, (rank + 1) * prefix // size)

    def bare_all_gather() -> None:
        for view in views:
            all_gather(view, view[half])

    def bare_all_reduce() -> None:
        for view in views:
            dist.all_reduce(view)

    calls = {
        "ours": forward.run,
        "all-reduce": all_reduce,
        "bare all-gather": bare_all_gather,
        "bare all-reduce": bare_all_reduce,
    }
    out: dict[str, Any] = {"seconds": {name: [] for name in calls}, "sent": {}}
    for turn, (name, call) in itertools.product(range(times + 1), calls.items()):
        dist.barrier()
        before = bytes_written()
        seconds = seconds_of(call)
        out["sent"][name] = bytes_written() - before
        if turn:  # the first one makes connections
            out["seconds"][name].append(seconds)
    return out


def coalesced(rank: int, size: int, share: int, times: int) -> dict[str, list[float]]:
    """Seconds of two all-gathers of ``share`` pages a rank, one for each store, and of one coalesced call, in turn."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    views = [torch.zeros(size * share, width // 8, dtype=torch.int64) for width in PAGE_BYTES]

    def two() -> None:
        for view in views:
            all_gather(view, view[rank * share : (rank + 1) * share])

    def one() -> None:
        with _coalescing_manager():
            two()

    out: dict[str, list[float]] = {"two": [], "one": []}
    for turn, (name, call) in itertools.product(range(times + 1), (("two", two), ("one", one))):
        dist.barrier()
        seconds = seconds_of(call)
        if turn:
            out[name].append(seconds)
    return out


def _planned_rows(cp_size: int, prefixes: Sequence[int], shared: list[Planned], stock: list[Planned]) -> list[Row]:
    parts: dict[bool, list[float]] = {True: [], False: []}
    for prefix, plan in zip(prefixes, shared, strict=True):
        parts[prefix >= BOUND_FROM].append(plan.bytes)
    how = "received, mean over ranks, over (N-1)/N of the prefix; worst of {} prefixes in a used pool"
    rows = [
        Row(
            f"bytes / bound, CP {cp_size}, {f'{BOUND_FROM} pages or more' if long else 'fewer pages'}",
            max(values),
            "ratio",
            how.format(len(values)),
            AT_BOUND if long else None,
        )
        for long, values in parts.items()
        if values
    ]
    for name, plans, budget in (("shared", shared, 1), ("stock's", stock, None)):
        title = f"largest share less smallest, CP {cp_size}, {name} allocator"
        how = f"of a request's pages, worst of {len(prefixes)} prefixes in a used pool"
        rows.append(Row(title, max(plan.spread for plan in plans), "pages", how, budget))
    return rows


def measure(
    cp_sizes: Sequence[int] = (2, 4, 8),
    prefixes: Sequence[int] = PREFIXES,
    pool: int = POOL,
    checked: Sequence[tuple[int, int]] = ((2, 100), (4, 333)),
    all_reduced: int = 1024,
    shares: Sequence[int] = (1, 16, 256),
    times: int = 7,
) -> Measured:
    """Rows and the curve of the bytes of one layer.

    Args:
        cp_sizes: ranks of the plans.
        prefixes: prefix lengths in pages.
        pool: logical pages of the pools that requests are drawn from.
        checked: (ranks, prefix pages) of the forwards that are run on gloo.
        all_reduced: prefix pages of the comparison with an all-reduce.
        shares: pages a rank of the comparison of two all-gathers with a coalesced one.
        times: measurements of each wall time.
    """
    measured, prefixes = Measured(), sorted(prefixes)
    with sglang_process() as call:
        for cp_size in cp_sizes:
            shared, stock = (call(planned, kind, cp_size, prefixes, pool) for kind in ("shared", "stock"))
            measured.rows += _planned_rows(cp_size, prefixes, shared, stock)
        measured.curves["gather"] = _curve(cp_sizes[-1], prefixes, shared, stock)
        for size, prefix in checked:
            ranks = call(on_ranks, received, size, prefix, 2)
            counted, sent, plan = (sum(rank[name] for rank in ranks) for name in ("counted", "sent", "planned"))
            title = f"CP {size}, {prefix} pages"
            measured.rows += [
                Row(
                    f"counted / planned bytes, {title}",
                    counted / plan,
                    "ratio",
                    "counters of a gloo run",
                    1.0,
                    "exactly",
                ),
                Row(
                    f"bytes on the wire / counted, {title}",
                    sent / counted,
                    "ratio",
                    "written by the ranks' processes, gloo's headers included",
                    AT_BOUND,
                ),
            ]
        measured.rows += _all_reduce_rows(call(on_ranks, beside_all_reduce, 2, all_reduced, 2, times), all_reduced)
        for share in shares:
            seconds = call(on_ranks, coalesced, 2, share, 10 * times)[0]
            measured.rows.append(
                Row(
                    f"time of one coalesced / two all-gathers, CP 2, {share} pages a rank",
                    median(seconds["one"]) / median(seconds["two"]),
                    "ratio",
                    f"gloo, MLA KV and index-K, median of {10 * times} in turn",
                )
            )
    return measured


def _all_reduce_rows(ranks: list[dict[str, Any]], prefix: int) -> list[Row]:
    sent = {name: sum(rank["sent"][name] for rank in ranks) for name in ("ours", "all-reduce")}
    seconds = {name: median(values) for name, values in ranks[0]["seconds"].items()}
    how = f"gloo, CP 2, {prefix} prefix pages, in turn in one run; ours writes a chunk of one page too"
    bare = "the two calls of a layer, alone; gloo copies what an all-gather brings once more, and sums in place"
    return [
        Row(
            "bytes, all-reduce of a zero-filled view / ours",
            sent["all-reduce"] / sent["ours"],
            "ratio",
            how,
            1.9,
            "at least",
        ),
        Row("time, all-reduce of a zero-filled view / ours", seconds["all-reduce"] / seconds["ours"], "ratio", how),
        Row("time, all-reduce / all-gather", seconds["bare all-reduce"] / seconds["bare all-gather"], "ratio", bare),
    ]


def _curve(cp_size: int, prefixes: Sequence[int], shared: list[Planned], stock: list[Planned]) -> Curve:
    bound = [prefix * sum(PAGE_BYTES) * (cp_size - 1) / cp_size / 1e6 for prefix in prefixes]

    def series(factors: Iterable[float]) -> list[tuple[float, float]]:
        return [(prefix, mega * factor) for prefix, mega, factor in zip(prefixes, bound, factors, strict=True)]

    return Curve(
        "prefix, pages of 64 tokens",
        f"received by a rank per layer, MB (CP {cp_size}, bf16)",
        {
            "all-reduce of a zero-filled view": series([2.0] * len(prefixes)),
            "one padded all-gather, stock's owners": series(plan.padded for plan in stock),
            "CP shared KV": series(plan.bytes for plan in shared),
            "bound, (N-1)/N of the prefix": series([1.0] * len(prefixes)),
        },
    )
