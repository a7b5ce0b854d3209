"""``run(scenario) -> Report``: the entry for tests. Starts the fork server on first use and keeps it."""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from .scenario import Report, Scenario
from .server import ENVIRONMENT

#: Of every test module that calls :func:`run`.
MARKS = [
    pytest.mark.pd,
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("sglang", "mooncake")),
        reason="needs sglang and a build of mooncake",
    ),
]
IMPORT_S = 120

PACKAGE_ROOT = Path(__file__).resolve().parents[__package__.count(".") + 1]
SOURCE_ROOT = Path(__file__).resolve().parents[2] / "src"


class HarnessError(RuntimeError):
    """A rank crashed, died or was late: the scenario says nothing about the product."""


class _ForkServer:
    """The process of ``server``, with this end of its socket."""

    def __init__(self) -> None:
        from cp_shared_kv_cpu.stubs import stub_directory

        ours, theirs = socket.socketpair()
        path = [str(PACKAGE_ROOT), str(SOURCE_ROOT), str(stub_directory()), os.environ.get("PYTHONPATH", "")]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.server", str(theirs.fileno())],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._channel = Connection(ours.detach())
        atexit.register(self.close)
        problem = self._receive(IMPORT_S)
        if problem is not None:
            raise HarnessError(f"the fork server cannot import SGLang:\n{problem}")

    def run(self, scenario: Scenario) -> Report:
        self._channel.send(scenario)
        result = self._receive(600)
        if not isinstance(result, Report):
            raise HarnessError(str(result))
        return result

    def _receive(self, timeout_s: float) -> object:
        try:
            if self._channel.poll(timeout_s):
                return self._channel.recv()
            reason = f"silent for {timeout_s} s"
        except (EOFError, ConnectionError):
            reason = "gone"
        self.close()
        raise HarnessError(f"the fork server is {reason}, exit status {self._process.poll()}")

    @property
    def alive(self) -> bool:
        return not self._channel.closed and self._process.poll() is None

    def close(self) -> None:
        """Close the socket, upon which the server ends; end it if it does not."""
        if not self._channel.closed:
            self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_server: _ForkServer | None = None


def run(scenario: Scenario) -> Report:
    """Run a scenario on fresh ranks and report; raises HarnessError when a rank did not get to its end."""
    global _server
    if _server is None or not _server.alive:
        _server = _ForkServer()
    return _server.run(scenario)
