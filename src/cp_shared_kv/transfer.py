"""Which pages a prefill rank sends to decode, and where each belongs there.

Stock splits a chunk's page list into contiguous runs and names a run's place by a slice. Here a rank's pages lie
anywhere in the list, so the place is an array of positions; ``destination[positions]`` works where a slice did. A slice
clips silently and an array raises in the transfer thread, when it is too late to tell, so positions are checked against
every destination before a chunk is queued. The check uses the end of the *whole* chunk, which is the same on all ranks:
either every rank sends its part of a chunk or none does.

Two origins: KV positions count from the page decode asked for first (its cached prefix is not sent again); index-K
positions count from the request's first page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cp_shared_kv.layout import CpSharedKVLayout, filter_kv_pages_for_cp_shared_kv


class PagePositions(np.ndarray):
    """Positions (int32) of a rank's pages in the destination's page list, and the end of the whole chunk.

    Attributes:
        stop: position one past the chunk's last page, this rank's or not.
    """

    stop: int

    def __new__(cls, positions: npt.ArrayLike, stop: int) -> PagePositions:
        array = np.asarray(positions, dtype=np.int32).view(cls)
        array.stop = int(stop)
        return array

    def __array_finalize__(self, source: Any) -> None:
        self.stop = getattr(source, "stop", 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return PagePositions, (np.asarray(self), self.stop)


def split_chunk(
    layout: CpSharedKVLayout, logical_pages: npt.NDArray[np.integer], chunk: slice
) -> tuple[npt.NDArray[np.int32], PagePositions]:
    """This rank's part of one chunk.

    Args:
        layout: placement, with this rank's number.
        logical_pages: all pages of the chunk in request order, ``(n,)``.
        chunk: their positions in the destination's page list, ``n`` long.

    Returns:
        ``(physical pages, positions)`` of the pages this rank owns.

    Raises:
        ValueError: the slice is not as long as the page list.
    """
    if chunk.stop - chunk.start != len(logical_pages):
        raise ValueError(f"chunk positions {chunk.start}..{chunk.stop} do not fit {len(logical_pages)} pages")
    pages, positions = filter_kv_pages_for_cp_shared_kv(
        layout=layout, logical_pages=logical_pages, chunk_page_start=chunk.start
    )
    return pages, PagePositions(positions, chunk.stop)


def split_state(
    layout: CpSharedKVLayout, logical_pages: npt.ArrayLike, destination: Sequence[int]
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """This rank's part of a request's index-K pages, paired with destination pages.

    Args:
        layout: placement, with this rank's number.
        logical_pages: all pages of the request in order, ``(n,)``.
        destination: decode's page for each of them, ``(n,)``.

    Returns:
        ``(physical pages, destination pages)``, equally long.

    Raises:
        ValueError: the two lists differ in length.
    """
    pages = np.asarray(logical_pages)
    if len(pages) != len(destination):
        raise ValueError(f"the request has {len(pages)} index-K pages but decode gave {len(destination)}")
    physical, positions = layout.filter_owned_pages_np(pages, np.arange(len(pages)))
    return physical, np.asarray(destination, dtype=np.int32)[positions].tolist()


@dataclass(frozen=True)
class Destination:
    """What one decode rank registered for a request: so many KV pages, and so many of each state component."""

    kv_pages: int
    state_pages: Sequence[int]


def chunk_problem(
    kv_stop: int, state_pages: Sequence[npt.NDArray[np.integer] | None], destinations: Iterable[Destination]
) -> str | None:
    """Why a chunk must not be sent, or None.

    Args:
        kv_stop: position one past the chunk's last KV page.
        state_pages: pages of each state component, None where a component sends nothing; empty before the last chunk.
        destinations: what the request's decode ranks registered for it.
    """
    for destination in destinations:
        if kv_stop > destination.kv_pages:
            return (
                f"KV pages up to position {kv_stop - 1} are to be sent but decode registered "
                f"{destination.kv_pages} pages"
            )
        for component, source in enumerate(state_pages):
            if source is None:
                continue
            given = destination.state_pages
            wanted = given[component] if component < len(given) else 0
            if len(source) != wanted:
                return f"{len(source)} index-K pages are to be sent but decode registered {wanted}"
    return None
