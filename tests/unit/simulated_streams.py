"""Streams and events as ``torch.cuda`` has them, on a simulated clock, and what may go wrong on them.

The host queues work and goes on; a piece of work starts when the host has queued it, the work before it on its stream
is done, and all that the stream waits for is done. As in CUDA, an event stands for what its stream was given before it
was recorded, and waiting for an event that was never recorded is no wait.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: What a device remembers: places, such as a page or a buffer, and what is in them.
Memory = dict[Hashable, Any]


@dataclass(frozen=True)
class Work:
    """A piece of work that ran on a stream.

    Attributes:
        name: what it does.
        stream: name of its stream.
        start, end: when it ran, ``start < end``.
        reads, writes: places it reads and writes at any time in between.
        effect: changes the memory; returns what is wrong with what it finds there, or None.
    """

    name: str
    stream: str
    start: int
    end: int
    reads: frozenset[Hashable]
    writes: frozenset[Hashable]
    effect: Callable[[Memory], str | None]


class Stream:
    """Work in order; ``free`` is when all that it was given and told to wait for is done."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.name = next(device.names)
        self.free = 0

    def wait_stream(self, other: Stream) -> None:
        if (self.name, other.name, "stream") not in self.device.ignored_waits:
            self.free = max(self.free, other.free)

    def wait_event(self, event: Event) -> None:
        if (self.name, event.stream, "event") not in self.device.ignored_waits:
            self.free = max(self.free, event.time)


class Event:
    """A point of a stream; of no stream before it is recorded."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream: str | None = None
        self.time = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.current_stream()
        self.stream, self.time = stream.name, stream.free


class Device:
    """Stands for the module ``torch.cuda``.

    The streams are named ``compute``, the current one at first, then ``loader`` and ``side`` as they are made.

    Args:
        duration: how long the work of this name takes, at least 1.
        host_delay: how long the host takes before it queues the work of this name.
        ignored_waits: faults: (stream that waits, stream waited for, ``stream`` or ``event``) of waits to leave out.
    """

    def __init__(
        self,
        duration: Callable[[str], int],
        host_delay: Callable[[str], int] = lambda name: 0,
        ignored_waits: Iterable[tuple[str, str, str]] = (),
    ) -> None:
        self.duration = duration
        self.host_delay = host_delay
        self.ignored_waits = frozenset(ignored_waits)
        self.names = iter(("compute", "loader", "side"))
        self.host_time = 0
        self.works: list[Work] = []
        self.Stream = functools.partial(Stream, self)
        self.Event = functools.partial(Event, self)
        self._current = self.Stream()

    def current_stream(self) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def queue(
        self,
        name: str,
        effect: Callable[[Memory], str | None],
        reads: Iterable[Hashable] = (),
        writes: Iterable[Hashable] = (),
    ) -> None:
        """Give the current stream a piece of work."""
        self.host_time += self.host_delay(name)
        stream = self._current
        start = max(stream.free, self.host_time)
        stream.free = start + self.duration(name)
        self.works.append(Work(name, stream.name, start, stream.free, frozenset(reads), frozenset(writes), effect))


def overlaps(works: Iterable[Work]) -> list[str]:
    """Pairs of works that use a place at the same time, one of them to write it."""
    users: dict[Hashable, list[Work]] = defaultdict(list)
    for work in sorted(works, key=lambda work: work.start):
        for place in work.reads | work.writes:
            users[place].append(work)
    found = []
    for place, using in users.items():
        running: list[Work] = []
        for work in using:
            running = [other for other in running if other.end > work.start]
            found += [
                f"{other.name} [{other.start}, {other.end}) and {work.name} [{work.start}, {work.end}) both use {place}"
                for other in running
                if place in other.writes or place in work.writes
            ]
            running.append(work)
    return found


def replay(works: Iterable[Work]) -> list[str]:
    """What works find wrong when their effects come in the order in which they ran."""
    memory: Memory = {}
    found = (work.effect(memory) for work in sorted(works, key=lambda work: work.start))
    return [problem for problem in found if problem is not None]
