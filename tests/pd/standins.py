"""The SGLang objects that the harness does not take from SGLang. Everything else that runs is stock.

Each is a plain class with exactly the attributes that the transfer paths of the supported releases read: an attribute
that is not here raises AttributeError, so that a change in what SGLang reads is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from .facts import holds


@dataclass
class ServerArgs:
    """What the KV managers and the prefill queue read from SGLang's ServerArgs."""

    disaggregation_bootstrap_port: int
    host: str = "127.0.0.1"
    port: int = 30000
    dist_init_addr: str | None = None
    nnodes: int = 1
    enable_dp_attention: bool = False
    dp_size: int = 1
    pp_size: int = 1
    kv_cache_dtype: str = "fp8_e4m3"
    load_balance_method: str = "round_robin"
    enable_hisparse: bool = False
    chunked_prefill_size: int = 8192
    disaggregation_ib_device: str | None = None
    disaggregation_transfer_backend: str = "mooncake"
    enable_trace: bool = False
    enable_dsa_cache_layer_split: bool = False
    optimistic_prefill_retries: int = 0
    optimistic_prefill_attempts: int = 0
    dcp_size: int = 1
    enable_pd_role_switch: bool = False


class TraceContext:
    def abort(self, abort_info: dict[str, str]) -> None:
        pass


class TimeStats:
    """Time stamps of a request; the harness needs none of them, but it must be possible to set them."""

    prefill_retry_count = 0

    def __init__(self) -> None:
        self.trace_ctx = TraceContext()

    def set_bootstrap_done_time(self) -> None:
        pass

    def set_wait_queue_entry_time(self) -> None:
        pass

    def set_prefill_kv_transfer_finish_time(self) -> None:
        pass

    def set_completion_time(self) -> None:
        pass

    def compute_and_observe_kv_transfer_metrics(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass
class SamplingParams:
    max_new_tokens: int = 1


@dataclass
class KVRecord:
    """Where a request's KV is: its row of ``req_to_token``."""

    req_pool_idx: int | None
    holds_mamba: bool = False
    retraction_backup: Any = None

    cache_protected_len: int = 0

    @property
    def holds_kv(self) -> bool:
        return self.req_pool_idx is not None

    @property
    def is_kv_released(self) -> bool:
        return self.req_pool_idx is None


@dataclass(eq=False)
class Req:
    """One request as the disaggregation code sees it. Compared by identity, as SGLang's own is."""

    rid: str
    bootstrap_host: str
    bootstrap_room: int
    origin_input_ids: list[int]
    record: KVRecord
    fill_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    start_send_idx: int = 0
    metadata_buffer_index: int = -1
    return_logprob: bool = False
    hidden_states_tensor: torch.Tensor | None = None
    cached_tokens: int = 0
    cached_tokens_device: int = 0
    cached_tokens_host: int = 0
    cached_tokens_storage: int = 0
    finished_reason: Any = None
    to_finish: Any = None
    disagg_kv_sender: Any = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    time_stats: TimeStats = field(default_factory=TimeStats)
    pending_bootstrap: bool = False
    is_retracted: bool = False
    disagg_prefill_dp_rank: int | None = None
    disagg_decode_prefix_len: int = 0
    prefill_attempt_count: int = 0
    inflight_middle_chunks: int = 0
    arrival_processed_tokens: int = 0
    cache_request_handle: Any = None
    skip_radix_cache_insert: bool = False
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    session: None = None
    weight_version_events: tuple[()] = ()
    discard_output_reason: None = None
    mamba_pool_idx: None = None
    multimodal_inputs: None = None
    mm_token_counts_ready: bool = True
    swa_branching_seqlen: None = None
    expected_kv_checksum: None = None
    pd_rebootstrap_forced_output_id: None = None
    already_computed: int = 0
    mm_image_tokens: int = 0
    mm_audio_tokens: int = 0
    mm_video_tokens: int = 0
    output_dsa_topk_indices: torch.Tensor | None = None
    times_released: int = 0

    @property
    def req_pool_idx(self) -> int | None:
        return self.record.req_pool_idx

    @property
    def kv(self) -> KVRecord | None:
        return self.record if holds("keeps_kv_record") or self.record.holds_kv else None

    @property
    def fill_len(self) -> int:
        return len(self.fill_ids)

    @property
    def extend_end(self) -> int:
        return len(self.fill_ids)

    @property
    def extend_range(self) -> SimpleNamespace:
        return SimpleNamespace(end=len(self.fill_ids))

    @property
    def kv_committed_freed(self) -> bool:
        return not self.record.holds_kv

    def finished(self) -> bool:
        return self.finished_reason is not None

    def update_finish_state(self) -> None:
        self.finished_reason = self.to_finish

    def get_mm_token_counts(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def effective_kv_committed_len(self) -> int:
        return len(self.fill_ids)


class TreeCache:
    """Counts releases. It takes the whole request back, as StreamingSession's does, so nothing else is freed.

    Args:
        released: called with each request that is released.
    """

    def __init__(self, released: Callable[[Req], None] = lambda req: None) -> None:
        self._released = released

    def cache_finished_req(self, req: Req, is_insert: bool = True, kv_len_to_handle: int | None = None) -> None:
        self._released(req)
        req.times_released += 1
        req.record.req_pool_idx = None

    def claim_kv_row(self, req: Req) -> bool:
        self.cache_finished_req(req)
        return True

    def finish(self, handle: Any, outcome: Any) -> None:
        pass

    def unlock(self, lock: None) -> None:
        pass

    def supports_mamba(self) -> bool:
        return False


@dataclass
class ReqToTokenPool:
    """``req_to_token``: int32 ``[rows, tokens]``, logical slot of each token of the request in a row."""

    req_to_token: torch.Tensor


@dataclass
class KVAllocator:
    page_size: int
    pool: Any = None

    def get_kvcache(self) -> Any:
        return self.pool

    def translate_kv_indices_for_transfer(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return kv_indices


@dataclass
class ModelRunner:
    """``tokens`` that a server may keep, under the names that it has had."""

    tokens: int
    kv_cache_dtype_str: str = "fp8_e4m3"

    @property
    def max_token_pool_size(self) -> int:
        return self.tokens

    @property
    def effective_max_total_num_tokens(self) -> int:
        return self.tokens

    @property
    def effective_logical_max_total_num_tokens(self) -> int:
        return self.tokens


@dataclass
class TpWorker:
    model_runner: ModelRunner
    is_hybrid_swa: bool = False


@dataclass
class ParallelState:
    """``Scheduler.ps``."""

    tp_rank: int
    dp_rank: int | None = None
    gpu_id: int = 0
    pp_rank: int = 0
    pp_size: int = 1


class SchedulerParts:
    """Methods of a scheduler that its disaggregation code calls on itself."""

    ipc_channels: ClientStream

    def collect_inflight_reqs(self) -> set[Req]:
        return set()

    def _release_aborted_request(self, req: Req) -> None:
        pass

    def send_abort_output(self, output: Any, req: Req) -> None:
        self.ipc_channels.send_output(output, req)


class Coordinator:
    """Parts of a scheduler that keep nothing of these requests."""

    def retire_group(self, req: Req) -> None:
        pass

    def _maybe_update_reasoning_tokens(self, req: Req, token: int) -> None:
        pass


@dataclass
class ModelConfig:
    num_hidden_layers: int
    hf_text_config: Any = None


class ClientStream:
    """``stream_output`` of both schedulers: counts how often each request was reported as done.

    It is the prefill scheduler's ``send_to_tokenizer`` too, which is told of requests that are aborted while they wait.

    Args:
        ended: called with the room of each request that was reported.
    """

    def __init__(self, ended: Callable[[int], None] = lambda room: None) -> None:
        self.times_streamed: dict[int, int] = {}
        self.dropped: set[int] = set()
        self._ended = ended

    def __call__(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        for req in reqs:
            self.times_streamed[req.bootstrap_room] = self.times_streamed.get(req.bootstrap_room, 0) + 1
            self._ended(req.bootstrap_room)

    @property
    def stream_output(self) -> ClientStream:
        return self

    @property
    def send_to_tokenizer(self) -> ClientStream:
        return self

    def send_output(self, output: Any, req: Req) -> None:
        self.dropped.add(req.bootstrap_room)
        self([req], False)


@dataclass
class Batch:
    """A batch of running requests: none, in a server that has only prefilled."""

    reqs: list[Req] = field(default_factory=list)


class GrammarManager:
    def abort_requests(self, recv_req: Any) -> None:
        pass
