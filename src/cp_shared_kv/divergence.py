"""Divergence guard: ranks that allocate differently would read each other's pages wrongly, so they are stopped.

Every rank runs its own scheduler and allocator, and shared KV relies on all of them handing out the same logical pages.
Each rank keeps a rolling checksum of the pages that its forwards use, and the group compares them before a forward uses
them: 16 bytes a rank over gloo. Compared more rarely, wrong pages could reach decode first, and ranks whose plans
differ could meet in a gather of different sizes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from cp_shared_kv.config import ConfigError

CHECK_EVERY_ENV = "CP_SHARED_KV_CHECK_EVERY"
DEFAULT_CHECK_EVERY = 1


class DivergenceError(RuntimeError):
    """Ranks of one attention-CP group use different pages for the same requests."""


def check_every(environ: Any = None) -> int:
    """Forwards between two comparisons; 0 compares never.

    Raises:
        ConfigError: ``CP_SHARED_KV_CHECK_EVERY`` is not a whole number of at least 0.
    """
    text = (os.environ if environ is None else environ).get(CHECK_EVERY_ENV, "").strip()
    if not text:
        return DEFAULT_CHECK_EVERY
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{CHECK_EVERY_ENV}={text!r} must be a whole number of forwards, 0 for no comparison "
            f"(default {DEFAULT_CHECK_EVERY})"
        )
    return int(text)


class DivergenceGuard:
    """Compares what the ranks of a group planned.

    Args:
        group: SGLang's attention-CP group coordinator; ``cpu_group``, ``world_size`` and ``rank_in_group`` are used.
        every: forwards between two comparisons; 0 for none.
    """

    def __init__(self, group: Any, every: int) -> None:
        self.group = group
        self.every = every
        self.forwards = 0
        self.checksum = 0

    def observe(
        self, pages: Sequence[npt.NDArray[np.integer]], prefix_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> None:
        """Note one forward; every few, a collective call that compares.

        Args:
            pages: logical pages of each request.
            prefix_lens: tokens read of each request.
            seq_lens: tokens of each request.

        Raises:
            DivergenceError: the ranks differ; names the ranks and how many pages of this forward differ.
        """
        if not self.every or self.group.world_size == 1:
            return
        used = np.concatenate([np.asarray(part, dtype=np.int64) for part in pages])
        lens = np.asarray([*prefix_lens, *seq_lens], dtype=np.int64)
        self.checksum = zlib.crc32(lens.tobytes(), zlib.crc32(used.tobytes(), self.checksum))
        self.forwards += 1
        if self.forwards % self.every:
            return
        mine = torch.tensor([self.forwards, self.checksum], dtype=torch.int64)
        said = [torch.empty_like(mine) for _ in range(self.group.world_size)]
        dist.all_gather(said, mine, group=self.group.cpu_group)
        if any(not torch.equal(other, said[0]) for other in said):
            self._report(used, lens)

    def _report(self, used: npt.NDArray[np.int64], lens: npt.NDArray[np.int64]) -> None:
        seen: list[Any] = [None] * self.group.world_size
        dist.all_gather_object(seen, (self.forwards, self.checksum, used, lens), group=self.group.cpu_group)
        lines = []
        for rank, (forwards, checksum, pages, lengths) in enumerate(seen):
            if len(pages) == len(seen[0][2]):
                differing = f"{int((pages != seen[0][2]).sum())} of {len(pages)} pages differ from rank 0"
            else:
                differing = f"{len(pages)} pages where rank 0 has {len(seen[0][2])}"
            same = "equal" if np.array_equal(lengths, seen[0][3]) else "different"
            lines.append(
                f"  - attention-CP rank {rank}: forwards={forwards}, checksum={checksum:#010x}, in this forward "
                f"{differing}, lengths {same}"
            )
        raise DivergenceError(
            "CP shared KV: the attention-CP ranks use different pages for the same requests; answers would be wrong, "
            "so the server stops. What each rank has:\n" + "\n".join(lines)
        )
