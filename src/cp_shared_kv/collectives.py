"""Byte-exact gather of pages over the attention-CP group.

Pages travel as integers, never as floating point and never by a sum: adding zero turns the fp8 byte 0x80 into 0x00,
and 656-byte rows mix fp8, fp32 and bf16. An all-gather moves ``(cp_size - 1) / cp_size`` of the prefix to each rank,
which is the bound for a dense local view; an all-reduce of a zero-filled view would move twice that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cp_shared_kv.plan import Surplus

#: torch 2.13 renames the call and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def page_rows(buffer: torch.Tensor, pages: int) -> torch.Tensor:
    """View of a pool buffer with one row of integers per page.

    Args:
        buffer: contiguous, its first dimension a multiple of ``pages`` (token rows or page rows), any dtype.
        pages: number of pages in it.

    Returns:
        ``(pages, n)``, int64 where a page's bytes are a multiple of 8, else uint8; shares memory with ``buffer``.
    """
    raw = buffer.view(torch.uint8).view(pages, -1)
    return raw.view(torch.int64) if raw.shape[1] % 8 == 0 else raw


@dataclass(frozen=True)
class GatherIndices:
    """Device-side part of a plan that the gather needs; all int64 on the pool's device."""

    base_share: int
    surplus: tuple[Surplus, ...]
    source: torch.Tensor
    surplus_source: torch.Tensor


class PageGather:
    """Gathers the pages of a plan into a workspace.

    Args:
        group: SGLang's group coordinator of the attention-CP ranks (``get_attn_cp_group()``); the attributes
            ``device_group``, ``ranks``, ``rank_in_group`` and ``world_size`` are used.
    """

    def __init__(self, group: Any) -> None:
        self.process_group = group.device_group
        self.ranks = list(group.ranks)
        self.rank = group.rank_in_group
        self.size = group.world_size

    def gather(self, physical: torch.Tensor, workspace: torch.Tensor, indices: GatherIndices) -> int:
        """Fill the gathered part of ``workspace``; a collective call, made by every rank of the group.

        Args:
            physical: this rank's pages, as :func:`page_rows` gives them.
            workspace: the workspace's pages, in the same form.
            indices: the plan.

        Returns:
            bytes received from other ranks, padding included.
        """
        share = indices.base_share
        received = 0
        if share:
            own = workspace[self.rank * share : (self.rank + 1) * share]
            torch.index_select(physical, 0, indices.source, out=own)
            _all_gather(workspace[: self.size * share], own, group=self.process_group)
            received += (self.size - 1) * share
        for part in indices.surplus:
            region = workspace[part.start : part.start + part.count]
            if part.owner == self.rank:
                torch.index_select(physical, 0, indices.surplus_source, out=region)
            else:
                received += part.count
            dist.broadcast(region, src=self.ranks[part.owner], group=self.process_group)
        return received * workspace.shape[1] * workspace.element_size()

    def self_check(self, device: torch.device | str) -> None:
        """Gather and broadcast one known page per rank; also makes the communicator take its memory now.

        Raises:
            RuntimeError: a page came back wrong: the group is broken or its ranks are in another order.
        """
        physical = torch.full((2, 4), -1, dtype=torch.int64, device=device)
        physical[1] = 1000 + self.rank
        workspace = torch.zeros((2 * self.size, 4), dtype=torch.int64, device=device)
        one = torch.ones(1, dtype=torch.int64, device=device)
        surplus = tuple(Surplus(r, self.size + r, 1) for r in range(self.size))
        self.gather(physical, workspace, GatherIndices(1, surplus, one, one))
        expected = [1000 + rank for rank in range(self.size)] * 2
        found = workspace[:, 0].tolist()
        if found != expected or not bool((workspace == workspace[:, :1]).all()):
            raise RuntimeError(
                f"CP shared KV self-check failed on attention-CP rank {self.rank}: gathered {found}, expected "
                f"{expected}; the attention-CP process group is broken or its ranks are out of order"
            )
