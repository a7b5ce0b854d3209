"""How a CPU process of SGLang is started: its environment and its arguments, defined once for tests and the demo.

The environment must be there before the process starts (Triton, torch and SGLang read it while they are imported):
pass ``cpu_environment`` to a subprocess, or call ``apply_cpu_environment`` before the first import of sglang.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from . import PLUGIN_NAME
from .releases import installed_row
from .stubs import stub_directory

ROLES = ("null", "prefill", "decode")
PAGE_SIZE = 64
# Per KV dtype: the backends that the two phases run with on Hopper, as far as references exist.
_BACKENDS = {
    "bfloat16": ("flashmla_sparse", "flashmla_sparse"),
    "fp8_e4m3": ("flashmla_sparse", "flashmla_kv"),
}


def cpu_environment(cp_size: int, *, plugins: Iterable[str] = ()) -> dict[str, str]:
    """Environment variables of a server process with ``cp_size`` ranks, to be laid over os.environ.

    ``plugins`` are the SGLang plugins to load after the CPU platform, for example ``("cp_shared_kv",)``; no other
    installed plugin is loaded. Raises ValueError when cp_size is not positive.
    """
    if cp_size < 1:
        raise ValueError(f"cp_size must be at least 1, not {cp_size}")
    cores = sorted(os.sched_getaffinity(0))
    path = [str(stub_directory())]
    path += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in path]
    return {
        "SGLANG_PLUGINS": ",".join([PLUGIN_NAME, *(name for name in plugins if name != PLUGIN_NAME)]),
        "SGLANG_USE_CPU_ENGINE": "1",
        # One entry a rank is mandatory; ranks share cores when there are more ranks than cores.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(cp_size)),
        "SGLANG_HOST_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        # The stand-in of deep_gemm has what the indexer calls, not the GEMMs that SGLang would use it for.
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # Loopback for the collectives, TCP for Mooncake: the host may have other interfaces and no RDMA.
        "GLOO_SOCKET_IFNAME": "lo",
        "MC_FORCE_TCP": "1",
    }


def apply_cpu_environment(cp_size: int, *, plugins: Iterable[str] = ()) -> None:
    """Lay ``cpu_environment`` over this process, for an in-process ``sglang.Engine``; its children inherit it.

    Raises RuntimeError when sglang or triton was imported before: they have read their environment by then.
    """
    early = [name for name in ("sglang", "triton") if name in sys.modules]
    if early and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"{', '.join(early)} imported before apply_cpu_environment; call it first")
    os.environ.update(cpu_environment(cp_size, plugins=plugins))
    if str(stub_directory()) not in sys.path:
        sys.path.insert(0, str(stub_directory()))


def engine_arguments(
    model_path: str | os.PathLike[str],
    *,
    role: str = "null",
    cp_size: int = 1,
    kv_cache_dtype: str = "bfloat16",
    max_total_tokens: int = 4096,
    chunked_prefill_size: int | None = None,
    context_length: int | None = None,
    bootstrap_port: int | None = None,
    port: int | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Keyword arguments for ``sglang.Engine`` on the CPU platform.

    role: "null" for one server, "prefill" or "decode" for disaggregation over Mooncake. kv_cache_dtype: "bfloat16" or
    "fp8_e4m3". None leaves SGLang's default. ``overrides`` are further arguments of SGLang and win over these.
    They are spelled as the installed release spells them. Raises ValueError for another role or dtype, for a cp_size
    below 1, for decode with cp_size above 1, which SGLang refuses, and for a release that ``releases`` does not know.
    """
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
    if kv_cache_dtype not in _BACKENDS:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(_BACKENDS)}, not {kv_cache_dtype!r}")
    if cp_size < 1 or (cp_size > 1 and role == "decode"):
        raise ValueError(f"cp_size {cp_size} with role {role}: at least 1, and exactly 1 for decode")
    row = installed_row()
    prefill_backend, decode_backend = _BACKENDS[kv_cache_dtype]
    arguments: dict[str, Any] = {
        "model_path": os.fspath(model_path),
        "device": "cpu",
        "dtype": "bfloat16",
        "kv_cache_dtype": kv_cache_dtype,
        "page_size": PAGE_SIZE,
        "max_total_tokens": max_total_tokens,
        "max_running_requests": 4,
        "mem_fraction_static": 0.5,
        "attention_backend": row.attention,
        f"{row.attention}_prefill_backend": prefill_backend,
        f"{row.attention}_decode_backend": decode_backend,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "disable_cuda_graph": True,
        "random_seed": 1,
        # The interpreter and shared cores are slow; a watchdog made for GPUs would end the server.
        "watchdog_timeout": 3000,
        "host": "127.0.0.1",
        "tp_size": cp_size,
    }
    optional = {"chunked_prefill_size": chunked_prefill_size, "context_length": context_length, "port": port}
    arguments.update({name: value for name, value in optional.items() if value is not None})
    if cp_size > 1:
        arguments.update(row.cp_arguments)
    if role != "null":
        arguments.update(disaggregation_mode=role, disaggregation_transfer_backend="mooncake")
        if bootstrap_port is not None:
            arguments["disaggregation_bootstrap_port"] = bootstrap_port
    arguments.update(overrides)
    return arguments


def server_flags(model_path: str | os.PathLike[str], **options: Any) -> list[str]:
    """The same as ``engine_arguments``, as flags of ``python -m sglang.launch_server``. Raises what it raises."""
    flags: list[str] = []
    for name, value in engine_arguments(model_path, **options).items():
        if value is False or value is None:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(str(value))
    return flags
