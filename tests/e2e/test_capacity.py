"""The capacity identity on a launch of eight ranks, with the figures of a real one."""

from __future__ import annotations

import pytest

from .harness import run
from .prompts import tokens
from .spec import Spec, Step

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

#: Tokens that one of eight H200 ranks was profiled for.
PHYSICAL, CP = 237_312, 8
LOGICAL = 1_898_496


def test_eight_ranks_offer_eight_times_the_tokens_of_one_and_answer_as_stock() -> None:
    prompt = tokens(1100)
    steps = (
        Step("fresh", (prompt,)),
        Step("hit", (prompt + tokens(33),)),
        Step("shorter than the ranks", (tokens(5),)),
    )
    report = run(Spec(steps, CP, True, PHYSICAL))
    assert report.failure is None, f"{report.failure}\n{report.log[-3000:]}"
    capacity = f"logical_tokens={LOGICAL}, physical_tokens_per_rank={PHYSICAL}, cp_size={CP}"
    assert report.log.count(f"CP shared KV scheduler capacity: {capacity}") == CP
    stock = run(Spec(steps, 1, False, 4096))
    assert stock.failure is None, stock.failure
    for name, [answer] in report.answers.items():
        assert answer.ids == stock.answers[name][0].ids
        assert answer.logprobs == stock.answers[name][0].logprobs
