"""Requests that fail or are aborted: no write outlives its request, both sides end it once, and the next is served.

Decode poisons a failed request's pages anew when it releases them, as if they were another's, and every write is logged
with its times and destinations, so a late one is seen twice (``late_writes``, ``DecodeOutcome.late_pages``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest

from .checks import (
    assert_counters_match_wire,
    assert_failed_on_decode,
    assert_failed_once,
    assert_nothing_else_happened,
    assert_nothing_is_kept,
    assert_served,
    late_writes,
)
from .facts import holds
from .harness import MARKS, run
from .scenario import ABORTED, SUCCESS, Abort, Report, Request, Scenario, SlowWrite, WriteFault

pytestmark = MARKS


@dataclass(frozen=True)
class Case:
    """How one request comes to fail; ``wave`` and ``room`` of its parts are filled in where it is run."""

    faults: tuple[WriteFault, ...] = ()
    slow: tuple[SlowWrite, ...] = ()
    aborts: tuple[Abort, ...] = ()
    late_on: tuple[int, ...] = ()
    pages_of_rank_0: bool = False
    computed: bool = True


def fault(cp_rank: int, kind: str, nth: int = 0, how: str = "error") -> tuple[WriteFault]:
    return (WriteFault(-1, cp_rank, kind, nth, how),)


def slow(cp_rank: int, kind: str, nth: int = 0) -> tuple[SlowWrite]:
    return (SlowWrite(-1, cp_rank, kind, nth, seconds=0.2),)


def abort(when: str, cp_rank: int | None = None) -> tuple[Abort]:
    return (Abort(-1, when, cp_rank),)


# Rank 0 is slow in its first chunk, so that the others of the request are queued when it fails.
SLOW_0 = slow(0, "kv")
CASES = {
    "KV": Case(fault(1, "kv"), SLOW_0),
    "KV, second write": Case(fault(1, "kv", 1), SLOW_0),
    "KV, refused by the engine": Case(fault(1, "kv", how="refused"), SLOW_0),
    "KV, by the slow rank": Case(fault(0, "kv"), SLOW_0),
    "state": Case(fault(1, "state"), SLOW_0),
    "metadata": Case(fault(1, "aux"), SLOW_0),
    "an exception at KV": Case(fault(1, "kv", how="raises"), SLOW_0),
    "an exception at state": Case(fault(1, "state", how="raises"), SLOW_0),
    "an exception at metadata": Case(fault(1, "aux", how="raises"), SLOW_0),
    "an exception while later chunks are queued": Case(fault(1, "kv", how="raises"), slow(1, "kv")),
    "aborted between chunks": Case((), SLOW_0, abort("between chunks")),
    "aborted between chunks, rank 1 first": Case((), SLOW_0, abort("between chunks", 1)),
    "aborted in flight": Case((), SLOW_0, abort("in flight")),
    "aborted in flight, rank 1 first": Case((), SLOW_0, abort("in flight", 1)),
    "aborted in flight, the slow rank first": Case((), SLOW_0, abort("in flight", 0)),
    "KV, and rank 1 has nothing to send": Case(fault(0, "kv"), slow(1, "aux"), pages_of_rank_0=True),
    "aborted in flight, rank 1 first, which has nothing to send": Case(
        (), SLOW_0, abort("in flight", 1), pages_of_rank_0=True
    ),
    "rejected": Case(aborts=abort("rejected"), computed=False),
    "rejected before decode announces itself": Case(aborts=abort("rejected"), late_on=(0, 1), computed=False),
    "aborted while waiting": Case(aborts=abort("waiting"), computed=False),
    "aborted while bootstrapping": Case(aborts=abort("bootstrapping"), computed=False),
    "aborted while bootstrapping, rank 1 first": Case(aborts=abort("bootstrapping", 1), computed=False),
    "aborted before decode announces itself": Case(aborts=abort("bootstrapping"), late_on=(0, 1), computed=False),
    "aborted before decode announces itself, rank 1 first": Case(
        aborts=abort("bootstrapping", 1), late_on=(0, 1), computed=False
    ),
    "aborted before a decode rank announces itself": Case(aborts=abort("bootstrapping"), late_on=(1,), computed=False),
}
# (CP size of prefill, TP size of decode, whether decode has the product's patches)
CLUSTERS = [(2, 1, True), (4, 2, True), (2, 2, False)]
on_clusters = pytest.mark.parametrize(
    ("cp_size", "decode_tp", "on_decode"),
    CLUSTERS,
    ids=[f"cp{cp}-decode_tp{tp}-decode_{'patched' if on else 'stock'}" for cp, tp, on in CLUSTERS],
)
on_patched_clusters = pytest.mark.parametrize(
    ("cp_size", "decode_tp"), [each[:2] for each in CLUSTERS if each[2]], ids=["cp2-decode_tp1", "cp4-decode_tp2"]
)


def three_chunks(room: int, **rest: object) -> Request:
    """Three chunks in each of which every rank owns pages."""
    return Request(room, tuple(range(1, 13)), 748, (256, 512, 748), **rest)


def next_request(room: int) -> Request:
    """On fragmented pages, without a new registration of decode."""
    return Request(room, (40, 3, 17, 90, 4, 55, 8, 21), 500, (192, 500))


def rooms(name: str) -> tuple[int, int]:
    """The room of a case and of the request after it."""
    first = 100 + 2 * list(CASES).index(name)
    return first, first + 1


#: How a request that decode aborts ends on prefill: as if nothing had happened, where nobody tells it.
PREFILL_OF_ABORTED = ABORTED if holds("tells_prefill_of_aborts") else SUCCESS
REOPENED = (three_chunks(200), replace(next_request(201), enters_after=1))
SLOW = three_chunks(210)
SLOW_WRITES = (*slow(1, "kv", 1), *slow(0, "state"), *slow(1, "aux"))
DECODE_ABORTED, BOTH_ABORTED = three_chunks(220), three_chunks(222)
AFTER_DECODE_ABORT = (next_request(221), next_request(223))


@cache
def failing_run(cp_size: int, decode_tp: int, on_decode: bool) -> Report:
    waves: list[tuple[Request, ...]] = []
    faults: list[WriteFault] = []
    slow_writes: list[SlowWrite] = []
    aborts: list[Abort] = []

    def add(hit: Request, case: Case) -> None:
        faults.extend(replace(each, wave=len(waves)) for each in case.faults)
        slow_writes.extend(replace(each, wave=len(waves)) for each in case.slow)
        aborts.extend(replace(each, room=hit.room) for each in case.aborts)
        waves.append((hit,))

    for name, case in CASES.items():
        room, after = rooms(name)
        hit = three_chunks(room, late_on=tuple(rank for rank in case.late_on if rank < decode_tp))
        if case.pages_of_rank_0:
            hit = replace(hit, pages=tuple(1 + cp_size * i for i in range(12)))
        add(hit, case)
        waves.append((next_request(after),))
    faults.append(WriteFault(len(waves), 1, "kv"))
    waves.append((replace(REOPENED[0], pages=tuple(range(60, 72))), REOPENED[1]))
    add(SLOW, Case(slow=SLOW_WRITES))
    if on_decode:
        add(DECODE_ABORTED, Case((), SLOW_0, abort("on decode")))
        waves.append(AFTER_DECODE_ABORT[:1])
        add(BOTH_ABORTED, Case((), SLOW_0, abort("on decode") + abort("in flight")))
        waves.append(AFTER_DECODE_ABORT[1:])
    return run(
        Scenario(
            cp_size,
            tuple(waves),
            decode_tp=decode_tp,
            with_queue=True,
            on_decode=on_decode,
            faults=tuple(faults),
            slow=tuple(slow_writes),
            aborts=tuple(aborts),
        )
    )


def request_of(report: Report, room: int) -> Request:
    return next(each for each in report.scenario.requests() if each.room == room)


@on_clusters
@pytest.mark.parametrize("name", CASES)
def test_a_request_fails_everywhere_once_and_the_next_one_is_served(
    name: str, cp_size: int, decode_tp: int, on_decode: bool
) -> None:
    report, case = failing_run(cp_size, decode_tp, on_decode), CASES[name]
    hit, after = (request_of(report, room) for room in rooms(name))
    wave = next(i for i, each in enumerate(report.scenario.waves) if hit in each)
    fired = [each for rank in report.prefill for each in rank.traffic.faults_fired if each.wave == wave]
    assert len(fired) == len(case.faults)
    assert_failed_once(report, hit, computed=case.computed)
    assert_served(report, after)


@on_clusters
def test_no_write_outlives_its_request_and_nothing_is_kept_of_one(
    cp_size: int, decode_tp: int, on_decode: bool
) -> None:
    report = failing_run(cp_size, decode_tp, on_decode)
    assert_nothing_else_happened(report)
    assert_counters_match_wire(report)


@on_clusters
def test_chunks_queued_behind_one_that_failed_are_never_written(cp_size: int, decode_tp: int, on_decode: bool) -> None:
    """An exception leaves the decode session open, so nothing else holds them back."""
    report = failing_run(cp_size, decode_tp, on_decode)
    room, _ = rooms("an exception while later chunks are queued")
    assert report.prefill[1].traffic.positions(room, "kv") == set()


@on_clusters
def test_a_failed_request_stays_failed_though_another_one_re_opens_the_session(
    cp_size: int, decode_tp: int, on_decode: bool
) -> None:
    """Its first chunk fails on rank 1, the other request arrives, and only then come its later chunks."""
    report = failing_run(cp_size, decode_tp, on_decode)
    hit, other = (request_of(report, each.room) for each in REOPENED)
    assert_failed_once(report, hit)
    assert report.prefill[1].traffic.positions(hit.room, "kv") == set()
    assert_served(report, other)


@on_clusters
def test_slow_writes_are_waited_for(cp_size: int, decode_tp: int, on_decode: bool) -> None:
    report = failing_run(cp_size, decode_tp, on_decode)
    slowed = [each for rank in report.prefill for each in rank.traffic.slowed]
    assert {(each.cp_rank, each.kind, each.nth) for each in slowed} >= {
        (each.cp_rank, each.kind, each.nth) for each in SLOW_WRITES
    }
    assert_served(report, SLOW)


@on_patched_clusters
def test_a_request_aborted_on_decode_keeps_its_pages_until_prefill_has_written_all(
    cp_size: int, decode_tp: int
) -> None:
    report = failing_run(cp_size, decode_tp, True)
    assert report.statuses(DECODE_ABORTED.room)["prefill"] == [PREFILL_OF_ABORTED] * cp_size
    assert_failed_on_decode(report, DECODE_ABORTED)
    assert_served(report, AFTER_DECODE_ABORT[0])


@on_patched_clusters
def test_a_request_aborted_on_both_sides_ends_when_prefill_has_stopped_writing(cp_size: int, decode_tp: int) -> None:
    report = failing_run(cp_size, decode_tp, True)
    assert_failed_once(report, BOTH_ABORTED)
    assert_served(report, AFTER_DECODE_ABORT[1])


def test_pages_that_prefill_never_answers_for_are_given_up_after_the_waiting_timeout_and_another() -> None:
    """The first request is aborted on decode, which is the one timeout, and the second one only waits."""
    timeout_s = 4.0
    report = run(
        Scenario(
            2,
            ((three_chunks(11),), (three_chunks(12),)),
            decode_tp=2,
            with_queue=True,
            on_decode=True,
            slow=(SlowWrite(0, 0, "kv"),),
            aborts=(Abort(11, "on decode"),),
            sabotage="never_answer",
            timeout_s=timeout_s,
        )
    )
    for rank in report.decode:
        held = {room: rank.released[room] - rank.announced[room] for room in (11, 12)}
        assert held[11] >= timeout_s
        assert held[12] >= 2 * timeout_s
        assert [(outcome.streamed, outcome.released) for outcome in rank.outcomes.values()] == [(1, 1)] * 2
        assert "Aborted" in rank.outcomes[11].error
        assert "timed out" in rank.outcomes[12].error
    # The ranks do not give up in the same turn; the first one ends the request on all of them.
    errors = [message for rank in report.decode for message in rank.errors]
    assert all(any(f"has not answered for room {room}" in message for message in errors) for room in (11, 12)), errors
    assert_nothing_is_kept(report)


# Controls on stock: the holes are there, and are seen.


@pytest.mark.skipif(holds("holds_failed_pages"), reason="this release's stock decode waits for prefill itself")
def test_control_stock_prefill_writes_to_pages_that_decode_has_given_away_after_a_failure_on_another_rank() -> None:
    report = run(
        Scenario(
            2,
            ((three_chunks(11),),),
            transfer="stock",
            faults=(WriteFault(0, 1, "kv"),),
            slow=(SlowWrite(0, 0, "kv", seconds=1.0),),
        )
    )
    assert report.statuses(11) == {"prefill": [ABORTED] * 2, "decode": [ABORTED]}
    assert any("prefill rank 0 wrote to room 11" in line for line in late_writes(report))
    assert report.decode[0].outcomes[11].late_pages["kv"] != []
    with pytest.raises(AssertionError, match="after its release"):
        assert_failed_once(report, *report.scenario.requests())
    with pytest.raises(AssertionError, match="after its release"):
        assert_nothing_else_happened(report)


@pytest.mark.skipif(holds("holds_failed_pages"), reason="this release's stock decode waits for prefill itself")
def test_control_stock_decode_gives_pages_away_at_an_abort_though_prefill_still_writes() -> None:
    report = run(
        Scenario(
            2,
            ((three_chunks(11),),),
            with_queue=True,
            slow=(SlowWrite(0, 0, "kv", seconds=1.0),),
            aborts=(Abort(11, "on decode"),),
        )
    )
    assert report.statuses(11) == {"prefill": [PREFILL_OF_ABORTED] * 2, "decode": [ABORTED]}
    assert any("prefill rank 0 wrote to room 11" in line for line in late_writes(report))
    assert report.decode[0].outcomes[11].late_pages["kv"] != []
