"""Page ids on the host: which pages a request has, known without asking the device.

Page ids live on the device, in ``req_to_token`` and in the prefix tree. The allocator draws them on the host, so what
it drew is known. What a request puts in the tree is noted by its tokens (:class:`CachedPages`), whatever the tree makes
of it, so the pages of a prefix that is found there later are known too. Where they are not, they are read from the
device once (:attr:`~cp_shared_kv.metrics.Counters.host_page_reads`) and then noted.

What is noted here is compared with ``req_to_token`` on the device before each forward; see :class:`PageCheck`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.metrics import COUNTERS
from cp_shared_kv.plan import ceil_div
from cp_shared_kv.releases import installed

Pages = npt.NDArray[np.int64]

#: Attribute of SGLang's requests.
_NOTED = "_cp_shared_kv_pages"
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


@dataclass(frozen=True)
class Noted:
    """What is noted of a request.

    Attributes:
        pages: its pages.
        cached: how many of them, from the first one on, are the prefix tree's.
    """

    pages: Pages
    cached: int


def noted_of(req: Any) -> Noted | None:
    """What is noted of a request, if anything is."""
    noted: Noted | None = getattr(req, _NOTED, None)
    return noted


def _page_tokens(tokens: Sequence[int], start: int, end: int, page_size: int) -> list[bytes]:
    """Tokens of pages ``start`` to ``end`` of a sequence, a string of bytes for each."""
    data = np.asarray(tokens[start * page_size : end * page_size], dtype=np.int64).tobytes()
    width = 8 * page_size
    return [data[i : i + width] for i in range(0, len(data), width)]


class CachedPages:
    """Pages of the prefix tree, by what leads to them.

    A page in the tree is known by the page before it, or by a namespace where it is the first, and by its own tokens.
    Entries outlive their page's eviction, and are overwritten when the same tokens are put in the tree again; so those
    of pages that are in the tree are right as long as every insertion is noted. There are no more than pages.
    """

    def __init__(self) -> None:
        self._pages: dict[tuple[Hashable, bytes], int] = {}
        self._places: dict[int, tuple[Hashable, bytes]] = {}

    def clear(self) -> None:
        """Forget all, as when an insertion could not be noted."""
        self._pages.clear()
        self._places.clear()

    def find(self, before: Hashable, tokens: Sequence[bytes]) -> Pages | None:
        """Pages that follow one another behind ``before``; None if one is not known.

        Args:
            before: the page before the first one, or the namespace.
            tokens: tokens of each page.
        """
        found = []
        for part in tokens:
            page = self._pages.get((before, part))
            if page is None:
                return None
            found.append(page)
            before = page
        return np.array(found, dtype=np.int64)

    def put(self, before: Hashable, tokens: Sequence[bytes], pages: Pages) -> None:
        """Note pages that the tree holds now; arguments as for :meth:`find`."""
        for part, page in zip(tokens, pages.tolist(), strict=True):
            place = (before, part)
            left = self._places.get(page)
            if left is not None and self._pages.get(left) == page:
                del self._pages[left]
            self._places[page] = place
            self._pages[place] = page
            before = page


class HostPages:
    """Pages of the requests of the latest batch, and of what is cached."""

    def __init__(self) -> None:
        self._rids: list[str] = []
        self._cached = CachedPages()
        self._caching: Any = None
        #: Pages of each request of the latest batch.
        self.latest: list[Pages] = []

    def prefix_pages(
        self, req: Any, length: int, holds_slots: bool, read_slots: Callable[[], torch.Tensor], page_size: int
    ) -> Noted:
        """Pages that hold the tokens which a request already has, before its next chunk is allocated.

        Args:
            req: SGLang's request.
            length: how many tokens those are.
            holds_slots: whether they are the request's own already, and not only found in the tree.
            read_slots: gives their slots, on the device.
            page_size: tokens per page.
        """
        count = ceil_div(length, page_size)
        noted = noted_of(req)
        if holds_slots and noted is not None and len(noted.pages) >= count:
            return Noted(noted.pages[:count], noted.cached)
        if not count:
            return Noted(NO_PAGES, 0)
        if holds_slots:
            return Noted(read_pages(read_slots()[::page_size], page_size), 0)
        tokens = _page_tokens(req.origin_input_ids, 0, count, page_size)
        pages = self._cached.find(_namespace(req), tokens)
        if pages is None:
            pages = read_pages(read_slots()[::page_size], page_size)
            self._cached.put(_namespace(req), tokens, pages)
        return Noted(pages, count)

    def note_batch(self, reqs: Sequence[Any], prefixes: Sequence[Noted], drawn: Sequence[Pages]) -> None:
        """Note what the requests of a batch have now: their prefixes and the pages that were drawn for their chunks."""
        self._rids = [req.rid for req in reqs]
        self.latest = [np.concatenate([prefix.pages, new]) for prefix, new in zip(prefixes, drawn, strict=True)]
        for req, prefix, pages in zip(reqs, prefixes, self.latest, strict=True):
            setattr(req, _NOTED, Noted(pages, prefix.cached))

    def of_batch(self, rids: Sequence[str] | None, counts: Sequence[int]) -> list[Pages] | None:
        """Pages of each request of a batch, or None where the batch is not the one that was noted.

        Args:
            rids: names of the requests.
            counts: how many pages each has.
        """
        is_noted = list(rids or ()) == self._rids and [len(pages) for pages in self.latest] == list(counts)
        return self.latest if is_noted else None

    @contextmanager
    def caching(self, req: Any) -> Iterator[None]:
        """While SGLang puts a request's tokens in the tree."""
        self._caching = req
        try:
            yield
        finally:
            self._caching = None

    def note_inserted(self, length: int, found: int, page_size: int) -> None:
        """After tokens of the request that is being cached were inserted: give what is new in the tree its pages.

        Where the tree had a prefix already, SGLang has freed the request's own pages and puts the tree's in their
        place.

        Args:
            length: tokens that were inserted, whole pages.
            found: tokens of them that the tree had before.
            page_size: tokens per page.
        """
        req, end = self._caching, length // page_size
        noted = None if req is None else noted_of(req)
        if noted is None or len(noted.pages) < end:
            self._cached.clear()
            return
        first, start = noted.cached, max(noted.cached, found // page_size)
        if end <= first:
            return
        tokens = req.origin_input_ids
        if len(tokens) < length:
            tokens = tokens + req.output_ids
        parts = _page_tokens(tokens, first, end, page_size)
        pages = noted.pages.copy()
        before = pages[first - 1].item() if first else _namespace(req)
        given = self._cached.find(before, parts[: start - first])
        if given is None:
            self._cached.clear()
            setattr(req, _NOTED, None)
            return
        pages[first:start] = given
        before = pages[start - 1].item() if start else _namespace(req)
        self._cached.put(before, parts[start - first :], pages[start:end])
        setattr(req, _NOTED, Noted(pages, end))


def _namespace(req: Any) -> Hashable:
    """What tells a request's prefixes apart from those of other requests with the same tokens."""
    return tuple(getattr(req, name) for name in installed().tree_namespace)


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
