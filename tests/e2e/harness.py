"""``run(spec) -> Report`` and ``Pair(spec)``. The host is started on first use and kept, and so is every report."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .spec import Report, Spec

TESTS = Path(__file__).resolve().parents[1]
IMPORT_S = 240
RUN_S = 1500


class _Host:
    def __init__(self) -> None:
        from cp_shared_kv_cpu.launch import cpu_environment

        ours, theirs = socket.socketpair()
        environment = {**os.environ, **cpu_environment(1, plugins=("cp_shared_kv",)), "CP_SHARED_KV": "0"}
        environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment["PYTHONPATH"]])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "e2e.host", str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.channel = Connection(ours.detach())
        atexit.register(self.close)
        if (problem := self.receive(IMPORT_S)) is not None:
            raise RuntimeError(f"the host cannot import SGLang:\n{problem}")

    def receive(self, timeout_s: float) -> Any:
        if not self.channel.poll(timeout_s):
            self.close()
            raise RuntimeError(f"the host was silent for {timeout_s} s")
        return self.channel.recv()

    def close(self) -> None:
        self.channel.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


@cache
def _host() -> _Host:
    return _Host()


@cache
def run(spec: Spec) -> Report:
    """Run a spec, or return the report of an earlier run of the same spec; never raises for a failed server."""
    host = _host()
    host.channel.send(spec)
    report = host.receive(RUN_S)
    assert isinstance(report, Report)
    return report


class Pair:
    """A pair of engines that a test drives itself, one pair at a time; ``host.Pair`` has the calls."""

    def __init__(self, spec: Spec) -> None:
        self._call("open", spec)

    def __getattr__(self, call: str) -> Callable[..., Any]:
        return partial(self._call, call)

    def _call(self, call: str, *arguments: Any, **options: Any) -> Any:
        host = _host()
        host.channel.send((call, arguments, options))
        problem, value = host.receive(RUN_S)
        if problem is not None:
            raise RuntimeError(problem)
        return value
