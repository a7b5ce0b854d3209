"""The tap on Mooncake's write call, without Mooncake: what it counts and what it must not let pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from cp_shared_kv.releases import installed

from .scenario import ITEM_LEN, WriteFault
from .wire import UNREGISTERED_ADDRESS, WireTap

KV_BASE, STATE_BASE, AUX_BASE = 0x10_0000, 0x80_0000, 0xF0_0000
PAGES = 5

pytestmark = pytest.mark.pd


def by_component(layers: list[int]) -> list[Any]:
    return [layers] if installed().state_by_component else layers


@dataclass
class KVArgs:
    """One layer of five pages of each kind and one aux buffer."""

    kv_data_ptrs: list[int] = field(default_factory=lambda: [KV_BASE])
    kv_data_lens: list[int] = field(default_factory=lambda: [PAGES * ITEM_LEN["kv"]])
    kv_item_lens: list[int] = field(default_factory=lambda: [ITEM_LEN["kv"]])
    state_types: list[str] = field(default_factory=lambda: ["nsa"])
    state_data_ptrs: list[Any] = field(default_factory=lambda: by_component([STATE_BASE]))
    state_data_lens: list[Any] = field(default_factory=lambda: by_component([PAGES * ITEM_LEN["state"]]))
    state_item_lens: list[Any] = field(default_factory=lambda: by_component([ITEM_LEN["state"]]))
    aux_data_ptrs: list[int] = field(default_factory=lambda: [AUX_BASE])
    aux_data_lens: list[int] = field(default_factory=lambda: [640])
    aux_item_lens: list[int] = field(default_factory=lambda: [64])


class Manager:
    """A manager whose writes all come back with ``result``; keeps what reached it."""

    def __init__(self, result: int = 0) -> None:
        self.kv_args = KVArgs()
        self.transfer_queues: list[object] = []
        self.result = result
        self.written: list[list[tuple[int, int, int]]] = []

    def _transfer_data(self, session_id: str, blocks: list[tuple[int, int, int]]) -> int:
        self.written.append(blocks)
        return self.result


def page_block(base: int, kind: str, page: int, pages: int = 1) -> tuple[int, int, int]:
    return base + page * ITEM_LEN[kind], 0x1000, pages * ITEM_LEN[kind]


def test_pages_and_bytes_are_counted_by_kind_room_and_position() -> None:
    tap = WireTap(Manager())
    tap.expect(0, {1: (11, 4), 2: (11, 5), 3: (12, 0)})
    assert tap("decode", [page_block(KV_BASE, "kv", 1, pages=2), page_block(STATE_BASE, "state", 3)]) == 0
    assert tap.traffic.positions(11, "kv") == {4, 5}
    assert tap.traffic.positions(12, "state") == {0}
    assert tap.traffic.positions(11, "state") == tap.traffic.positions(12, "kv") == set()
    assert tap.traffic.bytes == {"kv": 2 * ITEM_LEN["kv"], "state": ITEM_LEN["state"], "aux": 0}


def test_a_write_that_failed_is_not_counted() -> None:
    tap = WireTap(Manager(result=-1))
    tap.expect(0, {1: (11, 0)})
    assert tap("decode", [page_block(KV_BASE, "kv", 1)]) == -1
    assert tap.traffic.bytes["kv"] == 0
    assert tap.traffic.positions(11, "kv") == set()


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(page_block(KV_BASE, "kv", PAGES), id="a page past the pool"),
        pytest.param(page_block(KV_BASE, "kv", PAGES - 1, pages=2), id="a run that leaves the pool"),
        pytest.param((KV_BASE - 1, 0x1000, 16), id="a byte before the pool"),
    ],
)
def test_a_source_outside_registered_memory_is_seen(block: tuple[int, int, int]) -> None:
    tap = WireTap(Manager())
    tap("decode", [block])
    assert tap.traffic.outside_registered == 1


def test_a_page_that_holds_no_request_is_seen() -> None:
    tap = WireTap(Manager())
    tap.expect(0, {1: (11, 0)})
    tap("decode", [page_block(KV_BASE, "kv", 2)])
    assert tap.traffic.unknown_pages == [("kv", 2)]


def test_a_block_that_is_not_whole_pages_is_an_error() -> None:
    tap = WireTap(Manager())
    with pytest.raises(AssertionError, match="begin and end with a page"):
        tap("decode", [(KV_BASE + 1, 0x1000, ITEM_LEN["kv"])])


def test_a_fault_hits_the_nth_write_of_its_kind_in_its_wave_and_no_other() -> None:
    manager = Manager()
    fault = WriteFault(wave=1, cp_rank=0, kind="kv", nth=1)
    tap = WireTap(manager, (fault,))
    results = []
    for wave in range(3):
        tap.expect(wave, {1: (11, 0)})
        results.append([tap("decode", [page_block(KV_BASE, "kv", 1)]) for _ in range(3)])
        tap("decode", [page_block(STATE_BASE, "state", 1)])
    assert results == [[0, 0, 0], [0, -1, 0], [0, 0, 0]]
    assert tap.traffic.faults_fired == [fault]
    assert len(manager.written) == 11, "the failed write must not reach the engine"


def test_a_refused_write_reaches_the_engine_with_unregistered_destinations() -> None:
    manager = Manager(result=-1)
    tap = WireTap(manager, (WriteFault(wave=0, cp_rank=0, kind="kv", how="refused"),))
    assert tap("decode", [page_block(KV_BASE, "kv", 1)]) == -1
    assert [destination for _, destination, _ in manager.written[0]] == [UNREGISTERED_ADDRESS]
