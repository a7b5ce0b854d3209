"""Prefill time of real servers: CP shared KV over stock prefill CP, same prompts, in turn.

Wall time, and the CPU time of each server's processes: on cores that others use too, the latter says more.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import requests

from .rows import Measured, Row

HOST = "127.0.0.1"
#: A request with this bootstrap host is prefilled and sent nowhere; SGLang's own health check uses it.
NOWHERE = "2.2.2.2"
START_S, REQUEST_S = 300, 120
LOGICAL_TOKENS, CONTEXT = 12288, 6144
#: The servers that are compared, and the room in which each gets the prefix.
ROOMS = {"stock": 1, "shared": 2}


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, where a prefill server tells decode servers how to reach its ranks, and its process."""

    port: int
    bootstrap_port: int
    pid: int = 0

    def cpu_seconds(self) -> float:
        """CPU time that the server's processes have used so far."""
        server = psutil.Process(self.pid)
        times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def generate(self, tokens: Sequence[int], room: int, bootstrap_host: str = HOST) -> tuple[float, dict[str, Any]]:
        """Seconds until the answer to a prompt, and its meta information.

        Raises:
            requests.RequestException: the server refused it or did not answer.
        """
        body: Any = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "bootstrap_host": bootstrap_host,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room,
        }
        begin = time.perf_counter()
        response = requests.post(f"http://{HOST}:{self.port}/generate", json=body, timeout=REQUEST_S)
        seconds = time.perf_counter() - begin
        response.raise_for_status()
        return seconds, response.json()["meta_info"]


class Servers:
    """Starts prefill servers with the same logical capacity, and decode servers that they need once.

    Args:
        fleet: the demo's; ends everything.
        work: directory of logs and model.
        cp_size: prefill ranks.
    """

    def __init__(self, fleet: Any, work: Path, cp_size: int) -> None:
        self.fleet, self.work, self.cp_size = fleet, work, cp_size

    def _server(self, name: str, role: str, at: Endpoint, shared: bool) -> Any:
        from cp_shared_kv_cpu.launch import cpu_environment, server_flags
        from pd_servers import Server, python_module

        ranks = self.cp_size if role == "prefill" else 1
        plugin = shared and role == "prefill"
        flags = server_flags(
            self.work / "model",
            role=role,
            cp_size=ranks,
            max_total_tokens=LOGICAL_TOKENS // (self.cp_size if plugin else 1),
            port=at.port,
            bootstrap_port=at.bootstrap_port,
            chunked_prefill_size=CONTEXT,
            context_length=CONTEXT,
            sleep_on_idle=True,  # a server that waits must not take a core from the one that is measured
        )
        if plugin:
            flags.append("--enable-nsa-prefill-cp-shared-kv")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "CP_SHARED_KV", "MC_"))}
        environment = {
            **inherited,
            **cpu_environment(ranks, plugins=("cp_shared_kv",) if plugin else ()),
            "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1" if shared else "0",
            "NO_PROXY": HOST,
            "no_proxy": HOST,
        }
        command = python_module("sglang.launch_server", *flags)
        log = self.work / f"{name.replace(' ', '-')}.log"
        return Server(name, command, environment, f"http://{HOST}:{at.port}/health", log)

    def start(self, name: str, shared: bool, prefix: Sequence[int], room: int) -> Endpoint:
        """A prefill server that has ``prefix`` in its cache.

        A request that goes nowhere does not enter the cache, so the prefix is sent to a decode server, which is then
        stopped.

        Raises:
            RuntimeError: a server did not start; with the end of its log.
        """
        from e2e.host import free_ports
        from pd_servers import DemoError, tail

        prefill_port, bootstrap_port, decode_port = free_ports(3)
        prefill, decode = Endpoint(prefill_port, bootstrap_port), Endpoint(decode_port, bootstrap_port)
        receiver = self._server(f"{name} decode", "decode", decode, shared)
        server = self._server(f"{name} prefill", "prefill", prefill, shared)
        try:
            self.fleet.start(server, receiver)
        except DemoError as error:
            raise RuntimeError(f"{error}\n{tail(error.log) if error.log else ''}") from None
        with ThreadPoolExecutor(2) as both:
            for done in [both.submit(side.generate, prefix, room) for side in (prefill, decode)]:
                done.result()
        self.fleet.stop(receiver)
        return replace(prefill, pid=server.pid)


@dataclass
class Timed:
    """Wall and CPU seconds of prompts by server, and how far the logprobs of two answers to a prompt are apart."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    differences: list[float]


def in_turn(at: Mapping[str, Endpoint], prompts: Sequence[Sequence[int]], cached: int, room: int) -> Timed:
    """Send each prompt to both servers, which take turns in being the first; the first prompt is not timed.

    Args:
        at: the two servers by name.
        prompts: token ids.
        cached: tokens that each must find in its cache.
        room: bootstrap room of the first request.

    Raises:
        RuntimeError: a server found another number of cached tokens.
    """
    timed = Timed({name: [] for name in at}, {name: [] for name in at}, [])
    for turn, prompt in enumerate(prompts):
        logprobs = []
        for name in sorted(at, reverse=bool(turn % 2)):
            before = at[name].cpu_seconds()
            seconds, meta = at[name].generate(prompt, room, NOWHERE)
            cpu_seconds = at[name].cpu_seconds() - before
            room += 1
            if meta["cached_tokens"] != cached:
                raise RuntimeError(f"{name}: {meta['cached_tokens']} tokens were cached, not {cached}")
            logprobs.append(meta["output_token_logprobs"][0][0])
            if turn:  # the first one pays for what is made on first use
                timed.seconds[name].append(seconds)
                timed.cpu_seconds[name].append(cpu_seconds)
        timed.differences.append(abs(logprobs[0] - logprobs[1]))
    return timed


def measure(cp_size: int = 2, prefix: int = 4096, chunk: int = 256, cold: int = 1024, times: int = 9) -> Measured:
    """Rows of the ratios, and whether both servers answer alike.

    Args:
        cp_size: prefill ranks of both servers.
        prefix, chunk: tokens that are cached and new, of the warm prompts.
        cold: tokens of the cold prompts.
        times: prompts of each kind that are timed.
    """
    from cp_shared_kv_cpu.model import write_tiny_model
    from pd_servers import Fleet

    draw = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, 500) for _ in range(count)]

    document = tokens(prefix)
    warm = [document + tokens(chunk) for _ in range(times + 1)]
    fresh = [tokens(cold) for _ in range(times + 1)]
    with tempfile.TemporaryDirectory(prefix="cp-shared-kv-bench-") as work:
        write_tiny_model(Path(work, "model"))
        with Fleet(partial(print, file=sys.stderr, flush=True), lambda text: None, START_S) as fleet:
            servers = Servers(fleet, Path(work), cp_size)
            at = {name: servers.start(name, name == "shared", document, room) for name, room in ROOMS.items()}
            timed = {
                f"{prefix} tokens cached, {chunk} new": in_turn(at, warm, prefix, 100),
                f"{cold} tokens, none cached": in_turn(at, fresh, 0, 1000),
            }
    measured = Measured()
    for text, of in timed.items():
        for kind, seconds in (("CPU", of.cpu_seconds), ("wall", of.seconds)):
            shared, stock = (statistics.median(seconds[name]) for name in ("shared", "stock"))
            how = f"CP {cp_size}, real servers in turn, median of {times}; stock takes {stock * 1000:.0f} ms"
            measured.rows.append(Row(f"prefill {kind} time, shared / stock, {text}", shared / stock, "ratio", how))
    apart = [difference for of in timed.values() for difference in of.differences]
    how = f"of {len(apart)} first tokens, shared beside stock"
    measured.rows.append(Row("greatest difference of a logprob", max(apart), "nat", how, 0.0, "exactly"))
    return measured
