"""Who may still write for a request: transfer threads on real threads, unanswered rooms, prefill's answers."""

from __future__ import annotations

import concurrent.futures
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from cp_shared_kv.rooms import Announcements, PrefillAnswers, Statuses, TransferThread, UnansweredRooms
from cp_shared_kv.seams import SourceTree

TIMEOUT_S = 10
"""How long a thread of a test may take; none needs more than milliseconds."""


@dataclass(frozen=True)
class Chunk:
    room: int
    number: int = 0


class Queue:
    """What TransferThread uses of SGLang's FastQueue."""

    def __init__(self, *chunks: Chunk | None) -> None:
        self._buf = deque(chunks)
        self._cond = threading.Condition()

    def put(self, chunk: Chunk) -> None:
        with self._cond:
            self._buf.append(chunk)
            self._cond.notify()


@pytest.fixture
def executor() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        yield threads


def in_thread(function: Callable[[], object]) -> concurrent.futures.Future[object]:
    """Start a function on a thread of its own."""
    future: concurrent.futures.Future[object] = concurrent.futures.Future()

    def body() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future


def transfer_thread(queue: Queue, executor: concurrent.futures.Executor, *over: int) -> TransferThread:
    return TransferThread(queue, executor, lambda room: room in over)


# The transfer thread.


def test_the_word_to_end_is_handed_on_and_marks_no_room(executor: concurrent.futures.ThreadPoolExecutor) -> None:
    """SGLang puts None into the queue when it takes its threads down."""
    queue = Queue(Chunk(7, 0), None, Chunk(7, 1))
    thread = transfer_thread(queue, executor)
    thread.get()
    assert thread.drop(7) is False
    assert thread.get() is None
    assert thread.room is None


def test_get_hands_out_chunks_in_their_order_and_marks_the_room(
    executor: concurrent.futures.ThreadPoolExecutor,
) -> None:
    chunks = [Chunk(7, 0), Chunk(8, 0), Chunk(7, 1)]
    thread = transfer_thread(Queue(*chunks), executor)
    assert thread.room is None
    for chunk in chunks:
        assert thread.get() == chunk
        assert thread.room == chunk.room


def test_get_waits_for_a_chunk_and_has_no_room_meanwhile(executor: concurrent.futures.ThreadPoolExecutor) -> None:
    queue = Queue(Chunk(7))
    thread = transfer_thread(queue, executor)
    thread.get()
    waiting = in_thread(thread.get)
    deadline = time.monotonic() + TIMEOUT_S
    while thread.room is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert thread.room is None
    queue.put(Chunk(8))
    assert waiting.result(TIMEOUT_S) == Chunk(8)
    assert thread.room == 8


class Lock(threading.Condition):
    """Calls ``released`` when the thread that made it lets go of the lock."""

    def __init__(self, released: Callable[[], None]) -> None:
        super().__init__()
        self._released = released
        self._owner = threading.current_thread()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if threading.current_thread() is self._owner:
            self._released()


def test_a_chunk_is_in_the_queue_or_with_the_thread_and_never_seen_in_neither(
    executor: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """Whoever has the lock next after a chunk has left the queue finds its room marked."""
    queue = Queue(Chunk(7))
    thread = transfer_thread(queue, executor)
    drops: list[object] = []
    queue._cond = Lock(lambda: drops.append(in_thread(lambda: thread.drop(7)).result(TIMEOUT_S)))
    assert thread.get() == Chunk(7)
    assert drops == [False]


def test_get_passes_over_chunks_of_rooms_that_are_over(executor: concurrent.futures.ThreadPoolExecutor) -> None:
    thread = transfer_thread(Queue(Chunk(7, 0), Chunk(7, 1), Chunk(8), Chunk(7, 2), Chunk(9)), executor, 7)
    assert thread.get() == Chunk(8)
    assert thread.get() == Chunk(9)


def test_the_room_is_marked_while_it_is_found_out_whether_it_is_over(
    executor: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """Otherwise a room could be found quiet, and be written for after all."""
    marked = []
    thread = TransferThread(Queue(Chunk(7)), executor, lambda room: marked.append(thread.room) is not None)
    thread.get()
    assert marked == [7]


def test_drop_removes_only_that_room_and_keeps_the_order(executor: concurrent.futures.ThreadPoolExecutor) -> None:
    queue = Queue(Chunk(7, 0), Chunk(8, 0), Chunk(7, 1), Chunk(9, 0), Chunk(8, 1))
    assert transfer_thread(queue, executor).drop(7) is True
    assert list(queue._buf) == [Chunk(8, 0), Chunk(9, 0), Chunk(8, 1)]


def test_drop_says_whether_the_thread_is_at_the_room(executor: concurrent.futures.ThreadPoolExecutor) -> None:
    queue = Queue(Chunk(7, 0), Chunk(7, 1))
    thread = transfer_thread(queue, executor)
    thread.get()
    assert thread.drop(7) is False
    assert list(queue._buf) == [], "what is queued goes at once"
    assert thread.drop(8) is True
    thread.finish()
    assert thread.drop(7) is True


def test_the_thread_is_at_the_room_until_every_write_in_the_executor_is_over(
    executor: concurrent.futures.ThreadPoolExecutor,
) -> None:
    thread = transfer_thread(Queue(Chunk(7)), executor)
    thread.get()
    begun, go_on = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        go_on.wait(TIMEOUT_S)

    thread.submit(write)
    finishing = in_thread(thread.finish)
    assert begun.wait(TIMEOUT_S)
    with pytest.raises(concurrent.futures.TimeoutError):
        finishing.result(0.05)
    assert thread.drop(7) is False
    go_on.set()
    finishing.result(TIMEOUT_S)
    assert thread.drop(7) is True


def test_get_waits_for_the_writes_of_the_chunk_before(executor: concurrent.futures.ThreadPoolExecutor) -> None:
    thread = transfer_thread(Queue(Chunk(7), Chunk(8)), executor)
    thread.get()
    go_on = threading.Event()
    thread.submit(go_on.wait, TIMEOUT_S)
    following = in_thread(thread.get)
    with pytest.raises(concurrent.futures.TimeoutError):
        following.result(0.05)
    assert thread.room == 7
    go_on.set()
    assert following.result(TIMEOUT_S) == Chunk(8)


def test_writes_that_stock_cancels_or_that_raise_end_the_chunk_all_the_same() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        thread = transfer_thread(Queue(Chunk(7)), executor)
        thread.get()
        go_on = threading.Event()
        thread.submit(go_on.wait, TIMEOUT_S)
        failing = thread.submit(lambda: 1 // 0)
        cancelled = thread.submit(int)
        assert cancelled.cancel()
        go_on.set()
        in_thread(thread.finish).result(TIMEOUT_S)
        assert isinstance(failing.exception(0), ZeroDivisionError)
        assert thread.drop(7) is True


def test_submit_hands_arguments_and_result_through(executor: concurrent.futures.ThreadPoolExecutor) -> None:
    thread = transfer_thread(Queue(), executor)
    assert thread.submit(int, "11", base=2).result(TIMEOUT_S) == 3


# Requests that ended before decode announced itself.


def test_a_room_is_answered_once_all_its_decode_ranks_have_announced_themselves() -> None:
    rooms, asked, announced = UnansweredRooms(100), [], {8}

    def answer(room: int) -> bool:
        asked.append(room)
        return room in announced

    rooms.add(7)
    rooms.add(8)
    assert rooms.settle(answer) == [8]
    assert asked == [7, 8]
    assert 7 in rooms
    assert 8 not in rooms
    announced.add(7)
    assert rooms.settle(answer) == [7]
    assert rooms.settle(answer) == []


def test_a_room_that_nobody_announces_is_forgotten_when_its_time_is_over() -> None:
    rooms = UnansweredRooms(0.0)
    rooms.add(7)
    assert rooms.settle(lambda room: False) == [7]
    assert 7 not in rooms


def test_adding_a_room_again_does_not_prolong_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rooms = UnansweredRooms(10)
    rooms.add(7)
    now = 1009.0
    rooms.add(7)
    assert rooms.settle(lambda room: False) == []
    now = 1010.0
    assert rooms.settle(lambda room: False) == [7]


def test_a_discarded_room_is_not_answered() -> None:
    rooms = UnansweredRooms(100)
    rooms.add(7)
    rooms.discard(7)
    rooms.discard(8)
    assert rooms.settle(lambda room: pytest.fail("asked")) == []


# What prefill has said, on a decode rank.


def test_answers_are_those_of_their_room_and_go_with_it() -> None:
    answers = PrefillAnswers()
    answers.note_final(7)
    assert answers.is_final(7)
    assert not answers.is_final(8)
    answers.forget(8)
    assert answers.is_final(7)
    answers.forget(7)
    assert not answers.is_final(7)


def test_pages_are_held_from_the_first_question_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    answers = PrefillAnswers()
    assert answers.held_until(7, 10) == (1010.0, True)
    now = 1004.0
    assert answers.held_until(7, 10) == (1010.0, False)
    assert answers.held_until(8, 10) == (1014.0, True)
    answers.forget(7)
    assert answers.held_until(7, 10) == (1014.0, True), "a new request of the same room has its own time"


# Announcements.


def test_a_room_counts_from_its_first_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    infos = Announcements()
    infos[7] = {}
    now = 1005.0
    infos[7]["second decode rank"] = "info"
    infos[7] = dict(infos[7])
    assert infos.since(7) == 1000.0
    assert infos.since(8) == 1005.0, "not announced yet"


def test_a_room_that_is_taken_away_and_announced_again_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    infos = Announcements()
    infos[7] = {"session": "info"}
    assert infos.pop(7) == {"session": "info"}
    assert infos.pop(7) is None, "taken away already"
    now = 1005.0
    infos[7] = {}
    assert infos.since(7) == 1005.0


def test_an_announcement_for_a_room_that_was_just_taken_away_is_kept() -> None:
    """SGLang's thread makes an entry for the room first, and fills it by another look-up."""
    infos = Announcements()
    infos[7] = {}
    infos.pop(7)
    infos[7]["session"] = "info"
    assert infos == {7: {"session": "info"}}


# Statuses.


def test_a_room_that_ended_reads_as_bootstrapping_and_stays_away() -> None:
    source = SourceTree.installed().file_of("sglang.srt.disaggregation.base.conn").read_text(encoding="utf-8")
    assert re.search(rf"class KVPoll\b.*?\bBootstrapping = {Statuses.BOOTSTRAPPING}\n", source, re.DOTALL)
    assert re.search(rf"class KVPoll\b.*?\bFailed = {Statuses.FAILED}\n", source, re.DOTALL)
    statuses = Statuses({7: 3})
    assert (statuses[7], statuses[8]) == (3, Statuses.BOOTSTRAPPING)
    assert 8 not in statuses
    assert statuses.get(8) is None


def test_a_late_failure_does_not_bring_back_a_room_that_is_over() -> None:
    statuses = Statuses({7: 3})
    statuses[7] = statuses[8] = Statuses.FAILED
    assert dict(statuses) == {7: Statuses.FAILED}
    statuses[8] = Statuses.BOOTSTRAPPING
    assert dict(statuses) == {7: Statuses.FAILED, 8: Statuses.BOOTSTRAPPING}
