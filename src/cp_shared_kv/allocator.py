"""The allocator the scheduler sees: stock paging over logical slots, with the owners of every request balanced.

Along a request owners are cyclic: after a page of rank r comes one of rank ``(r + 1) % cp_size``, from chunk to chunk
and on from a cached prefix too. So no rank holds more than one page above or below its even share of a request. A rank
that has run out of free pages is passed over, so an allocation succeeds whenever enough pages are free in total.

Free pages are kept on the host and only the drawn ones are uploaded, so the host knows every page without asking the
device. Nothing here depends on this rank's number: ranks that make the same calls hand out the same pages.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.utils import next_power_of_2

from cp_shared_kv.host_pages import NO_PAGES, Pages, to_device
from cp_shared_kv.layout import DUMMY_PAGE, NO_OWNER, CpSharedKVLayout
from cp_shared_kv.releases import symbol

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache

PagedTokenToKVPoolAllocator: Any = symbol("PagedTokenToKVPoolAllocator")
#: Module of the stock allocator, which holds the kernels that it launches.
stock: Any = sys.modules[PagedTokenToKVPoolAllocator.__module__]


def _without_repeats(values: Pages) -> Pages:
    """The values that differ from the one before them."""
    keep = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=keep[1:])
    return values[keep]


def _pages_of(slots: Pages, page_size: int) -> Pages:
    """Distinct pages of token slots, ascending."""
    # Slots mostly come page by page, so few values are left to sort; np.unique would sort one for each slot.
    pages = _without_repeats(slots // page_size)
    pages.sort()
    return _without_repeats(pages)


class FreePages:
    """Logical pages that nobody uses, on the host, apart by owner.

    A page is *free*, which is to say next to be drawn, or *set aside* until :meth:`merge`. Arrays of pages are int64
    and never written to, so they can be shared with callers and snapshots.

    Args:
        layout: placement of the group; its rank is not used.
        num_pages: pages of the group, all free at first.
    """

    def __init__(self, layout: CpSharedKVLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        # Owners of the new pages of any request are a slice of this. 16 bits, because NumPy sorts those by radix.
        self._cycle = layout.owner_for_logical_pages_np(np.arange(1, num_pages + layout.cp_size + 1)).astype(np.int16)
        self.clear()

    def clear(self) -> None:
        """Free all pages."""
        self.replace(np.arange(DUMMY_PAGE + 1, self.num_pages + 1), NO_PAGES)

    def _set(self, free: list[list[Pages]], aside: list[Pages]) -> None:
        # Per owner a stack of arrays: pages are drawn from the front of the last one.
        self._free = free
        self._free_counts = [sum(map(len, stack)) for stack in free]
        self._aside = aside
        self._aside_count = sum(map(len, aside))

    def __len__(self) -> int:
        """Pages that are free or set aside."""
        return sum(self._free_counts) + self._aside_count

    @property
    def free(self) -> Pages:
        """Free pages, owner by owner, each owner's in the order in which they will be drawn."""
        return np.concatenate([NO_PAGES, *(pages for stack in self._free for pages in reversed(stack))])

    @property
    def aside(self) -> Pages:
        """Pages that are set aside."""
        return np.concatenate([NO_PAGES, *self._aside])

    def replace(self, free: Pages, aside: Pages) -> None:
        """Forget all pages for these; an owner's free pages will be drawn in the order given."""
        self._set([[pages] for pages in self._by_owner(free)], [aside] if len(aside) else [])

    def put_first(self, pages: Pages) -> None:
        """Make pages free, before all others."""
        for owner, part in enumerate(self._by_owner(pages)):
            if len(part):
                self._free[owner].append(part)
                self._free_counts[owner] += len(part)

    def set_aside(self, pages: Pages) -> None:
        """Keep pages until :meth:`merge`."""
        self._aside.append(pages)
        self._aside_count += len(pages)

    def merge(self) -> None:
        """Make the pages that are set aside free, each owner's in ascending order; nothing if there are none."""
        if self._aside:
            stacks = zip(self._free, self._by_owner(self.aside), strict=True)
            # Stable is merge sort here, fast because the free pages are mostly sorted already.
            self._set([[np.sort(np.concatenate([*stack, freed]), kind="stable")] for stack, freed in stacks], [])

    def snapshot(self) -> Any:
        """The pages as they are now, for :meth:`restore`; not copied."""
        return [list(stack) for stack in self._free], list(self._aside)

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot."""
        free, aside = snapshot
        self._set([list(stack) for stack in free], list(aside))

    def draw(self, counts: list[int], last_pages: npt.ArrayLike | None = None) -> Pages | None:
        """New pages for the requests of a batch; None, and nothing is drawn, if there are not enough.

        Args:
            counts: new pages of each request.
            last_pages: the page that each request ends with so far; 0 for a request without pages, which starts at the
                owner with most free pages, the lowest of equals. None if no request has pages.

        Returns:
            The pages, request by request. Pages set aside are merged first if the free ones are too few in total, or
            too few of one owner.
        """
        if sum(counts) > len(self):
            return None
        if last_pages is None:
            previous = [NO_OWNER] * len(counts)
        else:
            previous = self.layout.owner_for_logical_pages_np(last_pages).tolist()
        owners, left = self._cyclic_owners(counts, previous)
        if min(left) < 0 and self._aside:
            self.merge()
            owners, left = self._cyclic_owners(counts, previous)
        if min(left) < 0:
            owners, left = self._owners_past_empty(counts, previous)
        return self._take(owners, left)

    def _by_owner(self, pages: Pages) -> list[Pages]:
        owners = self.layout.owner_for_logical_pages_np(pages)
        return [pages[owners == owner] for owner in range(self.layout.cp_size)]

    def _cyclic_owners(self, counts: list[int], previous: list[int]) -> tuple[npt.NDArray[np.int16], list[int]]:
        """Owner of each new page, and free pages then left of each owner: below 0 where it has too few."""
        ranks = self.layout.cp_size
        left = self._free_counts.copy()
        parts = [self._cycle[:0]]
        for count, owner in zip(counts, previous, strict=True):
            first = left.index(max(left)) if owner == NO_OWNER else (owner + 1) % ranks
            parts.append(self._cycle[first : first + count])
            if count >= ranks:
                left = [free - count // ranks for free in left]
            for step in range(first, first + count % ranks):
                left[step % ranks] -= 1
        return np.concatenate(parts), left

    def _owners_past_empty(self, counts: list[int], previous: list[int]) -> tuple[npt.NDArray[np.int16], list[int]]:
        """The same, but in place of an owner without free pages comes the one with most, and then the one after it."""
        ranks = self.layout.cp_size
        left = self._free_counts.copy()
        owners = []
        for count, owner in zip(counts, previous, strict=True):
            following = left.index(max(left)) if owner == NO_OWNER else (owner + 1) % ranks
            for _ in range(count):
                if not left[following]:
                    following = left.index(max(left))
                left[following] -= 1
                owners.append(following)
                following = (following + 1) % ranks
        return np.array(owners, dtype=np.int16), left

    def _take(self, owners: npt.NDArray[np.int16], left: list[int]) -> Pages:
        """Draw a page of each owner given, in that order, which leaves so many of each owner."""
        parts = [NO_PAGES]
        for stack, count, kept in zip(self._free, self._free_counts, left, strict=True):
            while count > kept:
                pages = stack.pop()
                if len(pages) > count - kept:
                    stack.append(pages[count - kept :])
                parts.append(pages[: count - kept])
                count -= len(parts[-1])
        self._free_counts = left
        drawn = np.empty(len(owners), dtype=np.int64)
        drawn[np.argsort(owners, kind="stable")] = np.concatenate(parts)
        return drawn


class CPSharedPagedTokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """Paged allocator over the logical slots of one attention-CP group.

    Args:
        logical_size: token slots the group offers; exactly ``physical_size * cp_size``.
        physical_size: token slots that one rank's pool holds (page 0 not counted).
        page_size: tokens per page.
        dtype: dtype of the KV cache, as the stock allocator takes it.
        device: device of the index tensors.
        kvcache: the rank's KV pool.
        need_sort: keep freed pages apart and sort them before reuse, as stock does for disaggregation.
        cp_size: ranks in the group.
        cp_rank: this rank in the group.

    Raises:
        ValueError: a size is not a multiple of the page size, or the two sizes do not fit ``cp_size``.
    """

    def __init__(
        self,
        logical_size: int,
        physical_size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: KVCache,
        need_sort: bool,
        cp_size: int,
        cp_rank: int,
    ) -> None:
        self.layout = CpSharedKVLayout(page_size=page_size, cp_size=cp_size, cp_rank=cp_rank)
        for name, size in (("logical_size", logical_size), ("physical_size", physical_size)):
            if size <= 0 or size % page_size:
                raise ValueError(f"{name} must be a positive multiple of page_size={page_size}, got {size}")
        if logical_size != physical_size * cp_size:
            raise ValueError(
                f"logical_size must be physical_size * cp_size = {physical_size} * {cp_size} = "
                f"{physical_size * cp_size}, got {logical_size}"
            )
        self.physical_size = physical_size
        self._pages = FreePages(self.layout, logical_size // page_size)
        self._last_pages: npt.NDArray[np.integer] | None = None
        self._counts: list[int] = []
        super().__init__(logical_size, page_size, dtype, device, kvcache, need_sort)

    @property
    def logical_size(self) -> int:
        """Token slots that the group offers."""
        return self.size

    @property
    def free_pages(self) -> torch.Tensor:
        """Pages that can be drawn, owner by owner, int64 on the device (an upload: for checks, not for allocation)."""
        return self._upload(self._pages.free)

    @free_pages.setter
    def free_pages(self, pages: torch.Tensor | None) -> None:
        self._pages.replace(self._download(pages), self._pages.aside)

    @property
    def release_pages(self) -> torch.Tensor:
        """Freed pages that wait to be sorted, int64 on the device (an upload, as above)."""
        return self._upload(self._pages.aside)

    @release_pages.setter
    def release_pages(self, pages: torch.Tensor | None) -> None:
        self._pages.replace(self._pages.free, self._download(pages))

    @property
    def drawn(self) -> list[Pages]:
        """New pages of each request of the last alloc_extend or alloc_decode, in order; empty if that gave None."""
        ends = itertools.accumulate(self._counts)
        return [self._drawn[end - count : end] for count, end in zip(self._counts, ends, strict=True)]

    def continue_after(self, last_pages: Sequence[int] | None) -> None:
        """Say where the requests of the next alloc_extend or alloc_decode end, which then need not ask the device.

        Args:
            last_pages: logical page of the last token of each request's prefix; 0 for a request without a prefix. None
                takes back what was said.
        """
        self._last_pages = None if last_pages is None else np.asarray(last_pages)

    def clear(self) -> None:
        """Free all pages."""
        self._pages.clear()
        self._freed_together: list[torch.Tensor] | None = None
        self._last_pages = None
        self._forget_drawn()

    def available_size(self) -> int:
        """Token slots of all pages that nobody uses."""
        return len(self._pages) * self.page_size

    def backup_state(self) -> Any:
        """The free pages as they are now, for :meth:`restore_state`."""
        return self._pages.snapshot()

    def restore_state(self, state: Any) -> None:
        """Return to the free pages of a backup."""
        self._pages.restore(state)

    def merge_and_sort_free(self) -> None:
        """Make freed pages that were kept apart ready to be drawn, in ascending order."""
        self._pages.merge()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots of whole pages for one request without a prefix, int64 ``(need_size,)``; None if too few are free."""
        if self.debug_mode:
            assert need_size % self.page_size == 0, "The allocation size should be page-aligned"
        pages = self._pages.draw([need_size // self.page_size])
        if pages is None:
            return None
        offsets = torch.arange(self.page_size, device=self.device)
        return (self._upload(pages)[:, None] * self.page_size + offsets).reshape(-1)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots of the new tokens of a batch, request by request, int64 ``(extend_num_tokens,)``.

        Copies last_loc from the device if a request with a prefix needs a page and :meth:`continue_after` was not
        called. Returns None if too few pages are free.

        Args:
            prefix_lens: tokens that have slots, per request, on the device; ``prefix_lens_cpu`` the same on the host.
            seq_lens: tokens that will have slots, per request, on the device; ``seq_lens_cpu`` the same on the host.
            last_loc: slot of each request's last token, -1 without a prefix, on the device.
            extend_num_tokens: new tokens of all requests.
            num_new_pages: pages that these lengths take, if the caller has counted them.

        Raises:
            ValueError: ``num_new_pages`` is not what the lengths take, or ``continue_after`` was told of another number
                of requests; nothing is drawn.
        """
        if self.debug_mode:
            assert torch.all((last_loc + 1) % self.page_size == prefix_lens % self.page_size)
        pages = self._draw(prefix_lens_cpu.numpy(), seq_lens_cpu.numpy(), last_loc, num_new_pages)
        if pages is None:
            return None
        batch = len(prefix_lens)
        slots = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        stock.alloc_extend_kernel[(batch,)](
            prefix_lens, seq_lens, last_loc, self._upload(pages), slots, next_power_of_2(batch), self.page_size
        )
        return self._checked(slots)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Slot of one new token for each request, int64 ``(batch,)``; arguments and errors as for alloc_extend.

        ``seq_lens`` counts the new token.
        """
        if self.debug_mode:
            assert torch.all((last_loc + 2) % self.page_size == seq_lens % self.page_size)
        lengths = seq_lens_cpu.numpy()
        pages = self._draw(lengths - 1, lengths, last_loc)
        if pages is None:
            return None
        batch = len(seq_lens)
        slots = torch.empty((batch,), dtype=torch.int64, device=self.device)
        stock.alloc_decode_kernel[(batch,)](
            seq_lens, last_loc, self._upload(pages), slots, next_power_of_2(batch), self.page_size
        )
        return self._checked(slots)

    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages of any token slots, each page once; in a free group, when the group ends.

        Raises:
            ValueError: a slot lies on no page of the group; nothing is freed.
        """
        if free_index.numel() == 0:
            return
        if self._freed_together is None:
            pages = _pages_of(self._download(free_index), self.page_size)
            if pages[0] <= DUMMY_PAGE or pages[-1] > self.num_pages:
                raise ValueError(
                    f"freed slots reach from page {pages[0]} to {pages[-1]}, not within 1 to {self.num_pages}"
                )
            if self.need_sort:
                self._pages.set_aside(pages)
            else:
                self._pages.put_first(pages)
        else:
            self._freed_together.append(free_index.clone())  # a view of rows that may be written before the group ends
        if self.debug_mode:
            free = self._pages.free
            assert len(np.unique(free)) == len(free)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Free the pages of a part of one request's slots; as free, but only a slot of each page is copied.

        Args:
            free_index: slots of positions that follow one another.
            start_pos: position of the first one.
        """
        inside = -start_pos % self.page_size
        heads = free_index[inside :: self.page_size]
        self.free(torch.cat([free_index[:1], heads]) if inside else heads)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """Free pages."""
        self.free(page_ids * self.page_size)

    def free_group_begin(self) -> None:
        """Keep what is freed from here on."""
        self._freed_together = []

    def free_group_end(self) -> None:
        """Free what was kept, each page once."""
        freed, self._freed_together = self._freed_together, None
        if freed:
            self.free(torch.cat(freed))

    def get_all_free_pages(self) -> torch.Tensor:
        """Pages that nobody uses, int64 on the device (an upload: for checks)."""
        return self._upload(np.concatenate([self._pages.free, self._pages.aside]))

    def _draw(
        self,
        prefix_lens: npt.NDArray[np.integer],
        seq_lens: npt.NDArray[np.integer],
        last_loc: torch.Tensor,
        num_new_pages: int | None = None,
    ) -> Pages | None:
        last_pages, self._last_pages = self._last_pages, None
        self._forget_drawn()
        round_up = self.page_size - 1
        before = (prefix_lens + round_up) // self.page_size
        new_pages = (seq_lens + round_up) // self.page_size - before
        counts = new_pages.tolist()
        if last_pages is not None and last_pages.shape != new_pages.shape:
            raise ValueError(f"continue_after was told of {last_pages.shape} last pages for {len(counts)} requests")
        if num_new_pages is not None and num_new_pages > len(self._pages):
            return None
        if num_new_pages is not None and num_new_pages != sum(counts):
            raise ValueError(f"num_new_pages is {num_new_pages}, but the lengths take {sum(counts)} new pages")
        if last_pages is None and any(count and old for count, old in zip(counts, before.tolist(), strict=True)):
            last_pages = self._download(last_loc) // self.page_size
        pages = self._pages.draw(counts, last_pages)
        if pages is not None:
            self._drawn, self._counts = pages, counts
        return pages

    def _forget_drawn(self) -> None:
        self._drawn = NO_PAGES
        self._counts = []

    def _checked(self, slots: torch.Tensor) -> torch.Tensor:
        if self.debug_mode:
            assert len(torch.unique(slots)) == len(slots)
        return slots

    def _upload(self, pages: Pages) -> torch.Tensor:
        """Pages as a tensor on the device, without waiting for it."""
        return to_device(pages, self.device)

    @staticmethod
    def _download(indices: torch.Tensor | None) -> Pages:
        """Indices as an array on the host; None, which the stock constructor assigns, as no index."""
        return NO_PAGES if indices is None else indices.cpu().numpy().astype(np.int64, copy=False)
