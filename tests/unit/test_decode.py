"""When a decode server gives the pages of a request away that ended early; SGLang's classes are stand-ins here."""

from __future__ import annotations

import sys
import time
import types
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from standins import KVPoll

from cp_shared_kv.patches import decode

ROOM = 7
W = 300


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    conn = types.ModuleType("sglang.srt.disaggregation.base.conn")
    conn.KVPoll = KVPoll  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, conn.__name__, conn)
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "time", clock)
    return clock


class Socket:
    """Hands out messages, in the frames of SGLang's status messages."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []

    def recv_multipart(self) -> list[bytes]:
        return self.messages.pop(0)


def made() -> tuple[Any, Any]:
    """A decode manager with the product's state, and a receiver that has announced itself just now."""
    manager = SimpleNamespace(
        server_socket=Socket(),
        waiting_timeout=W,
        prefill_response_tracker=defaultdict(set),
        addr_to_rooms_tracker={"prefill": {ROOM}},
    )
    decode._manager_init(lambda *args: None, manager, ("kv_args", SimpleNamespace(value="decode")), {})
    manager.request_status[ROOM] = KVPoll.WaitingForInput
    manager.request_status[ROOM] = KVPoll.Failed
    manager.required_prefill_response_num_table[ROOM] = 2
    return manager, SimpleNamespace(kv_mgr=manager, bootstrap_room=ROOM, init_time=time.time())


def poll(receiver: Any, status: KVPoll = KVPoll.Failed) -> KVPoll:
    return decode._receiver_poll(lambda: status, receiver, (), {})


@pytest.mark.parametrize("aborted_after", [0.01, W / 2, W])
def test_pages_are_kept_for_two_waiting_timeouts_from_the_announcement(clock: Clock, aborted_after: float) -> None:
    """However early the request ended: prefill may begin a write until one of them is over."""
    manager, receiver = made()
    announced = clock.now
    clock.now += aborted_after
    assert poll(receiver) == KVPoll.WaitingForInput
    clock.now = announced + 2 * W - 1
    assert poll(receiver) == KVPoll.WaitingForInput
    clock.now = announced + 2 * W + 1
    assert poll(receiver) == KVPoll.Failed
    assert decode.answers_of(manager).is_final(ROOM)  # type: ignore[union-attr]


def test_a_failure_that_prefill_reports_ends_the_request_at_once(clock: Clock) -> None:
    manager, receiver = made()
    assert poll(receiver) == KVPoll.WaitingForInput
    manager.server_socket._socket.messages = [[b"7", b"0", b"1"]]
    assert manager.server_socket.recv_multipart() == [b"7", b"0", b"1"]
    assert poll(receiver) == KVPoll.Failed


def test_success_ends_it_when_all_prefill_ranks_have_reported_it(clock: Clock) -> None:
    manager, receiver = made()
    manager.prefill_response_tracker[ROOM].add(0)
    assert poll(receiver) == KVPoll.WaitingForInput
    manager.prefill_response_tracker[ROOM].add(1)
    assert poll(receiver) == KVPoll.Failed


def test_a_prefill_server_that_is_lost_answers_no_more(clock: Clock) -> None:
    manager, receiver = made()
    assert poll(receiver) == KVPoll.WaitingForInput
    decode._handle_node_failure(lambda address: None, manager, ("prefill",), {})
    assert poll(receiver) == KVPoll.Failed


def test_a_request_that_prefill_knows_no_pages_of_ends_at_once(clock: Clock) -> None:
    _, receiver = made()
    receiver.init_time = None
    assert poll(receiver) == KVPoll.Failed


@pytest.mark.parametrize("status", [status for status in KVPoll if status != KVPoll.Failed])
def test_other_statuses_pass(clock: Clock, status: KVPoll) -> None:
    _, receiver = made()
    assert poll(receiver, status) == status


def test_late_news_of_a_request_that_is_over_are_left_out(clock: Clock) -> None:
    manager, receiver = made()
    del manager.request_status[ROOM]
    manager.server_socket._socket.messages = [
        [b"7", b"0", b"1"],
        [b"8", b"4", b"1"],
        [b"AUX_DATA", b"0", b"0", b"0", b"4", b"data"],
        [b"ABORT_ACK", b"0", b"1"],
    ]
    assert manager.server_socket.recv_multipart() == [b"8", b"4", b"1"]
    assert manager.server_socket.recv_multipart() == [b"AUX_DATA", b"0", b"0", b"0", b"4", b"data"]
    assert manager.server_socket.recv_multipart() == [b"ABORT_ACK", b"0", b"1"], "of room 0"
    assert not decode.answers_of(manager).is_final(ROOM)  # type: ignore[union-attr]
    assert poll(receiver) == KVPoll.WaitingForInput


def test_what_was_noted_goes_with_the_request(clock: Clock) -> None:
    manager, receiver = made()
    poll(receiver)
    decode._handle_node_failure(lambda address: None, manager, ("prefill",), {})
    decode._receiver_clear(lambda: None, receiver, (), {})
    answers = decode.answers_of(manager)
    assert answers is not None
    assert not answers.is_final(ROOM)
    assert answers._held_until == {}
