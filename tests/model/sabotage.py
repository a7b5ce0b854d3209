"""The product broken on purpose, one mechanism at a time, to show that the machine finds it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np

import cp_shared_kv.collectives as collectives
import cp_shared_kv.plan as plan
from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator as Allocator
from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.pool import CPSharedNSATokenToKVPool as Pool

from . import rank
from .oracle import PAGE


def instead(owner: Any, name: str, broken: Callable[..., Any]) -> AbstractContextManager[Any]:
    """``owner.name`` replaced by ``broken(real, *arguments)``."""
    real = getattr(owner, name)
    return patch.object(owner, name, lambda *arguments, **named: broken(real, *arguments, **named))


def _owner(real: Any, layout: CpSharedKVLayout, pages: Any) -> Any:
    return np.where(np.asarray(pages) > 0, np.asarray(pages) % layout.cp_size, -1)


def _no_restore(real: Any, *arguments: Any) -> Any:
    made = real(*arguments)
    object.__setattr__(made, "restore", made.restore[:0])
    return made


def _no_keep_of_index(real: Any, pool: Any, store: Any, layer: int) -> None:
    if store is pool._kv:
        real(pool, store, layer)


def _boundary_not_gathered(real: Any, pages: Any, prefix: int, end: int, page_size: int, request: int) -> Any:
    _, _, write = real(pages, prefix, end, page_size, request)
    return pages[: prefix // page_size], write, write


def _boundary_not_kept(real: Any, *arguments: Any) -> Any:
    read, new, _ = real(*arguments)
    return read, new, new


def _kept_on_the_next_page(real: Any, *arguments: Any) -> Any:
    made = real(*arguments)
    object.__setattr__(made, "keep_physical", np.roll(made.keep_physical, 1))
    return made


def _surplus_backwards(real: Any, *arguments: Any) -> Any:
    made = real(*arguments)
    object.__setattr__(made, "surplus_source", made.surplus_source[::-1].copy())
    return made


def _ranks_backwards(real: Any, gather: Any, group: Any) -> None:
    real(gather, group)
    gather.ranks.reverse()


def _positions_from_zero(real: Any, layout: Any, pages: Any, chunk: slice) -> Any:
    return real(layout, pages, slice(0, len(pages)))


def _state_off_by_one(real: Any, layout: Any, pages: Any, destination: list[int]) -> Any:
    return real(layout, pages, destination[1:] + destination[:1])


def _page_twice(real: Any, allocator: Any, *arguments: Any) -> Any:
    before = allocator.free_pages
    slots = real(allocator, *arguments)
    taken = len(before) - len(allocator.free_pages)
    allocator.free_pages = before[max(0, taken - 1) :]
    return slots


def _page_lost(real: Any, allocator: Any, slots: Any) -> None:
    real(allocator, slots[:-PAGE] if len(slots) > PAGE else slots)


def _ranks_free_in_another_order(real: Any, allocator: Any, slots: Any) -> None:
    real(allocator, slots)
    if allocator.layout.cp_rank == 1:
        allocator.free_pages = allocator.free_pages.flip(0)
        allocator.release_pages = allocator.release_pages.flip(0)


BROKEN: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "owner of a page": lambda: instead(CpSharedKVLayout, "owner_for_logical_pages_np", _owner),
    "unwritten rows of a new page": lambda: instead(rank, "_plan", _no_restore),
    "index-K is not kept": lambda: instead(Pool, "_keep", _no_keep_of_index),
    "boundary page is not gathered": lambda: instead(plan, "_split_request_pages", _boundary_not_gathered),
    "boundary page is not kept": lambda: instead(plan, "_split_request_pages", _boundary_not_kept),
    "kept as another page": lambda: instead(rank, "_plan", _kept_on_the_next_page),
    "surplus in another order": lambda: instead(rank, "_plan", _surplus_backwards),
    "ranks of the gather": lambda: instead(collectives.PageGather, "__init__", _ranks_backwards),
    "origin of KV positions": lambda: instead(rank, "split_chunk", _positions_from_zero),
    "pairs of index-K pages": lambda: instead(rank, "split_state", _state_off_by_one),
    "a page is handed out twice": lambda: instead(Allocator, "alloc_extend", _page_twice),
    "a freed page is lost": lambda: instead(Allocator, "free", _page_lost),
    "ranks free in another order": lambda: instead(Allocator, "free", _ranks_free_in_another_order),
}
