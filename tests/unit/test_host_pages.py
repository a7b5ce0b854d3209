"""Page ids on the host beside those on the device, through SGLang's own allocation, prefix tree and chunk cache.

SGLang can be imported only in the environment of the CPU platform, which must not leak into other tests: what touches
it runs in one child process, made once for this module.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from cp_shared_kv import host_pages
from cp_shared_kv.host_pages import CachedPages, HostPages, HostPagesError, Noted, PageCheck, Pages, noted_of
from cp_shared_kv.metrics import COUNTERS
from cp_shared_kv.patches import page_ids
from cp_shared_kv.releases import installed, symbol
from cp_shared_kv_cpu import launch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from model import bookkeeping

PAGE = 4
#: Tokens of whole pages; few, so that requests share prefixes and part in the middle of tree nodes.
WHOLE_PAGES = ([1, 2, 3, 4], [5, 6, 7, 8])

InSglang = Callable[..., Any]


def prepare() -> None:
    """Make this process one that can import SGLang, and has the wrappers in place."""
    launch.apply_cpu_environment(1)
    from cp_shared_kv.patches import PatchSet

    patches = PatchSet.for_release(groups=["page_ids"])
    patches.apply()
    patches.attest()
    bookkeeping.install(PAGE)


@pytest.fixture(scope="module")
def in_sglang() -> Iterator[InSglang]:
    """Runs a function of this module in a process that can import SGLang; returns its result or raises its error."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=prepare) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=240)


class Scheduler:
    """Requests that SGLang's scheduler would run, in a random order, and what must hold after each step.

    Args:
        seed: seed of all choices.
        cache: ``tree`` or ``chunk``, or ``other`` for a tree of a class that is not followed.
        unprocessed: whether requests may finish before their chunk was put in the tree, as after an abort.
    """

    def __init__(self, seed: int, cache: str, unprocessed: bool) -> None:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator

        self.rng = random.Random(seed)
        self.unprocessed = unprocessed
        self.host_pages = HostPages()
        self.allocator = CPSharedPagedTokenToKVPoolAllocator(
            logical_size=24 * PAGE,
            physical_size=12 * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=SimpleNamespace(host_pages=self.host_pages, page_check=PageCheck(PAGE, "cpu")),
            need_sort=self.rng.random() < 0.5,
            cp_size=2,
            cp_rank=0,
        )
        #: What the allocator was told to go on after in the latest batch.
        self.told: list[list[int] | None] = []
        continue_after = self.allocator.continue_after
        self.allocator.continue_after = lambda pages: (self.told.append(pages), continue_after(pages))
        self.table = ReqToTokenPool(6, 12 * PAGE, "cpu", enable_memory_saver=False)
        tree = symbol("prefix_tree")
        kinds = {"tree": tree, "chunk": symbol("chunk_cache"), "other": type("OtherCache", (tree,), {})}
        self.cache = bookkeeping.make_tree(self.table, self.allocator, PAGE, kinds[cache])
        self.names = iter(range(1000))
        #: Requests by what can be done with them next.
        self.waiting: list[Any] = []
        self.allocated: list[Any] = []
        self.chunked: list[Any] = []
        self.computed: list[Any] = []
        self.seen: Counter[str] = Counter()

    # Steps; each returns whether it did anything.

    def add(self) -> bool:
        if len(self.waiting) > 3:
            return False
        pages = [self.rng.choice(WHOLE_PAGES) for _ in range(self.rng.randint(0, 7))]
        tail = self.rng.choice(WHOLE_PAGES)[: self.rng.randint(1, PAGE)]
        tokens = [token for page in pages for token in page] + tail
        key = self.rng.choice([None, None, None, "another adapter"])
        self.waiting.append(bookkeeping.make_request(f"r{next(self.names)}", tokens, key))
        return True

    def batch(self) -> bool:
        """Allocate the next chunk of a few requests."""
        reqs = []
        left = self.table.available_size()
        for req in self.rng.sample(self.waiting + self.chunked, min(3, len(self.waiting + self.chunked))):
            is_first = req in self.waiting
            if is_first and not left:
                continue
            left -= is_first
            if is_first:
                bookkeeping.match(req, self.cache)
                self.seen["prefixes found"] += bookkeeping.prefix_len(req) > 0
            else:
                req.init_next_round_input(None)
            prefix = bookkeeping.prefix_len(req)
            room = self.allocator.available_size() + self.evictable() - (len(reqs) + 1) * PAGE
            room -= sum(bookkeeping.chunk_end(other) - bookkeeping.prefix_len(other) for other in reqs)
            tokens = min(room, self.rng.randint(1, bookkeeping.tokens_of(req) - prefix))
            if tokens <= 0:
                if is_first:
                    bookkeeping.let_go(req, self.cache)
                continue
            (self.waiting if is_first else self.chunked).remove(req)
            bookkeeping.take_chunk(req, prefix + tokens)
            reqs.append(req)
            self.seen["chunks that end inside a page"] += req.is_chunked and (prefix + tokens) % PAGE > 0
        if not reqs:
            return False
        prefixes = [-(-bookkeeping.prefix_len(req) // PAGE) for req in reqs]
        self.told.clear()
        bookkeeping.allocate(bookkeeping.batch_of(reqs, self.table, self.cache))
        self.allocated += reqs
        self._check_batch(reqs, prefixes)
        return True

    def evictable(self) -> int:
        """Tokens of the tree that nobody holds on to."""
        return int(self.cache.evictable_size())

    def _check_batch(self, reqs: list[Any], prefixes: list[int]) -> None:
        rids = [req.rid for req in reqs]
        found = [self.pages_of(req) for req in reqs]
        noted = self.host_pages.of_batch(rids, [len(pages) for pages in found])
        if type(self.cache).__name__ == "OtherCache":
            assert noted is None
            assert self.told == []
            return
        assert noted is not None
        ends = [pages[count - 1] if count else 0 for pages, count in zip(found, prefixes, strict=True)]
        assert self.told == [ends, None]
        for pages, expected in zip(noted, found, strict=True):
            np.testing.assert_array_equal(pages, expected)

    def process(self) -> bool:
        """Put a chunk that was computed in the tree."""
        if not self.allocated:
            return False
        req = self.allocated.pop(self.rng.randrange(len(self.allocated)))
        before = self.pages_of(req)
        bookkeeping.cache_chunk(req, self.cache)
        (self.chunked if req.is_chunked else self.computed).append(req)
        self.seen["pages that gave way to the tree's"] += int((self.pages_of(req) != before).sum())
        return True

    def finish(self) -> bool:
        """End a request; its pages stay in the tree."""
        ended = self.computed + (self.chunked + self.allocated if self.unprocessed else [])
        if not ended:
            return False
        self._release(self.rng.choice(ended), is_insert=True)
        return True

    def abort(self) -> bool:
        """End a request; pages that are not in the tree are freed."""
        if not self.running:
            return False
        self._release(self.rng.choice(self.running), is_insert=False)
        return True

    def retract(self) -> bool:
        """Put a request back in the waiting queue."""
        if not self.running:
            return False
        req = self.rng.choice(self.running)
        self._release(req, is_insert=False)
        bookkeeping.retract(req)
        self.waiting.append(req)
        return True

    def _release(self, req: Any, is_insert: bool) -> None:
        before = self.tree_pages()
        bookkeeping.release(req, self.cache, is_insert)
        for queue in (self.allocated, self.chunked, self.computed):
            if req in queue:
                queue.remove(req)
        self.seen["pages that were put in the tree at the end"] += len(self.tree_pages() - before)

    def evict(self) -> bool:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        before = len(self.tree_pages())
        self.cache.evict(EvictParams(num_tokens=self.rng.randint(1, 5 * PAGE)))
        self.seen["pages evicted"] += before - len(self.tree_pages())
        return True

    def flush(self) -> bool:
        """Forget all that is cached, which SGLang does when nothing runs."""
        if self.running:
            return False
        self.cache.reset()
        self.table.clear()
        self.allocator.clear()
        return True

    @property
    def running(self) -> list[Any]:
        return self.allocated + self.chunked + self.computed

    # What must hold.

    def run(self, steps: int) -> Counter[str]:
        """Take random steps; returns what happened.

        Raises:
            AssertionError: after some step something noted is wrong, or the device was asked too often.
        """
        choices = [self.add, self.batch, self.process, self.finish, self.abort, self.retract, self.evict, self.flush]
        weights = [6, 8, 8, 3, 1, 1, 1, 1]
        for _ in range(steps):
            step = self.rng.choices(choices, weights)[0]
            reads = COUNTERS.host_page_reads
            if step():
                self.seen[step.__name__] += 1
            self._check(COUNTERS.host_page_reads - reads)
        return self.seen

    def _check(self, reads: int) -> None:
        if type(self.cache).__name__ == "OtherCache":
            assert all(noted_of(req) is None for req in self.running)
            return
        for req in self.running:
            noted = noted_of(req)
            assert noted is not None
            np.testing.assert_array_equal(noted.pages, self.pages_of(req))
        self.seen["reads of the device"] += reads

    def pages_of(self, req: Any) -> np.ndarray:
        """Pages of a request as the device has them."""
        row = self.table.req_to_token[bookkeeping.row_of(req)]
        return row[: bookkeeping.held_tokens(req) : PAGE].numpy() // PAGE

    def tree_pages(self) -> set[int]:
        """Pages that the tree holds."""
        return bookkeeping.tree_pages(self.cache, PAGE)


def told_by_a_failure() -> list[list[int] | None]:
    """What the allocator is told when a batch asks for more than there is."""
    scheduler = Scheduler(0, "tree", unprocessed=False)
    scheduler.allocator.available_size = lambda: 100 * PAGE
    scheduler.allocator.alloc_extend = lambda *args, **kwargs: None
    scheduler.add()
    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.batch()
    return scheduler.told


def run_scripts(cache: str, unprocessed: bool, seeds: int = 60, steps: int = 80) -> Counter[str]:
    """What happened in many scripts; the first that goes wrong raises, with its seed."""
    seen: Counter[str] = Counter()
    for seed in range(seeds):
        try:
            seen += Scheduler(seed, cache, unprocessed).run(steps)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    return seen


class TestFollowing:
    @pytest.mark.parametrize("unprocessed", [False, True])
    def test_no_request_ever_asks_the_device(self, in_sglang: InSglang, unprocessed: bool):
        seen = in_sglang(run_scripts, "tree", unprocessed)
        assert seen["reads of the device"] == 0
        for what in (
            "prefixes found",
            "chunks that end inside a page",
            "pages that gave way to the tree's",
            "pages evicted",
            "retract",
            "abort",
            "finish",
            "flush",
        ):
            assert seen[what] > 5, (what, seen)
        assert (seen["pages that were put in the tree at the end"] > 5) == unprocessed

    def test_a_prefix_that_was_put_in_the_tree_unnoticed_is_read_from_the_device_once(self):
        req = SimpleNamespace(origin_input_ids=list(range(12)), extra_key=None, cache_salt=None)
        pages, reads = HostPages(), COUNTERS.host_page_reads
        for _ in range(2):
            found = pages.prefix_pages(req, 12, False, lambda: SLOTS[0].repeat_interleave(PAGE), PAGE)
            assert (found.pages.tolist(), found.cached) == ([3, 1, 5], 3)
        assert COUNTERS.host_page_reads == reads + 1

    def test_a_prefix_longer_than_what_is_noted_of_its_request_is_read_from_the_device(self):
        req = SimpleNamespace(rid="a")
        pages = HostPages()
        pages.note_batch([req], [Noted(np.array([3]), 1)], [np.array([1])])
        found = pages.prefix_pages(req, 11, True, lambda: SLOTS[0].repeat_interleave(PAGE)[:-1], PAGE)
        assert (found.pages.tolist(), found.cached) == ([3, 1, 5], 0)

    def test_an_insertion_by_nobody_known_makes_all_that_is_cached_unknown(self):
        req = SimpleNamespace(origin_input_ids=list(range(12)), extra_key=None, cache_salt=None)
        pages = HostPages()
        pages.prefix_pages(req, 12, False, lambda: SLOTS[0].repeat_interleave(PAGE), PAGE)
        pages.note_inserted(12, 0, PAGE)
        reads = COUNTERS.host_page_reads
        pages.prefix_pages(req, 12, False, lambda: SLOTS[0].repeat_interleave(PAGE), PAGE)
        assert COUNTERS.host_page_reads == reads + 1

    def test_an_allocation_that_fails_leaves_nothing_said_to_the_allocator(self, in_sglang: InSglang):
        assert in_sglang(told_by_a_failure) == [[0], None]

    @pytest.mark.skipif(installed().symbols["chunk_cache"] is None, reason="SGLang has no chunk cache here")
    def test_the_chunk_cache_never_asks_the_device(self, in_sglang: InSglang):
        seen = in_sglang(run_scripts, "chunk", True)
        assert seen["batch"] > 100
        assert seen["reads of the device"] == 0

    def test_of_another_cache_nothing_is_noted(self, in_sglang: InSglang):
        assert in_sglang(run_scripts, "other", True, 3)["batch"] > 20


class TestCachedPages:
    def test_same_tokens_behind_other_pages_or_namespaces_are_other_pages(self):
        cached = CachedPages()
        cached.put(("a",), [b"x", b"y"], np.array([3, 4]))
        cached.put(("b",), [b"x", b"x"], np.array([5, 6]))
        assert [cached.find((name,), [b"x"]) for name in "ab"] == [[3], [5]]
        assert cached.find(("a",), [b"x", b"x"]) is None
        assert cached.find(3, [b"y"]) == [4]

    def test_a_page_is_found_where_it_was_put_last_and_tokens_lead_to_the_page_put_there_last(self):
        cached = CachedPages()
        cached.put((), [b"x"], np.array([3]))
        cached.put((), [b"y"], np.array([3]))
        assert cached.find((), [b"x"]) is None
        cached.put((), [b"y"], np.array([4]))
        cached.put((), [b"z"], np.array([3]))
        assert (cached.find((), [b"y"]), cached.find((), [b"z"])) == ([4], [3])


def _no_page_gives_way(self: HostPages, length: int, found: int, page_size: int) -> None:
    real_note_inserted(self, length, 0, page_size)


def _old_pages_of_the_tree_are_overwritten(self: CachedPages, before: Any, tokens: Any, pages: Any) -> None:
    self._pages.update(dict.fromkeys([(before, part) for part in tokens], 1))


def _not_noted(self: HostPages, length: int, found: int, page_size: int) -> None:
    pass


def _without_namespace(req: Any) -> Any:
    return ()


def _prefix_of_before(self: HostPages, req: Any, length: int, holds_slots: bool, *args: Any) -> Any:
    noted = noted_of(req)
    return real_prefix_pages(self, req, length, holds_slots or noted is not None, *args)


real_note_inserted = HostPages.note_inserted
real_prefix_pages = HostPages.prefix_pages

#: What breaks the following, by name: owner, attribute, and what takes its place.
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a request keeps pages that the tree replaced": (HostPages, "note_inserted", _no_page_gives_way),
    "what is put in the tree is noted wrongly": (CachedPages, "put", _old_pages_of_the_tree_are_overwritten),
    "an insertion is not followed": (HostPages, "note_inserted", _not_noted),
    "requests of other adapters are taken for the same": (host_pages, "_namespace", _without_namespace),
    "a request that lost its pages keeps their note": (HostPages, "prefix_pages", _prefix_of_before),
}


def error_under(fault: str) -> str:
    """What scripts raise under a fault."""
    owner, name, broken = FAULTS[fault]
    with patch.object(owner, name, broken):
        try:
            run_scripts("tree", True)
        except AssertionError as error:
            return str(error)
    return "none"


class TestTheCheck:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_sees_a_fault_of_the_following(self, in_sglang: InSglang, fault: str):
        assert in_sglang(error_under, fault).startswith("seed ")


class TestOfBatch:
    @staticmethod
    def noted() -> HostPages:
        pages = HostPages()
        reqs = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
        prefixes = [Noted(np.array([7, 3]), 2), Noted(np.array([], dtype=np.int64), 0)]
        pages.note_batch(reqs, prefixes, [np.array([9]), np.array([4, 5])])
        return pages

    def test_are_prefix_and_drawn_pages_in_the_order_of_the_batch(self):
        found = self.noted().of_batch(["a", "b"], [3, 2])
        assert found is not None
        assert [pages.tolist() for pages in found] == [[7, 3, 9], [4, 5]]

    @pytest.mark.parametrize(
        ("rids", "pages"),
        [
            (None, [3, 2]),
            (["a"], [3, 2]),
            (["b", "a"], [2, 3]),
            (["a", "c"], [3, 2]),
            (["a", "b"], [3, 3]),
            (["a", "b"], [2, 2]),
        ],
    )
    def test_are_not_known_of_another_batch(self, rids: list[str] | None, pages: list[int]):
        assert self.noted().of_batch(rids, pages) is None

    def test_are_those_of_the_latest_batch_only(self):
        pages = self.noted()
        pages.note_batch([SimpleNamespace(rid="c")], [Noted(np.array([1]), 0)], [np.array([2])])
        assert pages.of_batch(["a"], [3]) is None


class Event:
    """Stands for ``torch.cuda.Event``; the device comes to it when the test says so."""

    made: list[Event]

    def __init__(self) -> None:
        self.is_recorded = self.is_done = False
        self.made.append(self)

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        assert self.is_recorded
        return self.is_done

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Events of the page checks that are made from here on, in order."""
    made: list[Event] = []
    stand_in = type("RecordedEvent", (Event,), {"made": made})
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=stand_in))
    return made


#: Slots of pages 3, 1, 5 and 2, 0, 0: the first slots of the pages of two requests, the second one shorter.
SLOTS = torch.tensor([[3, 1, 5], [2, 0, 0]], dtype=torch.int32) * PAGE


def pages_of(*requests: list[int]) -> list[Pages]:
    return [np.array(pages, dtype=np.int64) for pages in requests]


class TestPageCheck:
    def test_nothing_of_a_request_with_wrong_pages_is_sent(self):
        check = PageCheck(PAGE, "cpu")
        allocator = SimpleNamespace(get_kvcache=lambda: SimpleNamespace(page_check=check))
        scheduler, sent = SimpleNamespace(token_to_kv_pool_allocator=allocator), []
        check.compare(SLOTS, pages_of([3, 1, 5], [2]))
        page_ids._send_kv_chunk(lambda req: sent.append(req), scheduler, ("a",), {})
        check.compare(SLOTS, pages_of([3, 1, 4], [2]))
        with pytest.raises(HostPagesError):
            page_ids._send_kv_chunk(lambda req: sent.append(req), scheduler, ("b",), {})
        assert sent == ["a"]

    def test_equal_pages_and_what_lies_beyond_them_are_no_difference(self, events: list[Event]):
        check = PageCheck(PAGE, "cpu")
        check.compare(SLOTS, pages_of([3, 1, 5], [2]))
        check.compare(SLOTS[:0], [])
        for event in events:
            event.is_done = True
        check.raise_if_different()

    @pytest.mark.parametrize("place", [(0, 0), (0, 2), (1, 0)])
    def test_a_difference_is_raised_at_the_next_look(self, events: list[Event], place: tuple[int, int]):
        noted = pages_of([3, 1, 5], [2])
        noted[place[0]][place[1]] += 1
        check = PageCheck(PAGE, "cpu")
        check.compare(SLOTS, noted)
        events[0].is_done = True
        with pytest.raises(HostPagesError, match="the pages that the host noted"):
            check.raise_if_different()

    def test_what_has_not_come_yet_is_not_waited_for_and_raised_once_it_has(self, events: list[Event]):
        check = PageCheck(PAGE, "cpu")
        for noted in (pages_of([3, 1, 5], [2]), pages_of([3, 1, 4], [2])):
            check.compare(SLOTS, noted)
        check.raise_if_different()
        events[0].is_done = True
        check.raise_if_different()
        events[1].is_done = True
        with pytest.raises(HostPagesError):
            check.raise_if_different()

    def test_an_outcome_is_looked_at_once(self, events: list[Event]):
        check = PageCheck(PAGE, "cpu")
        check.compare(SLOTS, pages_of([3, 1, 4], [2]))
        events[0].is_done = True
        with pytest.raises(HostPagesError):
            check.raise_if_different()
        check.raise_if_different()

    def test_on_a_cpu_a_difference_is_raised_at_the_next_look(self):
        check = PageCheck(PAGE, "cpu")
        check.compare(SLOTS, pages_of([3, 1, 4], [2]))
        with pytest.raises(HostPagesError):
            check.raise_if_different()
