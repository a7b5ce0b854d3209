"""Who may still write for a request, on both sides of a transfer. A *room* is SGLang's bootstrap room, one a request.

Decode gives a failed request's pages to the next one, so it must not hear of a failure while anybody still writes.
:class:`TransferThread` knows which room a prefill rank's transfer thread writes for, :class:`UnansweredRooms` which
requests ended before decode announced itself, :class:`PrefillAnswers` on a decode rank whether prefill is done with it.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any


class TransferThread:
    """Queue and executor of one transfer thread, as the thread uses them: it is noted which room it writes for.

    Args:
        queue: SGLang's ``FastQueue`` of ``TransferKVChunk``; its lock and buffer are used.
        executor: the thread pool that the transfer thread may spread a chunk's layers over.
        is_over: whether nothing more is to be written for a room; its chunks are passed over.

    Attributes:
        room: the room that is being written for, or None.
    """

    def __init__(self, queue: Any, executor: concurrent.futures.Executor, is_over: Callable[[int], bool]) -> None:
        self.room: int | None = None
        self._is_over = is_over
        self._queue = queue
        self._executor = executor
        self._writes: list[concurrent.futures.Future[Any]] = []

    def get(self) -> Any:
        """Next chunk to write, None to end the thread; the thread is done with the one before."""
        while True:
            self.finish()
            with self._queue._cond:
                while not self._queue._buf:
                    self._queue._cond.wait()
                chunk = self._queue._buf.popleft()
                if chunk is None:
                    return None
                self.room = chunk.room  # under the lock: a chunk is in the queue or with the thread, never neither
            # A chunk after one that failed would have stock report success.
            if not self._is_over(chunk.room):
                return chunk

    def submit(self, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Run a part of a chunk in the executor."""
        future = self._executor.submit(*args, **kwargs)
        self._writes.append(future)
        return future

    def finish(self) -> None:
        """End of a chunk. After a failed write stock leaves those of other layers running: they are waited for."""
        concurrent.futures.wait(self._writes)
        self._writes.clear()
        self.room = None

    def drop(self, room: int) -> bool:
        """Drop what is queued for a room.

        Returns:
            whether the thread is done with the room, so that no write for it can follow.
        """
        with self._queue._cond:
            kept = [chunk for chunk in self._queue._buf if chunk is None or chunk.room != room]
            if len(kept) < len(self._queue._buf):
                self._queue._buf.clear()
                self._queue._buf.extend(kept)
            return self.room != room


class Announcements(dict[int, dict[str, Any]]):
    """SGLang's ``transfer_infos``, room -> decode session -> ``TransferInfo``, with the time of a room's first entry.

    A room that is taken away while SGLang's thread notes an announcement for it comes back empty, where a plain dict
    would end that thread with a KeyError.
    """

    def __init__(self) -> None:
        super().__init__()
        self._since: dict[int, float] = {}

    def __setitem__(self, room: int, infos: dict[str, Any]) -> None:
        self._since.setdefault(room, time.monotonic())
        super().__setitem__(room, infos)

    def __missing__(self, room: int) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        self[room] = infos
        return infos

    def pop(self, room: int, default: Any = None) -> Any:
        """Take a room away, if it is there: SGLang's transfer thread and its scheduler both do so at the end."""
        self._since.pop(room, None)
        return super().pop(room, default)

    def since(self, room: int) -> float:
        """``time.monotonic()`` of decode's first announcement for a room; now where there is none."""
        return self._since.get(room, time.monotonic())


class Statuses(dict[int, int]):
    """SGLang's ``request_status``, room -> ``KVPoll``, in which a missing room reads as bootstrapping and cannot fail.

    Stock looks a room up after it has seen that it is there; one that ends in between would end that thread. And a
    failure that is noted late must not bring a request back that is over.
    """

    FAILED, BOOTSTRAPPING = 0, 1

    def __setitem__(self, room: int, status: int) -> None:
        if status != self.FAILED or room in self:
            super().__setitem__(room, status)

    def __missing__(self, room: int) -> int:
        return self.BOOTSTRAPPING


class UnansweredRooms:
    """Requests of a prefill rank that ended while decode, or some of its ranks, had yet to announce itself.

    Args:
        patience_s: how long an announcement is waited for.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._until: dict[int, float] = {}

    def __contains__(self, room: int) -> bool:
        return room in self._until

    def add(self, room: int) -> None:
        """Remember a room; once is enough."""
        self._until.setdefault(room, time.monotonic() + self._patience_s)

    def discard(self, room: int) -> None:
        """Forget a room."""
        self._until.pop(room, None)

    def settle(self, is_announced: Callable[[int], bool]) -> list[int]:
        """Rooms that decode has announced itself for by now, or whose time is over; they are forgotten."""
        now = time.monotonic()
        done = [room for room, until in self._until.items() if is_announced(room) or now >= until]
        for room in done:
            self.discard(room)
        return done


class PrefillAnswers:
    """What the prefill side has said about the requests of one decode rank."""

    def __init__(self) -> None:
        self._final: set[int] = set()
        self._held_until: dict[int, float] = {}

    def note_final(self, room: int) -> None:
        """No prefill rank writes for the room any more: one of them has said so, or the prefill server is lost."""
        self._final.add(room)

    def is_final(self, room: int) -> bool:
        """Whether :meth:`note_final` was called for the room."""
        return room in self._final

    def held_until(self, room: int, patience_s: float) -> tuple[float, bool]:
        """When the room's pages are given up on, ``time.monotonic()`` seconds, and whether this is the first call."""
        first = room not in self._held_until
        return self._held_until.setdefault(room, time.monotonic() + patience_s), first

    def forget(self, room: int) -> None:
        """The request is over."""
        self._final.discard(room)
        self._held_until.pop(room, None)
