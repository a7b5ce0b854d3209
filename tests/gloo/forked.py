"""Gloo ranks forked from a process that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

RANK_S = 120


def _rank(
    function: Callable[..., Any], rank: int, size: int, port: int, args: Any, kwargs: Any, to: Connection
) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        to.send((True, function(rank, size, *args, **kwargs)))
    except BaseException:
        to.send((False, traceback.format_exc()))
    os._exit(0)


def on_ranks(function: Callable[..., Any], size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Results of ``function(rank, size, *args, **kwargs)`` on gloo ranks forked from this process, in rank order.

    Raises:
        RuntimeError: a rank raised, with its traceback, or was silent.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_rank, args=(function, rank, size, port, args, kwargs, send), daemon=True)
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
            rank.join(5)
            if rank.is_alive():
                rank.kill()
    return results
