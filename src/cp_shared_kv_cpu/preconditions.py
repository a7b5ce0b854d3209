"""What must hold before the CPU platform patches a process: named one by one, with the way to put each right."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping

from . import PLUGIN_NAME
from .releases import installed_version, supported_versions
from .stubs import STUB_NAMES, is_stub, stub_directory

# Read by Triton when a kernel is declared, by SGLang and by torch while they are imported: too late to set here.
REQUIRED_ENVIRONMENT = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
SWITCHES = ("CP_SHARED_KV_CPU_INTERPRET", "CP_SHARED_KV_CPU_FUSED_STORE")


def refuse(wrong: str, accepted: str, fix: str) -> SystemExit:
    """The one form of every refusal: what was found, what is accepted, how to get there."""
    return SystemExit(f"{PLUGIN_NAME}: {wrong}. Accepted: {accepted}. Fix: {fix}.")


def cuda_available() -> bool:
    """Whether torch sees a real CUDA device."""
    import torch

    return torch.cuda.is_available()


def check_preconditions(environ: Mapping[str, str] | None = None) -> None:
    """Raise SystemExit, naming the first precondition that does not hold; return None when all hold."""
    environ = os.environ if environ is None else environ
    use_launch = "start the process with the variables of cp_shared_kv_cpu.launch.cpu_environment"
    for name, value in REQUIRED_ENVIRONMENT.items():
        if environ.get(name) != value:
            raise refuse(f"{name} is {environ.get(name)!r}", f"{name}={value}", use_launch)
    for name in SWITCHES:
        if environ.get(name, "0") not in ("0", "1"):
            raise refuse(f"{name} is {environ[name]!r}", "0 or 1", f"set {name} to 0 or 1, or unset it")
    if environ.get("OMP_NUM_THREADS", "") == "":
        raise refuse("OMP_NUM_THREADS is not set", "a small number, 1 by default", use_launch)
    version, known = installed_version(), supported_versions()
    if version not in known:
        fix = f"pip install --no-deps sglang=={known[-1]}, or take {PLUGIN_NAME} out of SGLANG_PLUGINS"
        raise refuse(f"sglang {version or 'is not installed'}", f"sglang {', '.join(known)}", fix)
    if cuda_available():
        fix = f"hide the GPU with CUDA_VISIBLE_DEVICES= or take {PLUGIN_NAME} out of SGLANG_PLUGINS"
        raise refuse("torch.cuda is available", "a process that sees no GPU", fix)
    for name in STUB_NAMES:
        module = sys.modules.get(name)
        spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
        origin = None if spec is None else spec.origin
        if not is_stub(origin):
            fix = f"put the directory {stub_directory()} first on PYTHONPATH, or {use_launch}"
            raise refuse(f"{name} comes from {origin or 'nowhere'}", "the stand-in of this package", fix)
