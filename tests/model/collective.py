"""Collective calls between the ranks of one process, for the product's own ``PageGather``.

The ranks run one after another, yet each call needs what all ranks bring to it. So every gather is made twice: first by
all ranks for what they bring, into a scratch workspace, then by each rank for what it gets. Bytes that a rank brings
are copied in the first turn, before any rank has written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

import cp_shared_kv.collectives as collectives
from cp_shared_kv.collectives import PageGather


class Exchange:
    """Collective calls of a group.

    Args:
        size: ranks in the group.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        #: Ranks of the group in the world, as point-to-point calls name them; not 0, 1, .., so they must be translated.
        self.ranks = [10 + 3 * rank for rank in range(size)]
        self.is_bringing = False
        self.brought: list[list[tuple[tuple[str, int], torch.Tensor]]] = [[] for _ in range(size)]
        self.answered = [0] * size

    def gather_of(self, rank: int) -> PageGather:
        """The product's gather for one rank."""
        link = Link(self, rank)
        return PageGather(
            SimpleNamespace(device_group=link, ranks=self.ranks, rank_in_group=rank, world_size=self.size)
        )

    @contextmanager
    def bringing(self) -> Iterator[None]:
        """Calls made inside are those in which ranks bring; those that follow get."""
        self.check_answered()
        self.brought = [[] for _ in range(self.size)]
        self.answered = [0] * self.size
        self.is_bringing = True
        try:
            yield
        finally:
            self.is_bringing = False

    def check_answered(self) -> None:
        """Each rank has got as often as it brought."""
        assert self.answered == [len(calls) for calls in self.brought], "a rank did not make a collective call"

    def call(self, rank: int, name: str, argument: int, own: torch.Tensor) -> list[torch.Tensor]:
        """One collective call; what each rank brought, or ``[]`` while ranks bring."""
        kind = (name, argument)
        if self.is_bringing:
            self.brought[rank].append((kind, own.clone()))
            return []
        turn = self.answered[rank]
        self.answered[rank] += 1
        assert all(turn < len(calls) for calls in self.brought), f"rank {rank} calls {kind} and another rank does not"
        called = [calls[turn] for calls in self.brought]
        assert all(other == kind for other, _ in called), f"ranks make different calls: {[c for c, _ in called]}"
        assert torch.equal(own, called[rank][1]), f"rank {rank} brings pages of another layer or time"
        return [brought for _, brought in called]


class Link:
    """One rank's process group."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange = exchange
        self.rank = rank

    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        if parts := self.exchange.call(self.rank, "all_gather", len(output), own):
            output.copy_(torch.cat(parts))

    def send_surplus(self, regions: Sequence[tuple[int, torch.Tensor]], ranks: Sequence[int]) -> None:
        for owner, region in regions:
            source = self.exchange.ranks.index(ranks[owner])
            own = region if self.rank == source else region[:0]
            if parts := self.exchange.call(self.rank, f"surplus of {len(region)} pages", source, own):
                region.copy_(parts[source])


def install() -> None:
    """Make the product's collective calls reach the links."""

    def all_gather(outputs: Sequence[torch.Tensor], owns: Sequence[torch.Tensor], group: Link) -> None:
        for output, own in zip(outputs, owns, strict=True):
            group.all_gather(output, own)

    def send_surplus(regions: Sequence[tuple[int, torch.Tensor]], rank: int, ranks: Sequence[int], group: Link) -> None:
        assert rank == group.rank
        group.send_surplus(regions, ranks)

    stand_ins: Any = collectives
    stand_ins._all_gather = all_gather
    stand_ins._send_surplus = send_surplus
