"""Prompts at and beyond the capacity: served, or refused at once on both sides; the server lives on."""

from __future__ import annotations

import json

import pytest

from .harness import run
from .prompts import tokens
from .spec import Report, Spec, Step

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PHYSICAL, CP = 1024, 2
LOGICAL = PHYSICAL * CP
#: SGLang's prefill budget: prompt + 1 + a page below the capacity; see `longest_schedulable_input`.
LIMIT = LOGICAL - 64 - 2

_inside, _longest, _refused, _beyond = tokens(300), tokens(LIMIT - 1), tokens(LIMIT), tokens(LOGICAL + 500)

STEPS = (
    Step("inside", (_inside,)),
    Step("more than one rank's pool", (tokens(PHYSICAL + 200),)),
    Step("longest that fits", (_longest,)),
    Step("within a page of the capacity", (_refused,)),
    Step("beyond the capacity", (_beyond,)),
    Step("beyond, among others", (_inside + tokens(20), _beyond, _inside + tokens(30))),
    Step("inside again", (_inside,)),
    # A client whose prompt was refused, and whose decode request never came, tries again with a shorter one.
    Step("refused, decode unaware", (_beyond,), sides=("prefill",), room=7),
    Step("same room again", (_inside + tokens(40),), room=7),
    Step("after the same room", (_inside + tokens(50),), server_info=True),
)


@pytest.fixture(scope="module")
def shared() -> Report:
    report = run(Spec(STEPS, CP, True, PHYSICAL, dump=True))
    assert report.failure is None, f"{report.failure}\n{report.log[-3000:]}"
    return report


@pytest.fixture(scope="module")
def stock() -> Report:
    # Stock serves the refused prompt's one-token stand-in, which would wait for a decode side that never comes.
    report = run(Spec(tuple(step for step in STEPS if "decode" in step.sides), CP, False, 4096))
    assert report.failure is None, f"{report.failure}\n{report.log[-3000:]}"
    return report


@pytest.mark.parametrize("step", ["inside", "more than one rank's pool", "longest that fits", "inside again"])
def test_prompts_up_to_the_limit_are_served_exactly(shared: Report, stock: Report, step: str) -> None:
    assert shared.answers[step] == stock.answers[step]
    assert shared.answers[step][0].error is None


@pytest.mark.parametrize("step", ["within a page of the capacity", "beyond the capacity"])
def test_longer_prompts_get_an_error_that_names_the_limit_and_decode_fails_them_too(shared: Report, step: str) -> None:
    [prefill], [decode] = shared.prefill_answers[step], shared.answers[step]
    assert prefill.error is not None
    assert f"maximum allowed length ({LIMIT} tokens)" in prefill.error
    assert decode.error is not None
    assert decode.ids == []


def test_a_refused_prompt_does_not_disturb_those_beside_it(shared: Report, stock: Report) -> None:
    first, refused, last = shared.answers["beyond, among others"]
    assert refused.error is not None
    assert [first, last] == [stock.answers["beyond, among others"][i] for i in (0, 2)]


def test_a_refused_room_can_be_used_again_and_the_server_lives_on(shared: Report, stock: Report) -> None:
    assert shared.prefill_answers["refused, decode unaware"][0].error is not None
    again = shared.answers["same room again"][0]
    # Should decode announce itself before prefill knows of the request, the room counts as the refused one's.
    assert again.error is not None or again == stock.answers["same room again"][0]
    assert shared.answers["after the same room"] == stock.answers["after the same room"]


def test_server_info_names_the_logical_capacity_and_carries_the_decision_as_text(shared: Report) -> None:
    info = shared.server_info["after the same room"]
    assert info["max_total_num_tokens"] == LOGICAL
    [state] = info["internal_states"]
    assert '"cp_size": 2' in state["_cp_shared_kv_decision"]
    json.dumps(state["_cp_shared_kv_decision"])


def test_nothing_is_lost_after_refusals(shared: Report) -> None:
    for dump in list(shared.dumps.values())[-1]:
        assert dump["available"] + dump["evictable"] == LOGICAL


def test_start_up_reports_physical_and_logical_capacity(shared: Report) -> None:
    enabled = (
        f"CP shared KV enabled. physical_tokens_per_rank={PHYSICAL}, logical_tokens={LOGICAL}, cp_size={CP}, "
        "shard_policy=page_interleaved"
    )
    scheduler = (
        f"CP shared KV scheduler capacity: logical_tokens={LOGICAL}, physical_tokens_per_rank={PHYSICAL}, cp_size={CP}"
    )
    assert shared.log.count(enabled) == CP
    assert shared.log.count(scheduler) == CP


def test_each_request_is_logged_with_its_pages_per_rank(shared: Report) -> None:
    pages = [line for line in shared.log.splitlines() if "CP shared KV transfer: rank=" in line]
    served = 6 + 2  # requests that were not refused
    assert len(pages) == served * CP
