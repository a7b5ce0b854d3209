"""Stand-in for sgl_kernel.kvcacheio: SGLang imports its names with the host pool, but a CPU run never calls them."""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} has no CPU reference in cp_shared_kv_cpu")

    return unavailable
