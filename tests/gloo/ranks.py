"""``call(function, size, **arguments)``: run a function of ``worker`` on gloo ranks."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@cache
def _channel() -> Connection:
    from cp_shared_kv_cpu.launch import cpu_environment

    environment = {**os.environ, **cpu_environment(1)}
    tests = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([tests, environment["PYTHONPATH"]])
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "gloo.worker", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    channel = Connection(ours.detach())
    atexit.register(process.wait)
    atexit.register(channel.close)
    if (problem := _receive(channel)) is not None:
        raise RuntimeError(str(problem))
    return channel


def _receive(channel: Connection) -> Any:
    if not channel.poll(240):
        raise RuntimeError("the worker is silent")
    return channel.recv()


def call(function: str, size: int, **arguments: Any) -> list[Any]:
    """Results of the ranks, in rank order.

    Raises:
        RuntimeError: a rank raised; with its traceback.
    """
    channel = _channel()
    channel.send((function, size, arguments))
    result = _receive(channel)
    if isinstance(result, str):
        raise RuntimeError(result)
    return list(result)
