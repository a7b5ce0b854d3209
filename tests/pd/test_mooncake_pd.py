"""Shared KV over Mooncake, byte for byte, between real prefill CP ranks and real decode ranks without a model.

Requests that belong together are served by one cluster, one wave after the other, so that its start is paid once and a
request also shows that those before it left nothing behind. Each test looks at its own requests of the cached run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from cp_shared_kv.releases import installed

from .checks import (
    assert_bytes_exact,
    assert_counters_match_wire,
    assert_failed_once,
    assert_nothing_else_happened,
    assert_served,
)
from .facts import holds
from .harness import MARKS, run
from .scenario import ABORTED, HUNG, ITEM_LEN, LAYERS, PAGE_SIZE, SUCCESS, Report, Request, Scenario, WriteFault

pytestmark = MARKS

# The page list of the public report on lost pages (sglang#28718): fragmented and out of order.
PUBLIC_FAULT = (40, 3, 17, 90, 4, 55, 8, 21)
# (CP size of prefill, TP size of decode)
CLUSTERS = [(2, 1), (4, 1), (2, 2), (4, 2)]
on_every_cluster = pytest.mark.parametrize(
    ("cp_size", "decode_tp"), CLUSTERS, ids=[f"cp{cp}-decode_tp{tp}" for cp, tp in CLUSTERS]
)


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


# Sound requests.


@cache
def page_lists(cp_size: int) -> dict[str, Request]:
    """Single requests by name."""
    one_rank = {
        "all pages of rank 0": request(14, owned_by(0, cp_size, 8), chunk_ends=(192,)),
        "all pages of the last rank": request(15, owned_by(cp_size - 1, cp_size, 8)),
        "a last chunk that one rank owns": request(16, (1, 2, 3, 4, 5), chunk_ends=(256,)),
        "a first chunk that one rank owns": request(17, (*owned_by(1, cp_size, 3), 9, 20, 31), chunk_ends=(192,)),
    }
    return one_rank | {
        "the public lost-page list": request(20, PUBLIC_FAULT, tokens=512),
        "the public lost-page list in chunks": request(21, PUBLIC_FAULT, chunk_ends=(192, 320)),
        "ascending": request(22, range(5, 15)),
        "ascending in chunks": request(23, range(5, 15), chunk_ends=(256, 450)),
        "descending": request(24, range(20, 8, -1), chunk_ends=(320,)),
        "one chunk a page": request(25, PUBLIC_FAULT, chunk_ends=tuple(range(64, 449, 64))),
        "chunks that end inside a page": request(26, PUBLIC_FAULT, chunk_ends=(30, 60, 100, 200, 333)),
        "a last chunk of one token": request(27, (9, 2, 30, 41, 6), tokens=257, chunk_ends=(256,)),
        "a full last page": request(28, (9, 2, 30, 41), tokens=256, chunk_ends=(128,)),
        "one page": request(29, (7,), tokens=40),
        "one token": request(30, (7,), tokens=1),
        "the largest pages of the pool": request(31, (96, 95, 94, 93, 1)),
    }


PREFIXES = {
    f"{pages} pages, {name}": request(
        40 + 10 * pages + len(ends), PUBLIC_FAULT, chunk_ends=ends, decode_prefix_pages=pages
    )
    for pages in ((1, 3, 7) if holds("heeds_decode_prefix") else ())
    for name, ends in {"one chunk": (), "chunks": (192, 320)}.items()
}
WHOLE_PREFIX = request(200, PUBLIC_FAULT, tokens=512, chunk_ends=(256,), decode_prefix_pages=8)
BALANCED = request(201, range(1, 17))
WARM_UP = request(202, PUBLIC_FAULT, fake=True, chunk_ends=(192,))
AFTER_WARM_UP = request(203, PUBLIC_FAULT)
TOGETHER = (
    request(211, PUBLIC_FAULT, chunk_ends=(192, 320)),
    request(212, (1, 2, 5, 6, 60, 59, 58), chunk_ends=(128, 300)),
    request(213, (77, 76, 12, 11), chunk_ends=(64,), decode_prefix_pages=2 * holds("heeds_decode_prefix")),
    request(214, (96,), tokens=1),
    request(215, (30, 31), fake=True),
)


@cache
def sound_run(cp_size: int, decode_tp: int) -> Report:
    lists = page_lists(cp_size).values()
    prefixes = (*PREFIXES.values(), WHOLE_PREFIX) if PREFIXES else ()
    singles = (*lists, *prefixes, BALANCED, WARM_UP, AFTER_WARM_UP)
    return run(Scenario(cp_size, (*((each,) for each in singles), TOGETHER), decode_tp=decode_tp))


@on_every_cluster
@pytest.mark.parametrize("name", page_lists(2))
def test_every_page_reaches_decode_from_its_owner_and_from_nobody_else(name: str, cp_size: int, decode_tp: int) -> None:
    assert_served(sound_run(cp_size, decode_tp), page_lists(cp_size)[name])


@on_every_cluster
@pytest.mark.parametrize("name", PREFIXES)
def test_kv_positions_count_from_the_decode_prefix_and_state_positions_from_the_start(
    name: str, cp_size: int, decode_tp: int
) -> None:
    """In chunks, the prefix ends inside the first one, at its end, or inside the last one."""
    assert_served(sound_run(cp_size, decode_tp), PREFIXES[name])


@pytest.mark.skipif(not PREFIXES, reason="Mooncake's prefill side of this release heeds no prefix on decode")
@on_every_cluster
def test_a_prefix_that_covers_the_prompt_sends_state_pages_at_most(cp_size: int, decode_tp: int) -> None:
    report = sound_run(cp_size, decode_tp)
    assert_served(report, WHOLE_PREFIX)
    assert not any(rank.traffic.positions(WHOLE_PREFIX.room, "kv") for rank in report.prefill)


@on_every_cluster
def test_every_rank_carries_an_even_share_of_a_balanced_request(cp_size: int, decode_tp: int) -> None:
    report = sound_run(cp_size, decode_tp)
    assert_served(report, BALANCED)
    for kind in ("kv", "state"):
        assert {len(rank.traffic.positions(BALANCED.room, kind)) for rank in report.prefill} == {16 // cp_size}


@on_every_cluster
def test_a_warm_up_request_ends_well_and_sends_nothing(cp_size: int, decode_tp: int) -> None:
    assert_served(sound_run(cp_size, decode_tp), WARM_UP, AFTER_WARM_UP)


@on_every_cluster
def test_rooms_served_at_the_same_time_do_not_mix(cp_size: int, decode_tp: int) -> None:
    assert_served(sound_run(cp_size, decode_tp), *TOGETHER)


@on_every_cluster
def test_bytes_on_the_wire_are_pages_times_layers_times_item_length(cp_size: int, decode_tp: int) -> None:
    """Over the whole run, and the product's counters of each rank agree."""
    assert_bytes_exact(sound_run(cp_size, decode_tp))


@on_every_cluster
def test_sound_requests_touch_nothing_but_their_own_pages(cp_size: int, decode_tp: int) -> None:
    assert_nothing_else_happened(sound_run(cp_size, decode_tp))


@pytest.mark.parametrize("cp_size", [2, 4])
def test_contiguous_destinations_are_not_written_as_one_block(cp_size: int) -> None:
    """A rank's pages are contiguous in its pool, and their destinations are not, though all of decode's are."""
    report = run(alone(cp_size, request(11, range(1, 17), chunk_ends=(512,)), contiguous_destination=True))
    assert_served(report)
    assert_nothing_else_happened(report)
    assert_bytes_exact(report)


# Writes that fail. Stock takes a decode session for dead after one failed write of KV (of state too, where it heeds
# those), and back when decode registers anew, which happens only when decode has lost and found the prefill server:
# ``renew_registration``.

FAULTS = {
    "KV, first write": WriteFault(0, 1, "kv", 0),
    "KV, second write": WriteFault(0, 1, "kv", 1),
    "KV, third write": WriteFault(0, 1, "kv", 2),
    "KV, refused by the engine": WriteFault(0, 1, "kv", 0, "refused"),
    "KV, rank 0": WriteFault(0, 0, "kv", 0),
    "state": WriteFault(0, 1, "state", 0),
    "state, refused by the engine": WriteFault(0, 1, "state", 0, "refused"),
    "state, rank 0": WriteFault(0, 0, "state", 0),
    "metadata": WriteFault(0, 1, "aux", 0),
}
FAIL_FAST_ROOMS = (90, 91, 92)


def failing_requests(name: str) -> tuple[Request, Request]:
    """The request that the fault hits, three chunks in which every rank owns pages, and the one after it."""
    room = 100 + 2 * list(FAULTS).index(name)
    hit = request(room, range(1, 13), chunk_ends=(256, 512))
    closes_session = ("kv", "state") if installed().heeds_state_failures else ("kv",)
    return hit, request(room + 1, PUBLIC_FAULT, renew_registration=FAULTS[name].kind in closes_session)


@cache
def failing_run(cp_size: int, decode_tp: int) -> Report:
    waves = [each for name in FAULTS for each in failing_requests(name)]
    faults = [
        WriteFault(2 * i, fault.cp_rank, fault.kind, fault.nth, fault.how) for i, fault in enumerate(FAULTS.values())
    ]
    faults.append(WriteFault(len(waves), 1, "kv"))
    hit, refused, renewed = FAIL_FAST_ROOMS
    waves += [request(hit, PUBLIC_FAULT), request(refused, PUBLIC_FAULT)]
    waves += [request(renewed, PUBLIC_FAULT, renew_registration=True)]
    return run(alone(cp_size, *waves, decode_tp=decode_tp, faults=tuple(faults)))


@on_every_cluster
@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_write_on_one_rank_fails_the_request_everywhere_once_and_the_next_one_is_served(
    name: str, cp_size: int, decode_tp: int
) -> None:
    """Stock ignores what the state transfer returns; see its control below."""
    report = failing_run(cp_size, decode_tp)
    hit, after = failing_requests(name)
    wave = 2 * list(FAULTS).index(name)
    fired = [fault for rank in report.prefill for fault in rank.traffic.faults_fired if fault.wave == wave]
    assert len(fired) == 1
    assert_failed_once(report, hit)
    assert_served(report, after)


@on_every_cluster
def test_after_a_failed_kv_write_requests_fail_at_once_until_decode_registers_anew(
    cp_size: int, decode_tp: int
) -> None:
    """Stock's rule, kept."""
    report = failing_run(cp_size, decode_tp)
    hit, refused, renewed = (each for each in report.scenario.requests() if each.room in FAIL_FAST_ROOMS)
    assert_failed_once(report, hit, refused)
    assert "is not alive" in report.prefill[1].outcomes[refused.room].error
    assert_served(report, renewed)


@on_every_cluster
def test_failed_writes_touch_nothing_else_and_stop_no_transfer_thread(cp_size: int, decode_tp: int) -> None:
    report = failing_run(cp_size, decode_tp)
    assert_nothing_else_happened(report)
    assert_counters_match_wire(report)


# Destinations that are too few. Nothing is wrong with the connection, so the next request needs no new registration.

SHORT_LISTS = {
    "one KV page short": {"missing_kv_destinations": 1},
    "KV pages short from the first chunk on": {"missing_kv_destinations": 7},
    "no KV page": {"missing_kv_destinations": 8},
    "one state page short": {"missing_state_destinations": 1},
    "one state page": {"missing_state_destinations": 7},
    "no state page": {"missing_state_destinations": 8},
    "both short": {"missing_kv_destinations": 2, "missing_state_destinations": 2},
}
if PREFIXES:
    SHORT_LISTS["KV short after a prefix"] = {"missing_kv_destinations": 1, "decode_prefix_pages": 3}
SHORT_CHUNKS = {"one chunk": (), "chunks": (128, 320)}
BESIDE = (
    (request(90, (1, 2, 5, 6, 60, 59, 58), chunk_ends=(128, 300)), request(91, (77, 76, 12, 11), chunk_ends=(64,))),
    (request(92, (1, 2, 5, 6, 60, 59, 58), chunk_ends=(128, 300)), request(93, (77, 76, 12, 11), chunk_ends=(64,))),
)
SHORT_BESIDE = (
    request(94, PUBLIC_FAULT, chunk_ends=(128, 320), missing_kv_destinations=1),
    request(95, PUBLIC_FAULT, chunk_ends=(128, 320), missing_state_destinations=1),
)


def short_requests(name: str, chunks: str) -> tuple[Request, Request]:
    """The request with too few destinations and the one after it."""
    room = 100 + 2 * (list(SHORT_LISTS).index(name) * len(SHORT_CHUNKS) + list(SHORT_CHUNKS).index(chunks))
    hit = request(room, PUBLIC_FAULT, chunk_ends=SHORT_CHUNKS[chunks], **SHORT_LISTS[name])
    return hit, request(room + 1, PUBLIC_FAULT)


@cache
def short_run(cp_size: int, decode_tp: int) -> Report:
    waves = [(each,) for name in SHORT_LISTS for chunks in SHORT_CHUNKS for each in short_requests(name, chunks)]
    waves += [(beside[0], hit, beside[1]) for beside, hit in zip(BESIDE, SHORT_BESIDE, strict=True)]
    return run(Scenario(cp_size, tuple(waves), decode_tp=decode_tp))


@on_every_cluster
@pytest.mark.parametrize("chunks", SHORT_CHUNKS)
@pytest.mark.parametrize("name", SHORT_LISTS)
def test_too_few_destinations_fail_the_request_everywhere_once_and_the_next_one_is_served(
    name: str, chunks: str, cp_size: int, decode_tp: int
) -> None:
    report = short_run(cp_size, decode_tp)
    hit, after = short_requests(name, chunks)
    assert_failed_once(report, hit)
    assert_served(report, after)


@on_every_cluster
def test_a_request_with_too_few_destinations_leaves_the_rooms_beside_it_alone(cp_size: int, decode_tp: int) -> None:
    report = short_run(cp_size, decode_tp)
    assert_failed_once(report, *SHORT_BESIDE)
    assert_served(report, *BESIDE[0], *BESIDE[1])


@on_every_cluster
def test_too_few_destinations_make_no_write_elsewhere_and_stop_no_transfer_thread(cp_size: int, decode_tp: int) -> None:
    report = short_run(cp_size, decode_tp)
    assert_nothing_else_happened(report)
    assert_counters_match_wire(report)


@on_every_cluster
def test_each_refused_request_is_counted_once_on_each_rank(cp_size: int, decode_tp: int) -> None:
    report = short_run(cp_size, decode_tp)
    refused = len(SHORT_LISTS) * len(SHORT_CHUNKS) + len(SHORT_BESIDE)
    assert [rank.counters["transfers_refused"] for rank in report.prefill] == [refused] * cp_size


@pytest.mark.parametrize("cp_size", [2, 4])
def test_with_the_queue_patched_such_a_request_is_failed_before_a_byte_is_sent(cp_size: int) -> None:
    hits, afters = zip(*(short_requests(name, "chunks") for name in SHORT_LISTS), strict=True)
    waves = [(hit, after) for hit, after in zip(hits, afters, strict=True)]
    spread = [(hit, replace(after, pages=(1, 2, 5, 6, 60, 59, 58, 57))) for hit, after in waves]
    report = run(Scenario(cp_size, tuple(spread), with_queue=True))
    for hit, after in spread:
        for rank in report.prefill:
            outcome = rank.outcomes[hit.room]
            assert (outcome.status, outcome.streamed, outcome.released) == (ABORTED, 1, 0), outcome
            assert "but decode registered" in outcome.error
        for decode in report.decode:
            assert decode.outcomes[hit.room].status == ABORTED
        assert_served(report, after)
    assert_nothing_else_happened(report)
    assert_counters_match_wire(report)
    for kind in ("kv_pages_sent", "state_pages_sent"):
        assert sum(rank.counters[kind] for rank in report.prefill) == sum(len(after.pages) for _, after in spread)
    assert [rank.counters["transfers_refused"] for rank in report.prefill] == [len(hits)] * cp_size


# Controls on stock: faults that are known to be there must be seen, and nobody be blamed without cause.


def wrong_positions(report: Report, kind: str) -> list[int]:
    """Of the one request of a report, on the first decode rank."""
    (outcome,) = report.decode[0].outcomes.values()
    return outcome.wrong_pages[kind]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_control_stock_with_rank_0_alone_sending_is_byte_exact(cp_size: int) -> None:
    prefix = 2 * bool(PREFIXES)
    waves = [request(11, PUBLIC_FAULT, chunk_ends=(192,)), request(12, range(5, 15), decode_prefix_pages=prefix)]
    report = run(alone(cp_size, *waves, transfer="stock", all_cp_ranks_send=False))
    for each in waves:
        assert report.statuses(each.room) == {"prefill": [SUCCESS] * cp_size, "decode": [SUCCESS]}
        assert report.decode[0].outcomes[each.room].wrong_pages == {"kv": [], "state": []}
    assert_nothing_else_happened(report)


def test_control_stock_with_all_ranks_sending_is_byte_exact_on_ascending_pages() -> None:
    report = run(alone(4, request(11, range(5, 15)), transfer="stock"))
    assert report.statuses(11) == {"prefill": [SUCCESS] * 4, "decode": [SUCCESS]}
    assert wrong_positions(report, "kv") == wrong_positions(report, "state") == []


@pytest.mark.parametrize("transfer", ["stock", "undone"])
def test_stock_with_all_ranks_sending_loses_pages_21_40_and_55_where_the_row_says_so(transfer: str) -> None:
    """Also when the patches were applied and undone: then the transfer does what stock does."""
    lost = [21, 40, 55] if installed().stock_loses_pages else []
    report = run(alone(4, request(11, PUBLIC_FAULT, tokens=512), transfer=transfer))
    assert report.statuses(11) == {"prefill": [SUCCESS] * 4, "decode": [SUCCESS]}, "stock does not notice"
    assert sorted(PUBLIC_FAULT[position] for position in wrong_positions(report, "kv")) == lost
    assert sorted(PUBLIC_FAULT[p] for p in report.decode[0].outcomes[11].untouched_pages["kv"]) == lost
    if lost:
        with pytest.raises(AssertionError, match="decode rank 0"):
            assert_served(report)


def test_shared_kv_with_all_ranks_sending_loses_no_page_of_the_public_list() -> None:
    report = run(alone(4, request(11, PUBLIC_FAULT, tokens=512), request(12, PUBLIC_FAULT, chunk_ends=(192, 320))))
    assert_served(report)
    assert report.decode[0].outcomes[11].untouched_pages == {"kv": [], "state": []}


def test_control_stock_reports_success_when_the_state_write_failed_where_the_row_says_so() -> None:
    fault = WriteFault(0, 0, "state")
    report = run(alone(1, request(11, PUBLIC_FAULT), transfer="stock", all_cp_ranks_send=False, faults=(fault,)))
    if installed().heeds_state_failures:
        assert report.statuses(11) == {"prefill": [ABORTED], "decode": [ABORTED]}
        return
    assert report.statuses(11) == {"prefill": [SUCCESS], "decode": [SUCCESS]}
    assert wrong_positions(report, "state") == list(range(8))


@pytest.mark.parametrize("kind", ["kv", "state"])
def test_control_stock_clips_destinations_that_are_too_few_and_reports_success(kind: str) -> None:
    short = request(11, PUBLIC_FAULT, **{f"missing_{kind}_destinations": 3})
    report = run(alone(1, short, transfer="stock", all_cp_ranks_send=False))
    assert report.statuses(11) == {"prefill": [SUCCESS], "decode": [SUCCESS]}
    assert wrong_positions(report, kind) == [5, 6, 7]


# Controls on the product, one mechanism broken at a time (``sabotage``). The pages are small, so that page numbers
# taken for those of another rank stay inside its pool and show as wrong bytes rather than as a crash.

SMALL_PAGES = (14, 3, 17, 20, 4, 11, 8, 21)


def broken_run(sabotage: str, broken: Request | None = None, **rest: object) -> Report:
    return run(alone(4, broken or request(11, SMALL_PAGES, chunk_ends=(192,)), sabotage=sabotage, **rest))


@pytest.mark.parametrize(
    ("sabotage", "kind", "wrong"),
    [
        ("shift_kv_positions", "kv", list(range(8))),
        ("shift_state_positions", "state", list(range(8))),
        ("skip_the_state_filter", "state", list(range(8))),
        ("one_rank_sends_nothing", "kv", [0]),
        ("count_owners_from_page_0", "kv", list(range(8))),
        ("count_owners_from_page_0", "state", list(range(8))),
    ],
)
def test_control_a_broken_page_selection_shows_as_wrong_pages(sabotage: str, kind: str, wrong: list[int]) -> None:
    report = broken_run(sabotage)
    assert report.statuses(11) == {"prefill": [SUCCESS] * 4, "decode": [SUCCESS]}, "nobody but the oracle notices"
    assert wrong_positions(report, kind) == wrong
    with pytest.raises(AssertionError):
        assert_served(report)


def test_control_pages_sent_by_ranks_that_do_not_own_them_are_seen_on_the_wire() -> None:
    report = broken_run("skip_the_state_filter")
    sent = sum(rank.traffic.bytes["state"] for rank in report.prefill)
    assert sent == 4 * 8 * LAYERS * ITEM_LEN["state"], "each rank sent all pages"
    with pytest.raises(AssertionError):
        assert_bytes_exact(report)


def test_control_a_rank_that_never_sees_the_last_chunk_shows_as_hung() -> None:
    report = broken_run("filter_before_the_sender_counts", timeout_s=3.0)
    assert report.statuses(11) == {"prefill": [HUNG] * 4, "decode": [HUNG]}
    with pytest.raises(AssertionError):
        assert_served(report)


def test_positions_out_of_range_that_nobody_checked_fail_the_request_and_stop_no_transfer_thread() -> None:
    """Stock's transfer thread ends with such an exception, and every later request of its queue hangs."""
    short = request(11, SMALL_PAGES, missing_kv_destinations=3)
    after = request(12, SMALL_PAGES, chunk_ends=(192,))
    report = run(alone(4, short, after, sabotage="skip_the_position_check"))
    assert any("IndexError" in rank.outcomes[short.room].error for rank in report.prefill)
    assert_failed_once(report, short)
    assert_served(report, after)
    assert_nothing_else_happened(report)


def test_control_a_failed_state_write_that_is_ignored_shows_as_success_with_wrong_pages() -> None:
    if installed().heeds_state_failures:
        pytest.skip("nothing of the product's is in the way: stock of this release fails such a request")
    report = broken_run("ignore_failed_state_writes", faults=(WriteFault(0, 1, "state"),))
    assert report.statuses(11) == {"prefill": [SUCCESS] * 4, "decode": [SUCCESS]}
    assert wrong_positions(report, "state") == [0]
    with pytest.raises(AssertionError, match="SUCCESS"):
        assert_failed_once(report, *report.scenario.requests())


def test_control_counters_that_differ_from_the_wire_are_seen() -> None:
    report = broken_run("count_pages_twice")
    assert_served(report)
    with pytest.raises(AssertionError):
        assert_counters_match_wire(report)
