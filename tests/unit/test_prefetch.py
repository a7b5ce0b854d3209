"""LayerPrefetch on a simulated clock: what overlaps, what must not, and what each read finds.

The forwards below give the compute stream what the pool gives it: per layer and kind of data the wait for the prefix,
the write of the chunk's rows over it, the copy of the written pages into the pool, reads. What a read should find is
computed beside it, by doing everything at once and in order. The recorded intervals are then checked: nothing may use a
buffer or a page of the pool while another piece of work writes it, and every read must find what it should.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from simulated_streams import Device, Memory, overlaps, replay

from cp_shared_kv.prefetch import LayerPrefetch

KINDS = ("index-K", "MLA KV")
INDEX, KV = KINDS
PAGES = range(5)
SOME_PAGES = st.frozensets(st.sampled_from(PAGES), max_size=4)

Fetched = tuple[str, int]


class InjectedError(Exception):
    """A forward that raises."""


@dataclass(frozen=True)
class Forward:
    """One forward.

    Attributes:
        visits: layers in the order in which they run, each with the kinds that it needs, in order.
        prefix: pages that are read; without any, nothing is fetched from other ranks.
        chunk: pages that are written; those that are in the prefix too keep their other rows.
        loaded: prefix pages that a loader writes first, while the forward already runs.
        fails_at: number of the step (a fetch, or a kind of a layer) that raises.
    """

    visits: tuple[tuple[int, tuple[str, ...]], ...]
    prefix: frozenset[int]
    chunk: frozenset[int]
    loaded: frozenset[int] = frozenset()
    fails_at: int | None = None

    @property
    def needed(self) -> list[Fetched]:
        return [(kind, layer) for layer, kinds in self.visits for kind in kinds]


class Pool:
    """One rank's pool on a simulated device, which runs forwards.

    Args:
        device: the device; work is queued on it.
        layers: number of layers.
        prefetches: whether LayerPrefetch gets the device's streams.
        buffers: buffers of each kind of data.
        waits_for_loader: whether a fetch waits for the loader.
        made_by: LayerPrefetch, or one that is broken.
    """

    def __init__(
        self,
        device: Device,
        layers: int,
        *,
        prefetches: bool = True,
        buffers: int = 2,
        waits_for_loader: bool = True,
        made_by: type[LayerPrefetch] = LayerPrefetch,
    ) -> None:
        self.device = device
        self.layers = layers
        self.buffers = buffers
        self.waits_for_loader = waits_for_loader
        self.loader = device.Stream()
        self.prefetch = made_by(
            lambda kinds, layer: [self.fetch(kind, layer) for kind in kinds],
            KINDS,
            layers,
            device if prefetches else None,
        )
        self.loaded: dict[int, Any] = {}
        self.forward: Forward | None = None
        self.steps = 0
        self.tags = itertools.count()
        #: Per forward, what was fetched, in the order in which it was queued.
        self.fetches: list[list[Fetched]] = []
        #: What the pool's pages hold once all that was queued has run.
        self.expected: Memory = {}

    def _step(self) -> None:
        assert self.forward is not None
        if self.steps == self.forward.fails_at:
            raise InjectedError
        self.steps += 1

    def _buffer(self, kind: str, layer: int) -> Hashable:
        return ("buffer", kind, layer % self.buffers)

    def fetch(self, kind: str, layer: int) -> None:
        """The fetch that LayerPrefetch is given."""
        forward = self.forward
        assert forward is not None, "a fetch outside a forward"
        self._step()
        if self.waits_for_loader and layer in self.loaded:
            self.device.current_stream().wait_event(self.loaded[layer])
        # Pages of the chunk too: those that it does not fill keep what they held.
        pages = {page: ("pool", kind, layer, page) for page in forward.prefix | forward.chunk}
        buffer = self._buffer(kind, layer)

        def gather(memory: Memory) -> None:
            memory[buffer] = {page: memory.get(place) for page, place in pages.items()}

        if forward.prefix:  # two collectives at a time would have no order that all ranks share
            self.device.queue(
                f"gather of {kind} of layer {layer}", gather, reads=pages.values(), writes=[buffer, "communicator"]
            )
        else:
            self.device.queue(f"copy of {kind} of layer {layer}", gather, reads=pages.values(), writes=[buffer])
        self.fetches[-1].append((kind, layer))

    def run(self, forward: Forward) -> None:
        """Queue one forward; one that raises ends as any other."""
        self.forward, self.steps = forward, 0
        self.fetches.append([])
        self._load(forward.loaded)
        try:
            self.prefetch.begin(communicates=bool(forward.prefix))
            for layer, kinds in forward.visits:
                self._run_layer(forward, layer, kinds)
        except InjectedError:
            pass
        finally:
            self.prefetch.end()
            self.forward = None

    def _load(self, pages: frozenset[int]) -> None:
        if not pages:
            return
        self.loader.wait_stream(self.device.current_stream())  # whoever had these pages before is done with them
        with self.device.stream(self.loader):
            for layer in range(self.layers):
                places = [("pool", kind, layer, page) for kind in KINDS for page in sorted(pages)]
                load = dict.fromkeys(places, ("loaded", next(self.tags)))
                self.expected.update(load)

                def store(memory: Memory, load: Memory = load) -> None:
                    memory.update(load)

                self.device.queue(f"load of layer {layer}", store, writes=places)
                self.loaded[layer] = self.device.Event()
                self.loaded[layer].record(self.loader)

    def _run_layer(self, forward: Forward, layer: int, kinds: Sequence[str]) -> None:
        contents = {}
        for kind in kinds:
            self._step()
            self.prefetch.need(kind, layer)
            contents[kind] = self._write_and_keep(forward, kind, layer)
            self._read(kind, layer, contents[kind], "indexer" if kind == INDEX else "attention")
        for kind, content in contents.items():
            self._read(kind, layer, content, "rest")

    def _write_and_keep(self, forward: Forward, kind: str, layer: int) -> dict[int, Any]:
        """Write the chunk over the prefix and keep its pages; returns what the buffer should hold then."""
        buffer, tag = self._buffer(kind, layer), next(self.tags)
        places = {page: ("pool", kind, layer, page) for page in forward.chunk}

        def written(content: dict[int, Any]) -> dict[int, Any]:
            return content | {page: (content.get(page), "and rows of", tag) for page in forward.chunk}

        def write(memory: Memory) -> None:
            memory[buffer] = written(memory.get(buffer, {}))

        def keep(memory: Memory) -> None:
            memory.update({place: memory.get(buffer, {}).get(page) for page, place in places.items()})

        self.device.queue(f"write of {kind} of layer {layer}", write, reads=[buffer], writes=[buffer])
        self.device.queue(f"keep of {kind} of layer {layer}", keep, reads=[buffer], writes=places.values())
        content = {page: self.expected.get(("pool", kind, layer, page)) for page in forward.prefix | forward.chunk}
        content = written(content)
        self.expected.update({place: content[page] for page, place in places.items()})
        return content

    def _read(self, kind: str, layer: int, content: dict[int, Any], reader: str) -> None:
        buffer = self._buffer(kind, layer)
        name = f"{reader} reads {kind} of layer {layer}"

        def read(memory: Memory) -> str | None:
            found = memory.get(buffer)
            return None if found == content else f"{name}: found {found} instead of {content}"

        self.device.queue(name, read, reads=[buffer])

    def problems(self) -> list[str]:
        """Whatever the recorded intervals show to be wrong."""
        return overlaps(self.device.works) + replay(self.device.works)

    def collectives(self) -> list[str]:
        """Gathers between ranks in the order in which they ran."""
        gathers = [work for work in self.device.works if work.name.startswith("gather")]
        return [work.name for work in sorted(gathers, key=lambda work: work.start)]


@dataclass(frozen=True)
class Schedule:
    """Forwards of a model with a number of layers, and the seed of all durations."""

    layers: int
    forwards: tuple[Forward, ...]
    seed: int = field(default=0)

    def run(self, *, seed: int | None = None, ignored_waits: Iterable[tuple[str, str, str]] = (), **pool: Any) -> Pool:
        """Run the forwards for random durations; see :class:`Device` and :class:`Pool` for the rest."""
        rng = random.Random(self.seed if seed is None else seed)
        slow_host = rng.random() < 0.5
        device = Device(
            lambda name: rng.choice((1, 2, 5, 40)), lambda name: rng.choice((0, 0, 9)) * slow_host, ignored_waits
        )
        ran = Pool(device, self.layers, **pool)
        for forward in self.forwards:
            ran.run(forward)
        return ran


@st.composite
def schedules(draw: Any, *, in_order: bool = True, may_fail: bool = True) -> Schedule:
    """Schedules of 1 to 4 forwards through up to 5 layers.

    Args:
        in_order: every layer at most once and in ascending order, as models do; otherwise in any order, and again.
        may_fail: whether forwards may raise.
    """
    layers = draw(st.integers(1, 5))
    some_layers = st.frozensets(st.integers(0, layers - 1))
    reusing = draw(some_layers)  # layers that reuse another's selection
    forwards = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 3)) == 0:
            reusing = draw(some_layers)
        order = list(range(layers))
        if not in_order:
            order = draw(st.lists(st.integers(0, layers - 1), max_size=7))
        elif draw(st.integers(0, 3)) == 0:
            order = sorted(draw(some_layers))
        kinds = draw(st.sampled_from([KINDS, KINDS, KINDS[::-1]]))
        visits = tuple((layer, tuple(kind for kind in kinds if kind == KV or layer not in reusing)) for layer in order)
        prefix = draw(SOME_PAGES)
        fails_at = draw(st.one_of(st.none(), st.integers(0, 12))) if may_fail else None
        loaded = prefix & draw(st.one_of(st.just(frozenset()), SOME_PAGES))
        forwards.append(Forward(visits, prefix, draw(SOME_PAGES), loaded, fails_at))
    return Schedule(layers, tuple(forwards), draw(st.integers(0, 2**32)))


class TestHazards:
    @settings(max_examples=150, deadline=None)
    @given(schedules())
    def test_every_read_finds_its_layer_and_nothing_overlaps_with_a_write(self, schedule: Schedule):
        assert schedule.run().problems() == []

    @settings(max_examples=150, deadline=None)
    @given(schedules(in_order=False))
    def test_layers_in_another_order_or_again_are_read_right_too(self, schedule: Schedule):
        assert schedule.run().problems() == []

    def test_what_an_ended_forward_had_fetched_ahead_is_not_taken_for_the_next_forwards(self):
        first = Forward(((0, KINDS), (1, KINDS)), frozenset({0}), frozenset({0, 1}))
        fetches_ahead = replace(first, visits=((0, KINDS),))
        other_prefix = replace(first, visits=((1, KINDS),), prefix=frozenset({1}), chunk=frozenset({2}))
        assert Schedule(2, (first, fetches_ahead, other_prefix)).run().problems() == []

    @settings(max_examples=50, deadline=None)
    @given(schedules(in_order=False))
    def test_without_streams_every_read_is_right_with_one_buffer(self, schedule: Schedule):
        assert schedule.run(prefetches=False, buffers=1).problems() == []


class TestOrder:
    @settings(max_examples=80, deadline=None)
    @given(schedules(in_order=False), st.integers(0, 2**32))
    def test_of_gathers_is_the_same_on_ranks_of_other_speed(self, schedule: Schedule, seed: int):
        mine, others = schedule.run(), schedule.run(seed=seed)
        assert mine.collectives() == others.collectives()

    @settings(max_examples=80, deadline=None)
    @given(schedules(in_order=False))
    def test_gathers_run_one_by_one_on_the_side_stream_and_nothing_else_does(self, schedule: Schedule):
        ran = schedule.run()
        on_side = [work for work in ran.device.works if work.stream == "side"]
        assert {work.name for work in on_side} == set(ran.collectives())
        assert len(on_side) == len(ran.collectives())
        assert all(one.end <= next_one.start for one, next_one in itertools.pairwise(on_side))


class TestFetches:
    @settings(max_examples=150, deadline=None)
    @given(schedules(may_fail=False))
    def test_are_one_of_each_kind_and_layer_that_is_needed_and_of_what_earlier_forwards_needed(
        self, schedule: Schedule
    ):
        ran = schedule.run()
        learned: set[Fetched] = set()
        for forward, fetched in zip(schedule.forwards, ran.fetches, strict=True):
            assert len(set(fetched)) == len(fetched)
            extra = set(fetched) - set(forward.needed)
            assert set(fetched) >= set(forward.needed)
            assert extra <= (learned if forward.prefix else set())
            learned |= set(forward.needed)

    @settings(max_examples=80, deadline=None)
    @given(schedules(may_fail=False))
    def test_of_a_model_that_needs_the_same_every_time_are_what_it_needs(self, schedule: Schedule):
        same = replace(
            schedule, forwards=tuple(replace(f, visits=schedule.forwards[0].visits) for f in schedule.forwards)
        )
        for forward, fetched in zip(same.forwards, same.run().fetches, strict=True):
            assert Counter(fetched) == Counter(forward.needed)

    @settings(max_examples=80, deadline=None)
    @given(schedules())
    def test_without_streams_come_when_they_are_needed_on_the_compute_stream(self, schedule: Schedule):
        ran = schedule.run(prefetches=False)
        assert {work.stream for work in ran.device.works} <= {"compute", "loader"}
        for forward, fetched in zip(schedule.forwards, ran.fetches, strict=True):
            assert fetched == forward.needed[: len(fetched)]
            assert len(fetched) == len(forward.needed) or forward.fails_at is not None

    def test_are_forgotten_on_demand(self):
        pool = Pool(Device(lambda name: 1), layers=3)
        forward = Forward(tuple((layer, KINDS) for layer in range(3)), frozenset({0}), frozenset({1}))
        pool.run(forward)
        pool.prefetch.forget()
        pool.run(replace(forward, visits=()))
        assert pool.fetches[-1] == []
        pool.run(forward)
        pool.run(replace(forward, visits=()))
        assert pool.fetches[-1] == [(INDEX, 0), (KV, 0)]

    def test_of_a_cpu_whose_streams_are_empty_shells_run_one_layer_ahead_in_order(self):
        calls: list[str] = []
        prefetch = LayerPrefetch(
            lambda kinds, layer: calls.append(f"fetch {', '.join(kinds)} {layer}"), KINDS, 3, torch.cpu
        )
        for _ in range(2):
            calls.clear()
            prefetch.begin(communicates=True)
            for layer, kind in itertools.product(range(3), KINDS):
                prefetch.need(kind, layer)
                calls.append(f"{kind} {layer}")
            prefetch.end()
        assert calls == [
            "fetch index-K, MLA KV 0",
            *("fetch index-K, MLA KV 1", "index-K 0", "MLA KV 0"),
            *("fetch index-K, MLA KV 2", "index-K 1", "MLA KV 1"),
            *("index-K 2", "MLA KV 2"),
        ]


@st.composite
def durations(draw: Any) -> tuple[Forward, dict[str, int], int]:
    """A forward, how long its gathers take by name, and how long everything else takes: longer than two gathers."""
    layers = draw(st.integers(1, 6))
    reusing = draw(st.frozensets(st.integers(0, layers - 1)))
    kinds = draw(st.sampled_from([KINDS, KINDS[::-1]]))
    visits = tuple(
        (layer, tuple(kind for kind in kinds if kind == KV or layer not in reusing)) for layer in range(layers)
    )
    forward = Forward(visits, draw(SOME_PAGES.filter(bool)), draw(SOME_PAGES))
    gathers = {f"gather of {kind} of layer {layer}": draw(st.integers(1, 50)) for kind, layer in forward.needed}
    return forward, gathers, draw(st.integers(100, 200))


class TestTime:
    """A forward of a model whose needs are known from an earlier one."""

    @staticmethod
    def spans(forward: Forward, duration: Callable[[str], int], prefetches: bool) -> tuple[int, int]:
        """Time from begin to end of a forward, and time for which the compute stream worked."""
        device = Device(duration)
        pool = Pool(device, len(forward.visits), prefetches=prefetches)
        pool.run(forward)
        done, before = len(device.works), device.current_stream().free
        pool.run(forward)
        worked = sum(work.end - work.start for work in device.works[done:] if not work.name.startswith("gather"))
        return device.current_stream().free - before, worked

    @settings(max_examples=60, deadline=None)
    @given(durations())
    def test_of_all_gathers_but_the_first_layers_is_hidden_behind_long_layers(
        self, case: tuple[Forward, dict[str, int], int]
    ):
        forward, gathers, other = case
        took, worked = self.spans(forward, lambda name: gathers.get(name, other), prefetches=True)
        assert took == worked + sum(time for name, time in gathers.items() if name.endswith("layer 0"))

    @settings(max_examples=60, deadline=None)
    @given(durations())
    def test_of_every_gather_is_spent_without_streams(self, case: tuple[Forward, dict[str, int], int]):
        forward, gathers, other = case
        took, worked = self.spans(forward, lambda name: gathers.get(name, other), prefetches=False)
        assert took == worked + sum(gathers.values())


class FetchesTwoAhead(LayerPrefetch):
    """Fetches into the buffer of the layer that computes."""

    def _fetch_ahead(self, layer: int) -> None:
        super()._fetch_ahead(layer + 1)


class FetchesNewNeedsInLine(LayerPrefetch):
    """Fetches what no earlier forward needed on the compute stream."""

    def need(self, kind: Hashable, layer: int) -> None:
        if (kind, layer) in self._needed:
            super().need(kind, layer)
        else:
            self._needed.add((kind, layer))
            self._fetch(kind, layer)


class OrdersByTime(LayerPrefetch):
    """Fetches the kinds of a layer in an order that depends on when it does."""

    def _fetch_on_side(self, kinds: Sequence[Hashable], layer: int) -> Any:
        return super()._fetch_on_side(kinds[::-1] if self._side.free % 2 else kinds, layer)


#: What breaks the ordering, by name: arguments of :meth:`Schedule.run`.
FAULTS: dict[str, dict[str, Any]] = {
    "a fetch does not wait for the compute stream": {"ignored_waits": [("side", "compute", "stream")]},
    "the compute stream does not wait for a fetch": {"ignored_waits": [("compute", "side", "event")]},
    "an end does not wait for fetches": {"ignored_waits": [("compute", "side", "stream")]},
    "one buffer": {"buffers": 1},
    "a fetch does not wait for the loader": {"waits_for_loader": False},
    "two layers ahead": {"made_by": FetchesTwoAhead},
    "collectives on two streams": {"made_by": FetchesNewNeedsInLine},
}


SEARCH = settings(max_examples=1000, deadline=None, derandomize=True, phases=[Phase.generate])


def finds(condition: Callable[[Schedule], bool]) -> bool:
    """Whether some schedule meets a condition."""
    try:
        find(schedules(), condition, settings=SEARCH)
    except NoSuchExample:
        return False
    return True


class TestTheCheck:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_sees_a_fault_of_the_ordering(self, fault: str):
        assert finds(lambda schedule: schedule.run(**FAULTS[fault]).problems() != [])

    def test_sees_gathers_whose_order_depends_on_durations(self):
        def differs(schedule: Schedule) -> bool:
            orders = [schedule.run(seed=seed, made_by=OrdersByTime).collectives() for seed in range(2)]
            return orders[0] != orders[1]

        assert finds(differs)

    def test_an_event_stands_for_what_was_queued_when_it_was_recorded(self):
        device = Device(lambda name: 10)
        other, early, never = device.Stream(), device.Event(), device.Event()
        device.queue("first", lambda memory: None)
        early.record()
        device.queue("second", lambda memory: None)
        other.wait_event(early)
        other.wait_event(never)
        with device.stream(other):
            device.queue("third", lambda memory: None)
        other.wait_stream(device.current_stream())
        with device.stream(other):
            device.queue("fourth", lambda memory: None)
        assert [(work.stream, work.start, work.end) for work in device.works] == [
            ("compute", 0, 10),
            ("compute", 10, 20),
            ("loader", 10, 20),
            ("loader", 20, 30),
        ]
