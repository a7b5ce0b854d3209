"""What prefill and decode ranks share: the cluster, process groups, the engine, and pools of known bytes."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import torch

from .facts import holds, made
from .scenario import ITEM_LEN, KINDS, LAYERS, PAGE_SIZE, TOKEN_BYTES, Scenario, page_content

METADATA_SLOTS = 16


@dataclass(frozen=True)
class Cluster:
    """One run's shared facts; handed to every rank by fork."""

    scenario: Scenario
    bootstrap_port: int
    prefill_dist_port: int
    decode_dist_port: int
    barrier: Barrier
    """Over all prefill and decode ranks."""


def init_distributed(world_size: int, rank: int, port: int, cp_size: int, bootstrap_port: int) -> None:
    """SGLang's own process groups over gloo: tensor parallel over the world, attention CP ``cp_size`` inside it."""
    import sglang.srt.distributed.parallel_state as parallel_state

    if holds("publishes_configuration"):
        _publish(world_size, rank, cp_size, bootstrap_port)
    parallel_state.init_distributed_environment(
        world_size=world_size,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        backend="gloo",
    )
    if holds("groups_from_configuration"):
        parallel_state.initialize_model_parallel(backend="gloo")
        return
    import sglang.srt.layers.dp_attention as dp_attention

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world_size, attention_context_model_parallel_size=cp_size, backend="gloo"
    )
    # initialize_dp_attention would build the attention layers' buffers too; only these two are read here.
    dp_attention._ATTN_DP_RANK, dp_attention._ATTN_DP_SIZE = 0, 1


def _publish(world_size: int, rank: int, cp_size: int, bootstrap_port: int) -> None:
    """Publish arguments of a rank, of a model that does not exist, for SGLang to read."""
    import sglang.srt.runtime_context as runtime_context

    arguments = runtime_context.get_context().override_server_args(
        tp_size=world_size,
        attn_cp_size=cp_size,
        page_size=PAGE_SIZE,
        host="127.0.0.1",
        disaggregation_bootstrap_port=bootstrap_port,
        disaggregation_transfer_backend="mooncake",
    )
    server_args = arguments.install()
    if holds("groups_from_configuration"):
        ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=0)
        runtime_context.publish(server_args, role="scheduler", ranks=ranks)


def init_engine() -> None:
    """SGLang's Mooncake wrapper. It asks for RDMA; the non-CUDA build falls back to TCP when there is no HCA."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import init_mooncake_transfer_engine

    init_mooncake_transfer_engine(hostname="127.0.0.1", gpu_id=0, ib_device=None)


def make_pool(pages: int) -> Any:
    """A stock NSA pool with fp8 rows: pages 1 to ``pages``, and the dummy page 0."""
    from cp_shared_kv.releases import symbol

    return symbol("NSATokenToKVPool")(
        size=pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_lora_rank=512,
        dtype=torch.float8_e4m3fn,
        qk_rope_head_dim=64,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=TOKEN_BYTES["kv"],
        start_layer=0,
        end_layer=LAYERS - 1,
    )


def make_metadata_buffers() -> Any:
    """SGLang's buffers for what decode gets beside KV: ``METADATA_SLOTS`` of them."""
    from sglang.srt.disaggregation.utils import MetadataBuffers

    return made(
        MetadataBuffers,
        size=METADATA_SLOTS,
        hidden_size=16,
        hidden_states_dtype=torch.float32,
        max_sampling_mask_tokens=1,
    )


def page_bytes(pool: Any, kind: str, layer: int) -> np.ndarray:
    """A layer's pages as bytes: uint8 view ``[pages, ITEM_LEN[kind]]`` of the pool's own memory."""
    buffer = pool.kv_buffer[layer] if kind == "kv" else pool.index_k_with_scale_buffer[layer]
    return buffer.view(torch.uint8).numpy().reshape(-1, ITEM_LEN[kind])


def poison(pool: Any, value: int) -> None:
    """Set every byte of the pool, dummy page included, to ``value``."""
    for kind in KINDS:
        for layer in range(LAYERS):
            page_bytes(pool, kind, layer)[:] = value


def fill_page(pool: Any, page: int, position: int, room: int) -> None:
    """Write the oracle's bytes of (position, room) into physical page ``page``, all kinds and layers."""
    for kind in KINDS:
        for layer in range(LAYERS):
            page_bytes(pool, kind, layer)[page] = page_content(kind, layer, position, room)
