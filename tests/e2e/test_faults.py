"""Requests that fail or are aborted: they end on every side, nothing is written late, and later answers are exact.

Each scenario ends with ``Stack.assert_unharmed``. Unless a test says otherwise decode runs the plugin too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .spec import Spec
from .stack import BOTH, LONG, PROMPT, Stack, late_writes, spec

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

GUARDED, STOCK_DECODE = spec(guarded=True), spec(guarded=False)
SIDES = [pytest.param(sides, id="+".join(sides)) for sides in (("prefill",), ("decode",), BOTH)]

_stack: Stack | None = None


def _close() -> None:
    global _stack
    if _stack is not None:
        _stack.pair.close()
        _stack = None


@pytest.fixture(scope="module", autouse=True)
def _end_of_module() -> Iterator[None]:
    yield
    _close()


@pytest.fixture
def stack_of() -> Callable[[Spec], Stack]:
    """The pair of engines of a spec, kept from the test before as long as it is at rest."""

    def stack_of(wanted: Spec) -> Stack:
        global _stack
        if _stack is not None and not (_stack.spec == wanted and _stack.ready()):
            _close()
        _stack = _stack or Stack(wanted)
        return _stack

    return stack_of


@pytest.fixture
def stack(stack_of: Callable[[Spec], Stack]) -> Stack:
    return stack_of(GUARDED)


@pytest.mark.parametrize("sides", SIDES)
def test_abort_before_the_other_side_knows_of_the_request(stack: Stack, sides: tuple[str, ...]) -> None:
    first = "decode" if sides == ("decode",) else "prefill"
    request = stack.submit(PROMPT, first)
    stack.wait_for(first, {"prefill": "bootstrap", "decode": "transfer"}[first])
    stack.abort(request, (first,))
    stack.pass_turns()
    other = "prefill" if first == "decode" else "decode"
    stack.submit(PROMPT, other, request=request)
    stack.abort(request, tuple(side for side in sides if side == other))
    stack.assert_ended(request, failed=first == "prefill")
    stack.assert_unharmed()


@pytest.mark.parametrize("sides", SIDES)
def test_abort_while_waiting_to_be_computed(stack: Stack, sides: tuple[str, ...]) -> None:
    stack.pair.order("prefill", hold_batches=True)
    request = stack.submit(PROMPT)
    stack.wait_for("prefill", "waiting")
    stack.abort(request, sides)
    stack.pass_turns()
    stack.pair.order("prefill", hold_batches=False)
    stack.assert_ended(request, failed="prefill" in sides)
    stack.assert_unharmed()


@pytest.mark.parametrize("sides", SIDES)
def test_abort_between_chunks(stack: Stack, sides: tuple[str, ...]) -> None:
    request = stack.submit(LONG)
    stack.wait_for("prefill", "chunked")
    stack.abort(request, sides)
    stack.assert_ended(request, failed=False)
    stack.assert_unharmed()


@pytest.mark.parametrize("sides", SIDES)
def test_abort_while_one_rank_still_writes(stack: Stack, sides: tuple[str, ...]) -> None:
    _abort_during_a_write(stack, sides)


def _abort_during_a_write(stack: Stack, sides: tuple[str, ...]) -> None:
    """Have rank 1 held in its first write when the client goes away."""
    stack.pair.order("prefill", faults=[{"do": "hold", "rank": 1}])
    request = stack.submit(PROMPT)
    stack.wait_for("prefill", "inflight")
    stack.wait_for_write(1)
    stack.abort(request, sides)
    stack.pass_turns()
    stack.pair.order("prefill", faults=[])
    stack.assert_ended(request, failed=sides != ("decode",))
    stack.assert_unharmed()


@pytest.mark.parametrize("phase", ["bootstrap", "waiting", "inflight"])
def test_abort_that_one_rank_sees_first(stack: Stack, phase: str) -> None:
    stack.pair.order("prefill", hold_batches=phase == "waiting", faults=[{"do": "hold", "rank": 0}])
    request = stack.submit(PROMPT, *(BOTH if phase != "bootstrap" else ("prefill",)))
    stack.wait_for("prefill", phase)
    if phase == "inflight":
        stack.wait_for_write(0)
    stack.pair.order("prefill", abort_on_rank=[1, request.rid])
    stack.pair.order("prefill", hold_batches=False)
    if phase == "waiting":
        stack.wait_for_write(0)
    stack.pass_turns()
    stack.pair.order("prefill", faults=[])
    if phase == "bootstrap":
        stack.submit(PROMPT, "decode", request=request)
    stack.assert_ended(request, failed=True)
    stack.assert_unharmed()


@pytest.mark.parametrize("kind", ["kv", "state", "aux"])
def test_failed_write_of_one_rank_while_another_still_writes(stack: Stack, kind: str) -> None:
    _disturb_a_write(stack, "fail", kind, 2 if kind == "kv" else 1)


def test_exception_in_the_transfer_thread_of_one_rank(stack: Stack) -> None:
    _disturb_a_write(stack, "raise", "kv", 2)


def _disturb_a_write(stack: Stack, do: str, kind: str, nth: int) -> None:
    """Have one write fail on rank 1 while rank 0 is held in its own."""
    faults = [{"do": do, "rank": 1, "kind": kind, "nth": nth}, {"do": "hold", "rank": 0, "kind": kind, "nth": nth}]
    stack.pair.order("prefill", faults=faults)
    request = stack.submit(PROMPT)
    stack.wait_for_write(0, kind)
    stack.pass_turns()
    stack.pair.order("prefill", faults=[])
    stack.assert_ended(request, failed=True)
    stack.assert_unharmed()


def test_position_beyond_the_pages_of_decode_on_one_rank(stack: Stack) -> None:
    stack.pair.order("prefill", breaks="range", faults=[])
    request = stack.submit(PROMPT)
    answers = [stack.answer(request, side) for side in BOTH]
    stack.pair.order("prefill")
    assert None not in answers
    stack.assert_ended(request, failed=True)
    stack.assert_unharmed()


def test_slow_rank_changes_no_answer(stack: Stack) -> None:
    stack.pair.order("prefill", faults=[{"do": "slow", "rank": 1, "seconds": 0.7}])
    request = stack.submit(PROMPT)
    assert stack.answer(request, "decode") == stack.clean[PROMPT]
    stack.pair.order("prefill", faults=[])
    stack.assert_unharmed()


def test_decode_that_has_waited_too_long_keeps_the_pages_until_prefill_has_answered(stack: Stack) -> None:
    stack.pair.order("prefill", faults=[{"do": "hold", "rank": 1}])
    request = stack.submit(PROMPT)
    stack.wait_for_write(1)
    stack.pair.order("decode", overdue=True)
    stack.pass_turns()
    stack.pair.order("prefill", faults=[])
    answer = stack.answer(request, "decode")
    assert answer is not None
    assert answer.error is not None
    stack.assert_unharmed()


def test_killed_prefill_rank_ends_the_server_and_decode_serves_the_next_one(stack: Stack) -> None:
    pair = stack.pair
    pair.order("prefill", faults=[{"do": "hold", "rank": rank} for rank in (0, 1)])
    request = stack.submit(PROMPT)
    stack.wait_for_write(1)
    pair.kill_process(pair.order("prefill")[1]["pid"])
    assert pair.exit_code("prefill", 60) not in (None, 0)
    answer = stack.answer(request, "decode")
    assert answer is not None
    assert answer.error is not None
    pair.start("prefill")
    stack.assert_unharmed()


def test_killed_decode_fails_its_request_on_prefill_which_serves_the_next_one(stack: Stack) -> None:
    pair = stack.pair
    pair.order("prefill", faults=[{"do": "hold", "rank": 1}])
    request = stack.submit(PROMPT)
    stack.wait_for_write(1)
    pair.kill("decode")
    pair.start("decode")
    pair.order("prefill", faults=[])
    answer = stack.answer(request, "prefill")
    assert answer is not None
    assert answer.error is not None
    stack.assert_unharmed()


def test_stock_decode_is_not_written_to_late_when_a_write_fails(stack_of: Callable[[Spec], Stack]) -> None:
    _disturb_a_write(stack_of(STOCK_DECODE), "fail", "kv", 2)


def test_stock_decode_is_not_written_to_late_when_prefill_aborts(stack_of: Callable[[Spec], Stack]) -> None:
    _abort_during_a_write(stack_of(STOCK_DECODE), ("prefill",))


def test_stock_decode_that_aborts_is_seen_to_be_written_to_late(stack_of: Callable[[Spec], Stack]) -> None:
    """What the plugin on the decode side is for, and that the other tests would notice its absence."""
    stack = stack_of(STOCK_DECODE)
    stack.pair.order("prefill", faults=[{"do": "hold", "rank": 1}])
    request = stack.submit(PROMPT)
    stack.wait_for_write(1)
    stack.abort(request, ("decode",))
    assert stack.answer(request, "decode") is not None
    stack.pair.order("prefill", faults=[])
    assert stack.answer(request, "prefill") is not None
    assert late_writes(stack.assert_at_rest()) != []
