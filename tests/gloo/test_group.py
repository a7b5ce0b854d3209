"""Ranks that are not alike are stopped: wrong order, other capacity, other allocations."""

from __future__ import annotations

import pytest

from .ranks import call
from .worker import PAGE

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]


def test_self_check_passes_on_a_sound_group() -> None:
    assert call("collectives_self_check", 4, order=[0, 1, 2, 3]) == [None] * 4


def test_self_check_sees_ranks_in_the_wrong_order() -> None:
    said = call("collectives_self_check", 2, order=[1, 0])
    assert all("attention-CP process group is broken or its ranks are out of order" in text for text in said)


def test_ranks_that_agree_on_capacity_go_on() -> None:
    assert call("agreement", 2, figures=[1024, 1024]) == [None, None]


def test_ranks_that_disagree_on_capacity_stop_and_say_who_has_what() -> None:
    for text in call("agreement", 4, figures=[1024, 1024, 960, 1024]):
        assert "disagree, so they cannot share a KV cache" in text
        assert "attention-CP rank 2: {'physical_tokens_per_rank': 960}" in text
        assert "--max-total-tokens" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("context_len", [1, 6000, 131072])
@pytest.mark.parametrize("prefetch", [False, True])
def test_pages_are_charged_what_the_workspace_takes(dtype: str, context_len: int, prefetch: bool) -> None:
    arguments = {"available": 10**9, "dtype": dtype, "context_len": context_len, "prefetch": prefetch}
    for left, taken in call("charge", 2, **arguments):
        assert left == 10**9 - taken


def test_a_workspace_that_does_not_fit_stops_the_launch_and_says_what_to_change() -> None:
    for layers in (1, 2):
        arguments = {"available": 10**6, "dtype": "bfloat16", "context_len": 131072, "prefetch": layers == 2}
        for text, taken in call("charge", 2, **arguments):
            workspace = f"{taken} bytes for its workspace ({layers} layers of one context of 131072 tokens)"
            assert f"needs {workspace} but only 1000000 bytes" in text
            assert "--mem-fraction-static" in text
            assert "--context-length" in text
            assert ("CP_SHARED_KV_PREFETCH=0" in text) == (layers == 2)


def test_the_gathers_own_communicator_waits_as_long_as_the_servers_others() -> None:
    assert call("communicator_timeout", 2, seconds=4321.0) == [4321.0] * 2
    assert call("communicator_timeout", 2, seconds=None)[0] > 60


SAME = [[1, 2, 3], [4, 5], [6]]


def test_ranks_that_allocate_alike_go_on() -> None:
    assert call("divergence", 4, pages=[SAME] * 4, every=1) == [(0, None)] * 4


def test_ranks_that_allocate_differently_stop_and_say_who_and_by_how_much() -> None:
    other = [[1, 2, 3], [4, 7], [6]]
    for forward, text in call("divergence", 4, pages=[SAME, SAME, other, SAME], every=1):
        assert forward == 2
        assert "attention-CP rank 2" in text
        assert "1 of 2 pages differ from rank 0" in text


def test_a_difference_is_seen_at_the_next_comparison() -> None:
    other = [[9, 2, 3], [4, 5], [6]]
    assert [forward for forward, _ in call("divergence", 2, pages=[SAME, other], every=3)] == [3, 3]


def test_comparison_can_be_turned_off() -> None:
    assert call("divergence", 2, pages=[SAME, [[8], [8], [8]]], every=0) == [(0, None)] * 2


@pytest.mark.parametrize(
    ("admitted", "tokens", "said"),
    [
        ([], 100 * PAGE, "asked stock"),
        ([3 * PAGE], 4 * PAGE, "asked stock"),
        ([3 * PAGE], 4 * PAGE + 1, "OTHER"),
        ([1, 1, 1, 1, 1, 1], 1, "asked stock"),
        ([1, 1, 1, 1, 1, 1, 1], 1, "OTHER"),
    ],
)
def test_a_request_joins_a_batch_while_the_pages_of_all_fit_in_the_workspace(
    admitted: list[int], tokens: int, said: str
) -> None:
    assert call("admission", 1, admitted=admitted, tokens=tokens) == [said]
