#!/usr/bin/env bash
# SGLang's router in front of one prefill and one decode node; clients talk to it alone.
#
#   PREFILL_HOST=10.0.0.1 DECODE_HOST=10.0.0.2 examples/launch_router.sh [further flags of the router]
#
# For sglang-router 0.3.2. It waits until both nodes are up, which takes minutes with real weights.
set -euo pipefail

PREFILL_HOST=${PREFILL_HOST:?HOST of launch_prefill_8xh200.sh}
DECODE_HOST=${DECODE_HOST:?HOST of launch_decode_8xh200.sh}
PREFILL_PORT=${PREFILL_PORT:-30000}
DECODE_PORT=${DECODE_PORT:-30000}
# Must be the prefill node's: the router tells decode through it where to find the prefill ranks.
BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-8998}

flags=(
    --pd-disaggregation
    # Takes two values: the server, and its bootstrap port.
    --prefill "http://$PREFILL_HOST:$PREFILL_PORT" "$BOOTSTRAP_PORT"
    --decode "http://$DECODE_HOST:$DECODE_PORT"
    --host "${HOST:-0.0.0.0}"
    --port "${PORT:-8000}"
    # Metrics are served on every interface by default.
    --prometheus-host "${METRICS_HOST:-127.0.0.1}"
    --prometheus-port "${METRICS_PORT:-29000}"
)

exec python3 -m sglang_router.launch_router "${flags[@]}" "$@"
