"""Import stand-ins for packages that have no CPU build, and where they lie.

``import sglang`` imports ``torchvision`` and ``sgl_kernel`` before SGLang loads any plugin (``sglang/__init__`` leads
to ``sglang.srt.utils.common``), so a plugin cannot provide them: they must be importable when the process starts. The
directory ``_stubs`` holds them; ``launch.cpu_environment`` puts it first on PYTHONPATH of CPU processes only, so that
no other process of the machine is affected. transformers finds torchvision with ``find_spec`` alone and needs no
distribution metadata.
"""

from __future__ import annotations

from pathlib import Path

STUB_NAMES = ("torchvision", "sgl_kernel", "deep_gemm")


def stub_directory() -> Path:
    """Directory to put on PYTHONPATH; it holds one package for each of STUB_NAMES."""
    return Path(__file__).resolve().parent / "_stubs"


def is_stub(origin: str | None) -> bool:
    """Whether a module file, as its spec's origin names it, lies in ``stub_directory()``."""
    return origin is not None and stub_directory() in Path(origin).resolve().parents
