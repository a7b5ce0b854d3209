"""Page ids on the host beside those on the device, through SGLang's own allocation, radix cache and chunk cache.

SGLang can be imported only in the environment of the CPU platform, which must not leak into other tests: what touches
it runs in one child process, made once for this module.
"""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from cp_shared_kv import host_pages
from cp_shared_kv.host_pages import HostPages, HostPagesError, PageCheck, Pages, noted_pages
from cp_shared_kv.metrics import COUNTERS
from cp_shared_kv.patches import page_ids
from cp_shared_kv_cpu import launch

PAGE = 4
#: Tokens of whole pages; few, so that requests share prefixes and part in the middle of tree nodes.
WHOLE_PAGES = ([1, 2, 3, 4], [5, 6, 7, 8])

InSglang = Callable[..., Any]


class ExtendKernel:
    """Stands for SGLang's allocation kernel, by SGLang's own torch version: the interpreter takes 10 ms a call."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    @staticmethod
    def run(prefix_lens: Any, seq_lens: Any, last_loc: Any, pages: Any, slots: Any, batch: int, page_size: int) -> None:
        from sglang.srt.mem_cache.allocator import alloc_extend_naive

        alloc_extend_naive(prefix_lens, seq_lens, last_loc, pages, slots, page_size, "cpu")


def prepare() -> None:
    """Make this process one that can import SGLang, has the wrappers in place, and a server to speak of."""
    launch.apply_cpu_environment(1)
    from sglang.srt import server_args
    from sglang.srt.mem_cache import allocator

    from cp_shared_kv.patches import PatchSet

    server_args.set_global_server_args_for_scheduler(
        SimpleNamespace(
            page_size=PAGE, speculative_algorithm=None, strip_thinking_cache=False, attention_backend="torch_native"
        )
    )
    patches = PatchSet.for_release(groups=["page_ids"])
    patches.apply()
    patches.attest()
    allocator.alloc_extend_kernel = ExtendKernel()


@pytest.fixture(scope="module")
def in_sglang() -> Iterator[InSglang]:
    """Runs a function of this module in a process that can import SGLang; returns its result or raises its error."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=prepare) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=240)


class Scheduler:
    """Requests that SGLang's scheduler would run, in a random order, and what must hold after each step.

    A tree node is *unknown* if a request put it in the tree when it finished, which is not followed, and nobody has
    read its pages since. Unknown pages are told here by comparing the tree before and after such a step.

    Args:
        seed: seed of all choices.
        cache: ``radix`` or ``chunk``, or ``other`` for a radix cache of a class that is not followed.
        unprocessed: whether requests may finish before their chunk was put in the tree, as after an abort.
    """

    def __init__(self, seed: int, cache: str, unprocessed: bool) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.chunk_cache import ChunkCache
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

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
        kinds = {"radix": RadixCache, "chunk": ChunkCache, "other": type("OtherCache", (RadixCache,), {})}
        self.cache = kinds[cache](
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
            )
        )
        self.has_tree = cache != "chunk"
        self.names = iter(range(1000))
        #: Requests by what can be done with them next.
        self.waiting: list[Any] = []
        self.allocated: list[Any] = []
        self.chunked: list[Any] = []
        self.computed: list[Any] = []
        self.unknown: set[int] = set()
        self.seen: Counter[str] = Counter()

    # Steps; each returns whether it did anything.

    def add(self) -> bool:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        if len(self.waiting) > 3:
            return False
        pages = [self.rng.choice(WHOLE_PAGES) for _ in range(self.rng.randint(0, 7))]
        tail = self.rng.choice(WHOLE_PAGES)[: self.rng.randint(1, PAGE)]
        tokens = [token for page in pages for token in page] + tail
        key = self.rng.choice([None, None, None, "another adapter"])
        self.waiting.append(Req(f"r{next(self.names)}", "", tokens, SamplingParams(max_new_tokens=1), extra_key=key))
        return True

    def batch(self) -> bool:
        """Allocate the next chunk of a few requests."""
        from sglang.srt.mem_cache.common import alloc_for_extend

        reqs = []
        left = self.table.available_size()
        for req in self.rng.sample(self.waiting + self.chunked, min(3, len(self.waiting + self.chunked))):
            is_first = req in self.waiting
            if is_first and not left:
                continue
            left -= is_first
            req.init_next_round_input(self.cache if is_first else None)
            if is_first:
                self.cache.inc_lock_ref(req.last_node)
                self.seen["prefixes found"] += len(req.prefix_indices) > 0
            room = self.allocator.available_size() + self.cache.evictable_size() - (len(reqs) + 1) * PAGE
            room -= sum(other.extend_input_len for other in reqs)
            tokens = min(room, self.rng.randint(1, len(req.fill_ids) - len(req.prefix_indices)))
            if tokens <= 0:
                if is_first:
                    self.cache.dec_lock_ref(req.last_node)
                continue
            (self.waiting if is_first else self.chunked).remove(req)
            end = len(req.prefix_indices) + tokens
            req.is_chunked = int(end < len(req.fill_ids))
            req.fill_ids = req.fill_ids[:end]
            req.set_extend_input_len(tokens)
            reqs.append(req)
            self.seen["chunks that end inside a page"] += req.is_chunked and end % PAGE > 0
        if not reqs:
            return False
        lengths = torch.tensor([len(req.fill_ids) for req in reqs])
        self.told.clear()
        alloc_for_extend(
            SimpleNamespace(
                reqs=reqs,
                prefix_lens=[len(req.prefix_indices) for req in reqs],
                extend_lens=[req.extend_input_len for req in reqs],
                extend_num_tokens=sum(req.extend_input_len for req in reqs),
                seq_lens=lengths,
                seq_lens_cpu=lengths,
                device="cpu",
                req_to_token_pool=self.table,
                tree_cache=self.cache,
                maybe_evict_swa=lambda: None,
            )
        )
        for req in reqs:
            req.kv_committed_len = req.kv_allocated_len = len(req.fill_ids)
        self.allocated += reqs
        self._check_batch(reqs)
        return True

    def _check_batch(self, reqs: list[Any]) -> None:
        rids = [req.rid for req in reqs]
        found = [self.pages_of(req) for req in reqs]
        noted = self.host_pages.of_batch(rids, [len(pages) for pages in found])
        if type(self.cache).__name__ == "OtherCache":
            assert noted is None
            assert self.told == []
            return
        assert noted is not None
        prefixes = [pages[: -(-len(req.prefix_indices) // PAGE)] for req, pages in zip(reqs, found, strict=True)]
        assert self.told == [[pages[-1] if len(pages) else 0 for pages in prefixes], None]
        for pages, expected in zip(noted, found, strict=True):
            np.testing.assert_array_equal(pages, expected)

    def process(self) -> bool:
        """Put a chunk that was computed in the tree."""
        from sglang.srt.mem_cache.common import maybe_cache_unfinished_req

        if not self.allocated:
            return False
        req = self.allocated.pop(self.rng.randrange(len(self.allocated)))
        before = self.pages_of(req)
        if not req.is_chunked:
            req.output_ids.append(0)
        maybe_cache_unfinished_req(req, self.cache, chunked=req.is_chunked > 0)
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
        req.reset_for_retract()
        req.output_ids = []
        self.waiting.append(req)
        return True

    def _release(self, req: Any, is_insert: bool) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        before = self.tree_pages()
        release_kv_cache(req, self.cache, is_insert=is_insert)
        for queue in (self.allocated, self.chunked, self.computed):
            if req in queue:
                queue.remove(req)
        inserted = self.tree_pages() - before
        self.unknown |= inserted
        self.seen["pages that were put in the tree unnoticed"] += len(inserted)

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
            lengths = {node: len(node.value) for node in self.nodes()}
            if step():
                self.seen[step.__name__] += 1
                self.seen["nodes split"] += sum(len(node.value) < length for node, length in lengths.items())
            self._check(COUNTERS.host_page_reads - reads)
        return self.seen

    def _check(self, reads: int) -> None:
        if type(self.cache).__name__ == "OtherCache":
            assert all(noted_pages(req) is None for req in self.running)
            return
        for req in self.running:
            np.testing.assert_array_equal(noted_pages(req), self.pages_of(req))
        self.unknown &= self.tree_pages()
        found_out = 0
        for node in self.nodes():
            noted, pages = noted_pages(node), node.value.numpy()[::PAGE] // PAGE
            if noted is None:
                assert self.unknown >= set(pages.tolist()), "a node was put in the tree, and its pages were not noted"
                continue
            np.testing.assert_array_equal(noted, pages)
            found_out += not self.unknown.isdisjoint(pages.tolist())
            self.unknown -= set(pages.tolist())
        assert reads == found_out, f"the device was asked {reads} times and told the pages of {found_out} nodes"
        self.seen["reads of the device"] += reads

    def pages_of(self, req: Any) -> np.ndarray:
        """Pages of a request as the device has them."""
        return self.table.req_to_token[req.req_pool_idx, : req.kv_committed_len : PAGE].numpy() // PAGE

    def nodes(self) -> list[Any]:
        """Nodes of the radix tree but its root."""
        found, stack = [], [self.cache.root_node] if self.has_tree else []
        while stack:
            children = list(stack.pop().children.values())
            found += children
            stack += children
        return found

    def tree_pages(self) -> set[int]:
        """Pages that the tree holds."""
        return {page for node in self.nodes() for page in (node.value // PAGE).tolist()}


def told_by_a_failure() -> list[list[int] | None]:
    """What the allocator is told when a batch asks for more than there is."""
    scheduler = Scheduler(0, "radix", unprocessed=False)
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
    def test_requests_that_finish_as_in_stock_prefill_never_ask_the_device(self, in_sglang: InSglang):
        seen = in_sglang(run_scripts, "radix", False)
        assert seen["reads of the device"] == 0
        assert seen["pages that were put in the tree unnoticed"] == 0
        for what in (
            "prefixes found",
            "nodes split",
            "chunks that end inside a page",
            "pages that gave way to the tree's",
            "pages evicted",
            "retract",
            "abort",
            "finish",
            "flush",
        ):
            assert seen[what] > 5, (what, seen)

    def test_nodes_that_were_put_in_the_tree_unnoticed_are_read_once_each(self, in_sglang: InSglang):
        seen = in_sglang(run_scripts, "radix", True)
        assert seen["pages that were put in the tree unnoticed"] > 50
        assert seen["reads of the device"] > 20

    def test_a_prefix_that_the_tree_does_not_explain_is_read_from_the_device(self):
        req = SimpleNamespace(prefix_indices=SLOTS[0].repeat_interleave(PAGE)[:-1], req_pool_idx=None, last_node=None)
        reads = COUNTERS.host_page_reads
        assert HostPages().prefix_pages(req, PAGE).tolist() == [3, 1, 5]
        assert COUNTERS.host_page_reads == reads + 1

    def test_a_prefix_longer_than_what_is_noted_of_its_request_is_read_from_the_device(self):
        req = SimpleNamespace(rid="a", prefix_indices=SLOTS[0].repeat_interleave(PAGE), req_pool_idx=1, last_node=None)
        pages = HostPages()
        pages.note_batch([req], [np.array([3])], [np.array([1])])
        assert pages.prefix_pages(req, PAGE).tolist() == [3, 1, 5]

    def test_an_allocation_that_fails_leaves_nothing_said_to_the_allocator(self, in_sglang: InSglang):
        assert in_sglang(told_by_a_failure) == [[0], None]

    def test_the_chunk_cache_never_asks_the_device(self, in_sglang: InSglang):
        seen = in_sglang(run_scripts, "chunk", True)
        assert seen["batch"] > 100
        assert seen["reads of the device"] == 0

    def test_of_another_cache_nothing_is_noted(self, in_sglang: InSglang):
        assert in_sglang(run_scripts, "other", True, 3)["batch"] > 20


def _split_wrong_way_round(pages: Any, front: Any, back: Any, page_size: int) -> None:
    real_note_split(pages, back, front, page_size)


def _split_not_divided(pages: Any, front: Any, back: Any, page_size: int) -> None:
    setattr(back, host_pages._PAGES, pages)
    setattr(front, host_pages._PAGES, pages)


def _split_of_unknown_not_marked(pages: Any, front: Any, back: Any, page_size: int) -> None:
    if pages is not None:
        real_note_split(pages, front, back, page_size)


def _split_not_followed(pages: Any, front: Any, back: Any, page_size: int) -> None:
    pass


def _inserted_without_check_of_id(req: Any, first_new_node: int, page_size: int) -> None:
    real_note_inserted(req, 0, page_size)


def _inserted_not_followed(req: Any, first_new_node: int, page_size: int) -> None:
    pass


def _inserted_keeps_own_pages(req: Any, first_new_node: int, page_size: int) -> None:
    own = noted_pages(req)
    real_note_inserted(req, first_new_node, page_size)
    setattr(req, host_pages._PAGES, own)


def _prefix_of_before(self: HostPages, req: Any, page_size: int) -> Any:
    noted, count = noted_pages(req), -(-len(req.prefix_indices) // page_size)
    return noted[:count] if noted is not None and len(noted) >= count else real_prefix_pages(self, req, page_size)


real_note_split = host_pages.note_split
real_note_inserted = host_pages.note_inserted
real_prefix_pages = HostPages.prefix_pages

#: What breaks the following, by name: owner, attribute, and what takes its place.
FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a split gives each half the other's pages": ("note_split", _split_wrong_way_round),
    "a split gives both halves all pages": ("note_split", _split_not_divided),
    "a split of an unknown node leaves no mark": ("note_split", _split_of_unknown_not_marked),
    "a split is not followed": ("note_split", _split_not_followed),
    "an insertion takes old nodes for new": ("note_inserted", _inserted_without_check_of_id),
    "an insertion is not followed": ("note_inserted", _inserted_not_followed),
    "a request keeps pages that the tree replaced": ("note_inserted", _inserted_keeps_own_pages),
    "a request that lost its pages keeps their note": ("prefix_pages", _prefix_of_before),
}


def error_under(fault: str) -> str:
    """What scripts raise under a fault."""
    from cp_shared_kv.patches import page_ids

    name, broken = FAULTS[fault]
    with patch.object(HostPages if name == "prefix_pages" else page_ids, name, broken):
        try:
            run_scripts("radix", True)
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
        pages.note_batch(reqs, [np.array([7, 3]), np.array([], dtype=np.int64)], [np.array([9]), np.array([4, 5])])
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
        pages.note_batch([SimpleNamespace(rid="c")], [np.array([1])], [np.array([2])])
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
