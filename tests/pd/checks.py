"""What must hold after a run, as assertions over a Report; every test of this package is made of these."""

from __future__ import annotations

from .prefill import owner_and_physical
from .scenario import ABORTED, ITEM_LEN, KINDS, LAYERS, SUCCESS, DecodeReport, PrefillReport, Report, Request, Write


def assert_served(report: Report, *requests: Request) -> None:
    """Each request (all of the scenario by default) ended well on every rank and its pages are right, byte by byte.

    Every CP rank sent exactly the pages that it owns, every layer of them once to each decode rank: the union over
    ranks is what decode asked for and no page crossed the wire twice.
    """
    for request in requests or report.scenario.requests():
        room = request.room
        for rank in report.prefill:
            outcome = rank.outcomes[room]
            assert outcome.status == SUCCESS, f"room {room}, prefill rank {rank.cp_rank}: {outcome}"
            assert (outcome.streamed, outcome.released) == (1, 1), (
                f"room {room}, prefill rank {rank.cp_rank}: {outcome}"
            )
        if not request.fake:
            _assert_pages_arrived(report, room)
        _assert_owners_sent(report, request)


def _assert_pages_arrived(report: Report, room: int) -> None:
    for rank in report.decode:
        outcome = rank.outcomes[room]
        assert outcome.status == SUCCESS, f"room {room}, decode rank {rank.tp_rank}: {outcome}"
        assert outcome.wrong_pages == {kind: [] for kind in KINDS}, (
            f"room {room}, decode rank {rank.tp_rank}: wrong pages {outcome.wrong_pages}"
        )
        assert outcome.error == "", f"room {room}, decode rank {rank.tp_rank}: {outcome.error}"


def _assert_owners_sent(report: Report, request: Request) -> None:
    cp_size = report.scenario.cp_size
    for kind in KINDS:
        expected = request.positions_to_send(kind)
        sent = [rank.traffic.positions(request.room, kind) for rank in report.prefill]
        assert set().union(*sent) == expected, f"room {request.room}: {kind} positions sent {sent}, asked {expected}"
        assert sum(map(len, sent)) == len(expected), f"room {request.room}: {kind} positions sent twice: {sent}"
        for rank, positions in zip(report.prefill, sent, strict=True):
            owned = {p for p in expected if owner_and_physical(request.pages[p], cp_size)[0] == rank.cp_rank}
            assert positions == owned, f"room {request.room}: rank {rank.cp_rank} sent {kind} {positions}, owns {owned}"
            if owned:
                times = rank.traffic.pages[request.room][kind]
                once_each = {(layer, p): report.scenario.decode_tp for layer in range(LAYERS) for p in owned}
                assert dict(times) == once_each, f"room {request.room}: rank {rank.cp_rank} sent {kind} {dict(times)}"


def assert_failed_once(report: Report, *requests: Request, computed: bool = True) -> None:
    """Each request failed on every rank of both sides, once, in time, and left only right or untouched pages.

    A side that learns of the failure by its own time limit counts as hung, not as failed.

    Args:
        computed: whether prefill had pages for the request; one that ends before has none to release.
    """
    for request in requests:
        for rank in report.prefill:
            outcome = rank.outcomes[request.room]
            assert outcome.status == ABORTED, f"prefill rank {rank.cp_rank}: {outcome}"
            assert (outcome.streamed, outcome.released) == (1, int(computed)), f"prefill rank {rank.cp_rank}: {outcome}"
        assert_failed_on_decode(report, request)


def assert_failed_on_decode(report: Report, *requests: Request) -> None:
    """The same for decode alone: prefill may have sent all before it heard."""
    for request in requests:
        for rank in report.decode:
            outcome = rank.outcomes[request.room]
            assert outcome.status == ABORTED, f"decode rank {rank.tp_rank}: {outcome}"
            assert (outcome.streamed, outcome.released) == (1, 1), f"decode rank {rank.tp_rank}: {outcome}"
            assert outcome.wrong_pages == {kind: [] for kind in KINDS}, f"room {request.room} wrote other bytes"
            assert outcome.late_pages == {kind: [] for kind in KINDS}, f"room {request.room} wrote after its release"


def late_writes(report: Report) -> list[str]:
    """Writes that ended when the request whose page, or metadata slot, they go to was already released on a side."""
    decode = {rank.session: rank for rank in report.decode}
    late = []
    for rank in report.prefill:
        for write in rank.traffic.writes:
            to = decode[write.session]
            for room in sorted(_rooms_written_to(write, to)):
                where = f"prefill rank {rank.cp_rank} wrote to room {room} of decode rank {to.tp_rank}"
                for side, released in (("decode", to.released), ("prefill", rank.released)):
                    if write.end > released.get(room, write.end):
                        late.append(f"{where} {write.end - released[room]:.3f} s after its release on {side}")
    return late


def _rooms_written_to(write: Write, decode: DecodeReport) -> set[int]:
    rooms = set()
    for address, length in write.destinations:
        region = next((each for each in decode.regions if each.holds(address, length)), None)
        if region is not None:
            holders = decode.holders[write.wave].get(region.kind, {})
            rooms |= {holders[item] for item in region.items(address, length) if item in holders}
    return rooms


def assert_nothing_is_kept(report: Report) -> None:
    """Neither side keeps anything of a request that is over."""
    for rank in [*report.prefill, *report.decode]:
        left = {wave: kept for wave, kept in rank.leftovers.items() if kept}
        name = f"prefill rank {rank.cp_rank}" if isinstance(rank, PrefillReport) else f"decode rank {rank.tp_rank}"
        assert left == {}, f"{name} still keeps, by wave, {left}"


def assert_nothing_else_happened(report: Report) -> None:
    """Neither in memory nor in state.

    No byte was read outside registered memory, none written to a page of nobody or of a request that is over, no
    transfer thread is lost, and both sides keep nothing of requests that are over.
    """
    late = late_writes(report)
    assert not late, late
    assert_nothing_is_kept(report)
    for rank in report.prefill:
        assert rank.traffic.outside_registered == 0, f"rank {rank.cp_rank} read outside registered memory"
        assert rank.traffic.unknown_pages == [], f"rank {rank.cp_rank} sent pages that hold no request"
        assert rank.workers_alive == rank.workers_started > 0, f"rank {rank.cp_rank} lost a transfer thread"
    for rank in report.decode:
        for wave, clobbered in rank.clobbered.items():
            assert clobbered == {kind: [] for kind in KINDS}, f"wave {wave}, decode rank {rank.tp_rank}"


def assert_bytes_exact(report: Report) -> None:
    """Bytes on the wire, over all ranks: pages x layers x item length x decode ranks; and the product counted them."""
    for kind in KINDS:
        pages = sum(len(request.positions_to_send(kind)) for request in report.scenario.requests())
        expected = pages * LAYERS * ITEM_LEN[kind] * report.scenario.decode_tp
        assert sum(rank.traffic.bytes[kind] for rank in report.prefill) == expected, kind
    assert_counters_match_wire(report)


def assert_counters_match_wire(report: Report) -> None:
    """The product's counters say what the tap on the write call saw; a page counts once, with all its layers."""
    for rank in report.prefill:
        for kind in KINDS:
            assert rank.counters[f"{kind}_bytes_sent"] == rank.traffic.bytes[kind], f"rank {rank.cp_rank}"
            pages = rank.traffic.bytes[kind] // (LAYERS * ITEM_LEN[kind])
            assert rank.counters[f"{kind}_pages_sent"] == pages, f"rank {rank.cp_rank}"


def assert_all_well(report: Report) -> None:
    """Everything above for a scenario in which nothing goes wrong."""
    assert_served(report)
    assert_nothing_else_happened(report)
    assert_bytes_exact(report)
