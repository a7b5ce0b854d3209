"""The plan of one forward pass: which pages are gathered, where each lies in the workspace, which are kept.

A forward reads whole requests but one rank holds only its share of their pages, so every layer first lays all of them
out in a *workspace*, a dense local copy that the stock kernels read. Its pages are, in order:

    [ cp_size x base_share prefix pages, rank by rank | surplus of each rank | this chunk's pages | .. | trash ]

*Prefix* pages hold tokens that earlier chunks wrote; they are gathered. A page that the prefix ends in the middle of
belongs here, and the chunk's rows are laid over it. *Chunk* pages are new and need no communication: SGLang has
all-gathered the chunk's K before it is written. The *trash* page takes writes of padding rows.

The plan is made once on the host, from lengths that the host knows and the requests' page ids, and it depends on
nothing that differs between ranks but the rank number: every rank of the group makes the same collective calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cp_shared_kv.layout import CpSharedKVLayout

#: The workspace holds one context and this fraction more, for padding where owners are out of balance.
SLACK_FRACTION = 8
#: From so many prefix pages on, padding may add one part in ``PADDING_FRACTION`` to what a rank receives. Below, bytes
#: are so few that one collective call is worth more than they are.
PADDING_COUNTS_FROM = 64
PADDING_FRACTION = 50


class PlanError(RuntimeError):
    """A batch that cannot be planned; the message names the request and the limit."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``."""
    return -(-a // b)


def workspace_pages(context_len: int, page_size: int, cp_size: int) -> int:
    """Pages of the workspace: one full context, slack for padding, one trash page.

    In-seq-split prefill runs one request a batch, so prefix and chunk together never exceed the context length. Slack
    never decides whether a batch fits (:func:`gather_shares` gathers without padding when it must), only how.

    Args:
        context_len: longest request in tokens.
        page_size: tokens per page.
        cp_size: ranks in the attention-CP group.
    """
    context_pages = ceil_div(context_len, page_size)
    return context_pages + max(cp_size, ceil_div(context_pages, SLACK_FRACTION)) + 1


def gather_shares(counts: Sequence[int], capacity: int) -> int:
    """Pages that every rank contributes to the all-gather.

    The largest count makes one all-gather do, padded for ranks with fewer pages. Where that does not fit, or pads a
    long prefix by more than a fiftieth, the largest smaller share is taken that does not, and each rank sends its
    surplus to the others; the smallest one pads nothing.

    Args:
        counts: prefix pages owned by each rank.
        capacity: workspace pages that prefix pages may take.

    Raises:
        PlanError: even without padding the pages do not fit.
    """
    total, others = sum(counts), len(counts) - 1
    if total > capacity:
        raise PlanError(f"the batch reads {total} prefix pages but the workspace has room for {capacity}")
    for share in range(max(counts), min(counts), -1):
        surplus = sum(max(0, count - share) for count in counts)
        received = others * share + surplus  # by a rank without surplus; the bound is others / len(counts) * total
        at_bound = PADDING_FRACTION * len(counts) * received <= (PADDING_FRACTION + 1) * others * total
        if len(counts) * share + surplus <= capacity and (at_bound or total < PADDING_COUNTS_FROM):
            return share
    return min(counts)


@dataclass(frozen=True)
class Surplus:
    """Prefix pages that one rank owns beyond the common share: workspace pages ``start .. start + count - 1``."""

    owner: int
    start: int
    count: int


@dataclass(frozen=True)
class ForwardPlan:
    """Host-side plan of one forward; page numbers of the workspace unless they are called physical.

    Attributes:
        tables: workspace page of each request's page positions, int32 ``(batch, pages + 1)``; trash past its end.
        prefix_lens: tokens of each request that are read but not written.
        seq_lens: tokens of each request, prefix and chunk.
        base_share: pages that each rank contributes to the all-gather.
        surplus: pages that one rank sends to the others, in workspace order.
        gather_source: physical pages that this rank contributes, int64 ``(base_share,)``; dummy page as padding.
        surplus_source: physical pages of this rank's surplus, int64.
        keep_workspace: written pages that this rank owns, int64 ``(kept,)``.
        keep_physical: where they are kept, int64 ``(kept,)``.
        restore: of those, the positions of new pages that the chunk does not fill, int64; whole pages are kept, so
            their other rows are first taken from the pool, and keep what they held as they would in stock.
        prefix_pages: distinct prefix pages of the batch.
        chunk_pages: distinct chunk pages of the batch.
        trash_page: the workspace's last page.
        cp_size: ranks in the attention-CP group.
        cp_rank: the rank that this plan is for.
    """

    tables: npt.NDArray[np.int32]
    prefix_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    base_share: int
    surplus: tuple[Surplus, ...]
    gather_source: npt.NDArray[np.int64]
    surplus_source: npt.NDArray[np.int64]
    keep_workspace: npt.NDArray[np.int64]
    keep_physical: npt.NDArray[np.int64]
    restore: npt.NDArray[np.int64]
    prefix_pages: int
    chunk_pages: int
    trash_page: int
    cp_size: int
    cp_rank: int

    @property
    def gathered_pages(self) -> int:
        """Workspace pages that communication fills, padding included."""
        return self.cp_size * self.base_share + sum(part.count for part in self.surplus)

    def own_pages(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Workspace pages that this rank fills from its own pool, and the physical pages they come from; int64."""
        share = np.arange(self.cp_rank * self.base_share, (self.cp_rank + 1) * self.base_share)
        surplus = [np.arange(s.start, s.start + s.count) for s in self.surplus if s.owner == self.cp_rank]
        workspace = np.concatenate([share, *surplus, self.keep_workspace[self.restore]])
        physical = np.concatenate([self.gather_source, self.surplus_source, self.keep_physical[self.restore]])
        return workspace.astype(np.int64), physical


def _split_request_pages(
    pages: npt.NDArray[np.int64], prefix_len: int, seq_len: int, page_size: int, request: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if not 0 <= prefix_len <= seq_len:
        raise PlanError(f"request {request} of the batch has prefix length {prefix_len} and length {seq_len}")
    read, last = ceil_div(prefix_len, page_size), ceil_div(seq_len, page_size)
    if last > len(pages) or (pages[:last] <= 0).any():
        raise PlanError(f"request {request} of the batch has no page for some of its {seq_len} tokens: {pages[:last]}")
    return pages[:read], pages[read:last], pages[prefix_len // page_size : last]


def _distinct(parts: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)


def build_plan(
    layout: CpSharedKVLayout,
    page_tables: npt.NDArray[np.integer],
    prefix_lens: Sequence[int],
    seq_lens: Sequence[int],
    capacity: int,
) -> ForwardPlan:
    """Plan one forward.

    Args:
        layout: the group's placement, with this rank's number.
        page_tables: logical page of each page position, ``(batch, pages)``; anything past a request's end.
        prefix_lens: tokens already in the pools, per request.
        seq_lens: prefix plus this forward's tokens, per request.
        capacity: pages of the workspace, trash page included.

    Raises:
        PlanError: a request lacks a page, one request writes a page that another reads, or the batch does not fit.
    """
    tables = np.asarray(page_tables, dtype=np.int64)
    split = [
        _split_request_pages(row, int(prefix), int(seq), layout.page_size, i)
        for i, (row, prefix, seq) in enumerate(zip(tables, prefix_lens, seq_lens, strict=True))
    ]
    prefix, chunk, write = (_distinct([parts[i] for parts in split]) for i in range(3))
    reads, writes = (np.concatenate([parts[i] for parts in split]) if split else chunk for i in (0, 2))
    pages, readers = np.unique(reads, return_counts=True)
    # A request writes into the page that its own prefix ends in; nobody else may read or write there.
    if len(np.unique(writes)) < len(writes):
        raise PlanError("two requests of the batch write the same page")
    if np.isin(chunk, prefix).any() or np.isin(pages[readers > 1], writes).any():
        raise PlanError("one request of the batch writes a page that another reads as its prefix")
    trash = capacity - 1
    by_owner = [prefix[layout.owner_for_logical_pages_np(prefix) == rank] for rank in range(layout.cp_size)]
    share = gather_shares([len(pages) for pages in by_owner], trash - len(chunk))

    known = np.concatenate([prefix, chunk])
    place = np.empty(len(known), dtype=np.int64)
    surplus: list[Surplus] = []
    end = layout.cp_size * share
    for rank, pages in enumerate(by_owner):
        where = np.searchsorted(prefix, pages)
        place[where[:share]] = rank * share + np.arange(min(share, len(pages)))
        extra = len(pages) - share
        if extra > 0:
            place[where[share:]] = end + np.arange(extra)
            surplus.append(Surplus(rank, end, extra))
            end += extra
    place[len(prefix) :] = end + np.arange(len(chunk))

    order = np.argsort(known)
    ordered, ordered_place = known[order], place[order]

    def locate(pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return ordered_place[np.searchsorted(ordered, pages)]

    # One column more than any request has pages: rows that pad a CP batch look past the end and must find a page.
    local_tables = np.full((tables.shape[0], tables.shape[1] + 1), trash, dtype=np.int32)
    for row, (read, new, _) in zip(local_tables, split, strict=True):
        row[: len(read) + len(new)] = locate(np.concatenate([read, new]))

    mine = layout.logical_pages_to_physical_np(by_owner[layout.cp_rank])
    source = np.zeros(share, dtype=np.int64)
    source[: min(share, len(mine))] = mine[:share]
    kept = write[layout.owner_for_logical_pages_np(write) == layout.cp_rank]
    unfilled = [new[-1:] for (_, new, _), seq in zip(split, seq_lens, strict=True) if int(seq) % layout.page_size]
    return ForwardPlan(
        tables=local_tables,
        prefix_lens=tuple(int(x) for x in prefix_lens),
        seq_lens=tuple(int(x) for x in seq_lens),
        base_share=share,
        surplus=tuple(surplus),
        gather_source=source,
        surplus_source=mine[share:],
        keep_workspace=locate(kept),
        keep_physical=layout.logical_pages_to_physical_np(kept),
        restore=np.flatnonzero(np.isin(kept, _distinct(unfilled))),
        prefix_pages=len(prefix),
        chunk_pages=len(chunk),
        trash_page=trash,
        cp_size=layout.cp_size,
        cp_rank=layout.cp_rank,
    )


def build_inert_plan(batch_size: int, pages: int, capacity: int) -> ForwardPlan:
    """Plan of a forward without requests (idle ranks, batches with made-up lengths): all reads and writes hit trash.

    Args:
        batch_size: rows of the page tables.
        pages: page positions per row.
        capacity: pages of the workspace, trash page included.
    """
    empty = np.empty(0, dtype=np.int64)
    return ForwardPlan(
        tables=np.full((batch_size, pages + 1), capacity - 1, dtype=np.int32),
        prefix_lens=(),
        seq_lens=(),
        base_share=0,
        surplus=(),
        gather_source=empty,
        surplus_source=empty,
        keep_workspace=empty,
        keep_physical=empty,
        restore=empty,
        prefix_pages=0,
        chunk_pages=0,
        trash_page=capacity - 1,
        cp_size=1,
        cp_rank=0,
    )
