"""Byte-exact gather of pages over the attention-CP group.

Pages travel as integers, never as floating point and never by a sum: adding zero turns the fp8 byte 0x80 into 0x00,
and 656-byte rows mix fp8, fp32 and bf16. An all-gather moves ``(cp_size - 1) / cp_size`` of the prefix to each rank,
which is the bound for a dense local view; an all-reduce of a zero-filled view would move twice that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from cp_shared_kv.plan import Surplus

#: torch 2.13 renames the call and warns about the old name.
_all_gather_call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: On gloo, shares up to so many pages travel in one call for all stores, which takes 0.5 to 0.9 of the time of two; for
#: larger ones it takes no less (benchmarks/gather.py). On NCCL one call is one launch, whatever the share.
GLOO_ONE_CALL_UP_TO = 64


def _all_gather(outputs: Sequence[torch.Tensor], owns: Sequence[torch.Tensor], group: Any) -> None:
    """All-gather each tensor of ``owns`` into its output, by one collective call."""
    together = contextlib.nullcontext() if len(outputs) == 1 else _coalescing_manager(group)
    with together:
        for output, own in zip(outputs, owns, strict=True):
            _all_gather_call(output, own, group=group)


def _send_surplus(regions: Sequence[tuple[int, torch.Tensor]], rank: int, ranks: Sequence[int], group: Any) -> None:
    """Send each region from its owner to all others; on NCCL one launch, whatever their number."""
    operations = [
        dist.P2POp(dist.isend if owner == rank else dist.irecv, region, ranks[peer], group=group)
        for owner, region in regions
        for peer in (range(len(ranks)) if owner == rank else (owner,))
        if peer != rank
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


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


def own_communicator(group: Any, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A process group of its own with the ranks of a group coordinator; made by each of them.

    Gathers that run beside a layer must not share a communicator with the layer's own collective calls: those of one
    communicator run one after another.

    Args:
        group: SGLang's group coordinator.
        timeout: of a collective call; torch's by default.
    """
    backend = dist.get_backend(group.device_group)
    return dist.new_group(list(group.ranks), timeout, backend, use_local_synchronization=True)


class PageGather:
    """Gathers the pages of a plan into a workspace.

    Args:
        group: SGLang's group coordinator of the attention-CP ranks (``get_attn_cp_group()``); the attributes
            ``device_group``, ``ranks``, ``rank_in_group`` and ``world_size`` are used.
        process_group: communicator with the same ranks in the same order; the group's own by default.
    """

    def __init__(self, group: Any, process_group: Any = None) -> None:
        self.process_group = group.device_group if process_group is None else process_group
        self.ranks = list(group.ranks)
        self.rank = group.rank_in_group
        self.size = group.world_size

    def gather(self, workspaces: Sequence[torch.Tensor], base_share: int, surplus: Sequence[Surplus]) -> int:
        """Bring the pages of other ranks into workspaces; a collective call, made by every rank of the group.

        Args:
            workspaces: pages of the workspace of each store, as :func:`page_rows` gives them; this rank's own pages
                are in them.
            base_share, surplus: as in the plan.

        Returns:
            bytes received from other ranks, padding included.
        """
        share, received = base_share, 0
        if share:
            outputs = [workspace[: self.size * share] for workspace in workspaces]
            owns = [workspace[self.rank * share : (self.rank + 1) * share] for workspace in workspaces]
            apart = share > GLOO_ONE_CALL_UP_TO and dist.get_backend(self.process_group) == "gloo"
            at_once = 1 if apart else len(workspaces)
            for first in range(0, len(workspaces), at_once):
                _all_gather(outputs[first : first + at_once], owns[first : first + at_once], self.process_group)
            received += (self.size - 1) * share
        if surplus:
            regions = [(s.owner, w[s.start : s.start + s.count]) for w in workspaces for s in surplus]
            _send_surplus(regions, self.rank, self.ranks, self.process_group)
            received += sum(s.count for s in surplus if s.owner != self.rank)
        return received * sum(workspace.shape[1] * workspace.element_size() for workspace in workspaces)

    def self_check(self, device: torch.device | str) -> None:
        """Gather and send one known page per rank; also makes the communicator take its memory now.

        Raises:
            RuntimeError: a page came back wrong: the group is broken or its ranks are in another order.
        """
        expected = [1000 + rank for rank in range(self.size)]
        surplus = tuple(Surplus(rank, rank, 1) for rank in range(self.size))
        # The all-gather first: ranks that are out of order could not even be sent to.
        for share, parts in ((1, ()), (0, surplus)):
            workspace = torch.zeros((self.size, 4), dtype=torch.int64, device=device)
            workspace[self.rank] = 1000 + self.rank
            self.gather([workspace, workspace.clone()], share, parts)
            found = workspace[:, 0].tolist()
            if found != expected or not bool((workspace == workspace[:, :1]).all()):
                raise RuntimeError(
                    f"CP shared KV self-check failed on attention-CP rank {self.rank}: gathered {found}, expected "
                    f"{expected}; the attention-CP process group is broken or its ranks are out of order"
                )
