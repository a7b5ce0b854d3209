"""Page ids on the host: which pages a request has, known without asking the device.

Page ids live on the device, in ``req_to_token`` and in the radix cache. The allocator draws them on the host, so what
it drew is known; the rest is followed through the radix cache: each tree node carries the pages of its slots, given to
it by the request that inserted it and divided with it when it is split. Where the pages of a node are not known, they
are read from the device once (:attr:`~cp_shared_kv.metrics.Counters.host_page_reads`) and then kept.

What is noted here is compared with ``req_to_token`` on the device before each forward; see :class:`PageCheck`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.metrics import COUNTERS
from cp_shared_kv.plan import ceil_div

Pages = npt.NDArray[np.int64]

#: Attribute of SGLang's requests and tree nodes.
_PAGES = "_cp_shared_kv_pages"
NO_PAGES: Pages = np.empty(0, dtype=np.int64)


def to_device(array: npt.NDArray[np.integer], device: torch.device | str) -> torch.Tensor:
    """Copy to the device; from pageable memory the host would wait for what is queued there."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def page_table(pages: Sequence[Pages], width: int, fill: int) -> npt.NDArray[np.int64]:
    """Pages of several requests as rows ``(batch, width)``, ``fill`` past the end of each."""
    table = np.full((len(pages), width), fill, dtype=np.int64)
    for row, part in zip(table, pages, strict=True):
        row[: len(part)] = part
    return table


def read_pages(first_slots: torch.Tensor, page_size: int) -> Pages:
    """Pages of slots; waits for the device.

    Args:
        first_slots: a slot of each page, any shape and integer dtype.
        page_size: tokens per page.
    """
    COUNTERS.add(host_page_reads=1)
    return (first_slots // page_size).cpu().numpy().astype(np.int64)


def noted_pages(holder: Any) -> Pages | None:
    """What is noted of a request or a tree node."""
    pages: Pages | None = getattr(holder, _PAGES, None)
    return pages


def _node_pages(node: Any, page_size: int) -> Pages:
    pages = noted_pages(node)
    if pages is None:
        pages = read_pages(node.value[::page_size], page_size)
        setattr(node, _PAGES, pages)
    return pages


def _path(node: Any) -> list[Any]:
    """Nodes from below the root down to ``node``."""
    nodes = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def _path_pages(nodes: Sequence[Any], page_size: int) -> Pages:
    return np.concatenate([NO_PAGES, *(_node_pages(node, page_size) for node in nodes)])


class HostPages:
    """Pages of the requests of the latest batch."""

    def __init__(self) -> None:
        self._rids: list[str] = []
        #: Pages of each request of the latest batch.
        self.latest: list[Pages] = []

    def prefix_pages(self, req: Any, page_size: int) -> Pages:
        """Pages that hold the tokens which a request already has, before its next chunk is allocated.

        Args:
            req: SGLang's request; ``prefix_indices`` are the slots of those tokens.
            page_size: tokens per page.
        """
        count = ceil_div(len(req.prefix_indices), page_size)
        noted = noted_pages(req)
        if req.req_pool_idx is not None and noted is not None and len(noted) >= count:
            return noted[:count]
        if not count:
            return NO_PAGES
        nodes = _path(req.last_node)
        if sum(len(node.value) for node in nodes) == len(req.prefix_indices):
            return _path_pages(nodes, page_size)
        return read_pages(req.prefix_indices[::page_size], page_size)

    def note_batch(self, reqs: Sequence[Any], prefixes: Sequence[Pages], drawn: Sequence[Pages]) -> None:
        """Note what the requests of a batch have now: their prefixes and the pages that were drawn for their chunks."""
        self._rids = [req.rid for req in reqs]
        self.latest = [np.concatenate(parts) for parts in zip(prefixes, drawn, strict=True)]
        for req, pages in zip(reqs, self.latest, strict=True):
            setattr(req, _PAGES, pages)

    def of_batch(self, rids: Sequence[str] | None, counts: Sequence[int]) -> list[Pages] | None:
        """Pages of each request of a batch, or None where the batch is not the one that was noted.

        Args:
            rids: names of the requests.
            counts: how many pages each has.
        """
        is_noted = list(rids or ()) == self._rids and [len(pages) for pages in self.latest] == list(counts)
        return self.latest if is_noted else None


def note_inserted(req: Any, first_new_node: int, page_size: int) -> None:
    """After a request's slots went into the radix cache: give the new nodes their pages, and the request the tree's.

    Where the tree had a prefix already, SGLang has freed the request's own pages and put the tree's in their place.

    Args:
        req: SGLang's request, ``last_node`` the end of its path.
        first_new_node: number of the first node that the insertion made.
        page_size: tokens per page.
    """
    noted = noted_pages(req)
    if noted is None:
        return
    nodes = _path(req.last_node)
    start = 0
    for node in nodes:
        end = start + len(node.value) // page_size
        if node.id >= first_new_node and _PAGES not in node.__dict__:
            setattr(node, _PAGES, noted[start:end].copy())  # a view would keep the pages of the whole request
        start = end
    setattr(req, _PAGES, np.concatenate([_path_pages(nodes, page_size), noted[start:]]))


def note_split(pages: Pages | None, front: Any, back: Any, page_size: int) -> None:
    """After a tree node was split in two.

    Args:
        pages: what was noted of the node before.
        front, back: the new node, which holds the first slots, and the old one, which holds the rest.
        page_size: tokens per page.
    """
    cut = len(front.value) // page_size
    # None says that nobody knows, so that a split node is not taken for an inserted one.
    setattr(front, _PAGES, None if pages is None else pages[:cut].copy())
    setattr(back, _PAGES, None if pages is None else pages[cut:].copy())


class HostPagesError(RuntimeError):
    """Pages noted on the host are not those on the device: a defect of the plugin."""


class PageCheck:
    """Compares noted pages with ``req_to_token`` on the device, and reads the outcome once it is there.

    The host never waits. The comparison is queued when a batch has got its pages, before its forward; the outcome is
    looked at before the next batch, and before anything of the request is sent, when its forward has ended.

    Args:
        page_size: tokens per page.
        device: the pool's device.
    """

    def __init__(self, page_size: int, device: torch.device | str) -> None:
        self._page_size = page_size
        self._streams = torch.get_device_module(device)
        self._pin = torch.device(device).type == "cuda"
        self._outcomes: deque[tuple[Any, torch.Tensor]] = deque()

    def compare(self, first_slots: torch.Tensor, noted: Sequence[Pages]) -> None:
        """Begin a comparison, on the current stream.

        Args:
            first_slots: first slot of each page, from ``req_to_token``, ``(batch, pages)``.
            noted: pages of each request; what the rows hold beyond them is not looked at.
        """
        expected = to_device(page_table(noted, first_slots.shape[1], -1), first_slots.device)
        differs = ((first_slots // self._page_size != expected) & (expected >= 0)).any()
        outcome = torch.empty((), dtype=torch.bool, pin_memory=self._pin)
        outcome.copy_(differs, non_blocking=True)
        event = self._streams.Event()
        event.record()
        self._outcomes.append((event, outcome))

    def raise_if_different(self) -> None:
        """Look at the outcomes that have come.

        Raises:
            HostPagesError: one is a difference.
        """
        while self._outcomes and self._outcomes[0][0].query():
            if self._outcomes.popleft()[1].item():
                raise HostPagesError(
                    "CP shared KV: the pages that the host noted for a request are not those in req_to_token, so its "
                    "forward read wrong pages and the server stops. This is a defect of the plugin or an unsupported "
                    "feature of the server; please report it"
                )
