"""Server processes of the demo: started in process groups of their own, watched while they start, always ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import requests

HOST = "127.0.0.1"
# Below the range that Linux takes outgoing connections' ports from, so that none is taken before its server binds it.
PORTS = range(20000, 30000)
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_libc = ctypes.CDLL(None)
_given_out: set[int] = set()


class DemoError(Exception):
    """The demo cannot go on; the message says why, and ``log`` is the log of the server to blame."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that nothing listens on, each given out once in this process."""
    found: list[int] = []
    candidates = list(set(PORTS) - _given_out)
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        if len(found) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
    if len(found) < count:
        raise DemoError(f"fewer than {count} free ports between {PORTS.start} and {PORTS.stop}")
    _given_out.update(found)
    return found


def end_with_parent() -> None:
    """Run in a new child: have the kernel end it when the demo dies without a chance to clean up."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def process_tree(root: int) -> list[int]:
    """``root`` and its living descendants, whatever process group they moved to."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The command name, in parentheses, may hold spaces; the parent is the second field after it.
                parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    tree, todo = [], [root]
    while todo:
        tree.append(todo.pop())
        todo += children.get(tree[-1], [])
    return tree


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than a zombie, which only its parent can remove."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Server:
    """One server of a pass: a command, its whole environment, the URL that says when it is ready, and its log."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    health: str
    log: Path
    started: float = 0.0
    ready_after: float | None = None
    _process: subprocess.Popen[bytes] | None = None
    _file: IO[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process's number, once it is started."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process; it leads a process group, so that Ctrl-C reaches only the demo."""
        self._file = self.log.open("wb")
        self._file.write(("$ " + " ".join(self.command) + "\n").encode())
        self._file.flush()
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def check_alive(self) -> None:
        """Raise DemoError when the process has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise DemoError(f"{self.name} ended with exit status {code}", self.log)

    def is_ready(self) -> bool:
        """Whether the server answers; remembers how long that took."""
        self.check_alive()
        if self.ready_after is None:
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.health, timeout=5).status_code == 200:
                    self.ready_after = time.monotonic() - self.started
        return self.ready_after is not None

    def stop(self) -> None:
        """End the process group and every descendant; returns when they are gone."""
        process, self._process = self._process, None
        if process is None:
            return
        # SIGKILL at once: nothing is in flight, and SGLang's own shutdown takes seconds. The tree is read first:
        # orphans can no longer be found by their parent.
        tree = process_tree(process.pid) if process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(map(is_running, tree)):
            time.sleep(0.05)
        if self._file is not None:
            self._file.close()


@dataclass
class Fleet:
    """All servers that are running; ends them when the ``with`` block is left, however that happens."""

    say: Callable[[str], None]
    status: Callable[[str], None]
    patience: float
    servers: list[Server] = field(default_factory=list)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not leave servers behind.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
        try:
            self.stop(*self.servers)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def start(self, *servers: Server) -> None:
        """Start servers side by side and wait until all of them answer.

        Raises:
            DemoError: one ended, or they took longer than ``patience`` seconds.
        """
        for server in servers:
            self.servers.append(server)
            server.start()
            self.say(f"  {server.name}: starting")
        begin = time.monotonic()
        waiting = list(servers)
        while waiting:
            for server in list(waiting):
                if server.is_ready():
                    waiting.remove(server)
                    self.say(f"  {server.name}: ready after {server.ready_after:.0f} s")
            if not waiting:
                break
            elapsed = time.monotonic() - begin
            if elapsed > self.patience:
                raise DemoError(f"{waiting[0].name} was not ready after {elapsed:.0f} s (--patience)", waiting[0].log)
            self.status(f"  {', '.join(server.name for server in waiting)}: starting, {elapsed:.0f} s")
            time.sleep(0.5)

    def check_alive(self) -> None:
        """Raise DemoError when a running server has ended."""
        for server in self.servers:
            server.check_alive()

    def stop(self, *servers: Server) -> None:
        """End some servers."""
        for server in servers:
            server.stop()
        self.servers = [server for server in self.servers if server not in servers]


def tail(log: Path, lines: int = 40) -> str:
    """Last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def python_module(name: str, *arguments: str) -> list[str]:
    """Command that runs a module with this interpreter."""
    return [sys.executable, "-m", name, *arguments]
