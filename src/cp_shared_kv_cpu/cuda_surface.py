"""The ``torch.cuda`` surface that SGLang's NSA path touches, answered for a host without a GPU.

Two parts: functions and classes of ``torch.cuda`` (streams, events, capability), and a torch function mode that maps
``device="cuda"`` literals, ``pin_memory`` and ``.cuda()`` to plain CPU tensors. ``torch.cuda.is_available`` stays
False: SGLang must keep choosing its CPU engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE_CAPABILITY = (9, 0)  # Hopper: the backend that prefill context parallelism was made for
# Fixed rather than measured, so that every rank and every CP size takes the same memory-dependent branches.
FREE_BYTES, TOTAL_BYTES = 8 << 30, 16 << 30

_mode: CudaToCpu | None = None


def to_cpu(device: Any) -> Any:
    """``device`` with any cuda device, as a string or torch.device, replaced by cpu; other values unchanged."""
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


class CudaToCpu(TorchFunctionMode):
    """Rewrites the arguments of torch calls: cuda devices become cpu, pinned memory becomes ordinary memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple(to_cpu(value) for value in args)
        return func(*args, **kwargs)


class Event(torch.cpu.Event):
    """``torch.cuda.Event`` takes keyword arguments (enable_timing, blocking, ...); they mean nothing here."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def install() -> None:
    """Patch ``torch.cuda`` and enter the mode in the calling thread, for the life of the process. Idempotent.

    A torch function mode belongs to one thread. SGLang loads plugins in the main thread of each process, which is
    also the thread that runs the model.
    """
    global _mode
    if _mode is not None:
        return
    surface: dict[str, Any] = {
        "get_device_capability": lambda *args, **kwargs: DEVICE_CAPABILITY,
        "current_device": lambda: "cpu",
        "mem_get_info": lambda *args, **kwargs: (FREE_BYTES, TOTAL_BYTES),
        "get_device_properties": lambda *args, **kwargs: SimpleNamespace(total_memory=TOTAL_BYTES),
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "Stream": torch.cpu.Stream,
        "Event": Event,
        "stream": torch.cpu.stream,
        "current_stream": lambda *args, **kwargs: torch.cpu.current_stream(),
    }
    for name, value in surface.items():
        setattr(torch.cuda, name, value)
    _mode = CudaToCpu()
    _mode.__enter__()
