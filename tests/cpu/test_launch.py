"""Environment and arguments of CPU processes, held against what SGLang's own parser takes."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from cp_shared_kv_cpu import launch, stubs
from cp_shared_kv_cpu.releases import row_for


class TestEnvironment:
    def test_binds_each_rank_to_a_core_and_wraps_around(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2})
        assert launch.cpu_environment(3)["SGLANG_CPU_OMP_THREADS_BIND"] == "2|5|2"

    def test_names_the_cpu_platform_first_and_once(self):
        environment = launch.cpu_environment(1, plugins=("cp_shared_kv", "cp_shared_kv_cpu"))
        assert environment["SGLANG_PLUGINS"] == "cp_shared_kv_cpu,cp_shared_kv"

    def test_puts_the_stand_ins_first_and_keeps_the_path(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/other", str(stubs.stub_directory()), ""]))
        assert launch.cpu_environment(1)["PYTHONPATH"].split(os.pathsep) == [str(stubs.stub_directory()), "/other"]

    def test_every_stand_in_lies_in_the_directory(self):
        assert all((stubs.stub_directory() / name / "__init__.py").is_file() for name in stubs.STUB_NAMES)

    def test_holds_strings_only(self):
        assert all(type(value) is str for value in launch.cpu_environment(2).values())

    def test_no_rank_is_refused(self):
        with pytest.raises(ValueError, match="at least 1, not 0"):
            launch.cpu_environment(0)

    def test_applying_it_after_sglang_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "sglang", sys)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(RuntimeError, match=r"sglang.* imported before"):
            launch.apply_cpu_environment(1)
        assert "TRITON_INTERPRET" not in os.environ


class TestArguments:
    @pytest.mark.parametrize(
        ("dtype", "backends"),
        [("bfloat16", ("flashmla_sparse", "flashmla_sparse")), ("fp8_e4m3", ("flashmla_sparse", "flashmla_kv"))],
    )
    def test_backends_follow_the_kv_dtype(self, dtype: str, backends: tuple[str, str]):
        arguments = launch.engine_arguments("m", kv_cache_dtype=dtype)
        name = arguments["attention_backend"]
        assert (arguments[f"{name}_prefill_backend"], arguments[f"{name}_decode_backend"]) == backends

    @pytest.mark.parametrize(
        ("version", "backend", "asked"),
        [
            ("0.5.11", "nsa", {"enable_nsa_prefill_context_parallel": True, "nsa_prefill_cp_mode": "in-seq-split"}),
            (
                "0.5.12.post1",
                "nsa",
                {"enable_nsa_prefill_context_parallel": True, "nsa_prefill_cp_mode": "in-seq-split"},
            ),
            ("0.5.13", "dsa", {"enable_dsa_prefill_context_parallel": True, "dsa_prefill_cp_mode": "in-seq-split"}),
            ("0.5.14", "dsa", {"enable_prefill_cp": True, "cp_strategy": "zigzag"}),
            ("0.5.19", "dsa", {"enable_prefill_cp": True, "cp_strategy": "zigzag"}),
            ("0.5.20", "dsa", {"enable_prefill_cp": True, "cp_strategy": "interleave", "moe_dense_tp_size": 1}),
            ("0.5.23", "dsa", {"enable_prefill_cp": True, "cp_strategy": "interleave", "moe_dense_tp_size": 1}),
        ],
    )
    def test_context_parallelism_is_asked_for_as_the_release_spells_it(
        self, monkeypatch: pytest.MonkeyPatch, version: str, backend: str, asked: dict[str, Any]
    ):
        monkeypatch.setattr(launch, "installed_row", lambda: row_for(version))
        one, two = (launch.engine_arguments("m", cp_size=ranks) for ranks in (1, 2))
        assert one["attention_backend"] == backend
        assert {name: value for name, value in two.items() if one.get(name) != value} == {**asked, "tp_size": 2}

    def test_an_unknown_release_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(launch, "installed_row", lambda: row_for("0.5.10"))
        with pytest.raises(ValueError, match=r"SGLang 0\.5\.10 is not known"):
            launch.engine_arguments("m")

    def test_disaggregation_comes_with_a_role(self):
        assert "disaggregation_mode" not in launch.engine_arguments("m", bootstrap_port=1)
        arguments = launch.engine_arguments("m", role="prefill", bootstrap_port=8999)
        assert (arguments["disaggregation_mode"], arguments["disaggregation_transfer_backend"]) == (
            "prefill",
            "mooncake",
        )
        assert arguments["disaggregation_bootstrap_port"] == 8999

    def test_overrides_win(self):
        assert launch.engine_arguments("m", log_level="error", random_seed=7).items() >= {
            ("log_level", "error"),
            ("random_seed", 7),
        }

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"role": "router"}, "role must be one of null, prefill, decode, not 'router'"),
            ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be one of bfloat16, fp8_e4m3, not 'fp8'"),
            ({"role": "decode", "cp_size": 2}, "cp_size 2 with role decode"),
            ({"cp_size": 0}, "cp_size 0"),
        ],
    )
    def test_a_bad_choice_is_named(self, options: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=message):
            launch.engine_arguments("m", **options)

    def test_flags_mean_the_same_to_sglang_as_the_arguments(self, activated: dict[str, Any]):
        assert len(activated["flags"]) == 3
        for arguments, parsed in activated["flags"]:
            assert {name: parsed.get(name) for name in arguments} == arguments

    def test_switched_off_options_give_no_flag(self):
        flags = launch.server_flags("m", disable_cuda_graph=False, tokenizer_path=None)
        assert "--disable-cuda-graph" not in flags
        assert "--tokenizer-path" not in flags
