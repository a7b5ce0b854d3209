"""Counts of what one forward asks of a device: operations that launch work, and waits of the host.

On a CPU nothing is launched and nothing waits, but the same calls are made as on a GPU, and those are counted. Only the
kernels differ: those of the vendor are stood in for, by the same code for stock and shared KV, and the product's own,
each one launch on a GPU, are counted as one here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

#: Operations that allocate, or ask a tensor about itself.
_NO_LAUNCH = ("empty", "new_empty", "lift_fresh", "sym_", "size", "stride", "_unsafe_view", "is_", "detach", "alias")
#: Calls after which the host knows something of the device.
_WAITS = frozenset(
    {"cpu", "item", "tolist", "nonzero", "unique", "masked_select", "equal", "__bool__", "__int__", "__float__"}
)
_KERNELS = {
    "copy_pages": ("cp_shared_kv.pool",),
    "expand_page_table": ("cp_shared_kv.pool",),
}


class Operations(TorchDispatchMode):
    """Counts operations that launch work, by name."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        if not func.is_view and not name.startswith(_NO_LAUNCH):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """Function that called torch, for messages."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f"in {Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


class Waits(TorchFunctionMode):
    """Counts waits for values that lie on the device, by the name of the call and of the caller.

    Args:
        on_device: tensors that a GPU would hold; what is computed from them is held there too.
    """

    def __init__(self, counts: Counter[str], on_device: list[torch.Tensor]) -> None:
        super().__init__()
        self.counts = counts
        self._kept = list(on_device)  # a storage that is let go could lend its address to a host tensor
        self._device = {tensor.untyped_storage().data_ptr() for tensor in on_device}

    def _is_on_device(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(self._is_on_device(each) for each in value)
        # All empty tensors lie at address 0.
        return (
            isinstance(value, torch.Tensor) and value.numel() > 0 and value.untyped_storage().data_ptr() in self._device
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        touched = self._is_on_device(args) or self._is_on_device(tuple(kwargs.values()))
        masked = name in ("__getitem__", "__setitem__", "index") and any(
            isinstance(at, torch.Tensor) and at.dtype == torch.bool
            for at in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if touched and (name in _WAITS or masked):
            self.counts[f"{name} {_caller()}"] += 1
        result = func(*args, **kwargs)
        if touched and name != "cpu":
            self.note(result)
        return result

    def note(self, result: Any) -> None:
        """Take what a call has made for a tensor on the device."""
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and not self._is_on_device(made):
                self._kept.append(made)
                self._device.add(made.untyped_storage().data_ptr())


def _host_page_reads() -> int:
    """Times that the product has waited for page ids, in this process so far."""
    metrics = sys.modules.get("cp_shared_kv.metrics")
    return metrics.COUNTERS.host_page_reads if metrics else 0


class Probe:
    """Counts every forward with requests of one rank's model runner."""

    def __init__(self, scheduler: Any) -> None:
        self.runner = scheduler.tp_worker.model_runner
        self.forwards: list[dict[str, Any]] = []
        self._total: Counter[str] = Counter()
        self._waits: Counter[str] = Counter()
        self._mode: Waits | None = None
        self._before: tuple[Counter[str], Counter[str]] | None = None
        self._layers: list[dict[str, Counter[str]]] = []
        self._on_device = [p.data for p in self.runner.model.parameters()]
        pool = self.runner.token_to_kv_pool
        self._on_device += [
            self.runner.req_to_token_pool.req_to_token,
            *pool.kv_buffer,
            *pool.index_k_with_scale_buffer,
        ]
        for layer in self.runner.model.model.layers:
            layer.register_forward_pre_hook(lambda *args: self._begin_layer())
            layer.register_forward_hook(lambda *args: self._end_layer())
        self._forward = self.runner.forward
        self.runner.forward = self._counted
        self._count_kernels()

    def _count_kernels(self) -> None:
        for name, modules in _KERNELS.items():
            for module in filter(None, map(sys.modules.get, modules)):
                setattr(module, name, self._as_one(name, getattr(module, name)))
        for module in filter(None, map(sys.modules.get, ("cp_shared_kv.pool", "cp_shared_kv.host_pages"))):
            module.to_device = self._noted(module.to_device)  # type: ignore[attr-defined]

    def _noted(self, upload: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*args: Any) -> torch.Tensor:
            made = upload(*args)
            self._total["to_device"] += 1  # nothing on a CPU, a copy on a GPU
            if self._mode is not None:
                self._mode.note(made)
            return made

        return noted

    def _as_one(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            if name != "copy_pages" or len(args[1]):
                self._total[name] += 1
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                result = kernel(*args)
            if self._mode is not None:
                self._mode.note(result)
            return result

        return counted

    def _begin_layer(self) -> None:
        self._before = self._total.copy(), self._waits.copy()

    def _end_layer(self) -> None:
        assert self._before is not None
        operations, waits = self._before
        self._layers.append({"operations": self._total - operations, "waits": self._waits - waits})

    def _counted(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        prefix = list(forward_batch.extend_prefix_lens_cpu or [])
        tokens = int(forward_batch.extend_num_tokens or 0)
        self._total.clear()
        self._waits.clear()
        self._layers = []
        held = [
            value
            for name, value in vars(forward_batch).items()
            if isinstance(value, torch.Tensor) and not name.endswith("_cpu")
        ]
        for name, value in vars(forward_batch).items():
            if isinstance(value, torch.Tensor) and name.endswith("_cpu"):
                setattr(forward_batch, name, value.clone())  # on a CPU it can be the very tensor of the device
        self._mode = Waits(self._waits, self._on_device + held)
        with self._mode, Operations(self._total):
            result = self._forward(forward_batch, *args, **kwargs)
        self._mode = None
        self.forwards.append(
            {
                "prefix": sum(prefix),
                "tokens": tokens,
                "operations": dict(self._total),
                "waits": dict(self._waits),
                "host_page_reads": _host_page_reads(),
                "layers": [{kind: dict(counts) for kind, counts in layer.items()} for layer in self._layers],
            }
        )
        return result
