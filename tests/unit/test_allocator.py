"""The shared allocator beside a stock one of the same logical size and a page-by-page oracle, through the same calls.

SGLang can be imported only in the environment of the CPU platform, which must not leak into other tests: everything
that touches it runs in one child process, made once for this module. Functions called ``check_...`` run there.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cp_shared_kv.releases import installed, symbol
from cp_shared_kv_cpu import launch

PAGE = 4
CP_SIZES = (1, 2, 3, 4, 8)

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


def error_of(function: Callable[..., Any], *args: Any, **changes: Any) -> tuple[str, str]:
    """Type and message of what a call raises."""
    try:
        function(*args, **changes)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def error_of_make(changes: dict[str, Any]) -> tuple[str, str]:
    """What construction raises."""
    return error_of(make, **changes)


# ------------------------------------------------------------------------------------------ what it is held against


def owner_of(page: int, cp_size: int) -> int:
    """Rank that a page is dealt to: 1, 2, 3, ... to ranks 0, 1, 2, ... in turn."""
    return (page - 1) % cp_size


class Oracle:
    """The rule of drawing, page by page, with Python lists."""

    def __init__(self, cp_size: int, pages: int, need_sort: bool) -> None:
        self.cp_size = cp_size
        self.need_sort = need_sort
        self.free = [list(range(rank + 1, cp_size * pages + 1, cp_size)) for rank in self.ranks]
        self.aside: list[int] = []

    @property
    def ranks(self) -> range:
        return range(self.cp_size)

    def available(self) -> int:
        return sum(map(len, self.free)) + len(self.aside)

    def draw(self, counts: Sequence[int], last_pages: Sequence[int]) -> list[list[int]] | None:
        """New pages of each request."""
        if sum(counts) > self.available():
            return None
        drawn, skipped = self._draw(counts, last_pages)
        if skipped and self.aside:
            self.merge()
            drawn, skipped = self._draw(counts, last_pages)
        for page in itertools.chain(*drawn):
            self.free[owner_of(page, self.cp_size)].remove(page)
        return drawn

    def _draw(self, counts: Sequence[int], last_pages: Sequence[int]) -> tuple[list[list[int]], bool]:
        left = [list(pages) for pages in self.free]

        def fullest() -> int:
            return max(self.ranks, key=lambda rank: (len(left[rank]), -rank))

        drawn, skipped = [], False
        for count, last in zip(counts, last_pages, strict=True):
            rank = (owner_of(last, self.cp_size) + 1) % self.cp_size if last else fullest()
            pages: list[int] = []
            for _ in range(count):
                if not left[rank]:
                    rank, skipped = fullest(), True
                    if not left[rank]:
                        return drawn, True
                pages.append(left[rank].pop(0))
                rank = (rank + 1) % self.cp_size
            drawn.append(pages)
        return drawn, skipped

    def give(self, pages: set[int]) -> None:
        """Free pages."""
        if self.need_sort:
            self.aside += sorted(pages)
        else:
            for rank in self.ranks:
                self.free[rank] = sorted(p for p in pages if owner_of(p, self.cp_size) == rank) + self.free[rank]

    def merge(self) -> None:
        """Sort what was freed into what is free."""
        if self.aside:
            for rank in self.ranks:
                self.free[rank] = sorted(self.free[rank] + [p for p in self.aside if owner_of(p, self.cp_size) == rank])
            self.aside = []


class Kernel:
    """Stands for one of stock's kernels, page by page: the interpreter takes milliseconds a request."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self.run


def _expand(prefix_lens: Any, seq_lens: Any, last_loc: Any, pages: Any, out: Any, batch: int, page_size: int) -> None:
    new = iter(pages.tolist())
    slots = []
    for prefix, seq, slot in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
        for position in range(prefix, seq):
            slot = slot + 1 if position % page_size else next(new) * page_size
            slots.append(slot)
    out.copy_(out.new_tensor(slots))


def _expand_one(seq_lens: Any, last_loc: Any, pages: Any, out: Any, batch: int, page_size: int) -> None:
    _expand(seq_lens - 1, seq_lens, last_loc, pages, out, batch, page_size)


@contextmanager
def kernels(extend: Callable[..., None] = _expand, decode: Callable[..., None] = _expand_one) -> Iterator[None]:
    """Functions in place of stock's kernels."""
    stock = sys.modules[symbol("PagedTokenToKVPoolAllocator").__module__]
    with ExitStack() as stack:
        stack.enter_context(patch.object(stock, "alloc_extend_kernel", Kernel(extend)))
        stack.enter_context(patch.object(stock, "alloc_decode_kernel", Kernel(decode)))
        yield


def extend(allocator: Any, *requests: tuple[int, int, int], **more: Any) -> Any:
    """``alloc_extend`` of requests given as (prefix tokens, tokens, last slot)."""
    import torch

    prefix, seq, last = (torch.tensor(values, dtype=torch.int64) for values in zip(*requests, strict=True))
    return allocator.alloc_extend(prefix, prefix, seq, seq, last, int((seq - prefix).sum()), **more)


def decode(allocator: Any, *requests: tuple[int, int]) -> Any:
    """``alloc_decode`` of requests given as (tokens, last slot)."""
    import torch

    seq, last = (torch.tensor(values, dtype=torch.int64) for values in zip(*requests, strict=True))
    return allocator.alloc_decode(seq, seq, last)


def owners(allocator: Any, slots: Any) -> list[int]:
    """Owners of the pages of slots, in order, a page once for each run of its slots."""
    return [owner_of(page, allocator.layout.cp_size) for page, _ in itertools.groupby((slots // PAGE).tolist())]


def drawn(allocator: Any) -> list[list[int]]:
    return [pages.tolist() for pages in allocator.drawn]


# ------------------------------------------------------------------------------------------------------- by machine


@dataclass(eq=False)
class Request:
    """A request, with the pages it got from the shared allocators and from stock, which are others.

    ``cached`` of its pages came with a cached prefix and are not its to free.
    """

    pages: list[int] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    stock_pages: list[int] = field(default_factory=list)

    def on_cached_prefix(self, cached: int) -> Request:
        """A new request whose first pages are this one's."""
        return Request(self.pages[:cached], cached * PAGE, cached, self.stock_pages[:cached])

    def slot(self, position: int) -> int:
        return self.pages[position // PAGE] * PAGE + position % PAGE

    def last(self) -> int:
        """Slot of the last token."""
        return self.slot(self.tokens - 1) if self.tokens else -1

    def stock_last(self) -> int:
        return self.stock_pages[-1] * PAGE + (self.tokens - 1) % PAGE if self.tokens else -1


#: Requests and the number of their new tokens.
Batch = list[tuple[Request, int]]


class Machine:
    """A stock allocator, the shared ones of all ranks and the oracle, through the same calls, compared after each."""

    def __init__(self, cp_size: int, pages: int, need_sort: bool, seed: int) -> None:
        import torch

        stock = symbol("PagedTokenToKVPoolAllocator")
        self.stock = stock(cp_size * pages * PAGE, PAGE, torch.bfloat16, "cpu", None, need_sort)
        self.is_grouping = False
        self.shared = [make(cp_size, pages, need_sort=need_sort, cp_rank=rank) for rank in range(cp_size)]
        self.oracle = Oracle(cp_size, pages, need_sort)
        self.cp_size, self.num_pages, self.need_sort = cp_size, cp_size * pages, need_sort
        self.rng = random.Random(seed)
        self.requests: list[Request] = []
        self.saved: Any = None
        self.made: set[str] = set()

    def each(self, call: Callable[[Any], Any]) -> Any:
        """What a call gives on every rank, which must be the same."""
        first, *others = [call(allocator) for allocator in self.shared]
        for other in others:
            assert (other is None) == (first is None)
            assert first is None or other.tolist() == first.tolist()
        return first

    def _draw(self, name: str, batch: Batch, stock: Callable[[], Any], call: Callable[[Any], Any]) -> None:
        """Give each request of a batch its new tokens, by one call on every allocator."""
        counts = [-(-(r.tokens + new) // PAGE) - len(r.pages) for r, new in batch]
        last_pages = [r.pages[-1] if r.pages else 0 for r, _ in batch]
        expected = self.oracle.draw(counts, last_pages)
        if name != "alloc" and self.rng.random() < 0.5:
            for allocator in self.shared:
                allocator.continue_after(last_pages)
        got = self.each(call)
        if expected is None:
            assert got is None
            self.made.add("None")
            return
        # Stock's kernels read beyond the free pages before stock looks whether there are enough.
        reference = stock()
        assert (got.dtype, got.shape, got.device) == (reference.dtype, reference.shape, reference.device)
        slots = []
        stock_slots = iter(reference.tolist())
        for (request, new), pages in zip(batch, expected, strict=True):
            request.pages += pages
            slots += [request.slot(position) for position in range(request.tokens, request.tokens + new)]
            theirs = [next(stock_slots) // PAGE for _ in range(new)]
            request.stock_pages += theirs[-request.tokens % PAGE :: PAGE]
            request.tokens += new
            if request not in self.requests:
                self.requests.append(request)
        assert got.tolist() == slots
        if self.cp_size == 1 and not self.need_sort:
            assert got.tolist() == reference.tolist()
        if name != "alloc":
            for allocator in self.shared:
                assert drawn(allocator) == expected
                assert all(pages.dtype == "int64" for pages in allocator.drawn)
        self.made.add(name)

    def alloc(self) -> None:
        size = self.rng.randint(0, 5) * PAGE
        self._draw("alloc", [(Request(), size)], lambda: self.stock.alloc(size), lambda a: a.alloc(size))

    def alloc_extend(self) -> None:
        batch: Batch = []
        for _ in range(self.rng.randint(1, 3)):
            request = Request()
            others = [r for r in self.requests if r not in (chosen for chosen, _ in batch)]
            if others and self.rng.random() < 0.7:
                request = self.rng.choice(others)
                if request.tokens >= PAGE and self.rng.random() < 0.5:
                    request = request.on_cached_prefix(self.rng.randint(1, request.tokens // PAGE))
            batch.append((request, self.rng.randint(1, 4 * PAGE)))
        ours = [(r.tokens, r.tokens + new, r.last()) for r, new in batch]
        theirs = [(r.tokens, r.tokens + new, r.stock_last()) for r, new in batch]
        self._draw("alloc_extend", batch, lambda: extend(self.stock, *theirs), lambda a: extend(a, *ours))

    def alloc_decode(self) -> None:
        batch = [(r, 1) for r in self.requests if r.tokens][:4]
        if batch:
            ours = [(r.tokens + 1, r.last()) for r, _ in batch]
            theirs = [(r.tokens + 1, r.stock_last()) for r, _ in batch]
            self._draw("alloc_decode", batch, lambda: decode(self.stock, *theirs), lambda a: decode(a, *ours))

    def free(self) -> list[int]:
        """Free a request, with its slots in any order, some twice, some pages only in part; returns its pages."""
        import torch

        if not self.requests:
            return []
        request = self.requests.pop(self.rng.randrange(len(self.requests)))
        pages, theirs = request.pages[request.cached :], request.stock_pages[request.cached :]
        offsets = [self.rng.sample(range(PAGE), self.rng.randint(1, PAGE)) for _ in pages]
        for allocators, of in (([self.stock], theirs), (self.shared, pages)):
            slots = [page * PAGE + offset for page, part in zip(of, offsets, strict=True) for offset in part]
            cut = self.rng.randint(0, len(slots))
            for allocator in allocators:
                if not self.is_grouping:
                    allocator.free(torch.tensor(slots[::-1] + slots[:cut], dtype=torch.int64))
                else:  # pieces of one group may meet inside a page
                    allocator.free(torch.tensor(slots[:cut], dtype=torch.int64))
                    allocator.free(torch.tensor(slots[max(0, cut - 1) :], dtype=torch.int64))
        if not self.is_grouping:
            self.oracle.give(set(pages))
        self.made.add("free")
        return pages

    def free_segment(self) -> None:
        """Free a request, by slots in the order of their positions or by pages."""
        import torch

        if not self.requests:
            return
        request = self.requests.pop(self.rng.randrange(len(self.requests)))
        by_page = self.rng.random() < 0.5 and "allocator.free_page_ids" not in installed().absent
        pages, theirs = request.pages[request.cached :], request.stock_pages[request.cached :]
        for allocators, of in (([self.stock], theirs), (self.shared, pages)):
            of = sorted(of)  # stock keeps the order, which is the shared allocator's to choose
            slots = [page * PAGE + offset for page in of for offset in range(PAGE)]
            for allocator in allocators:
                if by_page:
                    allocator.free_page_ids(torch.tensor(of, dtype=torch.int64))
                else:
                    allocator.free_segment(torch.tensor(slots, dtype=torch.int64), start_pos=request.cached * PAGE)
        self.oracle.give(set(pages))
        self.made.add("free_segment")

    def free_group(self) -> None:
        for allocator in (self.stock, *self.shared):
            allocator.free_group_begin()
        self.is_grouping = True
        freed = set(self.free() + self.free())
        self.is_grouping = False
        assert len({allocator.available_size() for allocator in (self.stock, *self.shared)}) == 1
        for allocator in (self.stock, *self.shared):
            allocator.free_group_end()
        if freed:
            self.oracle.give(freed)
            self.made.add("free_group")

    def merge_and_sort_free(self) -> None:
        for allocator in (self.stock, *self.shared):
            allocator.merge_and_sort_free()
        self.oracle.merge()

    def backup(self) -> None:
        states = [allocator.backup_state() for allocator in (self.stock, *self.shared)]
        oracle = ([list(pages) for pages in self.oracle.free], list(self.oracle.aside))
        requests = [(r, list(r.pages), r.tokens, list(r.stock_pages)) for r in self.requests]
        self.saved = (states, oracle, requests)

    def restore(self) -> None:
        """Return to the last backup, which may be used again."""
        if self.saved is None:
            return
        states, (free, aside), requests = self.saved
        for allocator, state in zip((self.stock, *self.shared), states, strict=True):
            allocator.restore_state(state)
        self.oracle.free, self.oracle.aside = [list(pages) for pages in free], list(aside)
        self.requests = [request for request, *_ in requests]
        for request, pages, tokens, theirs in requests:
            request.pages, request.tokens, request.stock_pages = list(pages), tokens, list(theirs)
        self.made.add("restore")

    def clear(self) -> None:
        for allocator in (self.stock, *self.shared):
            allocator.clear()
        self.oracle = Oracle(self.cp_size, self.num_pages // self.cp_size, self.need_sort)
        self.requests, self.saved = [], None

    def check(self) -> None:
        """What holds after every call."""
        assert {a.available_size() for a in self.shared} == {self.stock.available_size()}
        free, aside = (self.each(lambda a, n=name: getattr(a, n)) for name in ("free_pages", "release_pages"))
        assert (str(free.dtype), str(aside.dtype)) == ("torch.int64", "torch.int64")
        assert free.tolist() == list(itertools.chain(*self.oracle.free))
        assert sorted(aside.tolist()) == sorted(self.oracle.aside)
        held = [page for request in self.requests for page in request.pages[request.cached :]]
        assert sorted([*held, *free.tolist(), *aside.tolist()]) == list(range(1, self.num_pages + 1))

    #: Calls and how often they are made.
    CALLS: ClassVar = {
        "alloc": 4,
        "alloc_extend": 10,
        "alloc_decode": 4,
        "free": 9,
        "free_segment": 4,
        "free_group": 4,
        "merge_and_sort_free": 0.5,
        "backup": 1,
        "restore": 1,
        "clear": 0.2,
    }

    @staticmethod
    def lacking() -> set[str]:
        """Calls that the installed SGLang does not make."""
        absent = {"backup": "backup_state", "restore": "restore_state", "free_segment": "free_segment"}
        return {name for name, seam in absent.items() if f"allocator.{seam}" in installed().absent}

    def run(self, calls: int) -> None:
        weights = {name: weight for name, weight in self.CALLS.items() if name not in self.lacking()}
        for _ in range(calls):
            name, *_ = self.rng.choices(list(weights), list(weights.values()))
            getattr(self, name)()
            self.check()


def check_random_calls(cp_size: int, need_sort: bool) -> None:
    made: set[str] = set()

    @settings(max_examples=40, deadline=None, database=None)
    @given(seed=st.integers(0, 2**32), pages=st.integers(1, 24 // cp_size))
    def run(seed: int, pages: int) -> None:
        machine = Machine(cp_size, pages, need_sort, seed)
        with kernels():
            machine.run(25)
        made.update(machine.made)

    run()
    expected = {"alloc", "alloc_extend", "alloc_decode", "None", "free", "free_segment", "free_group", "restore"}
    assert made >= expected - Machine.lacking()


def check_stock_kernels() -> None:
    machine = Machine(2, 10, True, seed=5)
    for name in ("extend", "decode", "extend", "free", "extend", "decode", "extend"):
        getattr(machine, name if name == "free" else f"alloc_{name}")()
        machine.check()
    assert machine.made >= {"alloc_extend", "alloc_decode", "free"}


class TestAgainstStockAndOracle:
    @pytest.mark.parametrize("need_sort", [False, True])
    @pytest.mark.parametrize("cp_size", CP_SIZES)
    def test_random_calls_give_the_oracles_pages_on_every_rank_and_stocks_counts(
        self, in_sglang: InSglang, cp_size: int, need_sort: bool
    ):
        in_sglang(check_random_calls, cp_size, need_sort)

    def test_stocks_own_kernels_expand_the_drawn_pages(self, in_sglang: InSglang):
        in_sglang(check_stock_kernels)

    def test_is_a_stock_allocator(self, in_sglang: InSglang):
        assert in_sglang(base_class) == "PagedTokenToKVPoolAllocator"


def base_class() -> str:
    from cp_shared_kv import CPSharedPagedTokenToKVPoolAllocator as Shared

    return Shared.__base__.__name__


# ---------------------------------------------------------------------------------------------------------- balance

#: Calls on a pool with plenty of pages: which request goes on (or 9: a new one; 8: a new one on a cached prefix), by
#: how many tokens, and whether a request is freed afterwards.
TRAFFIC = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), min_size=1, max_size=25)


def check_balance(cp_size: int, need_sort: bool) -> None:
    @settings(max_examples=60, deadline=None, database=None)
    @given(traffic=TRAFFIC, batch=st.integers(1, 3))
    def run(traffic: list[tuple[int, int, bool]], batch: int) -> None:
        import torch

        allocator = make(cp_size, 400, need_sort=need_sort)
        requests: list[Request] = []
        while traffic:
            chosen: Batch = []
            for which, new, _ in traffic[:batch]:
                if which < len(requests) and requests[which] not in (request for request, _ in chosen):
                    chosen.append((requests[which], new))
                elif which == 8 and requests:
                    chosen.append((requests[-1].on_cached_prefix(requests[-1].tokens // PAGE), new))
                else:
                    chosen.append((Request(), new))
            with kernels():
                extend(allocator, *((r.tokens, r.tokens + new, r.last()) for r, new in chosen))
            for (request, new), pages in zip(chosen, drawn(allocator), strict=True):
                request.pages += pages
                request.tokens += new
                share = [sum(owner_of(p, cp_size) == rank for p in request.pages) for rank in range(cp_size)]
                assert max(share) - min(share) <= 1
                if request not in requests:
                    requests.append(request)
            if traffic[0][2]:
                gone = requests.pop(0)
                allocator.free(torch.tensor([p * PAGE for p in gone.pages[gone.cached :]], dtype=torch.int64))
            traffic = traffic[batch:]

    run()


def check_starts() -> None:
    allocator = make(4, 6)
    with kernels():
        for expected in ([0], [1], [2], [3], [0]):
            assert owners(allocator, extend(allocator, (0, PAGE, -1))) == expected
        # 5, 6, 6, 6 pages are left: the fullest is rank 1, then rank 2, and the draws of one batch see each other.
        assert owners(allocator, extend(allocator, (0, 2 * PAGE, -1), (0, PAGE, -1))) == [1, 2, 3]
        assert owners(allocator, allocator.alloc(5 * PAGE)) == [0, 1, 2, 3, 0]


class TestBalance:
    @pytest.mark.parametrize("need_sort", [False, True])
    @pytest.mark.parametrize("cp_size", CP_SIZES)
    def test_no_rank_holds_more_than_a_page_more_of_a_request_than_another_while_each_has_free_pages(
        self, in_sglang: InSglang, cp_size: int, need_sort: bool
    ):
        in_sglang(check_balance, cp_size, need_sort)

    def test_a_request_without_prefix_starts_at_the_rank_with_most_free_pages_the_lowest_of_equals(
        self, in_sglang: InSglang
    ):
        in_sglang(check_starts)


def check_exhausted_classes(cp_size: int) -> None:
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        keep=st.lists(st.integers(0, 12), min_size=cp_size, max_size=cp_size),
        cuts=st.lists(st.integers(1, 9), max_size=12),
        last=st.integers(0, cp_size),
        need_sort=st.booleans(),
    )
    def run(keep: list[int], cuts: list[int], last: int, need_sort: bool) -> None:
        import torch

        allocator = make(cp_size, 12, need_sort=need_sort)
        allocator.alloc(allocator.size)
        # Of each rank so many pages are free again, and no others.
        freed = [rank + 1 + i * cp_size for rank, count in enumerate(keep) for i in range(count)]
        allocator.free(torch.tensor([page * PAGE for page in freed], dtype=torch.int64))
        got: list[int] = []
        with kernels():
            for cut in cuts:
                left = len(freed) - len(got)
                prefix = PAGE if last else 0
                slots = extend(allocator, (prefix, prefix + cut * PAGE, last * PAGE + PAGE - 1 if last else -1))
                assert (slots is None) == (cut > left)
                got += [] if slots is None else (slots[::PAGE] // PAGE).tolist()
        rest = allocator.alloc((len(freed) - len(got)) * PAGE)
        assert allocator.alloc(PAGE) is None
        assert sorted(got + (rest[::PAGE] // PAGE).tolist()) == sorted(freed)

    run()


def check_passing_over() -> None:
    import torch

    allocator = make(3, 4)
    allocator.alloc(allocator.size)
    allocator.free(torch.tensor([page * PAGE for page in (1, 4, 3, 6, 9)]))  # owners 0, 0, 2, 2, 2
    with kernels():
        # After owner 0 comes 1, which is empty: the fullest, 2, and on from there; then 0 is empty as well.
        slots = extend(allocator, (PAGE, 6 * PAGE, 7 * PAGE + PAGE - 1))
    assert (slots[::PAGE] // PAGE).tolist() == [3, 1, 6, 4, 9]


class TestScarcity:
    @pytest.mark.parametrize("cp_size", CP_SIZES)
    def test_an_allocation_succeeds_exactly_when_enough_pages_are_free_in_total(
        self, in_sglang: InSglang, cp_size: int
    ):
        in_sglang(check_exhausted_classes, cp_size)

    def test_in_place_of_an_empty_rank_comes_the_fullest_and_then_the_one_after_it(self, in_sglang: InSglang):
        in_sglang(check_passing_over)


# ------------------------------------------------------------------------------------------------- single behaviours


def check_order(need_sort: bool) -> None:
    import torch

    def pages(slots: Any) -> list[int]:
        return (slots[::PAGE] // PAGE).tolist()

    allocator = make(2, 4, need_sort=need_sort)
    allocator.alloc(6 * PAGE)
    allocator.free(torch.tensor([5 * PAGE, 2 * PAGE]))
    allocator.free(torch.tensor([3 * PAGE]))
    if need_sort:
        assert (allocator.free_pages.tolist(), allocator.release_pages.tolist()) == ([7, 8], [2, 5, 3])
        assert pages(allocator.alloc(2 * PAGE)) == [7, 8]
        assert pages(allocator.alloc(3 * PAGE)) == [3, 2, 5]
    else:
        assert (allocator.free_pages.tolist(), allocator.release_pages.tolist()) == ([3, 5, 7, 2, 8], [])
        assert pages(allocator.alloc(3 * PAGE)) == [3, 2, 5]


def check_merge_before_passing_over() -> None:
    import torch

    allocator = make(2, 2, need_sort=True)
    allocator.alloc(3 * PAGE)
    allocator.free(torch.tensor([1 * PAGE]))  # rank 1 has page 4 free, rank 0 has page 1 set aside
    with kernels():
        slots = extend(allocator, (PAGE, 2 * PAGE, 2 * PAGE + PAGE - 1))
    assert (slots[0] // PAGE).tolist() == 1
    assert allocator.release_pages.tolist() == []


def check_sorted_on_request() -> None:
    import torch

    allocator = make(2, 4, need_sort=True)
    allocator.alloc(6 * PAGE)
    allocator.free(torch.tensor([5 * PAGE, 2 * PAGE, 1 * PAGE]))
    allocator.merge_and_sort_free()
    assert (allocator.free_pages.tolist(), allocator.release_pages.tolist()) == ([1, 5, 7, 2, 8], [])


def check_assigned_lists() -> None:
    import torch

    allocator = make(2, 3, need_sort=True)
    allocator.free_pages = torch.tensor([5, 6, 1, 2])
    allocator.release_pages = torch.tensor([3])
    assert allocator.available_size() == 5 * PAGE
    assert (allocator.alloc(4 * PAGE)[::PAGE] // PAGE).tolist() == [5, 6, 1, 2]
    assert allocator.release_pages.tolist() == [3]


class TestOrder:
    @pytest.mark.parametrize("need_sort", [False, True])
    def test_freed_pages_are_reused_first_or_after_the_free_ones_and_sorted(self, in_sglang: InSglang, need_sort: bool):
        in_sglang(check_order, need_sort)

    def test_freed_pages_of_a_rank_are_merged_before_that_rank_is_passed_over(self, in_sglang: InSglang):
        in_sglang(check_merge_before_passing_over)

    def test_merge_and_sort_free_sorts_each_ranks_pages(self, in_sglang: InSglang):
        in_sglang(check_sorted_on_request)

    def test_assigned_page_lists_are_drawn_in_their_order(self, in_sglang: InSglang):
        in_sglang(check_assigned_lists)


def check_partial_page() -> None:
    allocator = make(2, 6)
    with kernels():
        extend(allocator, (0, 5, -1))
        last = drawn(allocator)[0][1]
        before = allocator.available_size()
        slots = extend(allocator, (5, 8, last * PAGE))
        assert slots.tolist() == [last * PAGE + 1, last * PAGE + 2, last * PAGE + 3]
        assert (drawn(allocator), allocator.available_size()) == ([[]], before)
        # The page after it follows in the cycle.
        assert owners(allocator, extend(allocator, (8, 9, last * PAGE + 3))) == [(owner_of(last, 2) + 1) % 2]


def check_prefix_on_other_page() -> None:
    """The owner goes on from the page of last_loc, whatever was drawn before."""
    for last_page in range(1, 9):
        allocator = make(4, 6)
        with kernels():
            slots = extend(allocator, (2 * PAGE, 4 * PAGE, last_page * PAGE + PAGE - 1))
        assert owners(allocator, slots) == [last_page % 4, (last_page + 1) % 4]


def check_told_last_pages() -> None:
    allocator = make(4, 6)
    last = 3 * PAGE + PAGE - 1
    with kernels():
        allocator.continue_after([2, 0])
        slots = extend(allocator, (PAGE, 2 * PAGE, last), (0, PAGE, -1))
        assert owners(allocator, slots) == [2, 0]
        # Said for one call only, also if that gives None or if it was said in vain.
        assert owners(allocator, extend(allocator, (PAGE, 2 * PAGE, last))) == [3]
        allocator.continue_after([2])
        assert extend(allocator, (0, 100 * PAGE, -1)) is None
        assert owners(allocator, extend(allocator, (PAGE, 2 * PAGE, last))) == [3]
        allocator.continue_after([2])
        allocator.continue_after(None)
        assert owners(allocator, extend(allocator, (PAGE, 2 * PAGE, last))) == [3]
        allocator.continue_after([2])
        assert owners(allocator, decode(allocator, (PAGE + 1, last))) == [2]
        allocator.continue_after([2])
        allocator.clear()
        assert owners(allocator, decode(allocator, (PAGE + 1, last))) == [3]


def check_wrong_last_pages() -> None:
    allocator = make(4, 6)
    free = allocator.free_pages.tolist()
    for last_pages in ([], [1], [1, 2, 3], [[1, 2]], [[1], [2]]):
        for call, arguments in ((extend, ((4, 9, 7), (0, 9, -1))), (decode, ((5, 7), (9, 11)))):
            allocator.continue_after(last_pages)
            with kernels():
                kind, message = error_of(call, allocator, *arguments)
            assert kind == "ValueError", message
            assert "for 2 requests" in message
            assert allocator.free_pages.tolist() == free


def check_counted_pages() -> None:
    allocator = make(2, 3)
    request = (0, 3 * PAGE, -1)
    with kernels():
        assert extend(allocator, request, num_new_pages=7) is None
        free = allocator.free_pages.tolist()
        for wrong in (2, 4):
            assert error_of(extend, allocator, request, num_new_pages=wrong) == (
                "ValueError",
                f"num_new_pages is {wrong}, but the lengths take 3 new pages",
            )
        assert allocator.free_pages.tolist() == free == [1, 3, 5, 2, 4, 6]
        assert extend(allocator, request, num_new_pages=3) is not None
    assert allocator.available_size() == 3 * PAGE


def check_failed_allocation(need_sort: bool) -> None:
    import torch

    allocator = make(2, 3, need_sort=need_sort)
    with kernels():
        extend(allocator, (0, 4 * PAGE, -1))
        allocator.free(torch.tensor([2 * PAGE]))
        before = (allocator.free_pages.tolist(), allocator.release_pages.tolist())
        assert allocator.alloc(4 * PAGE) is None
        assert extend(allocator, (PAGE, 5 * PAGE, 7), (0, 1, -1)) is None
        assert drawn(allocator) == []
        assert decode(allocator, *[(PAGE + 1, 7)] * 4) is None
    assert (allocator.free_pages.tolist(), allocator.release_pages.tolist()) == before


def check_bad_frees() -> None:
    import torch

    allocator = make(2, 3)
    allocator.alloc(6 * PAGE)
    for slots, low, high in (([PAGE, 0], 0, 1), ([PAGE, -1], -1, 1), ([PAGE, 7 * PAGE], 1, 7)):
        kind, message = error_of(allocator.free, torch.tensor(slots))
        assert (kind, message) == ("ValueError", f"freed slots reach from page {low} to {high}, not within 1 to 6")
    allocator.free(torch.tensor([], dtype=torch.int64))
    assert allocator.available_size() == 0
    allocator.free(torch.tensor([PAGE, 6 * PAGE + PAGE - 1], dtype=torch.int32))
    assert allocator.free_pages.tolist() == [1, 6]


def check_debug_mode() -> None:
    import torch

    allocator = make(2, 3)
    allocator.debug_mode = True
    with kernels():
        assert error_of(allocator.alloc, 3) == ("AssertionError", "The allocation size should be page-aligned")
        assert error_of(extend, allocator, (3, 5, 9))[0] == "AssertionError"
        assert error_of(decode, allocator, (3, 3))[0] == "AssertionError"
        slots = extend(allocator, (0, 5, -1))
        assert error_of(extend, allocator, (5, 6, int(slots[-1])), (5, 6, int(slots[-1])))[0] == "AssertionError"
        assert error_of(decode, allocator, (6, int(slots[-1])), (6, int(slots[-1])))[0] == "AssertionError"
        assert decode(allocator, (6, int(slots[-1]))) is not None
    allocator.free(slots[:1])
    assert error_of(allocator.free, torch.tensor([int(slots[0])]))[0] == "AssertionError"


class TestCalls:
    def test_a_partial_page_is_filled_first_and_draws_no_page(self, in_sglang: InSglang):
        in_sglang(check_partial_page)

    def test_a_request_goes_on_from_the_owner_of_its_last_page(self, in_sglang: InSglang):
        in_sglang(check_prefix_on_other_page)

    def test_continue_after_stands_for_last_loc_in_the_next_call_only(self, in_sglang: InSglang):
        in_sglang(check_told_last_pages)

    def test_last_pages_of_another_number_of_requests_are_refused_before_anything_is_drawn(self, in_sglang: InSglang):
        in_sglang(check_wrong_last_pages)

    def test_num_new_pages_is_held_against_the_lengths_and_the_free_pages(self, in_sglang: InSglang):
        in_sglang(check_counted_pages)

    @pytest.mark.parametrize("need_sort", [False, True])
    def test_an_allocation_that_fails_changes_no_page(self, in_sglang: InSglang, need_sort: bool):
        in_sglang(check_failed_allocation, need_sort)

    def test_slots_of_no_page_of_the_group_are_not_freed(self, in_sglang: InSglang):
        in_sglang(check_bad_frees)

    def test_debug_mode_asserts_what_stock_asserts(self, in_sglang: InSglang):
        in_sglang(check_debug_mode)


# ------------------------------------------------------------------------------------------------------------ costs


def on_device(*values: int) -> tuple[Any, list[str]]:
    """A tensor that stands for one on a GPU, and the calls on it or its results that would wait for the GPU."""
    import torch

    waits: list[str] = []
    names = {"cpu", "numpy", "tolist", "item", "nonzero", "unique", "masked_select", "__bool__", "__int__", "__index__"}

    class OnDevice(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(function, types, args, kwargs or {})
            if getattr(function, "__name__", "") not in names:
                return result
            waits.append(function.__name__)
            return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result

    return torch.tensor(values, dtype=torch.int64).as_subclass(OnDevice), waits


def check_waits(shared: bool) -> dict[str, list[str]]:
    """What waits for the device in each call of an allocator."""
    import torch

    stock = symbol("PagedTokenToKVPoolAllocator")
    allocator = make(2, 50) if shared else stock(400, PAGE, torch.bfloat16, "cpu", None, False)
    allocator.use_triton_kernels = True  # later releases do without on a CPU
    said = {}

    def call(name: str, prefix: list[int], seq: list[int], last_pages: list[int] | None = None, decode: bool = False):
        lengths = [on_device(*values) for values in (prefix, seq, [p * PAGE + PAGE - 1 if p else -1 for p in prefix])]
        (before, _), (after, _), (last, _) = lengths
        if last_pages:
            allocator.continue_after(last_pages)
        if decode:
            allocator.alloc_decode(after, torch.tensor(seq), last)
        else:
            allocator.alloc_extend(before, torch.tensor(prefix), after, torch.tensor(seq), last, sum(seq) - sum(prefix))
        said[name] = [wait for _, waits in lengths for wait in waits]

    with kernels(lambda *args: None, lambda *args: None):
        call("no prefix", [0, 0, 0], [5, 9, 1])
        call("prefixes", [4, 8, 0], [9, 17, 5])
        call("prefixes without a new page", [5, 0], [8, 8])
        call("decode", [4, 8], [5, 9], decode=True)
        call("decode without a new page", [5, 9], [6, 10], decode=True)
        if shared:
            call("told", [4, 8, 0], [9, 17, 5], [1, 2, 0])
            call("told, decode", [4, 8], [5, 9], [1, 2], decode=True)
    slots, waits = on_device(*range(PAGE, 5 * PAGE))
    allocator.free(slots)
    said["free"] = list(waits)
    allocator.free_group_begin()
    waits.clear()
    allocator.free(slots + 4 * PAGE)
    allocator.free(slots[:5] + 8 * PAGE)
    assert waits == []
    allocator.free_group_end()
    said["free group"] = list(waits)
    return said


def check_upload() -> None:
    import torch

    allocator = make(2, 3, device="cuda")
    calls: list[Any] = []

    def pin_memory(tensor: Any) -> Any:
        calls.append("pin")
        return tensor

    def to(tensor: Any, device: str, non_blocking: bool) -> Any:
        calls.append((device, non_blocking, tensor.tolist()))
        return tensor

    with patch.object(torch.Tensor, "pin_memory", pin_memory), patch.object(torch.Tensor, "to", to):
        allocator.free_pages.tolist()
    assert calls == ["pin", ("cuda", True, [1, 3, 5, 2, 4, 6])]


def peak_bytes(pages: int, need_sort: bool) -> int:
    """Most memory that an allocation, a free and another allocation take at a time in a pool of a size."""
    allocator = make(2, pages, need_sort=need_sort)
    with kernels(lambda *args: None):
        slots = allocator.alloc(16 * PAGE)
        tracemalloc.start()
        extend(allocator, (0, 20 * PAGE, -1), (PAGE, 9, 7))
        allocator.free(slots)
        allocator.available_size()
        extend(allocator, (0, 20 * PAGE, -1))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


class TestCosts:
    def test_at_most_one_transfer_waits_for_the_device_and_none_when_last_pages_are_told(self, in_sglang: InSglang):
        assert in_sglang(check_waits, True) == {
            "no prefix": [],
            "prefixes": ["cpu"],
            "prefixes without a new page": [],
            "decode": ["cpu"],
            "decode without a new page": [],
            "told": [],
            "told, decode": [],
            "free": ["cpu"],
            "free group": ["cpu"],
        }

    def test_stock_waits_for_the_device_in_each_free_as_well(self, in_sglang: InSglang):
        waits = in_sglang(check_waits, False)
        assert waits["free"] == waits["free group"] == ["unique"]

    def test_pages_go_to_a_gpu_from_pinned_memory_without_waiting(self, in_sglang: InSglang):
        in_sglang(check_upload)

    @pytest.mark.parametrize("need_sort", [False, True])
    def test_memory_that_calls_take_does_not_grow_with_the_pool(self, in_sglang: InSglang, need_sort: bool):
        small, large = (in_sglang(peak_bytes, pages, need_sort) for pages in (1 << 10, 1 << 16))
        assert large < small + 2048


def check_benchmark() -> list[dict[str, Any]]:
    """Rows of the benchmark, whose stand-in for stock's kernel writes what this module's does."""
    import torch

    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from benchmarks import allocator as benchmark

    rng = random.Random(0)
    for _ in range(50):
        prefix = torch.tensor([rng.choice([0, rng.randint(1, 20)]) for _ in range(rng.randint(1, 4))])
        seq = prefix + torch.tensor([rng.randint(1, 20) for _ in prefix])
        last = torch.tensor([rng.randint(1, 9) * PAGE + (tokens - 1) % PAGE for tokens in prefix.tolist()])
        pages = torch.randperm(40)
        expected, got = (torch.full((int((seq - prefix).sum()),), -1) for _ in range(2))
        _expand(prefix, seq, last, pages, expected, len(prefix), PAGE)
        benchmark.NumpyKernel()[(len(prefix),)](prefix, seq, last, pages, got, len(prefix), PAGE)
        assert got.tolist() == expected.tolist()
    for mix, told in benchmark.MIXES:
        with patch("sglang.srt.mem_cache.allocator.alloc_extend_kernel", benchmark.NumpyKernel()):
            traffic = mix(benchmark.make(2, "cpu", shared=True), told)
            before = traffic.allocator.available_size()
            traffic.cycle()
            assert traffic.allocator.available_size() == before
    return benchmark.measure(rounds=1, round_s=0)


class TestBenchmark:
    @pytest.mark.skipif(
        not str(installed().symbols["PagedTokenToKVPoolAllocator"]).startswith("sglang.srt.mem_cache.allocator:"),
        reason="the benchmark stands in for the kernel where the primary release has it",
    )
    def test_cycles_give_back_what_they_take_and_counted_syncs_keep_to_their_budgets(self, in_sglang: InSglang):
        rows = in_sglang(check_benchmark)
        budgets = {row["name"]: row["budget"] for row in rows if row["higher_is_better"]}
        assert len(budgets) == 12
        assert set(budgets.values()) == {0.9}
        syncs = {row["name"]: (row["value"], row["budget"]) for row in rows if not row["higher_is_better"]}
        assert syncs == {
            "host syncs, batch without prefix": (0, 0),
            "host syncs, batch with prefixes": (1, 1),
            "host syncs, batch with prefixes, last pages told": (0, 0),
            "host syncs, free": (1, 1),
        }


# --------------------------------------------------------------------------------------------- capacity and arguments


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
        assert in_sglang(error_of_make, changes) == (kind, message)
