"""The process that imports SGLang once and forks the ranks of each scenario; ``harness`` starts it.

Importing SGLang takes about ten seconds, a fork none. It is not done in the test process because what the import sees
(stubs for packages without a CPU build, environment variables) would then bind every other test of that process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .product import transfer_patches
from .scenario import DecodeReport, PrefillReport, Report, Scenario

# Set before SGLang is imported; the ranks inherit them.
ENVIRONMENT = {
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MC_FORCE_TCP": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    # The stand-in of deep_gemm has what the indexer calls, not the GEMMs that SGLang would use it for.
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    # Where stock decode waits for prefill to stop writing, and prefill cannot say that a failed write has stopped.
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "1",
}
START_S = 30
"""Time that the ranks may take beyond what their waves may take."""


def import_everything() -> None:
    """Import what the ranks use, so that the fork hands it to them ready."""
    import mooncake.engine  # noqa: F401
    import sglang.srt.disaggregation.decode
    import sglang.srt.disaggregation.fake
    import sglang.srt.disaggregation.mooncake
    import sglang.srt.disaggregation.prefill
    import sglang.srt.distributed.parallel_state
    import sglang.srt.managers.schedule_batch
    import sglang.srt.mem_cache.memory_pool  # noqa: F401

    from . import decode, prefill  # noqa: F401


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _rank_process(
    body: Callable[[Any, int], Any], cluster: Any, rank: int, log: str, limit_s: int, to: Connection
) -> None:
    """Run one rank in a forked process: output to ``log``, report or traceback to ``to``; never returns."""
    # Should server and tests die, the rank ends by itself.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limit_s)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sends = "1" if cluster.scenario.all_cp_ranks_send else "0"
    os.environ["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] = sends
    import zmq
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    # The one inherited at import has its I/O thread in the parent only: sockets of it would never send.
    CommonKVReceiver._ctx = zmq.Context()
    try:
        result: Any = body(cluster, rank)
    except BaseException:
        cluster.barrier.abort()
        result = traceback.format_exc()
    to.send(result)
    sys.stdout.flush()
    sys.stderr.flush()
    # SGLang's manager threads are not daemons and never end.
    os._exit(0)


def run_ranks(scenario: Scenario) -> Report | str:
    """Fork the ranks of a scenario and collect their reports; a string says why there is none."""
    from . import decode, prefill
    from .pools import Cluster

    began = time.monotonic()
    if scenario.transfer != "stock":
        try:
            transfer_patches(scenario.with_queue)
        except Exception:
            return traceback.format_exc()
    context = multiprocessing.get_context("fork")
    limit_s = int(START_S + 2 * scenario.timeout_s + 5 * len(scenario.waves))
    barrier = context.Barrier(scenario.cp_size + scenario.decode_tp, timeout=limit_s)
    cluster = Cluster(scenario, *free_ports(3), barrier)
    bodies = [(prefill.main, rank) for rank in range(scenario.cp_size)]
    bodies += [(decode.main, rank) for rank in range(scenario.decode_tp)]
    ranks: dict[Connection, tuple[str, Any, str]] = {}
    with tempfile.TemporaryDirectory(prefix="pd-ranks-") as logs:
        for body, rank in bodies:
            name = f"{body.__module__.rsplit('.', 1)[1]} rank {rank}"
            log = str(Path(logs, name.replace(" ", "-")))
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_process, args=(body, cluster, rank, log, limit_s, send), name=name, daemon=True
            )
            process.start()
            send.close()
            ranks[receive] = (name, process, log)
        results = _collect(ranks, began + limit_s)
        problems = [
            f"{name}: {results[pipe]}\n--- its log ends with\n{Path(log).read_text(errors='replace')[-3000:]}"
            for pipe, (name, _, log) in ranks.items()
            if isinstance(results[pipe], str)
        ]
        for _, process, _ in ranks.values():
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        if os.environ.get("PD_LOGS"):
            for name, _, log in ranks.values():
                print(f"===== {name}\n{Path(log).read_text(errors='replace')}", file=sys.stderr, flush=True)
    if problems:
        return "\n\n".join(problems)
    found = list(results.values())
    return Report(
        scenario,
        prefill=[each for each in found if isinstance(each, PrefillReport)],
        decode=[each for each in found if isinstance(each, DecodeReport)],
        seconds=time.monotonic() - began,
    )


def _collect(ranks: dict[Connection, tuple[str, Any, str]], deadline: float) -> dict[Connection, Any]:
    """Each rank's report, in the order of ``ranks``; a string where it crashed, died or was late."""
    results: dict[Connection, Any] = dict.fromkeys(ranks, "no report in time")
    pending = set(ranks)
    while pending and time.monotonic() < deadline:
        for pipe in wait(list(pending), timeout=1):
            assert isinstance(pipe, Connection)
            pending.discard(pipe)
            try:
                results[pipe] = pipe.recv()
            except EOFError:
                results[pipe] = "died without a report"
    return results


def main() -> None:
    """Serve scenarios over the inherited socket until the other side closes it."""
    channel = Connection(int(sys.argv[1]))
    try:
        import_everything()
    except BaseException:
        channel.send(traceback.format_exc())
        return
    # What is there now lives as long as the process. Left to the collector, every rank would touch it, and the kernel
    # would have to copy it page by page.
    gc.freeze()
    channel.send(None)
    while True:
        try:
            scenario = channel.recv()
        except EOFError:
            return
        channel.send(run_ranks(scenario))


if __name__ == "__main__":
    main()
