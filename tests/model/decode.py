"""The decode side: stock, unsharded; it names pages for each request and counts what is written to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .oracle import INDEX_PAGE_BYTES, KV_BYTES, LAYERS, PAGE, Bytes


@dataclass(frozen=True)
class Destination:
    """Decode's answer for a request, with the names of SGLang's ``TransferInfo``.

    Attributes:
        dst_kv_indices: a page for each page of the request behind decode's cached prefix, int32.
        dst_state_indices: one list: a page for each page of the request.
        prefix_pages: pages that decode has cached.
    """

    dst_kv_indices: npt.NDArray[np.int32]
    dst_state_indices: list[list[int]]
    prefix_pages: int
    is_dummy: bool = False

    @property
    def kv_pages(self) -> int:
        """KV pages that are to be sent."""
        return len(self.dst_kv_indices)

    @property
    def state_pages(self) -> list[int]:
        """Index-K pages that are to be sent, in one list."""
        return [len(pages) for pages in self.dst_state_indices]


class Decode:
    """Decode's pools of ``pages`` pages; page 0 is the dummy page."""

    def __init__(self, pages: int) -> None:
        self.kv: Bytes = np.zeros((LAYERS, pages + 1, PAGE * KV_BYTES), dtype=np.uint8)
        self.index: Bytes = np.zeros((LAYERS, pages + 1, INDEX_PAGE_BYTES), dtype=np.uint8)
        self.kv_writes = np.zeros(pages + 1, dtype=np.int64)
        self.index_writes = np.zeros(pages + 1, dtype=np.int64)
        # Odd pages first: a request's pages are not one run.
        self.free = [*range(2, pages + 1, 2), *range(1, pages + 1, 2)]

    def register(self, pages: int, prefix_pages: int, lacks: str) -> Destination:
        """Take pages for a request of so many pages; ``lacks`` names what decode takes one page too few of."""
        taken = [self.free.pop() for _ in range(pages)]
        kv, state = taken[prefix_pages:], list(taken)
        if lacks == "kv":
            kv.pop()
        if lacks == "state":
            state.pop()
        self.kv_writes[taken] = self.index_writes[taken] = 0
        return Destination(np.array(kv, dtype=np.int32), [state], prefix_pages)

    def release(self, destination: Destination, pages: int) -> None:
        """Give a request's pages back."""
        taken = {*destination.dst_kv_indices.tolist(), *destination.dst_state_indices[0]}
        assert len(taken) == pages, "the two lists must name the same pages, but for one that is lacking"
        self.kv_writes[[*taken]] = self.index_writes[[*taken]] = 0
        self.free = [*sorted(taken), *self.free]

    def stray_writes(self) -> int:
        """Writes to pages that no request has."""
        unused = [0, *self.free]
        return int(self.kv_writes[unused].sum() + self.index_writes[unused].sum())
