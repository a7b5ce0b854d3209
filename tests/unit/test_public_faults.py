"""Inputs of public bug reports that need neither SGLang nor real ranks; ``docs/faults.md`` lists all reports.

SGLang's classes are stood in for by the few attributes that the code under test uses.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib.util
import queue
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from standins import KVPoll
from test_gate import BROKEN, NAMES, absent_arguments, facts
from torch.overrides import TorchFunctionMode

import cp_shared_kv
from cp_shared_kv import collectives, releases
from cp_shared_kv.collectives import PageGather
from cp_shared_kv.gate import Gate, GateError
from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.patches import attention, capacity, transfer
from cp_shared_kv.plan import PlanError, build_plan, workspace_pages
from cp_shared_kv.releases import release_for
from cp_shared_kv.seams import SourceTree
from cp_shared_kv.transfer import split_chunk

#: Release that the stand-ins and the servers of the reports are like.
PRIMARY = "0.5.12.post1"
PAGE = 64
LAYERS = 3
#: Values per token: MLA KV (nope, rope) and index-K.
NOPE, ROPE, INDEX = 6, 2, 4
PAGE_BYTES = PAGE * (NOPE + ROPE) * 2 + PAGE * INDEX

#: Report -> the server it is about, and the rules that refuse it.
SERVERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sglang#29725": ({"dp_size": 2, "attn_cp_size": 4}, ["dp_size"]),
    "vllm-ascend#16144": ({"pp_size": 2}, ["pp_size"]),
    "tpu-inference#3344": ({"enable_kv_cache_sharding": True}, ["KV cache sharding of SGLang"]),
    "sglang#33197": (
        {"nsa_prefill_cp_mode": "round-robin-split", "speculative_algorithm": "EAGLE"},
        ["cp_mode", "speculative decoding"],
    ),
    "sglang#29161": (
        {"nsa_prefill_backend": "trtllm", "nsa_decode_backend": "trtllm"},
        ["prefill_backend", "kv_layout"],
    ),
    "sglang#30992": ({"speculative_algorithm": "EAGLE"}, ["speculative decoding"]),
    "sglang#20360": ({"nsa_prefill_cp_mode": "round-robin-split"}, ["cp_mode"]),
    "sglang#24560": ({"attn_cp_size": 4}, ["attn_tp"]),
    "sglang#40109": ({"fact": {"index_kpool": 4}}, ["index_kpool"]),
    "sglang#30505": ({"nsa_prefill_backend": "flashmla_kv"}, ["prefill_backend"]),
    "vllm-plugin-das#21": ({"speculative_algorithm": "NEXTN"}, ["speculative decoding"]),
    "sglang#22692": ({"fact": {"architecture": "KimiK25ForConditionalGeneration", "is_nsa": False}}, ["model"]),
    "sglang#19897": ({"speculative_algorithm": "EAGLE"}, ["speculative decoding"]),
    "sglang#30321": ({"enable_hierarchical_cache": True}, ["HiCache"]),
    "sglang#28895": (
        {"enable_hierarchical_cache": True, "speculative_algorithm": "EAGLE"},
        ["speculative decoding", "HiCache"],
    ),
    "sglang#37149": (
        {"enable_hierarchical_cache": True, "hicache_storage_backend": "mooncake"},
        ["HiCache", "HiCache storage"],
    ),
    "sglang#26670": (
        {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"},
        ["HiCache", "HiCache storage"],
    ),
    "sglang#31425": ({"enable_hierarchical_cache": True}, ["HiCache"]),
    "sglang#38324": (
        {"enable_hierarchical_cache": True, "enable_dsa_cache_layer_split": True},
        ["HiCache", "KV layer split"],
    ),
}


def group(cp_size: int) -> list[CpSharedKVLayout]:
    return [CpSharedKVLayout(page_size=PAGE, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]


class TestGate:
    @pytest.mark.parametrize("report", SERVERS)
    def test_the_server_of_a_report_is_refused_by_name(self, report: str):
        change, rules = SERVERS[report]
        with pytest.raises(GateError) as refused:
            Gate().require(facts(**change))
        assert [refusal.rule for refusal in refused.value.refusals] == rules
        for rule in rules:
            assert f"[{rule}]" in str(refused.value)

    @pytest.mark.skipif(releases.installed().arguments != NAMES, reason="the servers of the reports are of other flags")
    def test_every_flag_that_the_gate_advises_is_spelt_as_in_the_release(self):
        """sglang#32553: a flag that another release spells otherwise ends the launch."""
        source = SourceTree.installed().file_of("sglang.srt.server_args").read_text(encoding="utf-8")
        refusals = [refusal for _, change, _, _ in BROKEN for refusal in Gate().refusals(facts(**change))]
        advised = {flag for r in refusals for flag in re.findall(r"--[a-z][a-z-]+", f"{r.needs} {r.remedy}")}
        later = {"--" + name.replace("_", "-") for name in absent_arguments(PRIMARY)}
        assert {NAMES.prefill_cp_flag, NAMES.cp_mode_flag, NAMES.prefill_backend_flag} <= advised
        assert {flag for flag in advised - later if f'"{flag}"' not in source} == set()
        assert f'"{NAMES.in_seq_split}"' in source


# Stand-ins.


class Stock:
    """A stock NSA pool of ``pages`` pages."""

    def __init__(self, pages: int) -> None:
        self.size, self.page_size, self.device = pages * PAGE, PAGE, "cpu"
        self.layer_num, self.start_layer, self.layer_transfer_counter = LAYERS, 0, None
        self.kv_buffer = [torch.zeros((pages + 1) * PAGE, 1, NOPE + ROPE).bfloat16() for _ in range(LAYERS)]
        self.index_k_with_scale_buffer = [
            torch.zeros(pages + 1, PAGE * INDEX, dtype=torch.uint8) for _ in range(LAYERS)
        ]

    def set_mla_kv_buffer(self, layer: Any, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
        self.kv_buffer[layer.layer_id][loc] = torch.cat([nope, rope], dim=-1)


class StateType(str, enum.Enum):
    NSA = "nsa"
    SWA = "swa"


class Coordinator(SimpleNamespace):
    """SGLang's group coordinator of the attention-CP ranks."""

    @classmethod
    def of(cls, rank: int, size: int) -> Coordinator:
        return cls(
            rank_in_group=rank, world_size=size, ranks=list(range(size)), device_group=None, cpu_group="the CPU group"
        )


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(attributes)
    return made


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stand-ins for what the product imports of SGLang; its CP group is ``sglang.group``."""
    here = SimpleNamespace(group=Coordinator.of(0, 1))
    allocator = module("sglang.srt.mem_cache.allocator", PagedTokenToKVPoolAllocator=object)
    releases.symbol.cache_clear()
    for owner in (releases, attention):
        monkeypatch.setattr(owner, "installed", lambda: release_for(PRIMARY))
    for made in (
        module("sglang.srt.mem_cache", allocator=allocator),
        allocator,
        module("sglang.srt.mem_cache.memory_pool", NSATokenToKVPool=Stock),
        module("sglang.srt.utils", next_power_of_2=None),
        module("sglang.srt.distributed.parallel_state", get_attn_cp_group=lambda: here.group),
        module("sglang.srt.disaggregation.base.conn", KVPoll=KVPoll, StateType=StateType),
        module("sglang.srt.environ", envs=MagicMock(**{"SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get.return_value": 300})),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    for name in ("cp_shared_kv.pool", "cp_shared_kv.allocator"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
    here.pool = sys.modules["cp_shared_kv.pool"]
    yield here
    releases.symbol.cache_clear()


@pytest.fixture
def collective_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each collective call of a gather brings from other ranks; nothing is moved."""
    calls: list[int] = []

    def all_gather(outputs: Any, owns: Any, group: Any) -> None:
        calls.append(sum(output.nbytes - own.nbytes for output, own in zip(outputs, owns, strict=True)))

    def send_surplus(regions: Any, rank: int, ranks: Any, group: Any) -> None:
        calls.append(sum(region.nbytes for owner, region in regions if owner != rank))

    monkeypatch.setattr(collectives, "_all_gather", all_gather)
    monkeypatch.setattr(collectives, "_send_surplus", send_surplus)
    return calls


@dataclasses.dataclass
class Rank:
    """Rank 0 of ``cp_size``, with a pool of ``pool_pages`` pages and a workspace for ``context_len`` tokens."""

    sglang: SimpleNamespace
    cp_size: int
    pool_pages: int
    context_len: int

    def __post_init__(self) -> None:
        self.layout = group(self.cp_size)[0]
        self.pool = self.sglang.pool.CPSharedNSATokenToKVPool.adopt(
            Stock(self.pool_pages),
            layout=self.layout,
            workspace_pages=workspace_pages(self.context_len, PAGE, self.cp_size),
            gather=PageGather(Coordinator.of(0, self.cp_size)),
        )

    def forward(self, prefix_pages: int, chunk_tokens: int = 2 * PAGE) -> Callable[[], None]:
        """Begin a forward of one request with pages 1, 2, 3, ...; returns what writes all of its layers."""
        seq = prefix_pages * PAGE + chunk_tokens
        table = np.arange(1, -(-seq // PAGE) + 1)[None]
        active = self.pool.begin_forward(
            build_plan(self.layout, table, [prefix_pages * PAGE], [seq], self.pool.workspace_page_count)
        )
        active.token_slots(PAGE, chunk_tokens)
        loc = torch.zeros(chunk_tokens, dtype=torch.int64)
        nope = torch.ones(chunk_tokens, 1, NOPE).bfloat16()
        rope = torch.ones(chunk_tokens, 1, ROPE).bfloat16()

        def write() -> None:
            for layer_id in range(LAYERS):
                with self.pool.storing_index_k(layer_id, chunk_tokens):
                    pass
                self.pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer_id), loc, nope, rope)

        return write


class Operations(TorchFunctionMode):
    """Notes the operations on tensors, and the bytes of the results that are not views or given outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.new_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.names.add(func.__name__)
        known = {t.untyped_storage().data_ptr() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)}
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                self.new_bytes += made.nbytes
        return result


class TestMemory:
    """sglang#30505, #37712, #35201, #36941: what is used beyond the pools must not grow unseen."""

    @pytest.mark.parametrize("cp_size", [2, 8])
    def test_the_workspace_is_the_same_for_a_pool_a_hundred_times_larger(self, sglang: SimpleNamespace, cp_size: int):
        small, large = Rank(sglang, cp_size, 4, 4096).pool, Rank(sglang, cp_size, 400, 4096).pool
        assert large.size == 100 * small.size
        assert large.workspace_bytes == small.workspace_bytes == workspace_pages(4096, PAGE, cp_size) * PAGE_BYTES

    @pytest.mark.parametrize("cp_size", [2, 8])
    def test_a_context_twice_as_long_at_most_doubles_the_workspace(self, cp_size: int):
        for context_len in (1, PAGE, 1000, 131072):
            assert workspace_pages(2 * context_len, PAGE, cp_size) <= 2 * workspace_pages(context_len, PAGE, cp_size)

    @pytest.mark.parametrize("cp_size", [2, 4, 8])
    def test_several_long_prefixes_in_one_batch_are_refused_before_memory_is_taken(self, cp_size: int):
        """SGLang forms batches of one request under in-seq-split; if it did not, this would not be an OOM."""
        context = 128
        tables = np.arange(1, 4 * context + 1).reshape(4, context)
        capacity_pages = workspace_pages(context * PAGE, PAGE, cp_size)
        lens = [context * PAGE - 1] * 4, [context * PAGE] * 4
        with pytest.raises(PlanError, match=f"reads 512 prefix pages but the workspace has room for {capacity_pages}"):
            build_plan(group(cp_size)[0], tables, *lens, capacity_pages + 1)
        build_plan(group(cp_size)[0], tables[:1], lens[0][:1], lens[1][:1], capacity_pages)

    def test_a_layer_takes_no_memory_that_grows_with_the_prefix(
        self, sglang: SimpleNamespace, collective_bytes: list[int], monkeypatch: pytest.MonkeyPatch
    ):
        """On a GPU, where pages are copied by a kernel that allocates nothing."""
        monkeypatch.setattr(sglang.pool, "copy_pages", lambda *args: None)
        taken = []
        for prefix_pages in (8, 80):
            write = Rank(sglang, 4, 40, 100 * PAGE).forward(prefix_pages)
            with Operations() as seen:
                write()
            taken.append(seen.new_bytes)
        assert 0 < taken[0] == taken[1]


class TestTime:
    """vllm-ascend#8050, sglang#14498, #22692: what is moved, how often, and what the host waits for. No clock."""

    def test_bytes_gathered_follow_the_pages_that_are_read_and_not_the_pool(
        self, sglang: SimpleNamespace, collective_bytes: list[int]
    ):
        def gathered(prefix_pages: int, pool_pages: int) -> int:
            collective_bytes.clear()
            Rank(sglang, 4, pool_pages, 200 * PAGE).forward(prefix_pages)()
            return sum(collective_bytes)

        assert gathered(8, 8) == gathered(8, 800) == LAYERS * PAGE_BYTES * 8 * 3 // 4
        assert gathered(80, 800) == 10 * gathered(8, 800)

    @pytest.mark.parametrize("cp_size", [2, 4, 8])
    def test_a_layer_makes_one_collective_call_for_each_kind_and_none_without_a_prefix(
        self, sglang: SimpleNamespace, collective_bytes: list[int], cp_size: int
    ):
        rank = Rank(sglang, cp_size, 40, 40 * PAGE)
        rank.forward(0)()
        assert collective_bytes == []
        rank.forward(16)()
        assert len(collective_bytes) == 2 * LAYERS

    def test_pages_that_a_loader_brings_are_waited_for_before_they_are_gathered(
        self, sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ):
        """sglang#30321, sglang#38324: HiCache is refused, but no loader that fills a layer late may be overtaken."""
        seen: list[Any] = []
        monkeypatch.setattr(collectives, "_all_gather", lambda *args: seen.append("gather"))
        rank = Rank(sglang, 4, 40, 40 * PAGE)
        rank.pool.layer_transfer_counter = SimpleNamespace(wait_until=seen.append)
        rank.forward(16)()
        assert seen == [step for layer in range(LAYERS) for step in (layer, "gather") * 2]

    def test_no_operation_of_a_layer_needs_a_value_on_the_host(
        self, sglang: SimpleNamespace, collective_bytes: list[int]
    ):
        write = Rank(sglang, 4, 40, 100 * PAGE).forward(8, chunk_tokens=100)
        with Operations() as seen:
            write()
        assert {"index_select", "index_copy_"} <= seen.names
        waits = {"item", "tolist", "numpy", "cpu", "nonzero", "unique", "equal", "__bool__", "__int__"}
        assert seen.names & waits == set()


class TestPool:
    def test_a_pool_that_is_shared_cannot_be_shared_again(self, sglang: SimpleNamespace):
        """tpu-inference#3344: sharded twice, a rank would hold a part of its part."""
        rank = Rank(sglang, 4, 8, 1024)
        with pytest.raises(TypeError, match="can adopt only the stock Stock, got CPSharedNSATokenToKVPool"):
            type(rank.pool).adopt(rank.pool, layout=rank.layout, workspace_pages=20, gather=None)

    @pytest.mark.parametrize("call", ["get_cpu_copy", "load_cpu_copy"])
    def test_pages_are_not_moved_to_the_host_or_back(self, sglang: SimpleNamespace, call: str):
        """sglang#30321: no path restores MLA KV and leaves index-K out."""
        pool = Rank(sglang, 4, 8, 1024).pool
        with pytest.raises(sglang.pool.SharedPoolError, match=f"{call} .* is not supported under CP shared KV"):
            getattr(pool, call)([1, 2])

    def test_a_draft_models_pool_is_refused_before_it_is_built(self, sglang: SimpleNamespace):
        """sglang#19897, #19796: second line behind the gate."""
        built: list[Any] = []
        with pytest.raises(capacity.CapacityError, match="remove --speculative-algorithm"):
            capacity._init_pools(built.append, SimpleNamespace(is_draft_worker=True), (None,), {})
        assert built == []


@dataclasses.dataclass
class Metadata:
    page_table_1: torch.Tensor
    real_page_table: torch.Tensor
    page_table_1_flattened: torch.Tensor
    indexer_seq_lens_cpu: torch.Tensor


class TestPageTables:
    def test_tables_that_are_already_local_give_the_same_tables_again(self, sglang: SimpleNamespace):
        """ATOM#234: they are built from the request's slots and never translated, so not twice either."""
        rank = Rank(sglang, 4, 8, 1024)
        pages, prefix, seq = torch.tensor([9, 2, 30]), 2 * PAGE, 2 * PAGE + 40
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[None]
        lens = torch.tensor([seq])
        logical = Metadata(slots[:, :seq].int(), pages[None].int(), slots[0, :seq].int(), lens)
        backend = SimpleNamespace(forward_metadata=logical)
        batch = SimpleNamespace(
            token_to_kv_pool=rank.pool,
            seq_lens_cpu=lens,
            extend_prefix_lens_cpu=[prefix],
            batch_size=1,
            forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
            req_pool_indices=torch.tensor([0]),
            req_to_token_pool=SimpleNamespace(req_to_token=slots),
            out_cache_loc=slots[0, prefix:seq],
            rids=None,
        )
        seen = []
        for _ in range(2):
            attention._init_forward_metadata(lambda forward_batch: None, backend, (batch,), {})
            made = backend.forward_metadata
            seen.append([made.page_table_1, made.real_page_table, made.page_table_1_flattened])
        for first, second in zip(*seen, strict=True):
            assert torch.equal(first, second)
        # Page 9 is of rank 0, page 2 of rank 1; page 30 is new and lies behind one gathered page of each rank. Before
        # them is the trash page.
        places = [1, 2, 5]
        token_slots = [places[i // PAGE] * PAGE + i % PAGE for i in range(seq)]
        assert [table.tolist() for table in seen[0]] == [[token_slots], [places], token_slots]


@dataclasses.dataclass(frozen=True)
class Request:
    """SGLang's ``TransferInfo``: a decode rank's answer for a room."""

    room: int
    mooncake_session_id: str
    dst_state_indices: list[list[int]]


class TestTransfer:
    @staticmethod
    def manager(rank: int, size: int, **changes: Any) -> Any:
        """A prefill manager whose other ranks and sizes are all different from those of attention CP."""
        return SimpleNamespace(
            **{
                "attn_cp_rank": rank,
                "attn_cp_size": size,
                "attn_tp_rank": 0,
                "attn_tp_size": 16,
                "tp_rank": 15 - rank,
                "dp_rank": 1,
                "pp_rank": 0,
                "pp_size": 1,
                "enable_all_cp_ranks_for_transfer": True,
                "kv_args": SimpleNamespace(page_size=PAGE, state_types=[StateType.NSA], state_item_lens=[[8]]),
                "state_item_lens_sum": 132,
                "bootstrap_timeout": 300,
                "record_failure": lambda room, reason: None,
                **changes,
            }
        )

    def init(self, manager: Any) -> CpSharedKVLayout | None:
        transfer._manager_init(lambda *args: None, manager, ("kv_args", SimpleNamespace(value="prefill")), {})
        return transfer.layout_of(manager)

    @pytest.mark.parametrize("rank", range(4))
    def test_the_owner_is_the_attention_cp_rank_and_no_other_rank(self, sglang: SimpleNamespace, rank: int):
        """sglang#29725, #24560."""
        sglang.group = Coordinator.of(rank, 4)
        assert self.init(self.manager(rank, 4)) == group(4)[rank]

    @pytest.mark.parametrize("other", [(2, 4), (1, 8)])
    def test_pool_and_transfer_with_different_ranks_stop_the_start(
        self, sglang: SimpleNamespace, other: tuple[int, int]
    ):
        """sglang#29725, #24560."""
        sglang.group = Coordinator.of(1, 4)
        with pytest.raises(RuntimeError, match="wrong pages would be sent"):
            self.init(self.manager(*other))

    def test_a_rank_that_would_not_send_its_pages_stops_the_start(self, sglang: SimpleNamespace):
        """sglang#37149, #31182: where one rank acts for all, the pages of the others are never there."""
        sglang.group = Coordinator.of(1, 4)
        with pytest.raises(RuntimeError, match="SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1"):
            self.init(self.manager(1, 4, enable_all_cp_ranks_for_transfer=False))

    @pytest.mark.parametrize("cp_size", [2, 4, 8])
    def test_each_rank_reports_under_a_number_of_its_own(self, sglang: SimpleNamespace, cp_size: int):
        """sglang#19119, #26670: all CP ranks have attention-TP rank 0."""
        numbers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        class Manager(SimpleNamespace):
            def sync_status_to_decode_endpoint(self, remote: str, port: int, room: int, status: Any, rank: int) -> None:
                numbers.put((remote, room, status, rank))

        info = SimpleNamespace(endpoint="decode", dst_port=1, room=7)
        for rank in range(cp_size):
            transfer.Teller(Manager(**vars(self.manager(rank, cp_size)))).tell(info)
            assert numbers.get(timeout=10) == ("decode", 7, KVPoll.Failed, rank)

    def test_nothing_is_written_for_a_request_that_decode_waits_for_no_longer(
        self, sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ):
        """sglang#24527: the time counts from decode's announcement, however late prefill gets the request."""
        sglang.group = Coordinator.of(0, 2)
        now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        failed: list[int] = []
        manager = self.manager(0, 2, update_status=lambda room, status: failed.append(room))
        self.init(manager)
        manager.request_status[7] = KVPoll.WaitingForInput
        manager.transfer_infos[7] = {"session": "info"}
        now += 300
        assert not transfer._is_over(manager, 7)
        now += 1
        assert transfer._is_over(manager, 7)
        assert failed == [7]

    def test_telling_decode_servers_that_are_gone_takes_one_socket_for_each(self, sglang: SimpleNamespace):
        """A context for each message ran the scheduler out of descriptors."""
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()

        class Manager(SimpleNamespace):
            def sync_status_to_decode_endpoint(self, remote: str, port: int, room: int, status: Any, rank: int) -> None:
                told.put((room, self._connect(f"tcp://127.0.0.1:{port}")))
                raise OSError("gone")

        teller = transfer.Teller(Manager(**vars(self.manager(0, 2))))
        for room in range(200):
            teller.tell(SimpleNamespace(endpoint="decode", dst_port=1 + room % 2, room=room))
        seen = [told.get(timeout=10) for _ in range(200)]
        assert [room for room, _ in seen] == list(range(200)), "one that is gone keeps nobody from being told"
        assert len({id(socket) for _, socket in seen}) == 2

    def test_a_chunk_that_was_translated_cannot_be_translated_again(self):
        """ATOM#234, tpu-inference#3344: physical pages come with positions that are no slice."""
        once = split_chunk(group(4)[1], np.array([40, 3, 17, 90, 4, 55, 8, 21]), slice(0, 8))
        with pytest.raises(AttributeError, match="has no attribute 'start'"):
            split_chunk(group(4)[1], *once)  # type: ignore[arg-type]

    def send_state(self, manager: Any, request: Request, source: list[Any]) -> tuple[int, list[Any]]:
        """Return code, and the ``(source, destination)`` pages that stock was given to send."""
        sent: list[Any] = []

        def stock(req: Any, prefill_state_indices: list[Any], **others: Any) -> int:
            sent.append(([part.tolist() for part in prefill_state_indices], req.dst_state_indices))
            return 0

        return transfer._maybe_send_extra(stock, manager, (request, source, None, None), {}), sent

    def test_index_k_of_a_request_is_translated_anew_for_each_decode_rank(self, sglang: SimpleNamespace):
        """ATOM#234: a chunk goes to all decode ranks of a request, one after the other."""
        sglang.group = Coordinator.of(1, 4)
        manager = self.manager(1, 4)
        self.init(manager)
        source = [np.array([40, 6, 17, 90, 4, 55, 10, 21])]
        for session in ("decode rank 0", "decode rank 1"):
            request = Request(7, session, [list(range(500, 508))])
            assert self.send_state(manager, request, source) == (0, [([[2, 23, 3]], [[501, 503, 506]])])

    def test_state_of_another_kind_fails_the_request_and_sends_nothing(self, sglang: SimpleNamespace):
        """vllm-ascend#13965: pages of one group sent by the sizes or addresses of another."""
        sglang.group = Coordinator.of(1, 4)
        manager = self.manager(
            1, 4, kv_args=SimpleNamespace(page_size=PAGE, state_types=[StateType.NSA, StateType.SWA])
        )
        self.init(manager)
        request = Request(7, "session", [[501, 502], [601, 602]])
        assert self.send_state(manager, request, [np.array([2, 6]), np.array([1, 2])]) == (-1, [])
        assert transfer._send_aux(lambda req: 0, manager, (request,), {}) == -1


class TestOneDefinition:
    def test_only_the_layout_divides_pages_by_the_number_of_ranks(self):
        """TRT-LLM#19273: copies of the ownership formula drift apart."""
        found: dict[str, set[str]] = {}
        root = Path(cp_shared_kv.__file__).parent
        for path in sorted(root.rglob("*.py")):
            for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(function, ast.FunctionDef) and _divides_by_ranks(function):
                    found.setdefault(path.relative_to(root).as_posix(), set()).add(function.name)
        formulas = {"owner_for_logical_pages", "logical_pages_to_physical"}
        assert found == {"layout.py": formulas | {f"{name}_np" for name in formulas}}


def _divides_by_ranks(function: ast.FunctionDef) -> bool:
    """Whether a function has ``x % n``, ``x // n``, ``divmod(x, n)`` or ``ceil_div(x, n)`` with a number of ranks."""
    ranks = re.compile(r"\b(attn_cp_size|cp_size|world_size|self\.size)\b")
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv)):
            divisor: ast.expr = node.right
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("divmod", "ceil_div") and len(node.args) == 2:
            divisor = node.args[1]
        else:
            continue
        if ranks.search(ast.unparse(divisor)):
            return True
    return False
