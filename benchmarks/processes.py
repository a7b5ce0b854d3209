"""Processes that can import SGLang on a machine without a GPU, and gloo ranks forked from them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from cp_shared_kv_cpu.launch import apply_cpu_environment

RANK_S = 120


def _prepare() -> None:
    atexit.register(os._exit, 0)  # Triton's bindings print what they leaked when an interpreter is taken down
    apply_cpu_environment(1)
    import torch

    from cp_shared_kv_cpu import activate

    activate()
    torch.set_num_threads(1)


@contextmanager
def sglang_process() -> Iterator[Callable[..., Any]]:
    """A function that calls a module-level function in a fresh process of the CPU platform and returns its result."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare) as pool:
        yield lambda function, *arguments, **options: pool.submit(function, *arguments, **options).result()


def _rank(function: Callable[..., Any], rank: int, size: int, port: int, arguments: Any, to: Connection) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        to.send((True, function(rank, size, *arguments)))
    except BaseException:
        to.send((False, traceback.format_exc()))
    os._exit(0)


def on_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Results of ``function(rank, size, *arguments)`` on gloo ranks forked from this process, in rank order.

    Raises:
        RuntimeError: a rank raised, with its traceback, or was silent.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_rank, args=(function, rank, size, port, arguments, send), daemon=True)
        for rank, (_, send) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    results = []
    try:
        for number, (receive, _) in enumerate(pipes):
            if not receive.poll(RANK_S):
                raise RuntimeError(f"rank {number} was silent for {RANK_S} s")
            good, body = receive.recv()
            if not good:
                raise RuntimeError(body)
            results.append(body)
    finally:
        for rank in ranks:
            rank.join(2)
            if rank.is_alive():
                rank.kill()
    return results


def bytes_written() -> int:
    """Bytes that this process has written so far, to sockets too: gloo sends with ``writev``, which Linux counts."""
    with open("/proc/self/io") as lines:
        return int(dict(line.split(":") for line in lines)["wchar"])
