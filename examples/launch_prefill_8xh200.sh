#!/usr/bin/env bash
# Prefill node: DeepSeek-V3.2 on 8 H200 with context parallelism over all 8 GPUs and CP shared KV.
#
#   MODEL=/models/DeepSeek-V3.2 HOST=10.0.0.1 examples/launch_prefill_8xh200.sh [further flags of SGLang]
#
# For SGLang 0.5.12 with DeepEP and Mooncake installed, and this plugin in the same environment; README.md has the
# spellings of later releases.
# Start launch_decode_8xh200.sh on the decode node and launch_router.sh anywhere. In the log, look for
#   CP shared KV enabled. physical_tokens_per_rank=..., logical_tokens=<8 times that>, cp_size=8, ...
set -euo pipefail

MODEL=${MODEL:-deepseek-ai/DeepSeek-V3.2}
HOST=${HOST:?address of this node that the decode node and the router can reach}
PORT=${PORT:-30000}
BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-8998}

# Load this plugin and no other: with the variable set, SGLang loads only the plugins that it names.
export SGLANG_PLUGINS=cp_shared_kv
# Each rank holds other pages, so each must send. Decode must be told the same, or it waits for one rank's pages only.
export SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1
# Pages and bytes sent, per request and rank: CP_SHARED_KV_LOG_LEVEL=debug.

flags=(
    --model-path "$MODEL"
    --host "$HOST"
    --port "$PORT"

    # CP size is tp-size / dp-size. in-seq-split makes SGLang set ep-size 8, moe-dense-tp-size 1 and DeepEP by itself.
    --tp-size 8
    --enable-nsa-prefill-context-parallel
    --nsa-prefill-cp-mode in-seq-split

    # The flag of this plugin; the launch stops with the whole list if a requirement is unmet.
    --enable-nsa-prefill-cp-shared-kv

    # The prefill backend that is right under in-seq-split: others get full lengths for half of the query rows. It is the
    # default on Hopper for bfloat16 KV but not for fp8.
    --nsa-prefill-backend flashmla_sparse
    # SGLang's default on Hopper; named because decode must use the same.
    --kv-cache-dtype bfloat16
    # SGLang sets 64 for this model; named because pages are the unit that is shared.
    --page-size 64
    # Whole pages, so that a request's chunk never ends inside a page. A chunk is split over the 8 ranks.
    --chunked-prefill-size 16384

    # Weights and KV pool. What is left holds activations and DeepEP's buffers; the plugin's workspace (two layers of one
    # context; one with CP_SHARED_KV_PREFETCH=0) is charged to the pool.
    --mem-fraction-static 0.8
    # in-seq-split prefills one request at a time; more only fill the queue and its per-request tables.
    --max-running-requests 32
    # Prefill forwards vary in length, and a captured one could not be planned.
    --disable-cuda-graph
    # DeepEP's high-throughput kernels only: the low-latency ones, for decode batches, would reserve buffers of their own.
    --deepep-mode normal

    --disaggregation-mode prefill
    --disaggregation-transfer-backend mooncake
    --disaggregation-bootstrap-port "$BOOTSTRAP_PORT"
)
# RDMA devices for Mooncake, comma-separated, such as mlx5_0,mlx5_1; without, SGLang finds them itself.
if [[ -n ${IB_DEVICES:-} ]]; then
    flags+=(--disaggregation-ib-device "$IB_DEVICES")
fi

exec python3 -m sglang.launch_server "${flags[@]}" "$@"
