"""Stand-in for torchvision.transforms.functional: every name imports, none can be called."""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"torchvision function {name} is a stand-in of cp_shared_kv_cpu")

    return unavailable
