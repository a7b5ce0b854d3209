"""The page arithmetic, held against pages dealt to the ranks like cards."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv import CpSharedKVLayout, filter_kv_pages_for_cp_shared_kv

LAST_PAGE = 60
FRAGMENTED = [40, 3, 17, 90, 4, 55, 8, 21]

cp_sizes = st.integers(1, 9)
pages_with_padding = st.lists(st.integers(-3, LAST_PAGE), max_size=20)


def deal(cp_size: int, last_page: int = 100) -> dict[int, tuple[int, int]]:
    """Page -> (owner, physical page): pages 1, 2, 3, ... dealt like cards, each rank numbering its own 1, 2, 3, ..."""
    hands: list[list[int]] = [[] for _ in range(cp_size)]
    dealt = {}
    for page, rank in zip(range(1, last_page + 1), itertools.cycle(range(cp_size)), strict=False):
        hands[rank].append(page)
        dealt[page] = (rank, len(hands[rank]))
    return dealt


def owner_and_physical(cp_size: int, page: int) -> tuple[int, int]:
    return deal(cp_size)[page] if page >= 1 else (-1, 0)


def group(cp_size: int, page_size: int = 64) -> list[CpSharedKVLayout]:
    return [CpSharedKVLayout(page_size=page_size, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]


class TestFormula:
    @settings(max_examples=60, deadline=None)
    @given(cp_sizes, pages_with_padding, st.sampled_from(["int32", "int64"]))
    def test_torch_and_numpy_agree_with_dealt_cards(self, cp_size: int, pages: list[int], dtype: str):
        layout = group(cp_size)[0]
        expected = [owner_and_physical(cp_size, page) for page in pages]
        owners, physical = [owner for owner, _ in expected], [page for _, page in expected]

        tensor = torch.tensor(pages, dtype=getattr(torch, dtype))
        assert layout.owner_for_logical_pages(tensor).tolist() == owners
        assert layout.logical_pages_to_physical(tensor).tolist() == physical
        array = np.asarray(pages, dtype=dtype)
        assert layout.owner_for_logical_pages_np(array).tolist() == owners
        assert layout.logical_pages_to_physical_np(array).tolist() == physical

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_torch_results_keep_shape_and_dtype(self, dtype: torch.dtype):
        layout = group(3)[1]
        pages = torch.arange(-2, 10, dtype=dtype).reshape(3, 4)
        for result in (layout.owner_for_logical_pages(pages), layout.logical_pages_to_physical(pages)):
            assert (result.dtype, result.shape) == (dtype, (3, 4))
        assert layout.logical_locs_to_physical(pages).dtype == dtype
        assert layout.logical_locs_to_physical(pages).shape == (3, 4)
        assert (layout.owned_pages_mask(pages).dtype, layout.owned_pages_mask(pages).shape) == (torch.bool, (3, 4))

    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    def test_numpy_results_are_int64_of_the_same_shape(self, dtype: Any):
        layout = group(3)[1]
        pages = np.arange(-2, 10, dtype=dtype).reshape(3, 4)
        for function in (
            layout.owner_for_logical_pages_np,
            layout.logical_pages_to_physical_np,
            layout.physical_to_logical_pages_np,
        ):
            assert (function(pages).dtype, function(pages).shape) == (np.int64, (3, 4))

    def test_inputs_are_not_changed(self):
        layout = group(3)[1]
        tensor, array = torch.arange(-2, 10), np.arange(-2, 10)
        layout.owner_for_logical_pages(tensor)
        layout.logical_pages_to_physical(tensor)
        layout.logical_locs_to_physical(tensor)
        layout.owner_for_logical_pages_np(array)
        layout.logical_pages_to_physical_np(array)
        layout.physical_to_logical_pages_np(array)
        assert tensor.tolist() == array.tolist() == list(range(-2, 10))

    @pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
    def test_pages_of_a_full_group_map_one_to_one(self, cp_size: int):
        pages = np.arange(1, 7 * cp_size + 1)
        layout = group(cp_size)[0]
        places = set(
            zip(layout.owner_for_logical_pages_np(pages), layout.logical_pages_to_physical_np(pages), strict=True)
        )
        assert places == set(itertools.product(range(cp_size), range(1, 8)))

    @pytest.mark.parametrize("cp_size", [1, 2, 8])
    def test_the_dummy_page_and_padding_are_nobodys_and_lie_on_page_0(self, cp_size: int):
        for layout in group(cp_size):
            pages = torch.tensor([0, -1, -64, -(2**31) + 1])
            assert layout.owner_for_logical_pages(pages).tolist() == [-1] * 4
            assert layout.logical_pages_to_physical(pages).tolist() == [0] * 4
            assert layout.owner_for_logical_pages_np(pages.numpy()).tolist() == [-1] * 4
            assert layout.logical_pages_to_physical_np(pages.numpy()).tolist() == [0] * 4
            assert not layout.owned_pages_mask(pages).any()

    def test_empty_input_gives_empty_output(self):
        layout = group(4)[2]
        assert layout.owner_for_logical_pages_np([]).tolist() == []
        assert layout.logical_pages_to_physical_np([]).tolist() == []
        assert layout.physical_to_logical_pages_np([]).tolist() == []
        assert [part.tolist() for part in layout.filter_owned_pages_np([], [])] == [[], []]
        empty = torch.empty(0, dtype=torch.int32)
        assert layout.owner_for_logical_pages(empty).tolist() == []
        assert layout.logical_locs_to_physical(empty).tolist() == []

    @pytest.mark.parametrize("cp_size", [1, 2, 8])
    def test_the_largest_int32_slots_of_a_pool_do_not_overflow(self, cp_size: int):
        layout = group(cp_size)[0]
        page = 2**31 // 64 - 1
        slot = torch.tensor([page * 64 + 63], dtype=torch.int32)
        assert layout.logical_locs_to_physical(slot).tolist() == [((page - 1) // cp_size + 1) * 64 + 63]


class TestDerived:
    @settings(max_examples=40, deadline=None)
    @given(cp_sizes, st.sampled_from([1, 2, 7, 64]), st.lists(st.integers(-130, 2000), max_size=12))
    def test_slots_go_with_their_page_and_keep_their_offset(self, cp_size: int, page_size: int, locs: list[int]):
        layout = group(cp_size, page_size)[0]
        dealt = deal(cp_size, 2001)
        expected = []
        for loc in locs:
            page, offset = divmod(max(loc, 0), page_size)
            expected.append((dealt[page][1] if page else 0) * page_size + offset)
        assert layout.logical_locs_to_physical(torch.tensor(locs, dtype=torch.int64)).tolist() == expected

    def test_slots_of_the_dummy_page_stay_and_negative_slots_become_slot_0(self):
        layout = group(4)[1]
        assert layout.logical_locs_to_physical(torch.tensor([0, 1, 63, -1, -64, -65])).tolist() == [0, 1, 63, 0, 0, 0]

    @settings(max_examples=30, deadline=None)
    @given(cp_sizes, pages_with_padding)
    def test_masks_of_the_ranks_cover_every_real_page_once(self, cp_size: int, pages: list[int]):
        tensor = torch.tensor(pages, dtype=torch.int64)
        layouts = group(cp_size)
        for rank, layout in enumerate(layouts):
            expected = [owner_and_physical(cp_size, page)[0] == rank for page in pages]
            assert layout.owned_by_this_rank(tensor).tolist() == expected
            assert layout.owned_pages_mask(tensor).tolist() == expected
            assert layouts[0].owned_pages_mask(tensor, rank=rank).tolist() == expected

    @settings(max_examples=40, deadline=None)
    @given(cp_sizes, st.lists(st.tuples(st.integers(-3, LAST_PAGE), st.integers(0, 9999)), max_size=20), st.data())
    def test_filtering_keeps_the_order_and_pairs_each_page_with_its_position(
        self, cp_size: int, items: list[tuple[int, int]], data: st.DataObject
    ):
        rank = data.draw(st.integers(0, cp_size - 1))
        layout = group(cp_size)[rank]
        expected = [
            (owner_and_physical(cp_size, page)[1], position)
            for page, position in items
            if owner_and_physical(cp_size, page)[0] == rank
        ]
        pages, positions = layout.filter_owned_pages_np([p for p, _ in items], [at for _, at in items])
        assert list(zip(pages.tolist(), positions.tolist(), strict=True)) == expected
        assert (pages.dtype, positions.dtype) == (np.int32, np.int32)

    @settings(max_examples=30, deadline=None)
    @given(cp_sizes, st.lists(st.integers(1, LAST_PAGE), max_size=20))
    def test_physical_pages_lead_back_to_the_logical_ones(self, cp_size: int, pages: list[int]):
        for layout in group(cp_size):
            owned = [page for page in pages if owner_and_physical(cp_size, page)[0] == layout.cp_rank]
            physical, _ = layout.filter_owned_pages_np(owned, range(len(owned)))
            assert layout.physical_to_logical_pages_np(physical).tolist() == owned

    def test_physical_page_0_and_padding_lead_back_to_page_0(self):
        assert group(4)[3].physical_to_logical_pages_np([0, -1, 1]).tolist() == [0, 0, 4]


class TestValidation:
    def test_a_layout_cannot_be_changed(self):
        layout = group(4)[2]
        for name in ("page_size", "cp_size", "cp_rank"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(layout, name, 1)

    def test_equal_layouts_are_equal_and_hash_alike(self):
        assert group(4)[2] == group(4)[2]
        assert hash(group(4)[2]) == hash(group(4)[2])
        assert group(4)[2] != group(4)[1]

    def test_numpy_integers_are_taken_as_ints(self):
        layout = CpSharedKVLayout(page_size=np.int64(64), cp_size=np.int32(4), cp_rank=np.int64(1))  # type: ignore[arg-type]
        assert layout == group(4)[1]
        assert type(layout.cp_size) is int

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"page_size": 0}, "page_size must be at least 1 token, got 0"),
            ({"page_size": -64}, "page_size must be at least 1 token, got -64"),
            ({"cp_size": 0, "cp_rank": 0}, "cp_size must be at least 1 rank, got 0"),
            ({"cp_rank": 4}, "cp_rank must lie in [0, cp_size=4), got 4"),
            ({"cp_rank": -1}, "cp_rank must lie in [0, cp_size=4), got -1"),
        ],
    )
    def test_a_value_out_of_range_is_named_with_what_is_accepted(self, change: dict[str, int], message: str):
        with pytest.raises(ValueError) as refused:
            CpSharedKVLayout(**{"page_size": 64, "cp_size": 4, "cp_rank": 0, **change})
        assert str(refused.value) == message

    @pytest.mark.parametrize("name", ["page_size", "cp_size", "cp_rank"])
    @pytest.mark.parametrize(("value", "text"), [(2.0, "float 2.0"), ("2", "str '2'"), (True, "bool True")])
    def test_a_value_of_another_type_is_named(self, name: str, value: Any, text: str):
        with pytest.raises(TypeError, match=f"{name} must be an int, got {text}"):
            CpSharedKVLayout(**{"page_size": 64, "cp_size": 4, "cp_rank": 0, name: value})

    @pytest.mark.parametrize("value", [[1.0, 2.0], [True, False]])
    def test_pages_that_are_not_integers_are_refused(self, value: list[Any]):
        layout = group(4)[0]
        for function in (
            layout.owner_for_logical_pages_np,
            layout.logical_pages_to_physical_np,
            layout.physical_to_logical_pages_np,
        ):
            with pytest.raises(TypeError, match="pages must hold integers, got dtype"):
                function(value)
        with pytest.raises(TypeError, match="positions must hold integers"):
            layout.filter_owned_pages_np([1, 2], value)

    @pytest.mark.parametrize(("pages", "positions"), [([1, 2], [0]), ([[1], [2]], [[0], [1]]), ([1], []), ([], [1])])
    def test_lists_that_do_not_fit_each_other_are_refused_with_their_shapes(self, pages: Any, positions: Any):
        with pytest.raises(ValueError, match=r"one-dimensional and equally long, got shapes \(.*\) and \(.*\)"):
            group(4)[0].filter_owned_pages_np(pages, positions)


class TestFilterForTransfer:
    def test_the_documented_example_holds(self):
        pages, positions = filter_kv_pages_for_cp_shared_kv(
            layout=group(4)[2], logical_pages=np.arange(9, 15), chunk_page_start=8
        )
        assert (pages.tolist(), positions.tolist()) == ([3], [10])

    @pytest.mark.parametrize("start", [0, 1, 8, 1000])
    @pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
    def test_a_fragmented_list_is_sent_by_the_ranks_together_exactly_once(self, cp_size: int, start: int):
        sent: list[tuple[int, int]] = []
        for layout in group(cp_size):
            pages, positions = filter_kv_pages_for_cp_shared_kv(
                layout=layout, logical_pages=FRAGMENTED, chunk_page_start=start
            )
            assert positions.tolist() == sorted(positions.tolist()), "not in request order"
            sent += zip(positions.tolist(), layout.physical_to_logical_pages_np(pages).tolist(), strict=True)
        assert len(sent) == len(FRAGMENTED)
        assert dict(sent) == {start + i: page for i, page in enumerate(FRAGMENTED)}

    @settings(max_examples=40, deadline=None)
    @given(cp_sizes, st.lists(st.integers(1, LAST_PAGE), unique=True, max_size=20), st.integers(0, 50))
    def test_any_list_is_sent_exactly_once(self, cp_size: int, logical: list[int], start: int):
        sent: list[tuple[int, int]] = []
        for layout in group(cp_size):
            pages, positions = filter_kv_pages_for_cp_shared_kv(
                layout=layout, logical_pages=logical, chunk_page_start=start
            )
            sent += zip(positions.tolist(), layout.physical_to_logical_pages_np(pages).tolist(), strict=True)
        assert sorted(sent) == [(start + i, page) for i, page in enumerate(logical)]

    def test_dummy_pages_and_padding_are_sent_by_nobody(self):
        for layout in group(4):
            pages, _ = filter_kv_pages_for_cp_shared_kv(layout=layout, logical_pages=[0, -1], chunk_page_start=3)
            assert pages.tolist() == []

    def test_a_rank_without_pages_gets_empty_int32_arrays(self):
        pages, positions = filter_kv_pages_for_cp_shared_kv(layout=group(4)[3], logical_pages=[1], chunk_page_start=0)
        assert (pages.size, positions.size) == (0, 0)
        assert (pages.dtype, positions.dtype) == (np.int32, np.int32)

    @pytest.mark.parametrize("pages", [range(9, 15), list(range(9, 15)), tuple(range(9, 15))])
    def test_ranges_lists_and_tuples_are_taken(self, pages: Any):
        found = filter_kv_pages_for_cp_shared_kv(layout=group(4)[2], logical_pages=pages, chunk_page_start=8)
        assert [part.tolist() for part in found] == [[3], [10]]

    def test_a_negative_start_is_refused(self):
        with pytest.raises(ValueError, match="chunk_page_start must be at least 0, got -1"):
            filter_kv_pages_for_cp_shared_kv(layout=group(4)[0], logical_pages=[1], chunk_page_start=-1)

    @pytest.mark.parametrize(
        "pages",
        [
            [[1, 2], [3, 4]],
            7,
        ],
    )
    def test_a_list_that_is_not_one_dimensional_is_refused(self, pages: Any):
        with pytest.raises(ValueError, match="one-dimensional"):
            filter_kv_pages_for_cp_shared_kv(layout=group(4)[0], logical_pages=pages, chunk_page_start=0)


class TestPackage:
    def test_importing_the_package_imports_neither_torch_nor_sglang(self):
        code = "import sys, cp_shared_kv; print(sorted({'torch', 'sglang', 'triton', 'wrapt'} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
        assert done.stdout.strip() == "[]"

    def test_an_unknown_name_is_an_attribute_error(self):
        import cp_shared_kv

        with pytest.raises(AttributeError, match="module 'cp_shared_kv' has no attribute 'Layout'"):
            cp_shared_kv.Layout  # noqa: B018
