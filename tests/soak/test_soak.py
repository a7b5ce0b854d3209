"""The soak itself: a short one finds nothing, and what a long one is to find would be found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.patches import decode as decode_patches
from cp_shared_kv.patches import transfer as transfer_patches
from cp_shared_kv.rooms import PrefillAnswers, UnansweredRooms
from e2e.spec import Answer

from .probe import kept_by_the_plugin, wrong_pages
from .report import GROWTH_LIMIT_BYTES, JUDGED_FROM, Report, difference
from .run import CHUNKS, LIMIT, LOGICAL
from .traffic import SIDES, Request, Traffic

TESTS = Path(__file__).resolve().parents[1]
SEED, REQUESTS, BROKEN_REQUESTS = 11, 24, 8


def drawn(count: int, seed: int = SEED) -> list[Request]:
    traffic = Traffic(seed, LIMIT, CHUNKS)
    return [traffic.next() for _ in range(count)]


def soak(to: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and figures of a run with cp 2 and bfloat16."""
    command = [sys.executable, "-m", "soak", "--seconds", "240", "--seed", str(SEED), "--json", str(to), *flags]
    done = subprocess.run(command, cwd=TESTS, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(done.stdout)
    return done.returncode, json.loads(to.read_text())


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_soak_finds_nothing_wrong(tmp_path: Path) -> None:
    status, figures = soak(tmp_path / "figures.json", "--requests", str(REQUESTS))
    assert figures["problems"] == []
    assert (figures["mismatches"], figures["pages_leaked"], figures["late_writes"]) == (0, 0, 0)
    assert status == 0
    assert figures["requests"] == REQUESTS
    assert figures["rejected"] == sum(request.kind == "too long" for request in drawn(REQUESTS)) > 0
    assert figures["aborted"] > 0
    assert figures["hits"] > 0
    assert figures["evicted_tokens"] > 0
    assert figures["flushes"] > 0
    assert figures["longest"] > LOGICAL // 2, "no prompt was longer than one rank's pool"
    assert figures["compared"] >= 2 * figures["served"] > 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_soak_with_a_broken_gather_ends_with_mismatches_and_a_replay(tmp_path: Path) -> None:
    status, figures = soak(tmp_path / "figures.json", "--requests", str(BROKEN_REQUESTS), "--breaks", "kv_gather")
    assert status == 1
    assert figures["mismatches"] > 0
    first = figures["problems"][0]
    asked = {request.number: request.prompt for request in drawn(BROKEN_REQUESTS)}
    number = int(first.split()[1])
    assert f"of seed {SEED}" in first
    assert f"prompt {list(asked[number])}\n" in first
    assert first.count("Answer(ids=") == 2


def test_an_answer_that_differs_in_a_token_or_in_one_bit_of_a_logprob_is_a_mismatch() -> None:
    stock = Answer([5, 6], [-1.5, -2.0])
    assert difference(Answer([5, 6], [-1.5, -2.0], cached=64), stock) is None
    assert "tokens" in str(difference(Answer([5, 7], [-1.5, -2.0]), stock))
    assert "tokens" in str(difference(Answer([5], [-1.5]), stock))
    assert "logprobs" in str(difference(Answer([5, 6], [-1.5, -2.0000000000000004]), stock))


@pytest.mark.parametrize(
    ("free", "cached", "wrong"),
    [
        pytest.param([1, 4], [2, 3], 0, id="each page once"),
        pytest.param([1], [2, 3], 1, id="lost"),
        pytest.param([1, 4, 4], [2, 3], 1, id="free twice"),
        pytest.param([1, 3, 4], [2, 3], 1, id="free and cached"),
        pytest.param([1, 2, 3, 4], [], 0, id="nothing cached"),
    ],
)
def test_pages_lost_or_given_out_twice_are_counted(free: list[int], cached: list[int], wrong: int) -> None:
    slots = torch.tensor([page * 64 + offset for page in cached for offset in range(64)])
    scheduler = SimpleNamespace(
        max_total_num_tokens=4 * 64,
        token_to_kv_pool_allocator=SimpleNamespace(
            page_size=64, free_pages=torch.tensor(free[:1]), release_pages=torch.tensor(free[1:], dtype=torch.int64)
        ),
        tree_cache=SimpleNamespace(evictable_size=lambda: len(slots), all_values_flatten=lambda: slots),
    )
    assert wrong_pages(scheduler) == wrong


def test_what_the_plugin_keeps_of_a_request_on_either_side_is_counted() -> None:
    answers = PrefillAnswers()
    answers.note_final(7)
    decode = SimpleNamespace(**{decode_patches.ANSWERS_ATTRIBUTE: answers})
    assert sum(kept_by_the_plugin(decode).values()) == 1
    answers.forget(7)
    assert set(kept_by_the_plugin(decode).values()) == {0}
    sending = transfer_patches.Sending(
        CpSharedKVLayout(64, 2, 0), UnansweredRooms(60), MagicMock(), 60, failed_state={(7, "decode")}
    )
    prefill = SimpleNamespace(**{transfer_patches.STATE_ATTRIBUTE: sending})
    assert sum(kept_by_the_plugin(prefill).values()) == 1
    sending.failed_state.clear()
    assert set(kept_by_the_plugin(prefill).values()) == {0}


@pytest.mark.parametrize(("factor", "found"), [(2.0, True), (0.5, False)])
def test_memory_that_grows_with_requests_is_a_problem_of_long_runs_only(factor: float, found: bool) -> None:
    def report(requests: int) -> Report:
        report = Report({}, served=requests)
        # Warming up takes 1 GiB at once and is not held against the process.
        report.memory = [
            (ended, {"prefill0": (ended > 50) * 2**30 + int(ended * factor * GROWTH_LIMIT_BYTES / 1000), "decode0": 1})
            for ended in range(0, requests + 1, 20)
        ]
        report.judge()
        return report

    long = report(2 * JUDGED_FROM)
    assert [problem.split()[0] for problem in long.problems] == ["prefill0"] * found
    assert long.growth()[1]["prefill0"] == pytest.approx(factor * GROWTH_LIMIT_BYTES, rel=0.01)
    assert report(JUDGED_FROM).problems == []


def test_traffic_is_the_seeds_and_has_all_that_is_wanted() -> None:
    requests = drawn(400)
    assert requests == drawn(400)
    assert requests != drawn(400, SEED + 1)
    prompts = [request.prompt for request in requests if request.kind != "too long"]
    assert min(map(len, prompts)) < 8
    assert LOGICAL // 2 < max(map(len, prompts)) < LIMIT
    assert all((len(r.prompt) >= LIMIT) == (r.kind == "too long") for r in requests)
    assert len(set(prompts)) < 0.9 * len(prompts)
    assert {request.aborts for request in requests} == {(), SIDES, SIDES[:1], SIDES[1:]}
    assert {request.first for request in requests} == set(SIDES)
    assert {request.chunk for request in requests} == {None, *CHUNKS}
    assert len({request.rid for request in requests}) == len(requests)
    assert len({len(request.rid) for request in requests}) == 1
