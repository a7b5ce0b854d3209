"""Plans of a forward, held against a simulation of the group: pools, gather and workspace as Python dictionaries."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.plan import (
    ForwardPlan,
    PlanError,
    Surplus,
    build_inert_plan,
    build_plan,
    gather_shares,
    workspace_pages,
)

PAGE = 4
LAST_PAGE = 400


def group(cp_size: int, page_size: int = PAGE) -> list[CpSharedKVLayout]:
    return [CpSharedKVLayout(page_size=page_size, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]


def deal(cp_size: int) -> dict[int, tuple[int, int]]:
    """Page -> (owner, physical page), pages dealt like cards."""
    return {page: ((page - 1) % cp_size, 1 + (page - 1) // cp_size) for page in range(1, LAST_PAGE + 1)}


@dataclass
class Batch:
    """Requests of one forward; ``rows`` hold whatever a page table holds past a request's end."""

    cp_size: int
    page_size: int
    rows: list[list[int]]
    prefix_lens: list[int]
    seq_lens: list[int]

    def pages(self, request: int) -> list[int]:
        """Pages that hold the request's tokens."""
        return self.rows[request][: -(-self.seq_lens[request] // self.page_size)]

    def read(self) -> set[int]:
        """Pages with a token that was there before."""
        return {self.rows[i][at // self.page_size] for i, prefix in enumerate(self.prefix_lens) for at in range(prefix)}

    def written(self) -> set[int]:
        """Pages with a token of this forward."""
        return {
            self.rows[i][at // self.page_size]
            for i, (prefix, seq) in enumerate(zip(self.prefix_lens, self.seq_lens, strict=True))
            for at in range(prefix, seq)
        }

    def new(self) -> set[int]:
        return self.written() - self.read()

    def unfilled(self) -> set[int]:
        """New pages with a row that this forward does not write."""
        rows = Counter(
            self.rows[i][at // self.page_size]
            for i, (prefix, seq) in enumerate(zip(self.prefix_lens, self.seq_lens, strict=True))
            for at in range(prefix, seq)
        )
        return {page for page in self.new() if rows[page] < self.page_size}

    @property
    def exact_capacity(self) -> int:
        """Pages of a workspace with no page to spare."""
        return len(self.read() | self.written()) + 1

    def plans(self, capacity: int) -> list[ForwardPlan]:
        table = np.asarray(self.rows, dtype=np.int32)
        return [
            build_plan(layout, table, self.prefix_lens, self.seq_lens, capacity)
            for layout in group(self.cp_size, self.page_size)
        ]


@st.composite
def batches(draw: Any) -> Batch:
    """Batches of 1 to 4 requests: unbalanced owners, no/whole/partial/shared prefixes, short chunks, stale ids."""
    cp_size = draw(st.integers(1, 6))
    page_size = draw(st.sampled_from([1, 2, 4, 64]))
    rng = random.Random(draw(st.integers(0, 2**32)))
    ids = list(range(1, LAST_PAGE + 1))
    rng.shuffle(ids)
    if draw(st.booleans()):  # the pages of one owner first
        favourite = rng.randrange(cp_size)
        ids.sort(key=lambda page: deal(cp_size)[page][0] != favourite)
    fresh = iter(ids)
    whole_prefixes: list[list[int]] = []
    rows, prefix_lens, seq_lens = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        shared = rng.choice(whole_prefixes) if whole_prefixes and draw(st.booleans()) else []
        shared = shared[: rng.randint(0, len(shared))]
        tail = draw(st.one_of(st.just(0), st.integers(0, 8 * page_size)))
        prefix = len(shared) * page_size + tail
        seq = prefix + draw(st.one_of(st.just(1), st.integers(1, cp_size + 1), st.integers(1, 4 * page_size)))
        pages = shared + list(itertools.islice(fresh, -(-seq // page_size) - len(shared)))
        whole_prefixes.append(pages[: prefix // page_size])
        rows.append(pages)
        prefix_lens.append(prefix)
        seq_lens.append(seq)
    width = max(len(row) for row in rows) + draw(st.integers(0, 3))
    stale = [0, 0, -1, *ids[:20]]
    for row in rows:
        row += [rng.choice(stale) for _ in range(width - len(row))]
    return Batch(cp_size, page_size, rows, prefix_lens, seq_lens)


def gathered_workspaces(batch: Batch, plans: list[ForwardPlan]) -> list[dict[int, int]]:
    """Per rank: workspace page -> logical page whose content the gather left there."""
    pools: list[dict[int, int]] = [{} for _ in range(batch.cp_size)]
    for page in batch.read():
        owner, physical = deal(batch.cp_size)[page]
        pools[owner][physical] = page
    workspaces: list[dict[int, int]] = []
    for plan in plans:
        workspace: dict[int, int] = {}

        def receive(at: int, sender: int, physical: int, workspace: dict[int, int] = workspace) -> None:
            assert at not in workspace, f"workspace page {at} is sent twice"
            if physical:  # the dummy page is padding
                workspace[at] = pools[sender][physical]

        for rank, sender in enumerate(plans):
            assert len(sender.gather_source) == plan.base_share, "an all-gather of unequal shares"
            for i, physical in enumerate(sender.gather_source.tolist()):
                receive(rank * plan.base_share + i, rank, physical)
        for part in plan.surplus:
            sent = plans[part.owner].surplus_source.tolist()
            assert len(sent) == part.count, "a surplus of another length than is received"
            for i, physical in enumerate(sent):
                receive(part.start + i, part.owner, physical)
        for rank, sender in enumerate(plans):
            if rank not in {part.owner for part in plan.surplus}:
                assert sender.surplus_source.size == 0, f"rank {rank} has surplus that nobody receives"
        workspaces.append(workspace)
    return workspaces


def check(batch: Batch, capacity: int) -> list[ForwardPlan]:
    """Plans of all ranks, after holding them against the simulation."""
    plans = batch.plans(capacity)
    first = plans[0]
    for plan in plans[1:]:
        np.testing.assert_array_equal(plan.tables, first.tables)
        for name in ("base_share", "surplus", "prefix_pages", "chunk_pages", "trash_page", "cp_size", "gathered_pages"):
            assert getattr(plan, name) == getattr(first, name), f"ranks disagree about {name}"
    assert (first.prefix_pages, first.chunk_pages) == (len(batch.read()), len(batch.new()))
    assert (first.prefix_lens, first.seq_lens) == (tuple(batch.prefix_lens), tuple(batch.seq_lens))
    assert first.trash_page == capacity - 1
    assert first.gathered_pages + first.chunk_pages + 1 <= capacity
    dealt = deal(batch.cp_size)
    for rank, (plan, workspace) in enumerate(zip(plans, gathered_workspaces(batch, plans), strict=True)):
        assert plan.tables.shape == (len(batch.rows), len(batch.rows[0]) + 1)
        place_of: dict[int, int] = {}
        for i in range(len(batch.rows)):
            pages = batch.pages(i)
            assert set(plan.tables[i, len(pages) :].tolist()) == {plan.trash_page}
            for position, page in enumerate(pages):
                at = int(plan.tables[i, position])
                assert place_of.setdefault(page, at) == at, f"page {page} lies in two places"
                if page in batch.read():
                    assert workspace[at] == page
                else:
                    assert plan.gathered_pages <= at < plan.trash_page, "a new page in the gathered region"
        assert len(set(place_of.values())) == len(place_of), "two pages in one place"
        assert plan.trash_page not in place_of.values()
        kept = {(place_of[page], dealt[page][1]) for page in batch.written() if dealt[page][0] == rank}
        assert len(plan.keep_workspace) == len(kept)
        assert set(zip(plan.keep_workspace.tolist(), plan.keep_physical.tolist(), strict=True)) == kept
        unfilled = {dealt[page][1] for page in batch.unfilled() if dealt[page][0] == rank}
        assert len(plan.restore) == len(unfilled)
        assert set(plan.keep_physical[plan.restore].tolist()) == unfilled
        share, surplus = plan.base_share, [part for part in plan.surplus if part.owner == rank]
        own = [*range(rank * share, (rank + 1) * share)]
        own += [part.start + i for part in surplus for i in range(part.count)]
        sources = [*plan.gather_source.tolist(), *plan.surplus_source.tolist()]
        restored = [(place_of[page], dealt[page][1]) for page in batch.unfilled() if dealt[page][0] == rank]
        laid = list(zip(*(part.tolist() for part in plan.own_pages()), strict=True))
        assert laid[: len(own)] == list(zip(own, sources, strict=True)), "own pages come from elsewhere"
        assert sorted(laid[len(own) :]) == sorted(restored)
    return plans


class TestBuildPlan:
    @settings(max_examples=80, deadline=None)
    @given(batches(), st.integers(0, 60))
    def test_every_position_finds_its_page_and_written_pages_are_kept_by_their_owner(self, batch: Batch, spare: int):
        check(batch, batch.exact_capacity + spare)

    @settings(max_examples=40, deadline=None)
    @given(batches())
    def test_a_workspace_without_a_spare_page_is_filled_without_padding(self, batch: Batch):
        plan = check(batch, batch.exact_capacity)[0]
        assert plan.gathered_pages == plan.prefix_pages

    @settings(max_examples=30, deadline=None)
    @given(batches())
    def test_one_page_less_than_needed_is_refused(self, batch: Batch):
        with pytest.raises(PlanError, match="prefix pages but the workspace has room for"):
            batch.plans(batch.exact_capacity - 1)

    @settings(max_examples=40, deadline=None)
    @given(batches())
    def test_with_room_for_it_one_all_gather_does(self, batch: Batch):
        largest = max(
            sum(deal(batch.cp_size)[page][0] == rank for page in batch.read()) for rank in range(batch.cp_size)
        )
        plan = check(batch, batch.cp_size * largest + len(batch.new()) + 1)[0]
        assert (plan.base_share, plan.surplus) == (largest, ())

    @settings(max_examples=20, deadline=None)
    @given(batches(), st.randoms(use_true_random=False))
    def test_what_lies_past_a_requests_end_changes_nothing(self, batch: Batch, rng: random.Random):
        before = batch.plans(batch.exact_capacity + 9)
        for i, row in enumerate(batch.rows):
            end = len(batch.pages(i))
            row[end:] = [rng.choice([0, -1, 7, LAST_PAGE]) for _ in row[end:]]
        for plan, other in zip(before, batch.plans(batch.exact_capacity + 9), strict=True):
            np.testing.assert_array_equal(plan.tables, other.tables)
            np.testing.assert_array_equal(plan.gather_source, other.gather_source)
            np.testing.assert_array_equal(plan.keep_physical, other.keep_physical)

    @pytest.mark.parametrize("page_size", [4, 64])
    @pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
    def test_a_single_token_without_prefix(self, cp_size: int, page_size: int):
        plan = check(Batch(cp_size, page_size, [[7, 0, 0]], [0], [1]), 2)[0]
        assert (plan.base_share, plan.prefix_pages, plan.chunk_pages) == (0, 0, 1)
        assert plan.tables.tolist() == [[0, 1, 1, 1]]

    @pytest.mark.parametrize("chunk", range(1, 9))
    def test_a_chunk_shorter_than_the_group_after_a_cached_prefix(self, chunk: int):
        check(Batch(8, PAGE, [[9, 10, 11, 12, 13]], [3 * PAGE], [3 * PAGE + chunk]), 40)

    def test_the_page_that_the_prefix_ends_in_is_gathered_and_kept(self):
        """Prefix of 1.5 pages: page 6 is read and written, so it is gathered and copied back by its owner, rank 1."""
        batch = Batch(4, PAGE, [[5, 6, 7]], [6], [9])
        plans = check(batch, 12)
        assert (plans[0].prefix_pages, plans[0].chunk_pages) == (2, 1)
        assert plans[1].keep_workspace.tolist() == [plans[1].tables[0, 1]]
        assert plans[1].keep_physical.tolist() == [2]
        assert plans[0].keep_physical.tolist() == []

    @pytest.mark.parametrize(
        ("prefix", "seq", "restored"), [(4, 9, [7]), (4, 8, []), (6, 7, []), (6, 9, [7]), (0, 3, [5]), (9, 11, [])]
    )
    def test_a_new_page_is_restored_where_the_chunk_does_not_fill_it(self, prefix: int, seq: int, restored: list[int]):
        """Not the page that the prefix ends in: it is gathered."""
        plan = check(Batch(1, PAGE, [[5, 6, 7]], [prefix], [seq]), 12)[0]
        assert plan.keep_physical[plan.restore].tolist() == restored

    def test_a_prefix_of_whole_pages_is_not_kept_again(self):
        plans = check(Batch(2, PAGE, [[1, 2, 3]], [8], [9]), 12)
        assert [plan.keep_physical.tolist() for plan in plans] == [[2], []]

    def test_a_prefix_shared_by_requests_is_gathered_once(self):
        batch = Batch(2, PAGE, [[1, 2, 3, 4], [1, 2, 5, 0], [1, 2, 3, 6]], [12, 8, 12], [16, 9, 13])
        plan = check(batch, 20)[0]
        assert (plan.prefix_pages, plan.chunk_pages) == (3, 3)

    def test_pages_of_one_owner_only_are_sent_by_it_where_padding_does_not_fit(self):
        """Owner 2 holds all of 5 prefix pages; 5 shares for 4 ranks would be 20 pages."""
        batch = Batch(4, PAGE, [[3, 7, 11, 15, 19, 4]], [20], [24])
        plan = check(batch, 7)[0]
        assert (plan.base_share, plan.surplus) == (0, (Surplus(owner=2, start=0, count=5),))
        plan = check(batch, 7 + 3 * 2)[0]
        assert (plan.base_share, plan.surplus) == (2, (Surplus(owner=2, start=8, count=3),))

    def test_dtypes_are_those_that_the_device_code_takes(self):
        plan = check(Batch(2, PAGE, [[1, 2, 3]], [8], [9]), 12)[0]
        assert plan.tables.dtype == np.int32
        for array in (
            plan.gather_source,
            plan.surplus_source,
            plan.keep_workspace,
            plan.keep_physical,
            plan.restore,
        ):
            assert array.dtype == np.int64

    def test_lengths_may_be_numpy_integers_and_are_noted_as_ints(self):
        plan = build_plan(group(2)[0], np.array([[1, 2, 3]]), np.array([8]), np.array([9]), 12)  # type: ignore[arg-type]
        assert (plan.prefix_lens, plan.seq_lens) == ((8,), (9,))
        assert type(plan.seq_lens[0]) is int

    def test_the_page_table_is_not_changed(self):
        table = np.array([[1, 2, 3]])
        build_plan(group(2)[0], table, [8], [9], 12)
        assert table.tolist() == [[1, 2, 3]]


class TestRefusals:
    @pytest.mark.parametrize(
        ("row", "found"), [([1, 0, 3], r"\[1 0 3\]"), ([1, -1, 3], r"\[ 1 -1  3\]"), ([1, 2], r"\[1 2\]")]
    )
    def test_a_token_without_a_page_is_named_with_its_request(self, row: list[int], found: str):
        with pytest.raises(PlanError, match=f"request 0 of the batch has no page for some of its 9 tokens: {found}"):
            build_plan(group(2)[0], np.array([row]), [4], [9], 20)

    def test_the_request_without_a_page_is_named_by_its_place_in_the_batch(self):
        with pytest.raises(PlanError, match="request 1 of the batch has no page"):
            build_plan(group(2)[0], np.array([[1, 2], [3, 0]]), [4, 4], [8, 8], 20)

    @pytest.mark.parametrize(("prefix", "seq"), [(9, 8), (-1, 8)])
    def test_lengths_that_contradict_each_other_are_named(self, prefix: int, seq: int):
        with pytest.raises(PlanError, match=f"request 0 of the batch has prefix length {prefix} and length {seq}"):
            build_plan(group(2)[0], np.array([[1, 2, 3]]), [prefix], [seq], 20)

    @pytest.mark.parametrize("rank", range(2))
    def test_a_new_page_of_one_request_in_anothers_prefix_is_refused(self, rank: int):
        with pytest.raises(PlanError, match="one request of the batch writes a page that another reads as its prefix"):
            build_plan(group(2)[rank], np.array([[1, 2], [2, 3]]), [4, 4], [8, 8], 20)

    def test_a_boundary_page_of_one_request_in_anothers_prefix_is_refused(self):
        """Request 0 writes rows 2 and 3 of page 2, which request 1 reads whole."""
        with pytest.raises(PlanError):
            build_plan(group(2)[0], np.array([[1, 2, 0], [1, 2, 3]]), [6, 8], [8, 9], 20)

    def test_a_page_written_by_two_requests_is_refused(self):
        with pytest.raises(PlanError):
            build_plan(group(2)[0], np.array([[1, 2], [3, 2]]), [4, 4], [8, 8], 20)

    @pytest.mark.parametrize("cp_size", [1, 2, 4])
    def test_more_prefix_pages_than_the_workspace_has_are_counted(self, cp_size: int):
        table = np.arange(1, 12)[None]
        with pytest.raises(PlanError, match="reads 10 prefix pages but the workspace has room for 9"):
            build_plan(group(cp_size)[0], table, [10 * PAGE], [10 * PAGE + 1], 11)

    def test_a_chunk_alone_can_be_too_big(self):
        with pytest.raises(PlanError):
            build_plan(group(2)[0], np.arange(1, 12)[None], [0], [11 * PAGE], 11)

    def test_lists_of_different_length_are_an_error(self):
        with pytest.raises(ValueError):
            build_plan(group(2)[0], np.array([[1], [2]]), [0], [1], 11)


class TestGatherShares:
    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 60))
    def test_of_few_pages_is_the_largest_share_that_fits(self, counts: list[int], spare: int):
        assume(sum(counts) < 64)
        capacity = sum(counts) + spare

        def needed(share: int) -> int:
            return sum(share + max(0, count - share) for count in counts)

        fitting = [share for share in range(max(counts) + 1) if needed(share) <= capacity]
        assert gather_shares(counts, capacity) == max(fitting)

    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 8), st.integers(64, 3000), st.integers(0, 7))
    def test_of_balanced_owners_receives_within_a_fiftieth_of_the_bound(self, cp_size: int, pages: int, first: int):
        """Pages are not divided: a rank that owns one page less than others receives one more."""
        counts = [0] * cp_size
        for page in range(first, first + pages):
            counts[page % cp_size] += 1
        share = gather_shares(counts, 2 * pages)
        surplus = [max(0, count - share) for count in counts]
        received = max((cp_size - 1) * share + sum(surplus) - own for own in surplus)
        assert received <= 1.02 * (cp_size - 1) / cp_size * pages

    def test_pads_where_that_is_within_a_fiftieth_and_sends_the_rest_where_not(self):
        assert gather_shares([50] * 7 + [49], 1000) == 50
        assert gather_shares([50] + [49] * 7, 1000) == 50
        assert gather_shares([10] + [9] * 7, 1000) == 9
        assert gather_shares([70, 0], 1000) == 0

    def test_no_pages_need_no_gather(self):
        assert gather_shares([0, 0, 0], 0) == 0

    def test_one_page_too_many_is_refused(self):
        assert gather_shares([3, 1], 4) == 1
        with pytest.raises(PlanError, match="the batch reads 4 prefix pages but the workspace has room for 3"):
            gather_shares([3, 1], 3)


class TestWorkspacePages:
    @pytest.mark.parametrize(
        ("context_len", "page_size", "cp_size", "expected"),
        [
            (1, 64, 2, 1 + 2 + 1),
            (64, 64, 8, 1 + 8 + 1),
            (65, 64, 2, 2 + 2 + 1),
            (6400, 64, 4, 100 + 13 + 1),
            (131072, 64, 8, 2048 + 256 + 1),
        ],
    )
    def test_hold_a_context_an_eighth_or_a_page_per_rank_and_trash(
        self, context_len: int, page_size: int, cp_size: int, expected: int
    ):
        assert workspace_pages(context_len, page_size, cp_size) == expected

    @settings(max_examples=40, deadline=None)
    @given(st.integers(1, 6), st.integers(2, 200), st.data())
    def test_are_enough_for_any_one_request_of_the_context(self, cp_size: int, seq: int, data: st.DataObject):
        """Also where one rank owns every page."""
        prefix = data.draw(st.integers(0, seq - 1))
        pages = list(range(1, LAST_PAGE, cp_size)) if cp_size < 5 else list(range(1, LAST_PAGE))
        row = pages[: -(-seq // PAGE)]
        check(Batch(cp_size, PAGE, [row], [prefix], [seq]), workspace_pages(seq, PAGE, cp_size))

    @pytest.mark.parametrize("cp_size", [2, 3, 8])
    @pytest.mark.parametrize("context_pages", [1, 7, 63])
    def test_are_enough_for_one_all_gather_where_owners_are_balanced(self, context_pages: int, cp_size: int):
        row = list(range(11, 11 + context_pages))
        seq = context_pages * PAGE
        plan = check(Batch(cp_size, PAGE, [row], [seq - 1], [seq]), workspace_pages(seq, PAGE, cp_size))[0]
        assert plan.surplus == ()


class TestInertPlan:
    def test_sends_every_position_to_trash_and_gathers_and_keeps_nothing(self):
        plan = build_inert_plan(3, 5, 20)
        assert plan.tables.shape == (3, 6)
        assert plan.tables.dtype == np.int32
        assert set(plan.tables.ravel().tolist()) == {19}
        assert plan.trash_page == 19
        assert (plan.gathered_pages, plan.base_share, plan.surplus) == (0, 0, ())
        assert (plan.prefix_pages, plan.chunk_pages, plan.prefix_lens, plan.seq_lens) == (0, 0, (), ())
        for array in (
            plan.gather_source,
            plan.surplus_source,
            plan.keep_workspace,
            plan.keep_physical,
            plan.restore,
        ):
            assert (array.size, array.dtype) == (0, np.int64)

    def test_may_have_no_rows(self):
        assert build_inert_plan(0, 1, 20).tables.shape == (0, 2)
