"""Seams in SGLang that ask 'is this CUDA' and that the NSA path must see answered as on a GPU.

Kept to what the NSA path needs; the rest of SGLang keeps its CPU engine. Every seam is replaced where it is defined
and wherever SGLang has imported it by name, and a seam that is gone raises ``SeamError``.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from . import kernels, triton_twins
from .seams import owner_of, replace

_INDEXER = "sglang.srt.layers.attention.nsa.nsa_indexer"
_PARALLEL = "sglang.srt.distributed.parallel_state"


def fused_store_enabled() -> bool:
    """Whether index keys take SGLang's fused store branch: CP_SHARED_KV_CPU_FUSED_STORE, by default 1.

    1 is what a GPU runs with bf16 keys and pages of 64; 0 takes the fallback, act_quant and
    ``set_index_k_scale_buffer``, which SGLang uses when the JIT kernel cannot be built.
    """
    return os.environ.get("CP_SHARED_KV_CPU_FUSED_STORE", "1") == "1"


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int, is_neox_style: bool) -> torch.Tensor:
    """Rotary embedding of x (tokens, heads, dim) or (tokens, dim) by cos, sin (tokens, rotary_dim / 2) fp32.

    Computed in fp32 and returned in x's dtype and shape; values beyond rotary_dim pass through.
    """
    y = x.reshape(x.shape[0], -1, x.shape[-1]).float()
    cos, sin = cos[:, None], sin[:, None]
    turning, passing = y[..., :rotary_dim], y[..., rotary_dim:]
    a, b = turning.chunk(2, -1) if is_neox_style else (turning[..., ::2], turning[..., 1::2])
    turned = (a * cos - b * sin, b * cos + a * sin)
    turning = torch.cat(turned, -1) if is_neox_style else torch.stack(turned, -1).flatten(-2)
    return torch.cat([turning, passing], -1).to(x.dtype).view(x.shape)


def _rope_forward(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, offsets: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepseekScalingRotaryEmbedding on flat tokens with a 2-D or 3-D key, as its CUDA kernel; stock needs (b, s)."""
    positions = positions if offsets is None else positions + offsets
    cos, sin = self.cos_sin_cache[positions.flatten()].float().chunk(2, -1)
    return (
        rotate(query, cos, sin, self.rotary_dim, self.is_neox_style),
        rotate(key, cos, sin, self.rotary_dim, self.is_neox_style),
    )


def _head_gate(self: Any, x: torch.Tensor) -> torch.Tensor:
    """bf16 x (tokens, hidden) times weights_proj with an fp32 result; torch.mm has no out_dtype on a CPU."""
    return x.float() @ self.weights_proj.weight.float().t()


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


def _install_indexer() -> None:
    """The NSA indexer runs its CUDA branch, with the references in place of the kernels."""
    import deep_gemm  # the stand-in, see stubs.py

    replace("sglang.jit_kernel.hadamard", "hadamard_transform", kernels.hadamard_transform)
    replace(_INDEXER, "_is_cuda", True)
    # Not a seam to check: stock assigns it only when it finds CUDA at import.
    owner_of(_INDEXER).deep_gemm = deep_gemm
    replace(f"{_INDEXER}:Indexer", "forward_native", _forward_as_cuda)
    replace(f"{_INDEXER}:Indexer", "_weights_proj_bf16_in_fp32_out", _head_gate)
    fused = fused_store_enabled()
    for module in ("sglang.jit_kernel.fused_store_index_cache", _INDEXER):
        replace(module, "can_use_nsa_fused_store", lambda *args, **kwargs: fused)
        replace(module, "fused_store_index_k_cache", triton_twins.fused_store_index_k_cache)


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
    _install_indexer()
    _install_collectives()
    replace(
        "sglang.srt.layers.rotary_embedding.rope_variant:DeepseekScalingRotaryEmbedding",
        "forward_native",
        _rope_forward,
    )
    # The capability says Hopper, where SGLang would launch kernels with programmatic dependent launch.
    for module in ("sglang.jit_kernel.utils", "sglang.srt.mem_cache.utils"):
        replace(module, "is_arch_support_pdl", lambda: False)
