"""PyTorch references for the JIT kernels of SGLang's fused indexer: norm, rotary embedding, quantisation and store.

On a GPU, 0.5.15 and later run them for models whose indexer rotates interleaved pairs (GLM-5), outside batches that CP
splits; ``SGLANG_DISABLE_DSA_INDEXER_FUSION=1`` switches them off. Unlike the path of several kernels they apply no
Hadamard transform, and the fused key is rounded to bf16 once, where the other path rounds after the norm too.
"""

from __future__ import annotations

import torch

from .interpreter import FP8_MAX, to_fp8
from .kernels import rotate
from .triton_twins import AMAX_FLOOR, fused_store_index_k_cache

_ROPE_DIM = 64


def _rotate_leading(x: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """fp32 x (N, .., 128) with its leading 64 values rotated in interleaved pairs; cache rows are [cos | sin]."""
    cos, sin = cos_sin_cache[positions.long()].float().chunk(2, -1)
    return rotate(x, cos, sin, _ROPE_DIM, is_neox_style=False)


def fused_k_indexer_norm_rope(
    k_input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Index keys: LayerNorm with fp32 weight and bias (128,), then rotary embedding.

    k_input (N, 128), any row stride; cos_sin_cache (positions, 64) fp32; positions (N,). Returns k_input's dtype.
    """
    x = k_input.float()
    centered = x - x.mean(-1, keepdim=True)
    normed = centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias
    return _rotate_leading(normed, cos_sin_cache, positions).to(k_input.dtype)


def fused_k_indexer_norm_rope_store(
    k_input: torch.Tensor,
    cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
) -> None:
    """``fused_k_indexer_norm_rope``, then ``fused_store_index_k_cache`` of the rounded keys."""
    key = fused_k_indexer_norm_rope(k_input, weight, bias, eps, cos_sin_cache, positions)
    fused_store_index_k_cache(key, cache, out_cache_loc, page_size)


def fused_q_indexer_rope_first_quant(
    q_input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries: rotary embedding and quantisation to fp8, the scale folded into the head weights.

    q_input (N, H, 128); weight (N, H). Returns queries (N, H, 128) fp8 e4m3 and head weights (N, H, 1) fp32.
    """
    x = _rotate_leading(q_input.float(), cos_sin_cache, positions)
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=AMAX_FLOOR) / FP8_MAX
    return to_fp8(x * scale.reciprocal()), weight.float()[..., None] * weight_scale * scale
