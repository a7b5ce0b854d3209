"""One decode TP rank: pool, KV manager, receivers and DecodeTransferQueue; all stock, if the scenario says so."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cp_shared_kv.releases import installed

from .facts import holds, made
from .pools import (
    METADATA_SLOTS,
    Cluster,
    init_distributed,
    init_engine,
    make_metadata_buffers,
    make_pool,
    page_bytes,
    poison,
)
from .prefill import LOOPBACK, first_token
from .product import decode_patches
from .scenario import (
    ABORTED,
    DECODE_POISON,
    HUNG,
    KINDS,
    LAYERS,
    PAGE_SIZE,
    SUCCESS,
    DecodeOutcome,
    DecodeReport,
    Request,
    page_content,
)
from .standins import ClientStream, Coordinator, KVRecord, Req, ServerArgs, TreeCache
from .wire import Signals, registered_regions

#: Signals of prefill upon which decode announces itself for a request that it holds back.
ANNOUNCED_AT = ("entered", "ended")


class NoSpeculation:
    def is_none(self) -> bool:
        return True


class ErrorLog(logging.Handler):
    """Keeps what the product logs as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []
        logging.getLogger("cp_shared_kv").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@dataclass
class DecodeScheduler:
    """What DecodeTransferQueue reads of the decode scheduler."""

    server_args: ServerArgs
    stream_output: ClientStream
    spec_algorithm: NoSpeculation
    output_streamer: ClientStream
    enable_hisparse: bool = False
    enable_metrics: bool = False
    enable_decode_hicache: bool = False
    metrics_reporter: Any = field(default_factory=lambda: SimpleNamespace(enable_metrics=False))
    batch_result_processor: Coordinator = field(default_factory=Coordinator)
    disagg_decode_prealloc_queue: None = None
    kv_checksum_computer: None = None


class DecodeRank:
    """The rank's objects and the steps that a decode scheduler takes for each request."""

    def __init__(self, cluster: Cluster, tp_rank: int) -> None:
        self.scenario = cluster.scenario
        self.tp_rank = tp_rank
        self.prefill_address = f"{LOOPBACK}:{cluster.bootstrap_port}"
        cluster.barrier.wait()  # the bootstrap server is up
        self.signals = Signals(cluster.prefill_dist_port)
        init_distributed(self.scenario.decode_tp, tp_rank, cluster.decode_dist_port, 1, cluster.bootstrap_port)
        if self.scenario.on_decode:
            decode_patches().apply()
        self.log = ErrorLog()
        init_engine()
        self.pool = make_pool(self.scenario.decode_pages)
        poison(self.pool, DECODE_POISON)
        self._build_queues(cluster.bootstrap_port)
        self.patience_s = self.scenario.timeout_s
        self.outcomes: dict[int, DecodeOutcome] = {}
        self.clobbered: dict[int, dict[str, list[int]]] = {}
        self.holders: dict[int, dict[str, dict[int, int]]] = {}
        self.announced: dict[int, float] = {}
        self.released: dict[int, float] = {}
        self.torn: dict[int, dict[str, list[int]]] = {}
        self.untouched: dict[int, dict[str, list[int]]] = {}
        self.leftovers: dict[int, list[str]] = {}

    def _build_queues(self, bootstrap_port: int) -> None:
        import sglang.srt.distributed.parallel_state as parallel_state
        from sglang.srt.disaggregation.base.conn import KVArgs
        from sglang.srt.disaggregation.decode import DecodeTransferQueue
        from sglang.srt.disaggregation.mooncake import MooncakeKVManager
        from sglang.srt.disaggregation.utils import (
            DisaggregationMode,
            ReqToMetadataIdxAllocator,
        )

        server_args = ServerArgs(disaggregation_bootstrap_port=bootstrap_port)
        self.metadata = make_metadata_buffers()
        self.metadata_slots = ReqToMetadataIdxAllocator(METADATA_SLOTS)
        args = KVArgs()
        args.engine_rank = self.tp_rank
        args.pp_rank = 0
        args.system_dp_rank = None
        args.page_size = PAGE_SIZE
        args.gpu_id = 0
        args.ib_device = None
        args.prefill_start_layer = args.num_draft_entries = 0
        args.kv_cache_dtype_str = "fp8_e4m3"
        args.kv_layer_ids = []
        args.kv_layout = args.mla_compression_ratios = args.rust_http_port = None
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.metadata.get_buf_infos()
        self._set_up_state(args)
        self.manager = MooncakeKVManager(args, DisaggregationMode.DECODE, server_args, True)
        self.stream = ClientStream()
        self.world_group = parallel_state.get_world_group().cpu_group
        self.transfers = made(
            DecodeTransferQueue,
            gloo_group=parallel_state.get_tp_group().cpu_group,
            req_to_metadata_buffer_idx_allocator=self.metadata_slots,
            tp_rank=self.tp_rank,
            metadata_buffers=self.metadata,
            scheduler=DecodeScheduler(server_args, self.stream, NoSpeculation(), self.stream),
            tree_cache=TreeCache(self._release),
        )

    def _set_up_state(self, args: Any) -> None:
        """State buffers of ``KVArgs``, as DecodePreallocQueue sets them."""
        if installed().state_by_component:
            from sglang.srt.disaggregation.utils import setup_state_kv_args

            setup_state_kv_args(args, self.pool, None, total_kv_layers=LAYERS)
            return
        args.state_type = installed().index_k_state
        args.state_data_ptrs, args.state_data_lens, args.state_item_lens = self.pool.get_state_buf_infos()

    def find_prefill(self) -> None:
        """Fetch the prefill side's layout from the bootstrap server, as DecodePreallocQueue does."""
        deadline = time.monotonic() + 10
        while not self.manager.try_ensure_parallel_info(self.prefill_address):
            if time.monotonic() > deadline:
                raise TimeoutError("the prefill ranks never finished registering at the bootstrap server")
            time.sleep(0.02)

    def renew_registration(self) -> None:
        """What stock does when the heartbeat to the prefill server is lost, and when it is back.

        It is the only way on 0.5.12 by which a running decode registers anew, and so the only one by which a prefill
        rank takes it off its list of failed sessions.
        """
        self.manager._handle_node_failure(self.prefill_address)
        self.find_prefill()

    def serve(self, index: int, wave: tuple[Request, ...]) -> None:
        """Ask for the requests of a wave and follow them to their end; fills ``outcomes`` (but for the wrong pages)."""
        self.destinations = self._choose_destinations(index, wave)
        wanted = [request for request in wave if not request.fake]
        self.holders[index] = {
            kind: {int(page): room for room, pages in self.destinations.items() for page in pages} for kind in KINDS
        }
        self.requests = {request.room: request for request in wanted}
        self.late: dict[int, Callable[[], None]] = {}
        reqs = {request.room: self._ask_for(request, self.holders[index].setdefault("aux", {})) for request in wanted}
        # Prefill may need the whole of its time first: a hang is to be seen there, not cut short here. And decode's
        # side of the product may need its own twice.
        deadline = time.monotonic() + self.patience_s * (2 if self.scenario.on_decode else 1) + 5
        self.pages_at_success: dict[int, dict[str, list[int]]] = {}
        aborted = False
        done = False
        while not done:
            if not aborted and self.signals.is_set("slow", index):
                aborted = True
                self._abort()
            for room in [room for room in self.late if any(self.signals.is_set(name, room) for name in ANNOUNCED_AT)]:
                self.late.pop(room)()
            if holds("holds_failed_pages"):
                self.transfers.resolve_deferred_releases()
            for req in self.transfers.pop_transferred():
                # At once: from here on a real decode would read the pages.
                self.released[req.bootstrap_room] = time.monotonic()
                self.pages_at_success[req.bootstrap_room] = self._differing(req.bootstrap_room)
            over = torch.tensor([int(time.monotonic() > deadline)])
            torch.distributed.all_reduce(over, op=torch.distributed.ReduceOp.MAX, group=self.world_group)
            held = holds("holds_failed_pages") and self.transfers.has_pending_deferred_releases()
            done = not (self.transfers.queue or held) or bool(over)
            time.sleep(0.01)
        for room, req in reqs.items():
            self.outcomes[room] = self._outcome(room, req)
            if self.outcomes[room].status == HUNG:
                self.patience_s = 2.0
        self.transfers.queue.clear()

    def _choose_destinations(self, index: int, wave: tuple[Request, ...]) -> dict[int, np.ndarray]:
        """room -> int32 destination page by position, disjoint over the wave, different on every rank."""
        pages = np.arange(1, self.scenario.decode_pages + 1, dtype=np.int32)
        if not self.scenario.contiguous_destination:
            pages = np.random.default_rng([index, self.tp_rank]).permutation(pages)
        rooms = [request for request in wave if not request.fake]
        ends = np.cumsum([len(request.pages) for request in rooms])
        if len(ends) and ends[-1] > len(pages):
            raise AssertionError("the decode pool is too small for this wave")
        return {request.room: part for request, part in zip(rooms, np.split(pages, ends)[:-1], strict=True)}

    def _abort(self) -> None:
        """The client's aborts on decode."""
        for abort in self.scenario.aborts:
            for decode_req in self.transfers.queue:
                if abort.when == "on decode" and decode_req.req.bootstrap_room == abort.room:
                    decode_req.kv_receiver.abort()

    def _release(self, req: Req) -> None:
        """The pages of a failed request may be another's from here on: they are poisoned again at once."""
        room = req.bootstrap_room
        self.released[room] = time.monotonic()
        self.torn[room] = self._torn(room)
        self.untouched[room] = self._untouched(room)
        for kind in KINDS:
            for layer in range(LAYERS):
                page_bytes(self.pool, kind, layer)[self.destinations[room]] = DECODE_POISON

    def _ask_for(self, request: Request, holders: dict[int, int]) -> Req:
        """Ask for a request, and note it as the holder of its metadata slot."""
        from sglang.srt.disaggregation.decode import DecodeRequest
        from sglang.srt.disaggregation.mooncake import MooncakeKVReceiver

        req = Req(
            rid=f"room-{request.room}",
            bootstrap_host=LOOPBACK,
            bootstrap_room=request.room,
            origin_input_ids=list(range(request.tokens)),
            record=KVRecord(0),
        )
        receiver = MooncakeKVReceiver(self.manager, self.prefill_address, request.room)
        receiver.init(0)
        slot = self.metadata_slots.alloc()
        holders[slot] = request.room
        pages = self.destinations[request.room]
        end = len(pages)
        state = pages[request.first_position("state") : end - request.missing_state_destinations]

        def announce() -> None:
            self.announced[request.room] = time.monotonic()
            receiver.send_metadata(
                pages[request.decode_prefix_pages : end - request.missing_kv_destinations],
                slot,
                [state] if installed().state_by_component else state,
                decode_prefix_len=request.decode_prefix_pages * PAGE_SIZE,
            )

        if self.tp_rank in request.late_on or request.enters_after:
            self.late[request.room] = announce
        else:
            announce()
        self.transfers.add(DecodeRequest(req, receiver, waiting_for_input=True, metadata_buffer_index=slot))
        return req

    def _outcome(self, room: int, req: Req) -> DecodeOutcome:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        status, error = HUNG, ""
        if room in self.pages_at_success:
            status = SUCCESS
            if req.output_ids != [first_token(room)]:
                error = f"first token {req.output_ids}, expected {first_token(room)}"
        elif isinstance(req.finished_reason, FINISH_ABORT):
            error = str(req.finished_reason.message)
            # Stock's own time limit turns a request that nobody finishes into a failed one.
            status = HUNG if "timed out" in error else ABORTED
        return DecodeOutcome(room, status, error, self.stream.times_streamed.get(room, 0), req.times_released)

    def _differing(self, room: int) -> dict[str, list[int]]:
        """kind -> positions whose destination page is not, in all layers, what it must be after a complete transfer."""
        request, pages = self.requests[room], self.destinations[room]
        wrong: dict[str, list[int]] = {}
        for kind in KINDS:
            sent = request.positions_to_send(kind)
            wrong[kind] = [
                position
                for position, page in enumerate(pages)
                if not all(
                    np.array_equal(page_bytes(self.pool, kind, layer)[page], page_content(kind, layer, position, room))
                    if position in sent
                    else (page_bytes(self.pool, kind, layer)[page] == DECODE_POISON).all()
                    for layer in range(LAYERS)
                )
            ]
        return wrong

    def _torn(self, room: int) -> dict[str, list[int]]:
        """For a request that failed: positions with bytes that are neither poison nor right, or that nobody offered."""
        request, pages = self.requests[room], self.destinations[room]
        torn: dict[str, list[int]] = {}
        for kind in KINDS:
            missing = request.missing_kv_destinations if kind == "kv" else request.missing_state_destinations
            offered = {p for p in request.positions_to_send(kind) if p < len(pages) - missing}
            torn[kind] = []
            for position, page in enumerate(pages):
                for layer in range(LAYERS):
                    found = page_bytes(self.pool, kind, layer)[page]
                    right = position in offered and np.array_equal(found, page_content(kind, layer, position, room))
                    if not right and not (found == DECODE_POISON).all():
                        torn[kind].append(position)
                        break
        return torn

    def _untouched(self, room: int) -> dict[str, list[int]]:
        request, pages = self.requests[room], self.destinations[room]
        return {
            kind: [
                position
                for position in sorted(request.positions_to_send(kind))
                if all(
                    (page_bytes(self.pool, kind, layer)[pages[position]] == DECODE_POISON).all()
                    for layer in range(LAYERS)
                )
            ]
            for kind in KINDS
        }

    def inspect(self, index: int) -> None:
        """Look at the whole pool once nothing is being written any more, and poison it for the next wave."""
        for room, outcome in self.outcomes.items():
            if room not in self.requests:
                continue
            if outcome.status == SUCCESS:
                late = self._differing(room)
                first = self.pages_at_success[room]
                outcome.wrong_pages = {kind: sorted({*first[kind], *late[kind]}) for kind in KINDS}
                outcome.untouched_pages = self._untouched(room)
            elif room in self.released:
                outcome.wrong_pages, outcome.untouched_pages = self.torn[room], self.untouched[room]
                untouched = self._untouched(room)
                outcome.late_pages = {
                    kind: sorted(self.requests[room].positions_to_send(kind) - set(untouched[kind])) for kind in KINDS
                }
            else:
                outcome.wrong_pages, outcome.untouched_pages = self._torn(room), self._untouched(room)
        nobodys = np.ones(self.scenario.decode_pages + 1, dtype=bool)
        for pages in self.destinations.values():
            nobodys[pages] = False
        self.clobbered[index] = {
            kind: sorted(
                {
                    int(page)
                    for layer in range(LAYERS)
                    for page in np.flatnonzero(
                        (page_bytes(self.pool, kind, layer) != DECODE_POISON).any(axis=1) & nobodys
                    )
                }
            )
            for kind in KINDS
        }
        poison(self.pool, DECODE_POISON)
        self.leftovers[index] = self._leftovers()

    def _leftovers(self) -> list[str]:
        """What is kept for requests although all are over."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager = self.manager
        statuses = manager.request_status
        if not (self.scenario.on_decode or holds("forgets_failed_requests")):
            statuses = {room: status for room, status in statuses.items() if status != KVPoll.Failed}
        containers: dict[str, Any] = {
            "request_status": statuses,
            "required_prefill_response_num_table": manager.required_prefill_response_num_table,
            "prefill_response_tracker": manager.prefill_response_tracker,
        }
        if self.scenario.on_decode:
            from cp_shared_kv.patches.decode import answers_of

            # Stock keeps the reason of each failure that prefill reports after the first one.
            containers["failure_records"] = manager.failure_records
            answers = answers_of(manager)
            containers |= {"final answers": answers._final, "held requests": answers._held_until}
        kept = [f"{name}: {container}" for name, container in containers.items() if container]
        free = self.metadata_slots.available_size()
        return kept + ([] if free == METADATA_SLOTS else [f"{free} of {METADATA_SLOTS} metadata slots are free"])

    def report(self) -> DecodeReport:
        return DecodeReport(
            self.tp_rank,
            self.outcomes,
            self.clobbered,
            self.manager.get_session_id(),
            registered_regions(self.manager.kv_args),
            self.holders,
            self.announced,
            self.released,
            self.leftovers,
            self.log.messages,
        )


def main(cluster: Cluster, tp_rank: int) -> DecodeReport:
    """Body of a decode process: serve every wave, in step with the other ranks, and report."""
    os.environ["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] = str(round(cluster.scenario.timeout_s))
    rank = DecodeRank(cluster, tp_rank)
    cluster.barrier.wait()
    rank.find_prefill()
    for index, wave in enumerate(cluster.scenario.waves):
        if any(request.renew_registration for request in wave):
            rank.renew_registration()
        rank.serve(index, wave)
        cluster.barrier.wait()
        rank.inspect(index)
        cluster.barrier.wait()
    return rank.report()
