"""Activation: inert unless named, complete and idempotent when named, refused with one clear message otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import cp_shared_kv_cpu
from cp_shared_kv_cpu import launch, preconditions, releases, stubs, triton_twins

# SGLang is imported here without TRITON_INTERPRET and without naming plugins, as on a GPU host.
INERT = """
import os, torch
before = {name: getattr(torch.cuda, name) for name in ("Stream", "get_device_capability", "synchronize")}
import sglang
from sglang.srt import plugins
plugins.load_plugins()
import cp_shared_kv_cpu
assert not cp_shared_kv_cpu.is_active()
assert all(getattr(torch.cuda, name) is value for name, value in before.items()), "torch.cuda was touched"
import sys
assert "cp_shared_kv_cpu.dispatch" not in sys.modules, "patching modules were imported"
print("INERT")
os.environ["SGLANG_PLUGINS"] = "cp_shared_kv_cpu"
plugins._plugins_loaded = False
plugins.load_plugins()
print("NOT REFUSED")
"""


def test_loaded_but_not_named_touches_nothing_and_named_without_interpreter_ends_the_process():
    environment = {**os.environ, **launch.cpu_environment(1)}
    for name in ("SGLANG_PLUGINS", "TRITON_INTERPRET"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", INERT], env=environment, capture_output=True, text=True, timeout=200)
    assert "INERT" in done.stdout, done.stderr[-3000:]
    assert "NOT REFUSED" not in done.stdout
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith(
            "cp_shared_kv_cpu: TRITON_INTERPRET is None. Accepted: TRITON_INTERPRET=1. Fix: start the process with"
        )
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, False),
        ({"SGLANG_PLUGINS": "cp_shared_kv", "SGLANG_USE_CPU_ENGINE": "1"}, False),
        ({"SGLANG_PLUGINS": "cp_shared_kv_cpu"}, False),
        ({"SGLANG_PLUGINS": "cp_shared_kv_cpu", "SGLANG_USE_CPU_ENGINE": "0"}, False),
        ({"SGLANG_PLUGINS": "cp_shared_kv , cp_shared_kv_cpu", "SGLANG_USE_CPU_ENGINE": "1"}, True),
    ],
)
def test_is_requested_only_by_name_and_cpu_engine(environ: dict[str, str], expected: bool):
    assert cp_shared_kv_cpu.requested(environ) is expected


def test_an_unexpected_error_ends_the_process_too(monkeypatch: pytest.MonkeyPatch):
    for name, value in launch.cpu_environment(1).items():
        monkeypatch.setenv(name, value)

    def broken() -> None:
        raise KeyError("seam")

    monkeypatch.setattr(preconditions, "check_preconditions", broken)
    with pytest.raises(SystemExit, match="cannot set up the CPU platform: KeyError: 'seam'"):
        cp_shared_kv_cpu.activate()
    assert not cp_shared_kv_cpu.is_active()


class TestPreconditions:
    @pytest.fixture
    def environ(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        monkeypatch.setattr(preconditions, "installed_version", lambda: "0.5.12.post1")
        monkeypatch.setattr(preconditions, "cuda_available", lambda: False)
        monkeypatch.syspath_prepend(str(stubs.stub_directory()))
        for name in stubs.STUB_NAMES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        return launch.cpu_environment(1)

    def test_hold_in_the_launch_environment(self, environ: dict[str, str]):
        preconditions.check_preconditions(environ)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("TRITON_INTERPRET", "0", "TRITON_INTERPRET is '0'. Accepted: TRITON_INTERPRET=1"),
            ("TORCHDYNAMO_DISABLE", "", "TORCHDYNAMO_DISABLE is ''. Accepted: TORCHDYNAMO_DISABLE=1"),
            ("OMP_NUM_THREADS", "", "OMP_NUM_THREADS is not set"),
            ("CP_SHARED_KV_CPU_INTERPRET", "yes", "CP_SHARED_KV_CPU_INTERPRET is 'yes'. Accepted: 0 or 1"),
            ("CP_SHARED_KV_CPU_FUSED_STORE", "", "CP_SHARED_KV_CPU_FUSED_STORE is ''. Accepted: 0 or 1"),
        ],
    )
    def test_a_wrong_variable_is_named(self, environ: dict[str, str], name: str, value: str, message: str):
        with pytest.raises(SystemExit) as refused:
            preconditions.check_preconditions({**environ, name: value})
        assert str(refused.value).startswith(f"cp_shared_kv_cpu: {message}")
        assert ". Fix: " in str(refused.value)

    @pytest.mark.parametrize("version", ["0.5.10", None])
    def test_an_unknown_release_is_refused(self, environ: dict[str, str], monkeypatch, version: str | None):
        monkeypatch.setattr(preconditions, "installed_version", lambda: version)
        found = f"sglang {version or 'is not installed'}"
        with pytest.raises(SystemExit, match=rf"{found}\. Accepted: sglang 0\.5\.11, .*0\.5\.23\. Fix: pip install"):
            preconditions.check_preconditions(environ)

    @pytest.mark.parametrize("version", releases.supported_versions())
    def test_every_release_with_a_row_is_accepted(self, environ: dict[str, str], monkeypatch, version: str):
        monkeypatch.setattr(preconditions, "installed_version", lambda: version)
        preconditions.check_preconditions(environ)

    def test_a_visible_gpu_is_refused(self, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(preconditions, "cuda_available", lambda: True)
        with pytest.raises(SystemExit, match=r"torch\.cuda is available"):
            preconditions.check_preconditions(environ)

    def test_missing_stand_ins_are_refused(self, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(stubs.stub_directory())])
        with pytest.raises(SystemExit, match=r"comes from .*Fix: put the directory .* first on PYTHONPATH"):
            preconditions.check_preconditions(environ)


class TestActivated:
    """One real activation, in the process of the ``activated`` fixture."""

    def test_replaces_vendor_kernels_and_keeps_stock_triton_kernels_when_asked(self, activated: dict[str, Any]):
        assert activated["active"]
        for name, module in activated["interpreted"].items():
            stock = name.rpartition(" ")[2] in triton_twins.TWINS
            assert module.startswith("sglang." if stock else "cp_shared_kv_cpu."), (name, module)

    def test_every_kernel_of_the_release_has_a_reference(self, activated: dict[str, Any]):
        at_their_places = {name for name in activated["twins"] if " " not in name}
        assert at_their_places == set(releases.installed_row().places)

    def test_twins_reach_every_name_that_the_path_looks_up(self, activated: dict[str, Any]):
        assert [m for m in activated["twins"].values() if not m.startswith("cp_shared_kv_cpu.")] == []

    def test_no_module_of_the_nsa_path_takes_itself_for_a_cpus(self, activated: dict[str, Any]):
        assert activated["cpu_claims"] == []

    def test_queries_have_a_device_index_where_the_release_asks_for_one(self, activated: dict[str, Any]):
        assert activated["indexed_device"] is releases.installed_row().indexed_device

    def test_a_second_activation_changes_nothing(self, activated: dict[str, Any]):
        assert activated["again"] == activated["twins"]

    def test_cuda_looks_like_hopper_but_stays_unavailable(self, activated: dict[str, Any]):
        assert activated["capability"] == (9, 0)
        assert activated["device"] == "cpu"
        assert activated["cuda_available"] is False
