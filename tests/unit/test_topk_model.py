"""The model behind ``docs/below-the-bound.md``: what selections need, what that costs, where it breaks even."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import topk  # noqa: E402
from benchmarks.rows import Row  # noqa: E402
from benchmarks.topk import PAGE, Turn  # noqa: E402

#: A page's MLA KV is 8 times its index-K, so that figures can be worked out by hand.
KV = 8 * topk.INDEX_BYTES
SMALL = Turn(64 * PAGE, 64, 64)


def flags(*ranks: str) -> topk.Flags:
    """By rank, a character for each page: x where it is needed."""
    return np.array([[page == "x" for page in rank] for rank in ranks])


class TestNeeds:
    def test_each_rank_computes_one_segment_and_its_mirror(self):
        assert [topk.queries_of(rank, 2, 8).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
        assert topk.queries_of(0, 2, 6).tolist() == [0, 1, 5], "the first segments take what is left over"

    def test_a_unit_is_needed_if_any_query_selects_in_it_and_the_chunk_costs_nothing(self):
        selection = np.array([[0, 63, 300], [130, 256, 257]], dtype=np.int32)
        assert topk.needed(selection, 4 * PAGE, PAGE).tolist() == [True, False, True, False]
        assert np.flatnonzero(topk.needed(selection, 4 * PAGE, 1)).tolist() == [0, 63, 130]

    def test_a_rank_needs_what_its_own_queries_select(self):
        selection = np.array([[0], [PAGE], [PAGE], [2 * PAGE]], dtype=np.int32)
        need = topk.needed_by_rank(selection, 3 * PAGE, 2, PAGE)
        assert need.tolist() == [[True, False, True], [False, True, False]]

    def test_neighbours_share_what_both_select(self):
        selection = np.array([[0, 1], [1, 2], [1, 2]], dtype=np.int32)
        assert topk.neighbours_share(selection) == 0.75


class TestBytes:
    def test_the_dense_gather_receives_the_other_ranks_part_of_both_stores(self):
        assert topk.dense_bytes(128, 4, 1152) == 96 * (1152 + 132)

    def test_a_request_takes_a_bit_for_each_unit_of_the_other_ranks(self):
        assert topk.request_bytes(2**17, 8, PAGE) == 7 / 8 * 2048 / 8
        assert topk.request_bytes(2**17, 8, 1) == 7 / 8 * 2**17 / 8

    # Owners are 0101: rank 0 needs both pages of rank 1 and one of its own, rank 1 one of its own.
    @pytest.mark.parametrize(("exchange", "units"), [("exact", 2), ("equal", 2), ("group", 2)])
    def test_pages_that_a_rank_owns_are_not_received(self, exchange: str, units: int):
        assert topk.units_received(flags("xx.x", ".x.."), PAGE, exchange) == units

    @pytest.mark.parametrize(("exchange", "units"), [("exact", 2), ("equal", 4), ("group", 4)])
    def test_equal_splits_pad_to_the_largest_pair_and_one_all_gather_to_the_largest_owner(
        self, exchange: str, units: int
    ):
        # Owners are 012012; rank 0 needs two pages of rank 1.
        assert topk.units_received(flags(".x..x.", "......", "......"), PAGE, exchange) == units

    def test_one_all_gather_brings_every_rank_what_any_rank_needs(self):
        need = flags(".x..", "...x")  # rank 1 owns both
        assert [topk.units_received(need, PAGE, exchange) for exchange in ("exact", "group")] == [1, 2]

    def test_rows_of_a_page_have_its_owner(self):
        need = np.zeros((2, 2 * PAGE), dtype=bool)
        need[0, [0, 1, 70]] = True
        assert topk.units_received(need, 1, "exact") == 1

    def test_nothing_needed_saves_the_mla_kv_less_the_requests_and_all_needed_costs_them(self):
        none, everything = np.zeros((2, 64), dtype=bool), np.ones((2, 64), dtype=bool)
        dense = topk.dense_bytes(64 * PAGE, 2, KV)
        assert topk.saved(none, PAGE, KV) == pytest.approx(8 / 9 - 4 / dense)
        assert topk.saved(everything, PAGE, KV) == pytest.approx(-4 / dense)
        assert topk.saved(everything, PAGE, KV, "group") == pytest.approx(-8 / dense)

    @pytest.mark.parametrize("unit", [PAGE, 1])
    def test_the_most_that_may_be_needed_saves_just_the_goal(self, unit: int):
        most = topk.most_needed(2, KV, unit, 0.25)
        pages = 2000
        need = np.zeros((2, pages * PAGE // unit), dtype=bool)
        per_page = PAGE // unit
        need[:, : round(most * pages) * per_page] = True
        assert topk.saved(need, unit, KV) == pytest.approx(0.25, abs=1e-3)


class TestSelections:
    @pytest.mark.parametrize("name", topk.SYNTHETIC)
    def test_every_query_selects_top_k_different_tokens_that_it_may_see(self, name: str):
        turn = Turn(2**13, 128, 256)
        selection = topk.SYNTHETIC[name](np.random.default_rng(1), turn=turn)
        assert selection.shape == (128, 256)
        assert all(len(set(row)) == 256 for row in selection.tolist())
        assert (selection >= 0).all()
        assert (selection.max(1) <= turn.prefix + np.arange(turn.chunk)).all()

    def test_shared_runs_are_whole_and_the_same_for_all_queries(self):
        selection = topk.draw_shared(np.random.default_rng(2), SMALL, share=0.75, run=4)
        assert (selection.reshape(-1, 4) % 4 == np.arange(4)).all()
        assert (np.diff(selection.reshape(-1, 4)) == 1).all()
        common = set.intersection(*(set(row) for row in selection.tolist()))
        assert len(common) == 48

    def test_recent_tokens_end_at_the_query_and_sinks_begin_the_prefix(self):
        selection = topk.draw_recent(np.random.default_rng(3), SMALL, share=0.25, sinks=16)
        assert (np.sort(selection, axis=1)[:, :16] == np.arange(16)).mean() > 0.9
        assert (selection.max(1) == SMALL.prefix + np.arange(SMALL.chunk)).all()
        [first, *_] = selection
        assert set(range(SMALL.prefix - 31, SMALL.prefix + 1)) <= set(first.tolist())

    @pytest.mark.parametrize(
        ("less", "more"),
        [
            (partial(topk.draw_zipf, exponent=0.5), partial(topk.draw_zipf, exponent=2.0)),
            (partial(topk.draw_scores, common=0.1), partial(topk.draw_scores, common=0.9)),
            (partial(topk.draw_shared, share=0.1), partial(topk.draw_shared, share=0.9)),
            (partial(topk.draw_recent, share=0.9, sinks=4), partial(topk.draw_recent, share=0.1, sinks=4)),
        ],
    )
    def test_the_stated_parameter_makes_neighbours_share_more_and_queries_need_less(
        self, less: topk.Draw, more: topk.Draw
    ):
        loose, tight = (draw(np.random.default_rng(4), turn=SMALL) for draw in (less, more))
        assert topk.neighbours_share(loose) < topk.neighbours_share(tight)
        assert topk.needed(loose, SMALL.prefix, 1).sum() > topk.needed(tight, SMALL.prefix, 1).sum()

    def test_the_common_part_of_scores_decides_what_neighbours_share(self):
        apart, alike = (topk.draw_scores(np.random.default_rng(8), SMALL, common=common) for common in (0.0, 1.0))
        assert topk.neighbours_share(apart) < 2 * SMALL.topk / SMALL.prefix
        assert topk.neighbours_share(alike) == 1

    def test_the_greatest_scores_are_selected_also_of_a_row_unlike_the_first(self):
        first, second = np.arange(100, dtype=np.float32), -np.arange(100, dtype=np.float32)
        rows = iter([first, first, second])
        selection = topk._best(lambda: next(rows), Turn(100, 2, 8))
        assert [sorted(row) for row in selection.tolist()] == [list(range(92, 100)), list(range(8))]

    def test_a_common_score_of_runs_gathers_the_selection_in_few_pages(self):
        scattered, gathered = (
            topk.draw_scores(np.random.default_rng(5), SMALL, common=0.99, run=run) for run in (1, PAGE)
        )
        assert topk.needed(gathered, SMALL.prefix, PAGE).sum() < topk.needed(scattered, SMALL.prefix, PAGE).sum() / 4


class TestBreakEven:
    @pytest.mark.parametrize("unit", [PAGE, 1])
    @pytest.mark.parametrize(("share", "run"), [(0.0, 1), (0.5, 4), (0.75, 16), (0.5, 64)])
    def test_the_expected_need_is_what_drawn_selections_need(self, share: float, run: int, unit: int):
        turn = Turn(2**14, 16, 256)
        seeds = range(60)
        drawn = [topk.draw_shared(np.random.default_rng(seed), turn, share, run) for seed in seeds]
        mean = np.mean([topk.needed(selection, turn.prefix, unit).mean() for selection in drawn])
        assert mean == pytest.approx(topk.expected_needed(turn.chunk, share, run, unit, turn), rel=0.02)

    def test_the_least_share_saves_just_the_goal(self):
        bf16 = topk.KV_BYTES["bf16"]
        share = topk.least_share(8, 16, PAGE, bf16)
        at, below = (topk.expected_needed(128, each, 16, PAGE) for each in (share, share - 2e-4))
        assert at <= topk.most_needed(8, bf16) < below

    def test_neighbours_that_share_enough_save_just_the_goal_at_worst(self):
        bf16, turn = topk.KV_BYTES["bf16"], Turn(2**13, 64, 256)
        fresh = round((1 - topk.least_neighbours_share(2, bf16, turn)) * turn.topk)
        remote = np.flatnonzero(np.arange(turn.prefix) // PAGE % 2 == 1)  # of rank 0
        selection = np.zeros((turn.chunk, turn.topk), dtype=np.int32)
        for at, query in enumerate(topk.queries_of(0, 2, turn.chunk)):
            begin = at * fresh + (turn.topk if at >= turn.chunk // 4 else 0)  # the second run has nothing of the first
            selection[query] = remote[begin : begin + turn.topk]
        need = topk.needed_by_rank(selection, turn.prefix, 2, 1)
        assert topk.saved(need, 1, bf16) == pytest.approx(topk.GOAL, abs=0.01)

    def test_no_share_is_asked_for_where_independent_queries_save_enough(self):
        assert topk.least_share(8, 1, PAGE, topk.KV_BYTES["bf16"], Turn(2**20, 8, 64)) == 0


class TestTable:
    def test_the_table_has_pages_and_rows_of_every_selection_and_no_budget(self):
        draw = {"drawn": partial(topk.draw_shared, share=0.5)}
        traced = [topk.draw_shared(np.random.default_rng(6), topk.TINY)]
        given = topk.measure(Turn(2**13, 1024, 128), draw, lambda: traced)
        rows = {row.name: row for row in map(Row.of, given)}
        assert len(rows) == len(given)
        for name in ("drawn", "tiny model, random weights, layer 0"):
            by_pages, by_rows = (rows[f"bytes saved by {what}, {name}"].value for what in ("pages", "rows"))
            assert by_pages < by_rows < 0.9
            assert 0 < rows[f"pages needed by 128 queries, {name}"].value <= 1
        assert all(row.budget is None and row.how for row in rows.values())
        assert rows["least share for 30% fewer bytes, rows, CP 8"].value < 0.5

    def test_the_decision_rests_on_pages_that_nearly_all_are_needed_where_queries_are_independent(self):
        selection = topk.draw_shared(np.random.default_rng(7))
        pages, rows = (topk.needed_by_rank(selection, topk.AGENT.prefix, 8, unit) for unit in (PAGE, 1))
        assert pages.mean() > 0.999
        assert topk.saved(pages, PAGE, topk.KV_BYTES["bf16"]) < 0 < topk.saved(rows, 1, topk.KV_BYTES["bf16"]) < 0.15
