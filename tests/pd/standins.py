"""The SGLang objects that the harness does not take from SGLang. Everything else that runs is stock.

Each is a plain class with exactly the attributes that the transfer path reads on 0.5.12.post1: an attribute that is
not here raises AttributeError, so that a change in what SGLang reads is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class ServerArgs:
    """What the KV managers and the prefill queue read from SGLang's ServerArgs."""

    disaggregation_bootstrap_port: int
    host: str = "127.0.0.1"
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


class TraceContext:
    def abort(self, abort_info: dict[str, str]) -> None:
        pass


class TimeStats:
    """Time stamps of a request; the harness needs none of them, but it must be possible to set them."""

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

    def compute_and_observe_kv_transfer_metrics(self, transfer_metric: Any) -> None:
        return None


@dataclass
class SamplingParams:
    max_new_tokens: int = 1


@dataclass(eq=False)
class Req:
    """One request as the disaggregation code sees it. Compared by identity, as SGLang's own is."""

    rid: str
    bootstrap_host: str
    bootstrap_room: int
    origin_input_ids: list[int]
    req_pool_idx: int | None
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
    mamba_pool_idx: Any = None
    disagg_kv_sender: Any = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    time_stats: TimeStats = field(default_factory=TimeStats)
    times_released: int = 0


class TreeCache:
    """Counts releases. It takes the whole request back, as StreamingSession's does, so nothing else is freed.

    Args:
        released: called with each request that is released.
    """

    def __init__(self, released: Callable[[Req], None] = lambda req: None) -> None:
        self._released = released

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        self._released(req)
        req.times_released += 1
        req.req_pool_idx = None


@dataclass
class ReqToTokenPool:
    """``req_to_token``: int32 ``[rows, tokens]``, logical slot of each token of the request in a row."""

    req_to_token: torch.Tensor


@dataclass
class KVAllocator:
    page_size: int


@dataclass
class TpWorker:
    is_hybrid_swa: bool = False


@dataclass
class ModelConfig:
    num_hidden_layers: int


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
