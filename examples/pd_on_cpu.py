#!/usr/bin/env python3
"""CP shared KV on a real prefill/decode deployment of SGLang, beside stock, on a machine without a GPU.

Starts real SGLang HTTP servers (prefill with context parallelism, decode, and SGLang's router) on the CPU platform,
joined by Mooncake over TCP on the loopback interface, and sends them the same prompts three times:
stock; stock with a pool large enough for the longest prompt, for its right answer; and with CP shared KV.
Prints one table. Exit status 0 only if every comparison holds, 1 if one does not, 2 if the demo could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

try:
    import requests

    from cp_shared_kv_cpu.launch import cpu_environment, server_flags
    from cp_shared_kv_cpu.model import tiny_config
except ImportError as error:
    sys.exit(f"{error}: run `make setup` in the repository, then .venv/bin/python {sys.argv[0]}")

from pd_report import PAGE_SIZE, Answer, Comparison, Pass, Prompt, page_bytes, pool_figures, rank_transfers
from pd_servers import HOST, STOP_SIGNALS, DemoError, Fleet, Server, free_ports, python_module, tail
from pd_table import render

POOL_TOKENS = 1536  # of one prefill rank, stock and shared alike
CHUNK_TOKENS = 512
DECODE_TOKENS = 12288
NEW_TOKENS = 8
REQUEST_TIMEOUT = 300
MINUTES = {2: 3, 4: 4}  # on two idle cores


OPENING = """\
CP shared KV beside stock SGLang, on this machine's CPU, with a tiny DeepSeek-V3.2 (prefill CP {cp}).
Real HTTP servers, SGLang's router, real Mooncake transfer over TCP. Three passes:
  1. stock SGLang, {requests} prompts through the router; the last is longer than the KV pool of one rank
  2. stock SGLang with one rank and a pool of {cp} times the size, for the right answer to the last prompt
  3. CP shared KV, the same {requests} prompts, the same memory per rank as stock
Takes about {minutes} minutes on two idle cores, most of it starting servers. Ctrl-C ends everything.
"""


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and where a prefill server tells decode servers how to reach its ranks."""

    port: int
    bootstrap_port: int

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True)
class Deployment:
    """The running servers of a pass, and how long they took to start."""

    prefill: Server
    router: Server
    decode: Endpoint
    seconds_to_start: float


class Interrupted(BaseException):
    """A signal asks the demo to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Console:
    """Progress: a line for each event, and on a terminal one more that says what is being waited for."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._live = sys.stdout.isatty()

    def say(self, text: str) -> None:
        """A line that stays."""
        print(f"{self._erase()}{self.elapsed():5.0f} s {text}", flush=True)

    def status(self, text: str) -> None:
        """A line that the next one replaces; nothing where output is not a terminal."""
        if self._live:
            print(f"{self._erase()}{self.elapsed():5.0f} s {text}", end="", flush=True)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def _erase(self) -> str:
        return "\r\x1b[K" if self._live else ""


def make_prompts(cp_size: int) -> list[Prompt]:
    """The same prompts on every run; the last one fits the pools of all ranks together, but not one of them."""
    draw = random.Random(20)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, 500) for _ in range(count)]

    document, chunked = tokens(300), tokens(900)
    return [
        Prompt("fresh", document),
        Prompt("repeated", document),
        Prompt("shared prefix, new question", document[:256] + tokens(100)),
        Prompt("shorter than a page", tokens(5)),
        Prompt(f"chunked (by {CHUNK_TOKENS})", chunked),
        Prompt("chunked, prefix cached", chunked[:450] + tokens(600)),
        Prompt("longer than one rank's pool", tokens((cp_size - 1) * POOL_TOKENS + POOL_TOKENS // 2)),
    ]


class Demo:
    """The deployment that each pass starts, and the requests that it is sent."""

    def __init__(self, prompts: Sequence[Prompt], cp_size: int, work: Path, console: Console, fleet: Fleet) -> None:
        self.prompts, self.cp_size, self.work, self.console, self.fleet = prompts, cp_size, work, console, fleet
        # No more than needed: the workspace of shared KV is made for one context.
        self.context_tokens = max(len(prompt.tokens) for prompt in prompts) + 4 * PAGE_SIZE
        self.model = work / "model"
        (work / "tmp").mkdir()

    def environment(self, ranks: int, *, shared: bool, plugin: bool = False) -> dict[str, str]:
        """Whole environment of a server; settings of the caller's shell for SGLang, Mooncake or the plugin stay out.

        But for the switch of prefetch, which may be tried.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "CP_SHARED_KV", "MC_"))}
        return {
            **inherited,
            **cpu_environment(ranks, plugins=("cp_shared_kv",) if plugin else ()),
            # Both sides must agree. Stock 0.5.12 loses pages when all ranks send, so there only rank 0 does.
            "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1" if shared else "0",
            "CP_SHARED_KV_LOG_LEVEL": "debug" if plugin else "",
            "CP_SHARED_KV_PREFETCH": os.environ.get("CP_SHARED_KV_PREFETCH", ""),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.work / "tmp"),
            "NO_PROXY": HOST,
            "no_proxy": HOST,
        }

    def server(self, name: str, role: str, ranks: int, tokens: int, at: Endpoint, shared: bool) -> Server:
        """A prefill or decode server; with ``shared`` a prefill server has the plugin, and decode stays stock."""
        flags = server_flags(
            self.model,
            role=role,
            cp_size=ranks,
            max_total_tokens=tokens,
            port=at.port,
            bootstrap_port=at.bootstrap_port,
            chunked_prefill_size=CHUNK_TOKENS,
            context_length=self.context_tokens,
            # Idle servers would otherwise poll, each on a whole core.
            sleep_on_idle=True,
            # One log line a request and rank, with the tokens computed and the bytes sent.
            enable_request_time_stats_logging=True,
        )
        plugin = shared and role == "prefill"
        if plugin:
            flags.append("--enable-nsa-prefill-cp-shared-kv")
        command = python_module("sglang.launch_server", *flags)
        environment = self.environment(ranks, shared=shared, plugin=plugin)
        return Server(name, command, environment, f"{at.url}/health", self.log(name))

    def router(self, name: str, prefill: Endpoint, decode: Endpoint) -> Server:
        """SGLang's router in front of one prefill and one decode server."""
        port, metrics_port = free_ports(2)
        arguments = ["--pd-disaggregation", "--host", HOST, "--port", str(port)]
        arguments += ["--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url]
        arguments += ["--prometheus-host", HOST, "--prometheus-port", str(metrics_port)]
        # It looks for its workers every 30 s unless told otherwise; its health checks are requests of their own, and a
        # retry would send a prompt twice.
        arguments += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "3600"]
        arguments += ["--disable-retries", "--disable-circuit-breaker"]
        environment = self.environment(1, shared=False)
        command = python_module("sglang_router.launch_router", *arguments)
        return Server(name, command, environment, f"http://{HOST}:{port}/readiness", self.log(name))

    def log(self, name: str) -> Path:
        """Log file of a server."""
        return self.work / (name.replace(" ", "-") + ".log")

    def ask(self, name: str, prompts: Sequence[Prompt], at: Deployment, ranks: int) -> Pass:
        """Send prompts one after another through the router and collect what the servers say of each."""
        prefill, router, shared = at.prefill, at.router, name == "shared"
        result = Pass(name, ranks, seconds_to_start=at.seconds_to_start)
        info = requests.get(prefill.health.replace("/health", "/server_info"), timeout=60).json()
        result.capacity_tokens = info["max_total_num_tokens"]
        result.pool_tokens, result.workspace_bytes, result.workspace_layers = pool_figures(prefill.log)
        begin = time.monotonic()
        for number, prompt in enumerate(prompts, 1):
            text = f"  request {number} of {len(prompts)}: {prompt.name}, {len(prompt.tokens):,} tokens"
            rid = f"demo-{name}-{number}"
            answer = self.wait_for(prompt, router.health.replace("/readiness", "/generate"), rid, text)
            answer.ranks = rank_transfers(prefill.log, rid, ranks, shared)
            result.answers[prompt.name] = answer
            self.console.say(
                f"{text}: HTTP {answer.status} after {answer.seconds:.1f} s{answer.error and ', '}{answer.error}"
            )
        result.seconds_of_requests = time.monotonic() - begin
        return result

    def wait_for(self, prompt: Prompt, url: str, rid: str, text: str) -> Answer:
        """One request, watching the servers meanwhile: a dead one may leave it without an answer."""
        with ThreadPoolExecutor(1) as executor:
            begin, future = time.monotonic(), executor.submit(generate, url, rid, prompt)
            try:
                while not wait([future], timeout=0.5).done:
                    self.fleet.check_alive()
                    self.console.status(f"{text}, {time.monotonic() - begin:.0f} s")
            except BaseException:
                # Closes the connection, so that leaving this block does not wait for the request's timeout.
                self.fleet.stop(*self.fleet.servers)
                raise
        return future.result()

    def start_pass(self, name: str, ranks: int, tokens: int, decode: Endpoint | None = None) -> Deployment:
        """Start the servers of a pass side by side; with ``decode`` that server is kept from an earlier pass."""
        shared, begin = name == "shared", time.monotonic()
        prefill = Endpoint(*free_ports(2))
        servers = [self.server(f"{name} prefill", "prefill", ranks, tokens, prefill, shared)]
        if decode is None:
            decode = Endpoint(*free_ports(2))
            servers.append(self.server(f"{name} decode", "decode", 1, DECODE_TOKENS, decode, shared))
        servers.append(self.router(f"{name} router", prefill, decode))
        self.fleet.start(*servers)
        return Deployment(servers[0], servers[-1], decode, time.monotonic() - begin)

    def run(self) -> Comparison:
        """All three passes."""
        say, cp, prompts = self.console.say, self.cp_size, self.prompts
        say("Writing a tiny DeepSeek-V3.2 checkpoint")
        write_model = python_module("cp_shared_kv_cpu.model", str(self.model))
        written = subprocess.run(write_model, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if written.returncode:
            raise DemoError(f"writing the checkpoint failed:\n{written.stderr}")

        say(f"Pass 1 of 3, stock: prefill CP {cp} with {POOL_TOKENS:,} tokens of KV a rank; rank 0 sends to decode")
        at = self.start_pass("stock", cp, POOL_TOKENS)
        stock = self.ask("stock", prompts, at, cp)
        self.fleet.stop(at.prefill, at.router)

        say(
            f"Pass 2 of 3, reference: stock prefill CP 1 with {cp * POOL_TOKENS:,} tokens, for the longest prompt alone"
        )
        # With one prefill rank the stock decode server of pass 1 serves as it is.
        at = self.start_pass("reference", 1, cp * POOL_TOKENS, at.decode)
        reference = self.ask("reference", prompts[-1:], at, 1)
        self.fleet.stop(*self.fleet.servers)

        say(f"Pass 3 of 3, shared: prefill CP {cp} with {POOL_TOKENS:,} tokens of KV a rank, shared; every rank sends")
        at = self.start_pass("shared", cp, POOL_TOKENS)
        shared = self.ask("shared", prompts, at, cp)
        self.fleet.stop(*self.fleet.servers)
        return Comparison(prompts, stock, reference, shared, page_bytes(tiny_config()))


def generate(url: str, rid: str, prompt: Prompt) -> Answer:
    """One greedy request through the router. An HTTP error is an answer too, with its text."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": prompt.tokens,
        "return_logprob": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    begin = time.monotonic()
    try:
        response = requests.post(url, json=body, timeout=REQUEST_TIMEOUT)
    except requests.RequestException as error:
        raise DemoError(f"no answer to {prompt.name!r}: {error}") from None
    seconds = time.monotonic() - begin
    if response.status_code != 200:
        return Answer(prompt.name, response.status_code, seconds, [], [], response.text[:200])
    answer = response.json()
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return Answer(prompt.name, 200, seconds, answer["output_ids"], logprobs)


def stop_on_signal(number: int, _frame: object) -> NoReturn:
    """Leave by an exception, so that the servers are ended on the way out."""
    raise Interrupted(number)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, choices=sorted(MINUTES), default=2, help="prefill ranks (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures and checks to FILE")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="copy the servers' logs to DIR at the end")
    parser.add_argument(
        "--patience",
        type=float,
        metavar="SECONDS",
        default=600,
        help="give up when the servers of a pass have not started after this long (default: 600)",
    )
    return parser.parse_args(arguments)


def report(comparison: Comparison, console: Console) -> int:
    """Print the table and every check that does not hold; the exit status."""
    print(f"\n{render(comparison)}\n")
    checks = comparison.checks()
    failed = [check for check in checks if not check.holds]
    for check in failed:
        print(f"FAILED  {check.name}: {check.detail}")
    if failed:
        print(f"{len(failed)} of {len(checks)} checks failed after {console.elapsed():.0f} s")
        return 1
    print(f"All {len(checks)} checks hold: same tokens and logprobs, every page sent once. {console.elapsed():.0f} s.")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    options = parse_arguments(arguments)
    for number in STOP_SIGNALS:
        signal.signal(number, stop_on_signal)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = HOST  # this process talks to loopback servers only
    console, prompts = Console(), make_prompts(options.cp)
    print(OPENING.format(cp=options.cp, requests=len(prompts), minutes=MINUTES[options.cp]), flush=True)
    work = Path(tempfile.mkdtemp(prefix="cp-shared-kv-demo-"))
    try:
        with Fleet(console.say, console.status, options.patience) as fleet:
            comparison = Demo(prompts, options.cp, work, console, fleet).run()
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(comparison.as_json(), indent=1) + "\n")
        return report(comparison, console)
    except DemoError as error:
        if error.log is not None:
            print(f"\n--- last lines of {error.log.name}\n{tail(error.log)}\n---")
        print(f"\nThe demo could not go on: {error}", flush=True)
        return 2
    except Interrupted as interrupt:
        print(f"\nInterrupted by {interrupt}; all servers have been ended.", flush=True)
        return interrupt.status
    finally:
        if options.keep_logs:
            options.keep_logs.mkdir(parents=True, exist_ok=True)
            for log in work.glob("*.log"):
                shutil.copy(log, options.keep_logs)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
