#!/usr/bin/env bash
# Decode node for launch_prefill_8xh200.sh: stock SGLang 0.5.12, DeepSeek-V3.2 on 8 H200.
#
#   MODEL=/models/DeepSeek-V3.2 HOST=10.0.0.2 examples/launch_decode_8xh200.sh [further flags of SGLang]
#
# One environment variable is all that this node must have. With the plugin installed here too, pages of a request that
# its client aborts are given away only when prefill has stopped writing to them.
set -euo pipefail

MODEL=${MODEL:-deepseek-ai/DeepSeek-V3.2}
HOST=${HOST:?address of this node that the prefill node and the router can reach}
PORT=${PORT:-30000}

# Take pages from all 8 prefill ranks. Without it decode asks rank 0 only, and requests time out while bootstrapping.
export SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1
# Turns the plugin on where it is installed and finds what it needs, else the server is stock, with a warning; add the flag
# --enable-nsa-prefill-cp-shared-kv to have the launch stop instead. SGLang loads no plugin that is not named here.
export SGLANG_PLUGINS=cp_shared_kv

flags=(
    --model-path "$MODEL"
    --host "$HOST"
    --port "$PORT"

    # Context parallelism is for prefill; decode must have CP size 1. With DP attention each GPU keeps the KV of its own
    # requests once, where plain tensor parallelism would keep it 8 times.
    --tp-size 8
    --dp-size 8
    --enable-dp-attention

    # Pages are copied byte for byte: dtype and page size must be those of the prefill node.
    --kv-cache-dtype bfloat16
    --page-size 64

    --mem-fraction-static 0.8
    # Shared by the 8 DP ranks; also the batch sizes that CUDA graphs are captured for.
    --max-running-requests 256
    --cuda-graph-max-bs 32

    --disaggregation-mode decode
    --disaggregation-transfer-backend mooncake
)
# RDMA devices for Mooncake, comma-separated, such as mlx5_0,mlx5_1; without, SGLang finds them itself.
if [[ -n ${IB_DEVICES:-} ]]; then
    flags+=(--disaggregation-ib-device "$IB_DEVICES")
fi

exec python3 -m sglang.launch_server "${flags[@]}" "$@"
