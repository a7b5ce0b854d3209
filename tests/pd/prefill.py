"""One prefill CP rank: real pool, bootstrap queue, chunk sender, KV manager and Mooncake engine."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import torch

from . import sabotage
from .pools import Cluster, fill_page, init_distributed, init_engine, make_pool, poison
from .product import transfer_patches
from .scenario import ABORTED, HUNG, KINDS, LAYERS, PAGE_SIZE, PREFILL_POISON, SUCCESS, Outcome, PrefillReport, Request
from .standins import (
    ClientStream,
    KVAllocator,
    ModelConfig,
    Req,
    ReqToTokenPool,
    ServerArgs,
    TpWorker,
    TreeCache,
)
from .wire import WireTap

METADATA_SLOTS = 16
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
        init_distributed(self.scenario.cp_size, cp_rank, cluster.prefill_dist_port, cp_size=self.scenario.cp_size)
        if self.scenario.transfer != "stock":
            # Before any class below is looked up, as in a real scheduler process.
            transfer_patches(self.scenario.with_queue).apply()
            if not self.shared:
                transfer_patches(self.scenario.with_queue).undo()
        sabotage.apply(self.scenario.sabotage)
        init_engine()
        held = self.scenario.logical_pages // (self.scenario.cp_size if self.shared else 1)
        self.pool = make_pool(held)
        self._build_scheduler(cluster.bootstrap_port)
        self.tap = WireTap(self.manager, tuple(fault for fault in self.scenario.faults if fault.cp_rank == cp_rank))
        self.patience_s = self.scenario.timeout_s
        self.workers_started = len(self.manager.transfer_queues)
        self.outcomes: dict[int, Outcome] = {}

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
        from sglang.srt.disaggregation.utils import MetadataBuffers, ReqToMetadataIdxAllocator, TransferBackend

        class Scheduler(prefill.SchedulerDisaggregationPrefillMixin):
            """Stock's prefill mixin over a stand-in; its attributes are set below."""

        self.world_group = parallel_state.get_world_group().cpu_group
        self.stream = ClientStream()
        scheduler = Scheduler()
        scheduler.attn_cp_cpu_group = parallel_state.get_attn_cp_group().cpu_group
        scheduler.attn_tp_cpu_group = parallel_state.get_attn_tp_group().cpu_group
        scheduler.server_args = ServerArgs(disaggregation_bootstrap_port=bootstrap_port)
        scheduler.dp_rank = None
        scheduler.gpu_id = 0
        scheduler.pp_rank = 0
        scheduler.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        scheduler.enable_metrics = False
        scheduler.enable_hicache_storage = False
        scheduler.sliding_window_size = None
        scheduler.model_config = ModelConfig(num_hidden_layers=LAYERS)
        scheduler.tp_worker = TpWorker()
        scheduler.tree_cache = TreeCache()
        scheduler.stream_output = self.stream
        scheduler.token_to_kv_pool_allocator = KVAllocator(page_size=PAGE_SIZE)
        scheduler.disagg_metadata_buffers = MetadataBuffers(METADATA_SLOTS, 16, torch.float32)
        scheduler.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(METADATA_SLOTS)
        logical_tokens = self.scenario.logical_pages * PAGE_SIZE
        slots = torch.zeros((METADATA_SLOTS, logical_tokens), dtype=torch.int32)
        scheduler.req_to_token_pool = ReqToTokenPool(slots)
        scheduler.disagg_prefill_inflight_queue = []
        self.queue = scheduler.disagg_prefill_bootstrap_queue = prefill.PrefillBootstrapQueue(
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
            pp_rank=0,
            pp_size=1,
            transfer_backend=TransferBackend.MOONCAKE,
        )
        self.scheduler = scheduler
        self.manager = self.queue.kv_manager

    def serve(self, index: int, wave: tuple[Request, ...]) -> None:
        """Serve the requests of a wave together, in the order of a real prefill scheduler's loop."""
        self._fill_pool(index, wave)
        deadline = time.monotonic() + self.patience_s
        reqs = {request.room: self._admit(request, row) for row, request in enumerate(wave)}
        ready = self._bootstrap(deadline)
        self._send_chunks([(request, reqs[request.room]) for request in wave if reqs[request.room] in ready])
        self._poll_until(lambda: not self.scheduler.disagg_prefill_inflight_queue, deadline)
        self.tap.wait_quiet(timeout_s=3)
        for request in wave:
            self.outcomes[request.room] = self._outcome(reqs[request.room])
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
            req_pool_idx=row,
        )
        self.queue.add(req, num_kv_heads=1)
        return req

    def _bootstrap(self, deadline: float) -> list[Req]:
        ready: list[Req] = []

        def all_left_the_queue() -> bool:
            ready.extend(self.queue.pop_bootstrapped())
            return not self.queue.queue

        self._loop_together(all_left_the_queue, deadline)
        return ready

    def _send_chunks(self, ready: list[tuple[Request, Req]]) -> None:
        """Chunk i of every request, then chunk i + 1; the inflight queue is polled between, as after each batch."""
        for step in range(max((len(request.ends) for request, _ in ready), default=0)):
            for request, req in ready:
                if step >= len(request.ends):
                    continue
                last = step == len(request.ends) - 1
                req.fill_ids = req.origin_input_ids[: request.ends[step]]
                if last:
                    req.output_ids = [first_token(request.room)]
                    self.scheduler.disagg_prefill_inflight_queue.append(req)
                self.scheduler.send_kv_chunk(req, last_chunk=last)
            self.scheduler.process_disagg_prefill_inflight_queue()

    def _poll_until(self, empty: Any, deadline: float) -> None:
        def polled() -> bool:
            self.scheduler.process_disagg_prefill_inflight_queue()
            return empty()

        self._loop_together(polled, deadline)

    def _loop_together(self, step: Any, deadline: float) -> None:
        """Call ``step`` until it is true on every rank or a rank's time is over; all ranks leave at the same count.

        The queues poll with collectives, so a rank that leaves a loop alone would leave the others waiting.
        """
        while True:
            flags = torch.tensor([int(not step()), int(time.monotonic() > deadline)])
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
        elif req in self.queue.queue:
            error = "still bootstrapping"
        else:
            error = f"in flight, local status {self.manager.request_status.get(req.bootstrap_room)}"
        streamed = self.stream.times_streamed.get(req.bootstrap_room, 0)
        return Outcome(req.bootstrap_room, status, error, streamed, req.times_released)

    def report(self) -> PrefillReport:
        alive = sum("transfer_worker" in thread.name for thread in threading.enumerate())
        return PrefillReport(
            self.cp_rank, self.outcomes, self.tap.traffic, self.workers_started, alive, self._product_counters()
        )

    def _product_counters(self) -> dict[str, int]:
        if not self.shared:
            return {}
        from cp_shared_kv.metrics import COUNTERS

        names = [f"{kind}_{unit}_sent" for kind in KINDS for unit in ("pages", "bytes")]
        return {name: getattr(COUNTERS, name) for name in [*names, "transfers_refused"]}


def main(cluster: Cluster, cp_rank: int) -> PrefillReport:
    """Body of a prefill process: serve every wave, in step with the other ranks, and report."""
    os.environ["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] = str(cluster.scenario.timeout_s)
    rank = PrefillRank(cluster, cp_rank)
    cluster.barrier.wait()
    for index, wave in enumerate(cluster.scenario.waves):
        rank.serve(index, wave)
        cluster.barrier.wait()  # nothing is being written any more: decode looks at its whole pool
        cluster.barrier.wait()  # decode has looked
    return rank.report()
