"""The process that imports SGLang once and forks engines; ``harness`` starts it and talks to it over a socket.

A fork costs nothing where an import costs ten seconds, and a pair of engines is seven processes. SGLang asks for spawn,
so its choice of start method is overridden in the engines; the plugins run afresh in every process all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import pickle
import queue
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .control import CONTROL_ENV
from .spec import Answer, Report, Spec, Step

START_S = 240
STEP_S = 240
ORDER_S = 60
ROLES = ("prefill", "decode")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different.

    Below the range that the system hands out to connections, which could otherwise take one before the server does;
    SGLang adds 10000 for a further port.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(10000, 22000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def die_with_parent() -> None:
    """Have the system kill this process when the one that started it dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def _prepare_fork() -> None:
    """In an engine's process: fork where SGLang would spawn, and let it load the plugins again."""
    import sglang.srt.plugins as plugins
    import zmq
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver
    from sglang.srt.plugins.hook_registry import HookRegistry

    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *args, **kwargs: set_start_method("fork", force=True)  # type: ignore
    CommonKVReceiver._ctx = zmq.Context()  # the inherited context has its threads in the parent only
    plugins._plugins_loaded = False
    HookRegistry.reset()
    import sglang.srt.managers.scheduler as scheduler

    run = scheduler.run_scheduler_process

    def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
        plugins._plugins_loaded = False
        return run(*args, **kwargs)

    from sglang.srt.entrypoints.engine import Engine

    Engine.run_scheduler_process_func = staticmethod(run_scheduler_process)


def _engine(
    spec: Spec, role: str, model: str, ports: list[int], log: str, control: str, jobs: Any, results: Any
) -> None:
    """Body of an engine's process: start it, answer jobs, stop."""
    die_with_parent()
    os.setpgrp()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    shared = spec.shared if role == "prefill" else spec.decode_shared
    os.environ["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] = "1" if spec.shared else "0"
    os.environ["CP_SHARED_KV"] = "1" if shared else "0"
    os.environ["CP_SHARED_KV_LOG_LEVEL"] = "debug"
    os.environ[CONTROL_ENV] = control
    if (shared and spec.auto) or (role == "decode" and spec.decode_plugin):
        del os.environ["CP_SHARED_KV"]
    os.environ.update(dict(spec.environ if role == "prefill" else spec.decode_environ))
    try:
        from cp_shared_kv_cpu.launch import cpu_environment, engine_arguments

        cp_size = spec.cp_size if role == "prefill" else 1
        os.environ.update(cpu_environment(cp_size, plugins=("cp_shared_kv",)))
        if not spec.spawn:
            _prepare_fork()
        import sglang

        if spec.foreign_patch and role == "prefill":
            from .control import patch_seam_as_another_plugin_would

            patch_seam_as_another_plugin_would()
        arguments = engine_arguments(
            model,
            role=role,
            cp_size=cp_size,
            kv_cache_dtype=spec.kv,
            max_total_tokens=spec.tokens if role == "prefill" else spec.decode_tokens,
            chunked_prefill_size=spec.chunk,
            context_length=spec.context_length,
            bootstrap_port=ports[0],
            port=ports[1] if role == "prefill" else ports[2],
            log_level="info",
            disable_overlap_schedule=not spec.overlap,
            max_running_requests=8,
            **(dict(spec.overrides) if role == "prefill" else {}),
        )
        engine = sglang.Engine(**arguments)
    except BaseException:
        results.put((role, "failed", traceback.format_exc()))
        return
    results.put((role, "up", None))
    while engine.loop.run_until_complete(_serve(engine, spec, role, jobs, results, ports[0])) is not None:
        results.put((role, "done", engine.get_server_info()))
    engine.shutdown()


async def _serve(engine: Any, spec: Spec, role: str, jobs: Any, results: Any, bootstrap_port: int) -> str | None:
    """Run jobs, without waiting for one before the next, until one comes that cannot run on the engine's loop."""
    tasks: set[asyncio.Task[None]] = set()

    async def send(prompts: Any, rooms: list[int]) -> None:
        requests = (_generate(engine, spec, p, r, bootstrap_port) for p, r in zip(prompts, rooms, strict=True))
        results.put((role, "done", list(await asyncio.gather(*requests))))

    async def submit(rid: str, prompt: Any, room: int) -> None:
        results.put((role, "answer", (rid, await _generate(engine, spec, prompt, room, bootstrap_port, rid))))

    async def abort(rid: str) -> None:
        engine.tokenizer_manager.abort_request(rid)

    verbs: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"send": send, "submit": submit, "abort": abort}
    while isinstance(job := await asyncio.get_running_loop().run_in_executor(None, jobs.get), tuple):
        verb, *arguments = job
        tasks.add(asyncio.ensure_future(verbs[verb](*arguments)))
    return job


async def _generate(
    engine: Any, spec: Spec, prompt: Any, room: int, bootstrap_port: int, rid: str | None = None
) -> Answer:
    try:
        out = await engine.async_generate(
            input_ids=list(prompt),
            sampling_params={"temperature": 0, "max_new_tokens": spec.new_tokens, "ignore_eos": True},
            bootstrap_host="127.0.0.1",
            bootstrap_port=bootstrap_port,
            bootstrap_room=room,
            return_logprob=True,
            rid=rid,
        )
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    meta = out["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        return Answer(error=str(reason.get("message")))
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    return Answer(out["output_ids"], logprobs, meta["cached_tokens"])


class Engines:
    """A prefill and a decode engine, each in a process group of its own, and their control directory."""

    def __init__(self, spec: Spec, model: str) -> None:
        self.spec = spec
        self.model = model
        self.directory = Path(tempfile.mkdtemp(prefix="e2e-"))
        self.serial = 0
        self.context = multiprocessing.get_context("spawn" if spec.spawn else "fork")
        self.results = self.context.Queue()
        self.ports = free_ports(3)
        self.logs = {role: str(self.directory / f"{role}.log") for role in ROLES}
        self.ranks = {"prefill": spec.cp_size, "decode": 1}
        self.jobs: dict[str, Any] = {}
        self.processes: dict[str, Any] = {}

    def start(self, role: str) -> None:
        """Start an engine; its "up" comes over ``results``."""
        self.jobs[role] = self.context.Queue()  # a new one each time: a killed reader leaves its queue locked
        self.processes[role] = self.context.Process(
            target=_engine,
            args=(
                self.spec,
                role,
                self.model,
                self.ports,
                self.logs[role],
                str(self.directory),
                self.jobs[role],
                self.results,
            ),
        )
        self.processes[role].start()

    def order(self, role: str, **orders: Any) -> None:
        """Have every rank of an engine apply orders, all in the same turn, and wait until all have."""
        self.serial += 1
        path = self.directory / f"control.{role}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"serial": self.serial, **orders}))
        partial.rename(path)
        acks = [self.directory / f"ack.{role}.{rank}.{self.serial}" for rank in range(self.ranks[role])]
        end = time.monotonic() + ORDER_S
        while not all(ack.exists() for ack in acks):
            if time.monotonic() > end or not self.processes[role].is_alive():
                raise RuntimeError(f"the {role} ranks did not take the orders {orders}")
            time.sleep(0.02)

    def dumps(self, role: str) -> list[dict[str, Any]]:
        """What each rank dumped at the last order, in rank order."""
        paths = [self.directory / f"dump.{role}.{rank}" for rank in range(self.ranks[role])]
        return [pickle.loads(path.read_bytes()) for path in paths]

    def log(self, role: str) -> str:
        """Output of an engine so far."""
        path = Path(self.logs[role])
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, role: str) -> None:
        """Kill all processes of an engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[role].pid, signal.SIGKILL)
        self.processes[role].join(10)

    def stop(self, gently: bool) -> None:
        """Stop both engines."""
        for role, process in self.processes.items():
            if gently and process.is_alive():
                self.jobs[role].put(None)
                process.join(5)
            self.kill(role)

    def remove_files(self) -> None:
        """Remove logs, orders and dumps."""
        shutil.rmtree(self.directory, ignore_errors=True)


class Run:
    """The steps of a spec on one pair of engines, and its report."""

    def __init__(self, spec: Spec, model: str) -> None:
        self.spec = spec
        self.report = Report()
        self.engines = Engines(spec, model)
        self.room = 1000

    def execute(self) -> Report:
        try:
            for role in ROLES:
                self.engines.start(role)
            if self._collect("up", START_S, ROLES) is not None:
                for step in self.spec.steps:
                    self._step(step)
        except Exception:
            self.report.failure = self.report.failure or traceback.format_exc()
        finally:
            self.engines.stop(gently=not self.report.failure)
        self.report.log, self.report.decode_log = (self.engines.log(role) for role in ROLES)
        self.engines.remove_files()
        return self.report

    def _collect(self, expected: str, timeout_s: float, roles: tuple[str, ...]) -> dict[str, Any] | None:
        """One message of each role; None where an engine failed, died or is late."""
        messages: dict[str, Any] = {}
        end = time.monotonic() + timeout_s
        while len(messages) < len(roles):
            try:
                role, kind, body = self.engines.results.get(timeout=1)
            except queue.Empty:
                dead = [role for role, process in self.engines.processes.items() if not process.is_alive()]
                if dead or time.monotonic() > end:
                    self.report.failure = (
                        f"{dead or 'the engines'} {'died' if dead else 'are late'} (awaiting {expected})"
                    )
                    return None
                continue
            if kind != expected:
                self.report.failure = f"{role}: {body}"
                return None
            messages[role] = body
        return messages

    def _step(self, step: Step) -> None:
        if self.report.failure:
            return
        if not self.spec.spawn:
            self.engines.order("prefill", chunk=step.chunk, breaks=step.breaks, count=self.spec.count)
        if step.server_info:
            self.engines.jobs["prefill"].put("server_info")
            if (said := self._collect("done", STEP_S, ("prefill",))) is None:
                return
            self.report.server_info[step.name] = said["prefill"]
        first = self.room if step.room is None else step.room
        rooms = list(range(first, first + len(step.prompts)))
        self.room += len(step.prompts)
        for role in step.sides:
            self.engines.jobs[role].put(("send", step.prompts, rooms))
        answers = self._collect("done", STEP_S, step.sides)
        if answers is None:
            self.report.failure = f"step {step.name}: {self.report.failure}"
            return
        self.report.answers[step.name] = answers.get("decode", [])
        self.report.prefill_answers[step.name] = answers.get("prefill", [])
        if self.spec.dump:
            self.engines.order("prefill", chunk=step.chunk, breaks=step.breaks, dump=True)
            self.report.dumps[step.name] = self.engines.dumps("prefill")


class Pair:
    """A pair of engines that a test drives call by call; requests are named by their rid on either side."""

    def __init__(self, spec: Spec, model: str) -> None:
        self.engines = Engines(spec, model)
        self.answers: dict[tuple[str, str], Answer] = {}
        try:
            self.start(*ROLES)
        except BaseException:
            self.close()
            raise

    def start(self, *roles: str) -> None:
        """Start engines and wait until they are up."""
        for role in roles:
            self.engines.start(role)
        self._receive(lambda up: up >= set(roles), START_S, roles)

    def submit(self, role: str, rid: str, prompt: tuple[int, ...], room: int) -> None:
        """Send a request to one side; it has its answer or error later."""
        self.engines.jobs[role].put(("submit", rid, prompt, room))

    def abort(self, role: str, rid: str) -> None:
        """What the server does when a client has gone."""
        self.engines.jobs[role].put(("abort", rid))

    def wait(self, requests: list[tuple[str, str]], timeout_s: float) -> dict[tuple[str, str], Answer]:
        """Answers to requests, given as ``(role, rid)``; those that have none when the time is over are left out."""
        with contextlib.suppress(TimeoutError):
            self._receive(lambda up: all(request in self.answers for request in requests), timeout_s, ())
        return {request: self.answers[request] for request in requests if request in self.answers}

    def _receive(self, done: Callable[[set[str]], bool], timeout_s: float, alive: tuple[str, ...]) -> None:
        """Take in what the engines say until it is enough.

        Raises:
            TimeoutError: it was not enough in time.
            RuntimeError: an engine of ``alive`` did not start or died.
        """
        end = time.monotonic() + timeout_s
        up: set[str] = set()
        while True:
            with contextlib.suppress(queue.Empty):
                role, kind, body = self.engines.results.get(timeout=0.05)
                if kind == "failed":
                    raise RuntimeError(f"{role}: {body}")
                if kind == "up":
                    up.add(role)
                if kind == "answer":
                    self.answers[role, body[0]] = body[1]
                continue
            if done(up):
                return
            if time.monotonic() > end:
                raise TimeoutError
            for role in alive:
                if not self.engines.processes[role].is_alive():
                    raise RuntimeError(f"{role} died:\n{self.engines.log(role)[-3000:]}")

    def order(self, role: str, **orders: Any) -> list[dict[str, Any]]:
        """Have all ranks of an engine apply orders; what they dumped, which is their state (``faults.state``)."""
        self.engines.order(role, state=True, **orders)
        return self.engines.dumps(role)

    def exit_code(self, role: str, timeout_s: float) -> int | None:
        """How an engine ended; None if it is still there when the time is over."""
        self.engines.processes[role].join(timeout_s)
        code: int | None = self.engines.processes[role].exitcode
        return code

    def kill(self, role: str) -> None:
        """Kill all processes of an engine."""
        self.engines.kill(role)

    def kill_process(self, pid: int) -> None:
        """Kill one process of an engine."""
        os.kill(pid, signal.SIGKILL)

    def log(self, role: str) -> str:
        """Output of an engine since it was started."""
        return self.engines.log(role)

    def close(self) -> None:
        """Kill both engines."""
        self.engines.stop(gently=False)
        self.engines.remove_files()


def main() -> None:
    die_with_parent()
    channel = Connection(int(sys.argv[1]))
    try:
        from cp_shared_kv.releases import installed
        from cp_shared_kv_cpu import activate
        from cp_shared_kv_cpu.model import write_tiny_model

        activate()
        import sglang
        import sglang.srt.disaggregation.decode
        import sglang.srt.disaggregation.mooncake.conn
        import sglang.srt.disaggregation.prefill
        import sglang.srt.entrypoints.engine
        import sglang.srt.managers.detokenizer_manager
        import sglang.srt.models.deepseek_v2  # noqa: F401

        importlib.import_module(installed().targets["attention.init_forward_metadata"].module)

        from . import control

        control.install()
        model = tempfile.mkdtemp(prefix="e2e-model-")
        write_tiny_model(model)
    except BaseException:
        channel.send(traceback.format_exc())
        return
    channel.send(None)
    pair: Pair | None = None
    try:
        while (task := channel.recv()) is not None:
            if isinstance(task, Spec):
                channel.send(Run(task, model).execute())
                continue
            call, arguments, options = task
            try:
                if call == "open":
                    pair = Pair(*arguments, model)
                    channel.send((None, None))
                else:
                    channel.send((None, getattr(pair, call)(*arguments, **options)))
            except Exception:
                channel.send((traceback.format_exc(), None))
    except EOFError:
        pass
    finally:
        if pair is not None:
            pair.close()
        shutil.rmtree(model, ignore_errors=True)


if __name__ == "__main__":
    main()
