"""The process that imports SGLang once and forks engines; ``harness`` starts it and talks to it over a socket.

A fork costs nothing where an import costs ten seconds, and a pair of engines is seven processes. SGLang asks for spawn,
so its choice of start method is overridden in the engines; the plugins run afresh in every process all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .control import CONTROL_ENV
from .spec import Answer, Report, Spec, Step

START_S = 240
STEP_S = 240


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
    shared = spec.shared and role == "prefill"
    os.environ["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] = "1" if spec.shared else "0"
    os.environ["CP_SHARED_KV"] = "1" if shared else "0"
    os.environ["CP_SHARED_KV_LOG_LEVEL"] = "debug"
    os.environ[CONTROL_ENV] = control
    if (shared and spec.auto) or (role == "decode" and spec.decode_plugin):
        del os.environ["CP_SHARED_KV"]
    if role == "prefill":
        os.environ.update(dict(spec.environ))
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
    while (job := jobs.get()) is not None:
        if job == "server_info":
            results.put((role, "done", engine.get_server_info()))
            continue
        prompts, rooms = job
        results.put((role, "done", _generate(engine, spec, prompts, rooms, ports[0])))
    engine.shutdown()


def _generate(engine: Any, spec: Spec, prompts: Any, rooms: list[int], bootstrap_port: int) -> list[Answer]:
    import asyncio

    async def one(prompt: Any, room: int) -> Answer:
        try:
            out = await engine.async_generate(
                input_ids=list(prompt),
                sampling_params={"temperature": 0, "max_new_tokens": spec.new_tokens, "ignore_eos": True},
                bootstrap_host="127.0.0.1",
                bootstrap_port=bootstrap_port,
                bootstrap_room=room,
                return_logprob=True,
            )
        except Exception as error:
            return Answer(error=f"{type(error).__name__}: {error}")
        meta = out["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            return Answer(error=str(reason.get("message")))
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        return Answer(out["output_ids"], logprobs, meta["cached_tokens"])

    async def everything() -> list[Answer]:
        return list(await asyncio.gather(*(one(p, r) for p, r in zip(prompts, rooms, strict=True))))

    return engine.loop.run_until_complete(everything())


class Run:
    """One pair of engines and its report."""

    def __init__(self, spec: Spec, model: str) -> None:
        self.spec = spec
        self.report = Report()
        self.directory = Path(tempfile.mkdtemp(prefix="e2e-"))
        self.serial = 0
        self.room = 1000
        context = multiprocessing.get_context("spawn" if spec.spawn else "fork")
        self.results = context.Queue()
        self.jobs = {role: context.Queue() for role in ("prefill", "decode")}
        ports = free_ports(3)
        self.logs = {role: str(self.directory / f"{role}.log") for role in self.jobs}
        self.processes = {
            role: context.Process(
                target=_engine,
                args=(spec, role, model, ports, self.logs[role], str(self.directory), self.jobs[role], self.results),
            )
            for role in self.jobs
        }

    def execute(self) -> Report:
        try:
            for process in self.processes.values():
                process.start()
            if self._collect("up", START_S, tuple(self.jobs)) is not None:
                for step in self.spec.steps:
                    self._step(step)
        except Exception:
            self.report.failure = self.report.failure or traceback.format_exc()
        finally:
            self._stop()
        self.report.log = Path(self.logs["prefill"]).read_text(errors="replace")
        self.report.decode_log = Path(self.logs["decode"]).read_text(errors="replace")
        shutil.rmtree(self.directory, ignore_errors=True)
        return self.report

    def _collect(self, expected: str, timeout_s: float, roles: tuple[str, ...]) -> dict[str, Any] | None:
        """One message of each role; None where an engine failed, died or is late."""
        messages: dict[str, Any] = {}
        end = time.monotonic() + timeout_s
        while len(messages) < len(roles):
            try:
                role, kind, body = self.results.get(timeout=1)
            except queue.Empty:
                dead = [role for role, process in self.processes.items() if not process.is_alive()]
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

    def _order(self, **orders: Any) -> None:
        """Have every prefill rank apply orders, and wait until all have."""
        self.serial += 1
        path = self.directory / "control.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"serial": self.serial, **orders}))
        partial.rename(path)
        end = time.monotonic() + 60
        while not all((self.directory / f"ack.{rank}.{self.serial}").exists() for rank in range(self.spec.cp_size)):
            if time.monotonic() > end or not self.processes["prefill"].is_alive():
                raise RuntimeError(f"the prefill ranks did not take the orders {orders}")
            time.sleep(0.02)

    def _step(self, step: Step) -> None:
        if self.report.failure:
            return
        if not self.spec.spawn:
            self._order(chunk=step.chunk, breaks=step.breaks)
        if step.server_info:
            self.jobs["prefill"].put("server_info")
            if (said := self._collect("done", STEP_S, ("prefill",))) is None:
                return
            self.report.server_info[step.name] = said["prefill"]
        first = self.room if step.room is None else step.room
        rooms = list(range(first, first + len(step.prompts)))
        self.room += len(step.prompts)
        for role in step.sides:
            self.jobs[role].put((step.prompts, rooms))
        answers = self._collect("done", STEP_S, step.sides)
        if answers is None:
            self.report.failure = f"step {step.name}: {self.report.failure}"
            return
        self.report.answers[step.name] = answers.get("decode", [])
        self.report.prefill_answers[step.name] = answers.get("prefill", [])
        if self.spec.dump:
            self._order(chunk=step.chunk, breaks=step.breaks, dump=True)
            paths = [self.directory / f"dump.{rank}" for rank in range(self.spec.cp_size)]
            self.report.dumps[step.name] = [pickle.loads(path.read_bytes()) for path in paths]

    def _stop(self) -> None:
        for role, process in self.processes.items():
            if process.pid is None:
                continue
            if process.is_alive() and not self.report.failure:
                self.jobs[role].put(None)
                process.join(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join(10)


def main() -> None:
    die_with_parent()
    channel = Connection(int(sys.argv[1]))
    try:
        import sglang
        import sglang.srt.disaggregation.decode
        import sglang.srt.disaggregation.mooncake.conn
        import sglang.srt.disaggregation.prefill
        import sglang.srt.entrypoints.engine
        import sglang.srt.layers.attention.nsa_backend
        import sglang.srt.managers.detokenizer_manager
        import sglang.srt.models.deepseek_v2  # noqa: F401

        from cp_shared_kv_cpu import activate
        from cp_shared_kv_cpu.model import write_tiny_model

        from . import control

        activate()
        control.install()
        model = tempfile.mkdtemp(prefix="e2e-model-")
        write_tiny_model(model)
    except BaseException:
        channel.send(traceback.format_exc())
        return
    channel.send(None)
    try:
        while (spec := channel.recv()) is not None:
            channel.send(Run(spec, model).execute())
    except EOFError:
        pass
    finally:
        shutil.rmtree(model, ignore_errors=True)


if __name__ == "__main__":
    main()
