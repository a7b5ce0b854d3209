"""Which pages are sent where, and what stops a chunk before a byte of it is sent."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.transfer import Destination, PagePositions, chunk_problem, split_chunk, split_state

FRAGMENTED = [40, 3, 17, 90, 4, 55, 8, 21]

unique_pages = st.lists(st.integers(1, 99), unique=True, max_size=16)


def group(cp_size: int) -> list[CpSharedKVLayout]:
    return [CpSharedKVLayout(page_size=64, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]


def decode(pages: int, *state: int) -> Destination:
    """Decode's answer: so many KV pages, and so many pages for each state component."""
    return Destination(pages, state)


def state(*counts: int | None) -> list[Any]:
    return [None if n is None else np.arange(1, n + 1) for n in counts]


class TestPagePositions:
    def test_index_an_array_and_remember_the_end_of_the_chunk(self):
        positions = PagePositions([1, 4], 9)
        assert np.arange(10, 20)[positions].tolist() == [11, 14]
        assert (positions.dtype, positions.stop, type(positions.stop)) == (np.int32, 9, int)

    def test_an_end_given_as_a_numpy_integer_becomes_an_int(self):
        assert type(PagePositions([1], np.int64(9)).stop) is int  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "derive",
        [
            lambda p: p[:1],
            lambda p: p[np.array([True, False, True])],
            lambda p: p + 1,
            lambda p: p.copy(),
            lambda p: p.astype(np.int64),
            copy.copy,
            copy.deepcopy,
        ],
        ids=["slice", "mask", "sum", "method", "astype", "copy", "deepcopy"],
    )
    def test_the_end_survives_what_code_does_to_an_array(self, derive: Any):
        derived = derive(PagePositions([1, 4, 5], 9))
        assert type(derived) is PagePositions
        assert derived.stop == 9

    def test_the_end_survives_pickling(self):
        assert pickle.loads(pickle.dumps(PagePositions([1, 4], 9))).stop == 9

    def test_no_pages_have_an_end_too(self):
        positions = PagePositions([], 9)
        assert (positions.stop, len(positions), positions.dtype) == (9, 0, np.int32)
        assert np.arange(3)[positions].tolist() == []

    def test_changing_a_copy_leaves_the_original(self):
        positions = PagePositions([1, 4], 9)
        positions.copy()[0] = 7
        assert positions.tolist() == [1, 4]


class TestSplitChunk:
    @pytest.mark.parametrize("start", [0, 3, 8])
    @pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
    def test_the_ranks_together_send_a_fragmented_chunk_once(self, cp_size: int, start: int):
        destination = np.full(start + len(FRAGMENTED) + 5, -1)
        writes = 0
        for layout in group(cp_size):
            pages, positions = split_chunk(layout, np.asarray(FRAGMENTED), slice(start, start + len(FRAGMENTED)))
            destination[positions] = layout.physical_to_logical_pages_np(pages)
            writes += len(positions)
            assert positions.stop == start + len(FRAGMENTED)
        assert writes == len(FRAGMENTED)
        assert destination.tolist() == [-1] * start + FRAGMENTED + [-1] * 5

    @settings(max_examples=30, deadline=None)
    @given(st.integers(1, 8), unique_pages, st.integers(0, 20))
    def test_consecutive_chunks_fill_the_destination(self, cp_size: int, pages: list[int], cut: int):
        cut = min(cut, len(pages))
        destination = np.zeros(len(pages), dtype=int)
        for layout in group(cp_size):
            for chunk in (slice(0, cut), slice(cut, len(pages))):
                physical, positions = split_chunk(layout, np.asarray(pages[chunk], dtype=np.int32), chunk)
                destination[positions] += layout.physical_to_logical_pages_np(physical)
        assert destination.tolist() == pages

    def test_a_rank_without_pages_still_knows_the_end_of_the_chunk(self):
        pages, positions = split_chunk(group(4)[3], np.array([1, 2]), slice(5, 7))
        assert (pages.tolist(), positions.tolist(), positions.stop) == ([], [], 7)

    @pytest.mark.parametrize("chunk", [slice(0, 3), slice(4, 5), slice(0, 0)])
    def test_a_slice_of_another_length_is_refused(self, chunk: slice):
        with pytest.raises(ValueError, match=f"chunk positions {chunk.start}..{chunk.stop} do not fit 2 pages"):
            split_chunk(group(4)[0], np.array([1, 2]), chunk)


class TestSplitState:
    @settings(max_examples=30, deadline=None)
    @given(st.integers(1, 8), unique_pages)
    def test_the_ranks_together_pair_every_page_with_its_destination(self, cp_size: int, pages: list[int]):
        destination = [1000 + i for i in range(len(pages))]
        paired: list[tuple[int, int]] = []
        for layout in group(cp_size):
            physical, given_pages = split_state(layout, pages, destination)
            assert physical.dtype == np.int32
            assert all(type(page) is int for page in given_pages)
            paired += zip(layout.physical_to_logical_pages_np(physical).tolist(), given_pages, strict=True)
        assert sorted(paired) == sorted(zip(pages, destination, strict=True))

    @pytest.mark.parametrize("pages", [[5, 6, 7], [5]])
    def test_lists_of_different_length_are_refused(self, pages: list[int]):
        with pytest.raises(ValueError, match=f"the request has {len(pages)} index-K pages but decode gave 2"):
            split_state(group(2)[0], pages, [1, 2])


class TestChunkProblem:
    def test_a_chunk_that_fits_has_none(self):
        assert chunk_problem(4, state(6), [decode(4, 6)]) is None

    def test_an_earlier_chunk_brings_no_state_and_may_end_before_decodes_pages(self):
        assert chunk_problem(2, (), [decode(4, 6)]) is None

    def test_no_destination_is_no_problem(self):
        assert chunk_problem(4, state(6), []) is None

    def test_too_few_kv_pages_are_named(self):
        problem = chunk_problem(5, (), [decode(4)])
        assert problem == "KV pages up to position 4 are to be sent but decode registered 4 pages"

    @pytest.mark.parametrize("given_pages", [5, 7, 0])
    def test_state_pages_must_be_exactly_as_many(self, given_pages: int):
        problem = chunk_problem(4, state(6), [decode(4, given_pages)])
        assert problem == f"6 index-K pages are to be sent but decode registered {given_pages}"

    def test_a_state_component_that_decode_does_not_know_is_a_problem(self):
        problem = chunk_problem(4, state(6, 2), [decode(4, 6)])
        assert problem == "2 index-K pages are to be sent but decode registered 0"

    def test_a_component_that_sends_nothing_is_skipped_but_keeps_its_place(self):
        assert chunk_problem(4, state(None, 2), [decode(4, 9, 2)]) is None
        assert chunk_problem(4, state(None, 2), [decode(4, 2, 9)]) is not None

    def test_every_decode_rank_is_checked(self):
        good, bad = decode(4, 6), decode(3, 6)
        assert chunk_problem(4, state(6), [good, good]) is None
        for destinations in ([good, bad], [bad, good]):
            assert chunk_problem(4, state(6), destinations) == (
                "KV pages up to position 3 are to be sent but decode registered 3 pages"
            )

    def test_destinations_may_be_an_iterator(self):
        assert chunk_problem(4, state(6), iter([decode(4, 6), decode(3, 6)])) is not None

    def test_with_a_prefix_on_decode_kv_counts_from_it_and_state_from_the_first_page(self):
        """A request of 6 pages, 2 of them cached on decode: 4 KV pages are sent, but 6 index-K pages."""
        assert chunk_problem(4, state(6), [decode(4, 6)]) is None
        assert chunk_problem(6, state(6), [decode(4, 6)]) is not None
        assert chunk_problem(4, state(4), [decode(4, 6)]) is not None

    @pytest.mark.parametrize("cp_size", [2, 4])
    def test_every_rank_comes_to_the_same_answer_also_one_without_pages(self, cp_size: int):
        """The check uses the end of the whole chunk: a rank that owns none of the pages beyond must refuse too."""
        answers = {
            chunk_problem(split_chunk(layout, np.array([1, 2, 3]), slice(2, 5))[1].stop, (), [decode(4)])
            for layout in group(cp_size)
        }
        assert answers == {"KV pages up to position 4 are to be sent but decode registered 4 pages"}
