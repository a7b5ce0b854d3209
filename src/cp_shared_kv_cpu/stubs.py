"""Import stand-ins for packages that have no CPU build, and where they lie.

``import sglang`` imports ``torchvision`` and ``sgl_kernel`` before SGLang loads any plugin (``sglang/__init__`` leads
to ``sglang.srt.utils.common``), so a plugin cannot provide them: they must be importable when the process starts. The
directory ``_stubs`` holds them; ``launch.cpu_environment`` puts it first on PYTHONPATH of CPU processes only, so that
no other process of the machine is affected. transformers finds torchvision with ``find_spec`` alone and needs no
distribution metadata.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

STUB_NAMES = ("torchvision", "sgl_kernel", "deep_gemm")


def stub_directory() -> Path:
    """Directory to put on PYTHONPATH; it holds one package for each of STUB_NAMES."""
    return Path(__file__).resolve().parent / "_stubs"


def is_stub(origin: str | None) -> bool:
    """Whether a module file, as its spec's origin names it, lies in ``stub_directory()``."""
    return origin is not None and stub_directory() in Path(origin).resolve().parents


def stand_in_for(modules: Iterable[str]) -> None:
    """Put a module whose every name imports, and none can be called, in the place of each module that is named.

    For modules of SGLang that need a package without a CPU build. Raises RuntimeError when one was imported before.
    """
    for module_name in modules:
        if module_name in sys.modules:
            raise RuntimeError(f"{module_name} was imported before the CPU platform was set up")
        module = ModuleType(module_name)
        module.__dict__["__getattr__"] = _uncallable(module_name)
        sys.modules[module_name] = module


def _uncallable(module_name: str) -> Callable[[str], Callable[..., Any]]:
    def get(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"{module_name}.{name} has no CPU reference in cp_shared_kv_cpu")

        return unavailable

    return get
