"""Which rank holds which page: the page arithmetic of CP shared KV, and its only copy.

A *logical page* ``p >= 1`` is held by attention-CP rank ``(p - 1) % cp_size`` as *physical page*
``(p - 1) // cp_size + 1`` of that rank's pool. Page 0 is SGLang's dummy page: nobody owns it and it is
physical page 0 on every rank. Pages below 0 are padding: nobody owns them either, and they map to 0 too.
For ``p >= 1`` the map ``p -> (owner, physical)`` is a bijection, so a group of ``cp_size`` ranks with
``n`` physical pages each offers exactly ``cp_size * n`` logical pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

NO_OWNER = -1
DUMMY_PAGE = 0


def _require_integers(name: str, value: Any) -> npt.NDArray[np.integer]:
    array = np.asarray(value)
    if array.size == 0:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}; pass page ids, not lengths or masks")
    return array


@dataclass(frozen=True)
class CpSharedKVLayout:
    """Placement of logical pages on the ranks of one attention-CP group.

    Args:
        page_size: tokens per page, at least 1 (NSA on CUDA uses 64).
        cp_size: ranks in the attention-CP group, at least 1.
        cp_rank: this process's rank in that group, ``0 <= cp_rank < cp_size``.

    Raises:
        TypeError: an argument is not an ``int``.
        ValueError: an argument is out of range.
    """

    page_size: int
    cp_size: int
    cp_rank: int

    def __post_init__(self) -> None:
        for name in ("page_size", "cp_size", "cp_rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
            object.__setattr__(self, name, int(value))
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {self.page_size}")
        if self.cp_size < 1:
            raise ValueError(f"cp_size must be at least 1 rank, got {self.cp_size}")
        if not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(f"cp_rank must lie in [0, cp_size={self.cp_size}), got {self.cp_rank}")

    # The formula. `clip`/`clamp` keeps padding and the dummy page at owner arithmetic that stays in range.

    def owner_for_logical_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Owner rank of each logical page; same shape and dtype as ``pages``; -1 for page 0 and padding."""
        return ((pages - 1) % self.cp_size).masked_fill(pages <= DUMMY_PAGE, NO_OWNER)

    def logical_pages_to_physical(self, pages: torch.Tensor) -> torch.Tensor:
        """Physical page of each logical page on its owner; same shape and dtype; 0 for page 0 and padding.

        Says nothing of ownership: combine with :meth:`owned_by_this_rank` before touching a pool.
        """
        return (pages.clamp(min=DUMMY_PAGE) + (self.cp_size - 1)) // self.cp_size

    def owner_for_logical_pages_np(self, pages: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """NumPy twin of :meth:`owner_for_logical_pages`; int64, same shape."""
        array = _require_integers("pages", pages).astype(np.int64)
        return np.where(array <= DUMMY_PAGE, NO_OWNER, (array - 1) % self.cp_size)

    def logical_pages_to_physical_np(self, pages: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """NumPy twin of :meth:`logical_pages_to_physical`; int64, same shape."""
        array = _require_integers("pages", pages).astype(np.int64)
        return (np.maximum(array, DUMMY_PAGE) + (self.cp_size - 1)) // self.cp_size

    # Derived: nothing below repeats the arithmetic.

    def owned_pages_mask(self, pages: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """True where ``rank`` (this rank by default) owns the page; bool, same shape as ``pages``."""
        return self.owner_for_logical_pages(pages) == (self.cp_rank if rank is None else rank)

    def owned_by_this_rank(self, pages: torch.Tensor) -> torch.Tensor:
        """True where this rank owns the page; bool, same shape as ``pages``."""
        return self.owned_pages_mask(pages)

    def logical_locs_to_physical(self, locs: torch.Tensor) -> torch.Tensor:
        """Physical token slot of each logical token slot, on the page's owner; same shape and dtype.

        Slots of page 0 stay as they are and negative slots (padding) become slot 0.
        """
        locs = locs.clamp(min=0)
        pages = locs // self.page_size
        return self.logical_pages_to_physical(pages) * self.page_size + locs % self.page_size

    def filter_owned_pages_np(
        self, pages: npt.ArrayLike, positions: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Pages of a list that this rank owns, with their places in it.

        Args:
            pages: logical pages in request order, shape ``(n,)``; any order, any gaps.
            positions: one place for each page, shape ``(n,)``.

        Returns:
            ``(physical pages, positions)``, both int32, in the order of the input.

        Raises:
            ValueError: the shapes differ or are not one-dimensional.
        """
        page_array = _require_integers("pages", pages)
        position_array = _require_integers("positions", positions)
        if page_array.ndim != 1 or page_array.shape != position_array.shape:
            raise ValueError(
                "pages and positions must be one-dimensional and equally long, "
                f"got shapes {page_array.shape} and {position_array.shape}"
            )
        mine = self.owner_for_logical_pages_np(page_array) == self.cp_rank
        return (
            self.logical_pages_to_physical_np(page_array[mine]).astype(np.int32),
            position_array[mine].astype(np.int32),
        )

    def physical_to_logical_pages_np(self, pages: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Logical page that each physical page of this rank holds; int64; page 0 stays 0."""
        array = _require_integers("pages", pages).astype(np.int64)
        return np.where(array <= DUMMY_PAGE, DUMMY_PAGE, (array - 1) * self.cp_size + self.cp_rank + 1)


def filter_kv_pages_for_cp_shared_kv(
    *, layout: CpSharedKVLayout, logical_pages: npt.ArrayLike, chunk_page_start: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Pages of one transfer chunk that this rank sends.

    Args:
        layout: placement of the sending group, with this rank's number.
        logical_pages: the chunk's logical pages in request order, shape ``(n,)``.
        chunk_page_start: place of the chunk's first page in the destination's page list, at least 0.

    Returns:
        ``(physical pages, positions in the destination's page list)``, both int32, in request order. Over the
        ranks of the group the positions are pairwise disjoint and together cover
        ``chunk_page_start .. chunk_page_start + n - 1`` (pages 0 and padding excepted).

    Raises:
        ValueError: ``chunk_page_start`` is negative or ``logical_pages`` is not one-dimensional.

    Example:
        >>> layout = CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=2)
        >>> pages, positions = filter_kv_pages_for_cp_shared_kv(
        ...     layout=layout, logical_pages=range(9, 15), chunk_page_start=8)
        >>> pages.tolist(), positions.tolist()
        ([3], [10])
    """
    if chunk_page_start < 0:
        raise ValueError(f"chunk_page_start must be at least 0, got {chunk_page_start}")
    pages = np.asarray(list(logical_pages) if isinstance(logical_pages, range) else logical_pages)
    if pages.ndim != 1:
        raise ValueError(f"logical_pages must be one-dimensional, got shape {pages.shape}")
    positions = np.arange(chunk_page_start, chunk_page_start + len(pages))
    return layout.filter_owned_pages_np(pages, positions)
