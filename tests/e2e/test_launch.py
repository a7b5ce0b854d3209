"""Launching as users do: real spawned processes, the flag, the switch, and every way of not being supported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cp_shared_kv.releases import installed
from cp_shared_kv_cpu.launch import cpu_environment, server_flags
from cp_shared_kv_cpu.model import write_tiny_model

from .harness import run
from .host import free_ports
from .prompts import tokens
from .spec import Spec, Step

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FLAG = "--enable-nsa-prefill-cp-shared-kv"
_prompt = tokens(700)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def launch(flags: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a server's launch that is expected to stop by itself."""
    environment = {**os.environ, **cpu_environment(2, plugins=("cp_shared_kv",)), **environ}
    return subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
    )


def prefill_flags(model: Path, **options: object) -> list[str]:
    ports = free_ports(2)
    options = {"role": "prefill", "cp_size": 2, "chunked_prefill_size": 512, "bootstrap_port": ports[0], **options}
    return server_flags(model, port=ports[1], **options)


def assert_stopped_before_weights(done: subprocess.CompletedProcess[str]) -> None:
    output = done.stdout + done.stderr
    assert done.returncode != 0, output[-2000:]
    assert "Load weight begin" not in output
    assert "KV Cache is allocated" not in output


def test_spawned_processes_answer_as_forked_ones_do() -> None:
    steps = (Step("fresh", (_prompt,)), Step("hit", (_prompt + tokens(90),)))
    spawned = run(Spec(steps, 2, True, 1024, spawn=True))
    forked = run(Spec(steps, 2, False, 2048))
    assert spawned.failure is None, f"{spawned.failure}\n{spawned.log[-3000:]}"
    assert spawned.answers == forked.answers
    assert "CP shared KV scheduler capacity: logical_tokens=2048" in spawned.log


@pytest.mark.release
def test_http_server_with_the_flag_warms_up_and_ends_cleanly(model: Path, tmp_path: Path) -> None:
    """Warm-up requests go through SGLang's fake sender, which takes no page positions."""
    flags = [flag for flag in prefill_flags(model) if flag != "--skip-server-warmup"]
    environment = {
        **os.environ,
        **cpu_environment(2, plugins=("cp_shared_kv",)),
        "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1",
    }
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *flags, FLAG],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + 240
        while "fired up and ready to roll" not in log.read_text():
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(20)
    text = log.read_text()
    assert text.count("CP shared KV scheduler capacity") == 2
    assert "hit an exception" not in text
    assert "SharedPoolError" not in text


@pytest.mark.release
@pytest.mark.any_release
def test_flag_on_an_unsupported_server_stops_the_launch_and_names_every_reason(model: Path) -> None:
    names = installed().arguments
    other = {"in-seq-split": "round-robin-split", "zigzag": "interleave"}[names.in_seq_split]
    flags = prefill_flags(model, **{names.cp_mode: other}, enable_mixed_chunk=True)
    done = launch([*flags, FLAG], SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER="0")
    assert_stopped_before_weights(done)
    output = done.stdout + done.stderr
    if installed().no_zigzag:
        assert f"[zigzag] found {installed().no_zigzag}" in output
    for reason in (
        f"[cp_mode] found {names.cp_mode}={other!r}",
        "[mixed chunk]",
        "[all_cp_ranks_transfer]",
    ):
        assert reason in output
    assert "export SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1" in output


def test_flag_contradicted_by_the_switch_stops_the_launch(model: Path) -> None:
    done = launch([*prefill_flags(model), FLAG], CP_SHARED_KV="0", SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER="1")
    assert_stopped_before_weights(done)
    assert "remove one of the two" in done.stdout + done.stderr


def test_model_without_nsa_is_refused_by_name(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, nsa=False)
    flags = server_flags(model, role="prefill", bootstrap_port=free_ports(1)[0], attention_backend="torch_native")
    done = launch([*flags, FLAG], SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER="1")
    assert_stopped_before_weights(done)
    assert "[model] found DeepseekV3ForCausalLM" in done.stdout + done.stderr
