"""The shared allocator beside a stock one of the same logical size, through the same calls.

SGLang can be imported only in the environment of the CPU platform, which must not leak into other tests: everything
that touches it runs in one child process, made once for this module.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from cp_shared_kv_cpu import launch

PAGE = 4

InSglang = Callable[..., Any]


@pytest.fixture(scope="module")
def in_sglang() -> Iterator[InSglang]:
    """Runs a function of this module in a process that can import SGLang; returns its result or raises its error."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=launch.apply_cpu_environment, initargs=(1,)) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=240)


def make(cp_size: int = 2, pages: int = 6, *, need_sort: bool = False, **changes: Any) -> Any:
    """Shared allocator of ``pages`` physical pages a rank."""
    import torch

    from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator

    arguments = {
        "logical_size": pages * cp_size * PAGE,
        "physical_size": pages * PAGE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "kvcache": "the pool",
        "need_sort": need_sort,
        "cp_size": cp_size,
        "cp_rank": 0,
    }
    return CPSharedPagedTokenToKVPoolAllocator(**{**arguments, **changes})


def error_of(changes: dict[str, Any]) -> tuple[str, str]:
    """Type and message of what construction raises."""
    try:
        make(**changes)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


class Twins:
    """A stock allocator and the shared ones of all ranks, driven by the same random calls and compared after each."""

    def __init__(self, seed: int, cp_size: int, pages: int, need_sort: bool) -> None:
        import torch
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        self.rng = random.Random(seed)
        logical = cp_size * pages * PAGE
        stock = PagedTokenToKVPoolAllocator(logical, PAGE, torch.bfloat16, "cpu", None, need_sort)
        shared = [make(cp_size, pages, need_sort=need_sort, cp_rank=rank) for rank in range(cp_size)]
        self.all = [stock, *shared]
        self.logical = logical
        self.requests: list[list[int]] = []
        self.states: list[Any] = []
        self.kept: list[list[int]] = []
        self.calls: set[str] = set()

    def each(self, call: Callable[[Any], Any]) -> Any:
        """The result of a call on every allocator, which must be the same on all."""
        first, *others = [call(allocator) for allocator in self.all]
        for other in others:
            if first is None or isinstance(first, int):
                assert other == first
            else:
                assert other.dtype == first.dtype
                assert other.tolist() == first.tolist()
        return first

    # Each call says whether it did something.

    def alloc(self) -> bool:
        size = self.rng.randint(1, 5) * PAGE
        got = self.each(lambda a: a.alloc(size))
        if got is not None:
            self.requests.append(got.tolist())
        return got is not None

    def alloc_extend(self) -> bool:
        import torch

        count = self.rng.randint(1, min(3, len(self.requests) + 1))
        chosen = [[] if i == 0 else self.requests[-i] for i in range(count)]
        new = [self.rng.randint(1, 3 * PAGE) for _ in chosen]
        # A prefix is used as far as a random token of the request.
        prefixes = [slots[: self.rng.randint(0, len(slots))] if slots else [] for slots in chosen]
        prefix_lens = torch.tensor([len(prefix) for prefix in prefixes])
        seq_lens = prefix_lens + torch.tensor(new)
        last = torch.tensor([prefix[-1] if prefix else -1 for prefix in prefixes])
        if sum(-(-n // PAGE) + 1 for n in new) > len(self.all[0].free_pages):
            return False  # stock's kernel reads beyond the free pages before it looks whether there are enough
        got = self.each(lambda a: a.alloc_extend(prefix_lens, prefix_lens, seq_lens, seq_lens, last, sum(new)))
        if got is not None and not prefixes[0]:
            self.requests.append(got.tolist()[: new[0]])
        return got is not None

    def free(self) -> bool:
        import torch

        if not self.requests:
            return False
        slots = self.requests.pop(self.rng.randrange(len(self.requests)))
        self.each(lambda a: a.free(torch.tensor(slots)))
        return True

    def free_group(self) -> bool:
        for allocator in self.all:
            allocator.free_group_begin()
        freed = [self.free() for _ in range(self.rng.randint(0, 2))]
        for allocator in self.all:
            allocator.free_group_end()
        return any(freed)

    def backup(self) -> bool:
        self.states = [allocator.backup_state() for allocator in self.all]
        self.kept = [list(request) for request in self.requests]
        return True

    def restore(self) -> bool:
        if not self.states:
            return False
        for allocator, state in zip(self.all, self.states, strict=True):
            allocator.restore_state(state)
        self.requests, self.states = self.kept, []
        return True

    def clear(self) -> bool:
        for allocator in self.all:
            allocator.clear()
        self.requests.clear()
        return True

    def step(self) -> None:
        name = self.rng.choices(
            ("alloc", "alloc_extend", "free", "free_group", "backup", "restore", "clear"), (8, 4, 6, 3, 1, 1, 0.3)
        )[0]
        if getattr(self, name)():
            self.calls.add(name)
        self.each(lambda a: a.available_size())
        self.each(lambda a: a.free_pages)
        self.each(lambda a: a.release_pages)
        free = [*self.all[0].free_pages.tolist(), *self.all[0].release_pages.tolist()]
        assert all(1 <= page <= self.logical // PAGE for page in free)


def run_twins(seeds: range, cp_size: int, need_sort: bool) -> set[str]:
    """Drive twins through random calls; returns the calls that were made."""
    calls: set[str] = set()
    for seed in seeds:
        twins = Twins(seed, cp_size, pages=6, need_sort=need_sort)
        for _ in range(25):
            twins.step()
        calls |= twins.calls
    return calls


class TestAgainstStock:
    @pytest.mark.parametrize("need_sort", [False, True])
    @pytest.mark.parametrize("cp_size", [1, 2, 4])
    def test_random_calls_hand_out_the_same_slots_on_every_rank_as_stock_of_the_logical_size(
        self, in_sglang: InSglang, cp_size: int, need_sort: bool
    ):
        calls = in_sglang(run_twins, range(4), cp_size, need_sort)
        assert calls >= {"alloc", "alloc_extend", "free", "free_group", "backup", "restore"}

    def test_is_a_stock_allocator_and_overrides_no_allocation(self, in_sglang: InSglang):
        base, own = in_sglang(describe_class)
        assert base == "PagedTokenToKVPoolAllocator"
        assert own == ["__init__", "logical_size"]


def describe_class() -> tuple[str, list[str]]:
    """Base class of the shared allocator, and the functions and properties it has of its own."""
    from cp_shared_kv import CPSharedPagedTokenToKVPoolAllocator as Shared

    own = sorted(name for name, value in vars(Shared).items() if callable(value) or isinstance(value, property))
    return Shared.__base__.__name__, own


def describe_capacity() -> dict[str, Any]:
    """What a fresh allocator of 3 ranks with 5 pages each says of itself, and what it hands out when emptied."""
    allocator = make(3, 5, cp_rank=2)
    said = {
        name: getattr(allocator, name)
        for name in ("size", "size_full", "logical_size", "physical_size", "page_size", "num_pages")
    }
    said["available"] = allocator.available_size()
    said["rank"] = allocator.layout.cp_rank
    said["kvcache"] = allocator.get_kvcache()
    slots = allocator.alloc(15 * PAGE)
    said["pages"] = sorted(set((slots // PAGE).tolist()))
    said["owners"] = allocator.layout.owner_for_logical_pages((slots[::PAGE]) // PAGE).tolist()
    said["exhausted"] = allocator.alloc(PAGE)
    physical = allocator.layout.logical_locs_to_physical(slots)
    said["physical_range"] = (int(physical.min()), int(physical.max()))
    return said


class TestCapacity:
    @pytest.fixture(scope="class")
    @staticmethod
    def said(in_sglang: InSglang) -> dict[str, Any]:
        return in_sglang(describe_capacity)

    def test_sizes_are_those_of_the_group_but_the_physical_one(self, said: dict[str, Any]):
        assert said["size"] == said["size_full"] == said["logical_size"] == said["available"] == 15 * PAGE
        assert said["physical_size"] == 5 * PAGE
        assert (said["page_size"], said["num_pages"], said["rank"], said["kvcache"]) == (PAGE, 15, 2, "the pool")

    def test_every_logical_page_but_the_dummy_can_be_handed_out_and_then_no_more(self, said: dict[str, Any]):
        assert said["pages"] == list(range(1, 16))
        assert said["exhausted"] is None

    def test_handed_out_slots_lie_within_a_ranks_pool(self, said: dict[str, Any]):
        assert said["physical_range"] == (PAGE, 5 * PAGE + PAGE - 1)

    def test_owners_of_a_fresh_request_alternate(self, said: dict[str, Any]):
        assert said["owners"] == [0, 1, 2] * 5


class TestValidation:
    @pytest.mark.parametrize(
        ("changes", "kind", "message"),
        [
            ({"logical_size": 50}, "ValueError", "logical_size must be a positive multiple of page_size=4, got 50"),
            ({"logical_size": 0}, "ValueError", "logical_size must be a positive multiple of page_size=4, got 0"),
            ({"physical_size": 23}, "ValueError", "physical_size must be a positive multiple of page_size=4, got 23"),
            ({"physical_size": -4}, "ValueError", "physical_size must be a positive multiple of page_size=4, got -4"),
            (
                {"logical_size": 44},
                "ValueError",
                "logical_size must be physical_size * cp_size = 24 * 2 = 48, got 44",
            ),
            ({"logical_size": 24}, "ValueError", "logical_size must be physical_size * cp_size = 24 * 2 = 48, got 24"),
            ({"cp_rank": 2}, "ValueError", "cp_rank must lie in [0, cp_size=2), got 2"),
            ({"page_size": 0}, "ValueError", "page_size must be at least 1 token, got 0"),
            ({"cp_rank": None}, "TypeError", "cp_rank must be an int, got NoneType None"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_a_wrong_argument_is_named_with_what_is_accepted(
        self, in_sglang: InSglang, changes: dict[str, Any], kind: str, message: str
    ):
        assert in_sglang(error_of, changes) == (kind, message)
