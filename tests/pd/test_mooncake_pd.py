"""Shared KV over Mooncake, byte for byte, between real prefill CP ranks and real decode ranks without a model."""

from __future__ import annotations

import importlib.util

import pytest

from .checks import (
    assert_all_well,
    assert_counters_match_wire,
    assert_failed_once,
    assert_nothing_else_happened,
    assert_served,
)
from .harness import run
from .scenario import ITEM_LEN, LAYERS, PAGE_SIZE, SUCCESS, Report, Request, Scenario, WriteFault

pytestmark = [
    pytest.mark.pd,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("sglang", "mooncake")),
        reason="needs sglang and a build of mooncake",
    ),
]

# The page list of the public report on lost pages (sglang#28718): fragmented and out of order.
PUBLIC_FAULT = (40, 3, 17, 90, 4, 55, 8, 21)
CP_SIZES = (2, 4)


def request(
    room: int,
    pages: tuple[int, ...] | range,
    tokens: int | None = None,
    chunk_ends: tuple[int, ...] = (),
    **rest: int | bool,
) -> Request:
    """A request in one chunk with a partial last page, unless told otherwise; ``chunk_ends`` without the last one."""
    tokens = len(pages) * PAGE_SIZE - 20 if tokens is None else tokens
    ends = (*chunk_ends, tokens) if chunk_ends else ()
    return Request(room, tuple(pages), tokens, ends, **rest)


def alone(cp_size: int, *requests: Request, **rest: object) -> Scenario:
    """The requests one after the other."""
    return Scenario(cp_size, tuple((each,) for each in requests), **rest)


def owned_by(rank: int, cp_size: int, count: int) -> tuple[int, ...]:
    """``count`` logical pages that one rank owns."""
    return tuple(rank + 1 + cp_size * i for i in range(count))


# name -> the request, given the CP size. Each is run at every CP size.
PAGE_LISTS = {
    "the public lost-page list": lambda cp: request(11, PUBLIC_FAULT, tokens=512),
    "the public lost-page list in chunks": lambda cp: request(11, PUBLIC_FAULT, chunk_ends=(192, 320)),
    "ascending": lambda cp: request(11, range(5, 15)),
    "ascending in chunks": lambda cp: request(11, range(5, 15), chunk_ends=(256, 450)),
    "descending": lambda cp: request(11, range(20, 8, -1), chunk_ends=(320,)),
    "one chunk a page": lambda cp: request(11, PUBLIC_FAULT, chunk_ends=tuple(range(64, 449, 64))),
    "chunks that end inside a page": lambda cp: request(11, PUBLIC_FAULT, chunk_ends=(30, 60, 100, 200, 333)),
    "a last chunk of one token": lambda cp: request(11, (9, 2, 30, 41, 6), tokens=257, chunk_ends=(256,)),
    "a full last page": lambda cp: request(11, (9, 2, 30, 41), tokens=256, chunk_ends=(128,)),
    "one page": lambda cp: request(11, (7,), tokens=40),
    "one token": lambda cp: request(11, (7,), tokens=1),
    "all pages of rank 0": lambda cp: request(11, owned_by(0, cp, 8), chunk_ends=(192,)),
    "all pages of the last rank": lambda cp: request(11, owned_by(cp - 1, cp, 8)),
    "a last chunk that one rank owns": lambda cp: request(11, (1, 2, 3, 4, 5), chunk_ends=(256,)),
    "a first chunk that one rank owns": lambda cp: request(11, (*owned_by(1, cp, 3), 9, 20, 31), chunk_ends=(192,)),
    "the largest pages of the pool": lambda cp: request(11, (96, 95, 94, 93, 1)),
}


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("name", PAGE_LISTS)
def test_every_page_reaches_decode_from_its_owner_and_from_nobody_else(name: str, cp_size: int) -> None:
    assert_all_well(run(alone(cp_size, PAGE_LISTS[name](cp_size))))


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_contiguous_destinations_are_not_merged_across_pages_of_other_owners(cp_size: int) -> None:
    report = run(alone(cp_size, request(11, range(1, 17), chunk_ends=(512,)), contiguous_destination=True))
    assert_all_well(report)


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_every_rank_carries_an_even_share_of_a_balanced_request(cp_size: int) -> None:
    report = run(alone(cp_size, request(11, range(1, 17))))
    assert_all_well(report)
    share = 16 // cp_size * LAYERS * ITEM_LEN["kv"]
    assert [rank.traffic.bytes["kv"] for rank in report.prefill] == [share] * cp_size


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("chunk_ends", [(), (192, 320)], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("prefix", [1, 3, 7])
def test_kv_positions_count_from_the_decode_prefix_and_state_positions_from_the_start(
    prefix: int, chunk_ends: tuple[int, ...], cp_size: int
) -> None:
    """With chunks, the prefix ends inside the first chunk, at its end, or after the first two."""
    report = run(alone(cp_size, request(11, PUBLIC_FAULT, chunk_ends=chunk_ends, decode_prefix_pages=prefix)))
    assert_all_well(report)


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_a_prefix_that_covers_the_prompt_sends_state_pages_only(cp_size: int) -> None:
    whole = request(11, PUBLIC_FAULT, tokens=512, chunk_ends=(256,), decode_prefix_pages=8)
    report = run(alone(cp_size, whole))
    assert_all_well(report)
    assert sum(rank.traffic.bytes["kv"] for rank in report.prefill) == 0


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_two_decode_ranks_both_receive_every_page(cp_size: int) -> None:
    long = request(11, PUBLIC_FAULT, chunk_ends=(192, 320))
    prefixed = request(12, range(5, 15), decode_prefix_pages=2)
    assert_all_well(run(alone(cp_size, long, prefixed, decode_tp=2)))


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_a_warm_up_request_sends_nothing_and_a_real_one_after_it_is_served(cp_size: int) -> None:
    warm_up = request(10, PUBLIC_FAULT, fake=True, chunk_ends=(192,))
    report = run(alone(cp_size, warm_up, request(11, PUBLIC_FAULT)))
    assert_all_well(report)


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_rooms_served_at_the_same_time_do_not_mix(cp_size: int) -> None:
    together = (
        request(21, PUBLIC_FAULT, chunk_ends=(192, 320)),
        request(22, (1, 2, 5, 6, 60, 59, 58), chunk_ends=(128, 300)),
        request(23, (77, 76, 12, 11), chunk_ends=(64,), decode_prefix_pages=2),
        request(24, (96,), tokens=1),
        request(25, (30, 31), fake=True),
    )
    assert_all_well(run(Scenario(cp_size, (together,))))


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_pages_used_again_by_later_requests_carry_the_later_bytes(cp_size: int) -> None:
    waves = [request(room, PUBLIC_FAULT, chunk_ends=(192,)) for room in (11, 12, 13)]
    assert_all_well(run(alone(cp_size, *waves)))


# Failed writes. Stock drops a decode session after one failed write and takes it back when decode registers anew, which
# on 0.5.12 happens only when decode has lost the prefill server's heartbeat; that is what ``renew_registration`` does.


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("how", ["error", "refused"])
@pytest.mark.parametrize("nth", [0, 1], ids=["first chunk", "second chunk"])
def test_a_failed_kv_write_on_one_rank_fails_the_request_everywhere_once(nth: int, how: str, cp_size: int) -> None:
    hit = request(11, range(1, 3 * cp_size + 1), chunk_ends=(64 * cp_size, 128 * cp_size))
    after = request(12, PUBLIC_FAULT, renew_registration=True)
    report = run(alone(cp_size, hit, after, fault=WriteFault(cp_size - 1, "kv", nth, how)))
    assert [rank.traffic.faults_fired for rank in report.prefill] == [0] * (cp_size - 1) + [1]
    assert_failed_once(report, hit)
    assert_served(report, after)
    assert_nothing_else_happened(report)


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_after_a_failed_write_requests_fail_fast_until_decode_registers_anew(cp_size: int) -> None:
    """Stock's rule, kept: one failed write and the rank takes the decode session for dead."""
    hit, before = request(11, PUBLIC_FAULT), request(12, PUBLIC_FAULT)
    renewed = request(13, PUBLIC_FAULT, renew_registration=True)
    report = run(alone(cp_size, hit, before, renewed, fault=WriteFault(1, "kv")))
    assert_failed_once(report, hit, before)
    assert "is not alive" in report.prefill[1].outcomes[before.room].error
    assert_served(report, renewed)
    assert_nothing_else_happened(report)


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_a_failed_write_fails_the_request_on_both_decode_ranks(cp_size: int) -> None:
    hit = request(11, PUBLIC_FAULT, chunk_ends=(192,))
    after = request(12, PUBLIC_FAULT, renew_registration=True)
    report = run(alone(cp_size, hit, after, decode_tp=2, fault=WriteFault(0, "kv")))
    assert_failed_once(report, hit)
    assert_served(report, after)
    assert_nothing_else_happened(report)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("how", ["error", "refused"])
@pytest.mark.parametrize("decode_tp", [1, 2])
def test_a_failed_state_write_alone_fails_the_request_everywhere_once(decode_tp: int, how: str, cp_size: int) -> None:
    """Stock ignores what the state transfer returns; see the control below."""
    hit = request(11, PUBLIC_FAULT, chunk_ends=(192,))
    after = request(12, PUBLIC_FAULT, renew_registration=True)
    report = run(alone(cp_size, hit, after, decode_tp=decode_tp, fault=WriteFault(1, "state", 0, how)))
    assert sum(rank.traffic.faults_fired for rank in report.prefill) == 1
    assert_failed_once(report, hit)
    assert_served(report, after)
    assert_nothing_else_happened(report)


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_a_failed_metadata_write_on_one_rank_fails_the_request_everywhere_once(cp_size: int) -> None:
    """Stock keeps the session in this case, so the next request needs no new registration."""
    hit = request(11, PUBLIC_FAULT, chunk_ends=(192,))
    after = request(12, PUBLIC_FAULT)
    report = run(alone(cp_size, hit, after, fault=WriteFault(1, "aux")))
    assert_failed_once(report, hit)
    assert_served(report, after)
    assert_nothing_else_happened(report)


# Destinations that do not fit. Nothing is wrong with the connection, so the next request needs no new registration.

SHORT_LISTS = {
    "one KV page short": {"missing_kv_destinations": 1},
    "KV pages short from the first chunk on": {"missing_kv_destinations": 7},
    "no KV pages at all": {"missing_kv_destinations": 8},
    "one state page short": {"missing_state_destinations": 1},
    "all but one state page short": {"missing_state_destinations": 7},
    "both short": {"missing_kv_destinations": 2, "missing_state_destinations": 2},
    "KV short after a prefix": {"missing_kv_destinations": 1, "decode_prefix_pages": 3},
}


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("chunk_ends", [(), (128, 320)], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("short", SHORT_LISTS)
def test_too_few_destinations_fail_the_request_and_write_nowhere_else(
    short: str, chunk_ends: tuple[int, ...], cp_size: int
) -> None:
    hit = request(11, PUBLIC_FAULT, chunk_ends=chunk_ends, **SHORT_LISTS[short])
    after = request(12, PUBLIC_FAULT)
    report = run(alone(cp_size, hit, after))
    assert_failed_once(report, hit)
    assert_served(report, after)
    assert_nothing_else_happened(report)
    assert_counters_match_wire(report)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("short", ["one KV page short", "one state page short"])
def test_too_few_destinations_fail_the_request_on_both_decode_ranks(short: str, cp_size: int) -> None:
    hit = request(11, PUBLIC_FAULT, chunk_ends=(192,), **SHORT_LISTS[short])
    report = run(alone(cp_size, hit, request(12, PUBLIC_FAULT), decode_tp=2))
    assert_failed_once(report, hit)
    assert_served(report, report.scenario.requests()[1])
    assert_nothing_else_happened(report)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("short", ["one KV page short", "one state page short"])
def test_a_refused_request_leaves_the_rooms_beside_it_alone(short: str, cp_size: int) -> None:
    beside = (
        request(21, (1, 2, 5, 6, 60, 59, 58), chunk_ends=(128, 300)),
        request(23, (77, 76, 12, 11), chunk_ends=(64,)),
    )
    hit = request(22, PUBLIC_FAULT, chunk_ends=(128, 320), **SHORT_LISTS[short])
    report = run(Scenario(cp_size, ((beside[0], hit, beside[1]),)))
    assert_failed_once(report, hit)
    assert_served(report, *beside)
    assert_nothing_else_happened(report)


# Controls: faults that are known to be there must be seen.


def lost_positions(report: Report, room: int, kind: str) -> list[int]:
    return report.decode[0].outcomes[room].wrong_pages[kind]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_control_stock_with_rank_0_alone_sending_is_byte_exact(cp_size: int) -> None:
    """The harness blames nobody without cause."""
    waves = [request(11, PUBLIC_FAULT, chunk_ends=(192,)), request(12, range(5, 15), decode_prefix_pages=2)]
    report = run(alone(cp_size, *waves, transfer="stock", all_cp_ranks_send=False))
    for each in waves:
        assert report.statuses(each.room) == {"prefill": [SUCCESS] * cp_size, "decode": [SUCCESS]}
        assert lost_positions(report, each.room, "kv") == lost_positions(report, each.room, "state") == []
    assert_nothing_else_happened(report)


def test_control_stock_with_all_ranks_sending_is_byte_exact_on_ascending_pages() -> None:
    report = run(alone(4, request(11, range(5, 15)), transfer="stock"))
    assert report.statuses(11) == {"prefill": [SUCCESS] * 4, "decode": [SUCCESS]}
    assert lost_positions(report, 11, "kv") == lost_positions(report, 11, "state") == []


@pytest.mark.parametrize("transfer", ["stock", "undone"])
def test_control_stock_with_all_ranks_sending_loses_pages_21_40_and_55(transfer: str) -> None:
    """Also once the patches are undone: then nothing of them may be left."""
    report = run(alone(4, request(11, PUBLIC_FAULT, tokens=512), transfer=transfer))
    assert report.statuses(11) == {"prefill": [SUCCESS] * 4, "decode": [SUCCESS]}, "stock does not notice"
    assert sorted(PUBLIC_FAULT[position] for position in lost_positions(report, 11, "kv")) == [21, 40, 55]
    with pytest.raises(AssertionError):
        assert_served(report)


def test_control_stock_reports_success_when_the_state_write_failed() -> None:
    report = run(
        alone(1, request(11, PUBLIC_FAULT), transfer="stock", all_cp_ranks_send=False, fault=WriteFault(0, "state"))
    )
    assert report.statuses(11) == {"prefill": [SUCCESS], "decode": [SUCCESS]}
    assert lost_positions(report, 11, "state") == list(range(8))


@pytest.mark.parametrize("kind", ["kv", "state"])
def test_control_stock_clips_destinations_that_are_too_few_and_reports_success(kind: str) -> None:
    short = request(11, PUBLIC_FAULT, **{f"missing_{kind}_destinations": 3})
    report = run(alone(1, short, transfer="stock", all_cp_ranks_send=False))
    assert report.statuses(11) == {"prefill": [SUCCESS], "decode": [SUCCESS]}
    assert lost_positions(report, 11, kind) == [5, 6, 7]
