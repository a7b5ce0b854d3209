"""Seams in SGLang that ask 'is this CUDA' and that the NSA path must see answered as on a GPU.

Kept to what the NSA path needs; the rest of SGLang keeps its CPU engine. Every seam is replaced where it is defined
and wherever SGLang has imported it by name, and a seam that is gone raises ``SeamError``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from . import indexer_fusion, kernels, triton_twins
from .releases import Row, installed_row
from .seams import owner_of, replace, replace_everywhere
from .stubs import stand_in_for

_VENDOR_KERNELS = (
    kernels.flash_mla_sparse_fwd,
    kernels.flash_mla_with_kvcache,
    kernels.get_mla_metadata,
    kernels.hadamard_transform,
    kernels.plan_topk_v2,
    kernels.topk_transform_paged_v2,
    kernels.topk_transform_ragged_v2,
)
_PARALLEL = "sglang.srt.distributed.parallel_state"


def fused_store_enabled() -> bool:
    """Whether index keys take SGLang's fused store branch: CP_SHARED_KV_CPU_FUSED_STORE, by default 1.

    1 is what a GPU runs with bf16 keys and pages of 64; 0 takes the fallback, act_quant and
    ``set_index_k_scale_buffer``, which SGLang uses when the JIT kernel cannot be built.
    """
    return os.environ.get("CP_SHARED_KV_CPU_FUSED_STORE", "1") == "1"


def _rope_forward(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, offsets: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepseekScalingRotaryEmbedding on flat tokens with a 2-D or 3-D key, as its CUDA kernel; stock needs (b, s)."""
    positions = positions if offsets is None else positions + offsets
    cos, sin = self.cos_sin_cache[positions.flatten()].float().chunk(2, -1)
    return (
        kernels.rotate(query, cos, sin, self.rotary_dim, self.is_neox_style),
        kernels.rotate(key, cos, sin, self.rotary_dim, self.is_neox_style),
    )


def _head_gate(self: Any, x: torch.Tensor) -> torch.Tensor:
    """bf16 x (tokens, hidden) times weights_proj with an fp32 result; torch.mm has no out_dtype on a CPU."""
    return x.float() @ self.weights_proj.weight.float().t()


class OnDeviceZero(torch.Tensor):
    """A CPU tensor that names its device with an index, as every CUDA tensor does; results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The CPU as device 0."""
        return torch.device("cpu", 0)


class OffCpu:
    """A platform of SGLang that denies being a CPU; all else is answered by the one it is made of."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cpu(self) -> bool:
        """False."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


# Delegates rather than copies of the methods, so that whoever patches those methods later is still called.


def _forward_as_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Indexer.forward_native: the CUDA branch."""
    return self.forward_cuda(*args, **kwargs)


def _all_gather_directly(self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """GroupCoordinator.all_gather_into_tensor without the custom op."""
    self._all_gather_into_tensor(output, input)


def _reduce_scatter_directly(self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """GroupCoordinator.reduce_scatter_tensor without the custom op."""
    self._reduce_scatter_tensor(output, input)


def _install_indexer(row: Row) -> None:
    """The NSA indexer runs its CUDA branch, with the references in place of the kernels."""
    import deep_gemm  # the stand-in, see stubs.py

    fused = fused_store_enabled()
    replace_everywhere(row.places["fused_store_index_k_cache"], triton_twins.fused_store_index_k_cache)
    replace_everywhere(row.places["can_fuse_store"], lambda *args, **kwargs: fused)
    for kernel in _VENDOR_KERNELS:
        if kernel.__name__ in row.places:
            replace_everywhere(row.places[kernel.__name__], kernel)
    replace(row.indexer, "_is_cuda", True)
    replace(f"{row.indexer}:Indexer", "forward_native", _forward_as_cuda)
    replace(f"{row.indexer}:Indexer", "_weights_proj_bf16_in_fp32_out", _head_gate)
    # Not seams to check: stock assigns these only when it finds CUDA at import.
    indexer = owner_of(row.indexer)
    indexer.deep_gemm = deep_gemm
    for name in row.cuda_imports:
        setattr(indexer, name, getattr(indexer_fusion, name))
    if row.indexed_device:
        _give_queries_a_device_index(indexer.Indexer)


def _give_queries_a_device_index(indexer: Any) -> None:
    """Have ``Indexer._get_topk_ragged``, which budgets memory by device, find an index on the device of its queries."""
    stock = indexer._get_topk_ragged

    @functools.wraps(stock)
    def get_topk_ragged(
        self: Any,
        enable_dual_stream: bool,
        forward_batch: Any,
        layer_id: int,
        q_fp8: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        queries = q_fp8.as_subclass(OnDeviceZero)
        return stock(self, enable_dual_stream, forward_batch, layer_id, queries, *rest, **named)

    indexer._get_topk_ragged = get_topk_ragged


def _install_collectives() -> None:
    """Collectives that SGLang registers as custom ops for the CUDA dispatch key only go straight to gloo."""
    coordinator = f"{_PARALLEL}:GroupCoordinator"
    replace(coordinator, "all_gather_into_tensor", _all_gather_directly)
    replace(coordinator, "reduce_scatter_tensor", _reduce_scatter_directly)
    groups = owner_of(_PARALLEL)._groups

    def inplace_all_reduce(tensor: torch.Tensor, group_name: str) -> None:
        torch.distributed.all_reduce(tensor, group=groups[group_name]().device_group)

    replace(_PARALLEL, "inplace_all_reduce", inplace_all_reduce)


def install() -> None:
    """Replace every seam. Imports the SGLang modules that hold them; raises SeamError when one has moved."""
    row = installed_row()
    stand_in_for(row.unimportable)
    _install_indexer(row)
    _install_collectives()
    replace(
        "sglang.srt.layers.rotary_embedding.rope_variant:DeepseekScalingRotaryEmbedding",
        "forward_native",
        _rope_forward,
    )
    for module in row.cpu_branches:
        replace(module, "_is_cpu", False)
    for module in row.cpu_refusals:
        replace(module, "current_platform", OffCpu(owner_of(module).current_platform))
    # The capability says Hopper, where SGLang would launch kernels with programmatic dependent launch.
    replace_everywhere(row.places["is_arch_support_pdl"], lambda: False)
