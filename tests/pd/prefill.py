"""One prefill CP rank: real pool, bootstrap queue, chunk sender, KV manager and Mooncake engine."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace

import numpy as np
import torch

from cp_shared_kv.releases import installed

from . import sabotage
from .facts import holds, made
from .pools import (
    METADATA_SLOTS,
    Cluster,
    fill_page,
    init_distributed,
    init_engine,
    make_metadata_buffers,
    make_pool,
    poison,
)
from .product import transfer_patches
from .scenario import ABORTED, HUNG, KINDS, LAYERS, PAGE_SIZE, PREFILL_POISON, SUCCESS, Outcome, PrefillReport, Request
from .standins import (
    Batch,
    ClientStream,
    Coordinator,
    GrammarManager,
    KVAllocator,
    KVRecord,
    ModelConfig,
    ModelRunner,
    ParallelState,
    Req,
    ReqToTokenPool,
    SchedulerParts,
    ServerArgs,
    TpWorker,
    TreeCache,
)
from .wire import Signals, WireTap

LOOPBACK = "127.0.0.1"


def first_token(room: int) -> int:
    """The token that prefill "samples" for a request; decode must find it in its metadata buffer."""
    return 4242 + room


def owner_and_physical(logical_page: int, cp_size: int) -> tuple[int, int]:
    """Rank and physical page of a logical page, by the design's definition.

    Written out here on purpose: it is the oracle against which the product's own layout is tested.
    """
    return (logical_page - 1) % cp_size, (logical_page - 1) // cp_size + 1


class PrefillRank:
    """The rank's objects and the loop that a prefill scheduler runs over them."""

    def __init__(self, cluster: Cluster, cp_rank: int) -> None:
        self.scenario = cluster.scenario
        self.cp_rank = cp_rank
        self.shared = self.scenario.transfer == "shared"
        self._start_bootstrap_server_on_rank_0(cluster)
        cp_size = self.scenario.cp_size
        init_distributed(cp_size, cp_rank, cluster.prefill_dist_port, cp_size, cluster.bootstrap_port)
        if self.scenario.transfer != "stock":
            # Before any class below is looked up, as in a real scheduler process.
            transfer_patches(self.scenario.with_queue).apply()
            if not self.shared:
                transfer_patches(self.scenario.with_queue).undo()
        if holds("pins_page_numbers"):
            from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

            MooncakeKVSender.supports_host_tensor_indices = False  # that takes a GPU
        sabotage.apply(self.scenario.sabotage)
        init_engine()
        held = self.scenario.logical_pages // (self.scenario.cp_size if self.shared else 1)
        self.pool = make_pool(held)
        self.wave = 0
        self.signals = Signals(cluster.prefill_dist_port)
        self._build_scheduler(cluster.bootstrap_port)
        self.tap = WireTap(
            self.manager,
            tuple(fault for fault in self.scenario.faults if fault.cp_rank == cp_rank),
            tuple(slow for slow in self.scenario.slow if slow.cp_rank == cp_rank),
            lambda wave: self.signals.set("slow", wave),
        )
        self.patience_s = self.scenario.timeout_s
        self.workers_started = len(self.manager.transfer_queues)
        self.outcomes: dict[int, Outcome] = {}
        self.leftovers: dict[int, list[str]] = {}
        self.released: dict[int, float] = {}
        self.rows: dict[int, int] = {}
        self.chunks: dict[int, list[int]] = {}

    def _start_bootstrap_server_on_rank_0(self, cluster: Cluster) -> None:
        if self.cp_rank == 0:
            import requests
            from sglang.srt.disaggregation.mooncake import MooncakeKVBootstrapServer

            MooncakeKVBootstrapServer(LOOPBACK, cluster.bootstrap_port)
            url = f"http://{LOOPBACK}:{cluster.bootstrap_port}/health"
            deadline = time.monotonic() + 10
            while True:
                try:
                    requests.get(url, timeout=1)
                    break
                except requests.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
        cluster.barrier.wait()

    def _build_scheduler(self, bootstrap_port: int) -> None:
        import sglang.srt.distributed.parallel_state as parallel_state
        from sglang.srt.disaggregation import prefill
        from sglang.srt.disaggregation.utils import (
            DisaggregationMode,
            ReqToMetadataIdxAllocator,
            TransferBackend,
        )

        class Scheduler(prefill.SchedulerDisaggregationPrefillMixin, SchedulerParts):
            """Stock's prefill mixin over a stand-in; its attributes are set below."""

            if self.scenario.with_queue:
                from sglang.srt.managers.scheduler import Scheduler as Stock

                # As patched: with the wrappers that they are in.
                abort_request = Stock.__dict__["abort_request"]
                if installed().answers_rejected:
                    retire_unadmitted_request = Stock.__dict__["retire_unadmitted_request"]
                if holds("aborts_between_chunks"):
                    process_pending_chunked_abort = Stock.__dict__["process_pending_chunked_abort"]

        self.world_group = parallel_state.get_world_group().cpu_group
        self.stream = ClientStream(lambda room: self.signals.set("ended", room))
        scheduler = Scheduler()
        scheduler.disaggregation_mode = DisaggregationMode.PREFILL
        scheduler.send_to_tokenizer = self.stream
        scheduler.grammar_manager = GrammarManager()
        scheduler.waiting_queue = []
        scheduler.running_batch = Batch()
        scheduler.cur_batch = scheduler.last_batch = None
        scheduler.chunked_req = scheduler._pending_chunked_abort_req = None
        scheduler.enable_overlap = False
        scheduler.mm_receiver = scheduler.dllm_config = None
        scheduler.beam_coordinator = Coordinator()
        scheduler.processed_tokens_counter = 0
        scheduler.kv_shard_widening = 1
        scheduler.scheduler_stage_metrics = None
        scheduler.kv_checksum_computer = None
        scheduler.enable_staging = False
        scheduler.disagg_prefill_pending_chunk_rids = set()
        scheduler.attn_cp_cpu_group = parallel_state.get_attn_cp_group().cpu_group
        scheduler.attn_tp_cpu_group = parallel_state.get_attn_tp_group().cpu_group
        scheduler.server_args = ServerArgs(disaggregation_bootstrap_port=bootstrap_port)
        scheduler.dp_rank = None
        scheduler.gpu_id = 0
        scheduler.pp_rank = 0
        scheduler.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        scheduler.ps = ParallelState(scheduler.tp_rank)
        scheduler.metrics_reporter = SimpleNamespace(enable_metrics=False)
        scheduler.output_streamer = scheduler.ipc_channels = self.stream
        scheduler.rust_server = None
        scheduler.enable_metrics = False
        scheduler.enable_hicache_storage = False
        scheduler.sliding_window_size = None
        scheduler.model_config = ModelConfig(num_hidden_layers=LAYERS)
        logical_tokens = self.scenario.logical_pages * PAGE_SIZE
        scheduler.tp_worker = TpWorker(ModelRunner(logical_tokens))
        scheduler.tree_cache = TreeCache(self._release)
        scheduler.stream_output = self.stream
        scheduler.token_to_kv_pool_allocator = KVAllocator(PAGE_SIZE, self.pool)
        scheduler.disagg_metadata_buffers = make_metadata_buffers()
        scheduler.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(METADATA_SLOTS)
        slots = torch.zeros((METADATA_SLOTS, logical_tokens), dtype=torch.int32)
        scheduler.req_to_token_pool = ReqToTokenPool(slots)
        scheduler.disagg_prefill_inflight_queue = []
        self.queue = scheduler.disagg_prefill_bootstrap_queue = made(
            prefill.PrefillBootstrapQueue,
            token_to_kv_pool=self.pool,
            draft_token_to_kv_pool=None,
            req_to_metadata_buffer_idx_allocator=scheduler.req_to_metadata_buffer_idx_allocator,
            metadata_buffers=scheduler.disagg_metadata_buffers,
            tp_rank=scheduler.tp_rank,
            tp_size=self.scenario.cp_size,
            gpu_id=0,
            bootstrap_port=bootstrap_port,
            gloo_group=scheduler.attn_tp_cpu_group,
            max_total_num_tokens=logical_tokens,
            scheduler=scheduler,
            scheduler_stage_metrics=None,
            pp_rank=0,
            pp_size=1,
            transfer_backend=TransferBackend.MOONCAKE,
        )
        self.scheduler = scheduler
        self.manager = self.queue.kv_manager

    def _release(self, req: Req) -> None:
        self.released[req.bootstrap_room] = time.monotonic()

    def serve(self, index: int, wave: tuple[Request, ...]) -> None:
        """Serve the requests of a wave together, in the order of a real prefill scheduler's loop."""
        self._fill_pool(index, wave)
        self.wave = index
        self.rooms = [request.room for request in wave]
        self.deadline = time.monotonic() + self.patience_s
        reqs: dict[int, Req] = {}
        chunks = self.chunks = {}
        for step in itertools.count():
            newcomers = [request for request in wave if request.enters_after == step]
            if newcomers:
                self._bring_in(newcomers, reqs)
                chunks |= {
                    request.room: list(request.ends)
                    for request in newcomers
                    if reqs[request.room] in self.scheduler.waiting_queue
                }
                self.scheduler.waiting_queue = []
            for room, ends in chunks.items():
                if ends:
                    self._send_chunk(reqs[room], ends.pop(0), last=not ends)
            self.scheduler.process_disagg_prefill_inflight_queue()
            if step == 0:
                self._abort("between chunks", reqs)
            if not any(chunks.values()) and step >= max(request.enters_after for request in wave):
                break
        self._abort("in flight", reqs)
        self._poll_until_all_is_over()
        self.tap.wait_quiet(timeout_s=3)
        for request in wave:
            self.outcomes[request.room] = self._outcome(reqs[request.room])
        self.leftovers[index] = self._leftovers()
        if any(self.outcomes[request.room].status == HUNG for request in wave):
            self.patience_s = 2.0
        # Whatever hangs must not be polled with the requests of the next wave.
        self.queue.queue = []
        self.scheduler.disagg_prefill_inflight_queue = []

    def _fill_pool(self, index: int, wave: tuple[Request, ...]) -> None:
        """Lay each request's pages where this rank holds them; every other page of the pool is poison."""
        poison(self.pool, PREFILL_POISON)
        held: dict[int, tuple[int, int]] = {}
        for request in wave:
            if request.fake:
                continue
            for position, logical in enumerate(request.pages):
                owner, page = owner_and_physical(logical, self.scenario.cp_size)
                if not self.shared:
                    page = logical
                elif owner != self.cp_rank:
                    continue
                if page in held:
                    raise AssertionError(f"rooms {held[page][0]} and {request.room} of one wave share page {logical}")
                held[page] = (request.room, position)
                fill_page(self.pool, page, position, request.room)
        self.tap.expect(index, held)

    def _admit(self, request: Request, row: int) -> Req:
        """Enter a request into the bootstrap queue, its logical slots in row ``row`` of ``req_to_token``."""
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

        slots = (np.array(request.pages)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[: request.tokens]
        self.scheduler.req_to_token_pool.req_to_token[row, : request.tokens] = torch.from_numpy(slots.astype(np.int32))
        req = Req(
            rid=f"room-{request.room}",
            bootstrap_host=FAKE_BOOTSTRAP_HOST if request.fake else LOOPBACK,
            bootstrap_room=request.room,
            origin_input_ids=list(range(request.tokens)),
            record=KVRecord(None),
        )
        self.rows[request.room] = row
        if any((abort.room, abort.when) == (request.room, "rejected") for abort in self.scenario.aborts):
            from sglang.srt.managers.schedule_batch import FINISH_ABORT

            req.to_finish = FINISH_ABORT("rejected", HTTPStatus.BAD_REQUEST)
        self.queue.add(req, num_kv_heads=1)
        return req

    def _bring_in(self, newcomers: list[Request], reqs: dict[int, Req]) -> None:
        """Take requests through the bootstrap queue into the waiting queue."""
        if reqs:
            self.tap.wait_quiet(timeout_s=3)
        for request in newcomers:
            reqs[request.room] = self._admit(request, row=len(reqs))
            if request.enters_after:
                self.signals.set("entered", request.room)
        for abort in self.scenario.aborts:
            for request in newcomers:
                if (abort.room, abort.when) == (request.room, "bootstrapping"):
                    self._wait_until_announced(request)
        self._abort("bootstrapping", reqs)

        def all_left_the_queue() -> bool:
            self.scheduler.waiting_queue.extend(self.queue.pop_bootstrapped())
            return not self.queue.queue

        self._loop_together(all_left_the_queue)
        self._abort("waiting", reqs)
        for req in self.scheduler.waiting_queue:
            req.record.req_pool_idx = self.rows[req.bootstrap_room]  # a batch with it is made up

    def _wait_until_announced(self, request: Request) -> None:
        """Wait for the decode ranks that do not wait for the end of the request themselves."""
        expected = self.scenario.decode_tp - len(request.late_on)
        self._wait_for(lambda: len(self.manager.transfer_infos.get(request.room, ())) == expected)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if time.monotonic() > self.deadline:
                raise TimeoutError("what the scenario waits for did not happen")
            time.sleep(0.005)

    def _abort(self, when: str, reqs: dict[int, Req]) -> None:
        """The client's aborts that are due; on all ranks, they come from the same turn of the scheduler."""
        for abort in self.scenario.aborts:
            if abort.when != when or abort.room not in reqs:
                continue
            if when == "in flight" and any(slow.wave == self.wave for slow in self.scenario.slow):
                self._wait_for(lambda: self.signals.is_set("slow", self.wave))
            req = reqs[abort.room]
            if abort.cp_rank is None and when != "between chunks":
                from sglang.srt.managers.io_struct import AbortReq

                self.scheduler.abort_request(AbortReq(rid=req.rid))
            elif abort.cp_rank is None and self.scenario.with_queue and holds("aborts_between_chunks"):
                self._abort_chunked(req)
            elif abort.cp_rank in (None, self.cp_rank):
                # Stock lets a request between chunks run on; other code that ends it would end its sender.
                req.disagg_kv_sender.abort()

    def _abort_chunked(self, req: Req) -> None:
        """Abort a request that is being prefilled in chunks: stock lets go of it, and nobody polls its sender."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.chunked_req = req
        self.scheduler.abort_request(AbortReq(rid=req.rid))
        self.scheduler.process_pending_chunked_abort()
        self.chunks[req.bootstrap_room] = []

    def _send_chunk(self, req: Req, end: int, last: bool) -> None:
        req.fill_ids = req.origin_input_ids[:end]
        if last:
            req.output_ids = [first_token(req.bootstrap_room)]
            self.scheduler.disagg_prefill_inflight_queue.append(req)
        self.scheduler.send_kv_chunk(req, last_chunk=last)

    def _poll_until_all_is_over(self) -> None:
        """Poll as the scheduler's loop does, until no request is in flight or waits to be told of to decode."""

        def over() -> bool:
            self.queue.pop_bootstrapped()
            if self.scheduler._pending_chunked_abort_req is not None:
                self.scheduler.process_pending_chunked_abort()
            self.scheduler.process_disagg_prefill_inflight_queue()
            kept = self.scheduler.disagg_prefill_inflight_queue or self.scheduler._pending_chunked_abort_req
            return not kept and not self._unanswered()

        self._loop_together(over)

    def _unanswered(self) -> list[int]:
        """Rooms that the product has yet to tell decode of; nobody does without its patches of the queue."""
        if not (self.shared and self.scenario.with_queue):
            return []
        from cp_shared_kv.patches.transfer import sending_of

        return [room for room in self.rooms if room in sending_of(self.manager).unanswered]

    def _loop_together(self, step: Callable[[], bool]) -> None:
        """Call ``step`` until it is true on every rank or a rank's time is over; all ranks leave at the same count.

        The queues poll with collectives, so a rank that leaves a loop alone would leave the others waiting.
        """
        while True:
            flags = torch.tensor([int(not step()), int(time.monotonic() > self.deadline)])
            torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=self.world_group)
            if not flags[0] or flags[1]:
                return
            time.sleep(0.01)

    def _outcome(self, req: Req) -> Outcome:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH

        status, error = HUNG, ""
        if isinstance(req.finished_reason, FINISH_LENGTH):
            status = SUCCESS
        elif isinstance(req.finished_reason, FINISH_ABORT):
            status, error = ABORTED, str(req.finished_reason.message)
        elif req.bootstrap_room in self.stream.dropped:
            status, error = ABORTED, "dropped while it waited"
        elif req in self.queue.queue:
            error = "still bootstrapping"
        else:
            error = f"in flight, local status {self.manager.request_status.get(req.bootstrap_room)}"
        streamed = self.stream.times_streamed.get(req.bootstrap_room, 0)
        return Outcome(req.bootstrap_room, status, error, streamed, req.times_released)

    def _leftovers(self) -> list[str]:
        """What is kept for requests although all are over, once the transfer threads have come to rest."""
        if not self.shared:
            return []
        from cp_shared_kv.patches.transfer import sending_of

        manager, sending = self.manager, sending_of(self.manager)
        containers = {
            "request_status": manager.request_status,
            "transfer_infos": manager.transfer_infos,
            "req_to_decode_prefix_len": manager.req_to_decode_prefix_len,
            "failure_records": manager.failure_records,
            "failed_state": sending.failed_state,
            "announcement times": self.manager.transfer_infos._since,
            "queued": sending.queued,
        }

        def found() -> list[str]:
            kept = [f"{name}: {container}" for name, container in containers.items() if container]
            kept += [f"writing for room {thread.room}" for thread in sending.threads if thread.room is not None]
            kept += [f"unanswered: {room}" for room in self._unanswered()]
            free = self.scheduler.req_to_metadata_buffer_idx_allocator.available_size()
            return kept + ([] if free == METADATA_SLOTS else [f"{free} of {METADATA_SLOTS} metadata slots are free"])

        patience = time.monotonic() + 1
        while found() and time.monotonic() < patience:
            time.sleep(0.01)
        return found()

    def report(self) -> PrefillReport:
        alive = sum("transfer_worker" in thread.name for thread in threading.enumerate())
        return PrefillReport(
            self.cp_rank,
            self.outcomes,
            self.tap.traffic,
            self.workers_started,
            alive,
            self._product_counters(),
            self.leftovers,
            self.released,
        )

    def _product_counters(self) -> dict[str, int]:
        if not self.shared:
            return {}
        from cp_shared_kv.metrics import COUNTERS

        names = [f"{kind}_{unit}_sent" for kind in KINDS for unit in ("pages", "bytes")]
        return {name: getattr(COUNTERS, name) for name in [*names, "transfers_refused"]}


def main(cluster: Cluster, cp_rank: int) -> PrefillReport:
    """Body of a prefill process: serve every wave, in step with the other ranks, and report."""
    rank = PrefillRank(cluster, cp_rank)
    cluster.barrier.wait()
    for index, wave in enumerate(cluster.scenario.waves):
        rank.serve(index, wave)
        cluster.barrier.wait()  # nothing is being written any more: decode looks at its whole pool
        cluster.barrier.wait()  # decode has looked
    return rank.report()
