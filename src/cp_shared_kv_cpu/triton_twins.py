"""Torch versions of the hot Triton kernels of the NSA path, equal to them bit for bit.

The interpreter costs 1 to 10 ms a Triton program, and these kernels start a program for each token: a warm request
takes seconds with them and tenths of a second with the twins. CP_SHARED_KV_CPU_INTERPRET=1 keeps the stock kernels.

``fused_store_index_k_cache`` stands for a CUDA kernel rather than a Triton one and is installed by ``dispatch``.
Locations must not be negative: the kernels would write in front of the buffer, so the twins raise instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .interpreter import FP8_MAX, to_fp8
from .kernels import INDEX_HEAD_DIM, MLA_NOPE_DIM, MLA_ROPE_DIM, MLA_TILE, dequantize_mla, split_index_page
from .releases import installed_row
from .seams import replace_everywhere

AMAX_FLOOR = 1e-4  # both index-K quantisers floor the row maximum here


def _locations(loc: torch.Tensor, capacity: int) -> torch.Tensor:
    """``loc`` as int64; raises IndexError when one lies outside [0, capacity)."""
    loc = loc.long()
    if loc.numel() and (int(loc.min()) < 0 or int(loc.max()) >= capacity):
        raise IndexError(f"location outside the buffer: [{int(loc.min())}, {int(loc.max())}] of {capacity}")
    return loc


# ---------------------------------------------------------------------------------------------- index-K buffer


def _index_pages(
    buf: torch.Tensor, page_indices: torch.Tensor, seq_len: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key bytes (seq_len, 128) and scale bytes (seq_len, 4) of the first seq_len tokens of a page list."""
    used = -(-seq_len // page_size)
    if used > page_indices.shape[0]:
        raise IndexError(f"{seq_len} tokens need {used} pages, the list has {page_indices.shape[0]}")
    keys, scales = split_index_page(buf[_locations(page_indices[:used], buf.shape[0])], page_size)
    return keys[:seq_len].contiguous(), scales[:seq_len].contiguous()


def get_k(
    buf: torch.Tensor, page_indices: torch.Tensor, seq_len: int, page_size: int, index_head_dim: int
) -> torch.Tensor:
    """Twin of ``_get_k_triton``: buf (pages, page_size * 132) uint8 -> key bytes (seq_len, 128) uint8."""
    return _index_pages(buf, page_indices, seq_len, page_size)[0]


def get_s(
    buf: torch.Tensor, page_indices: torch.Tensor, seq_len: int, page_size: int, index_head_dim: int
) -> torch.Tensor:
    """Twin of ``_get_s_triton``: buf (pages, page_size * 132) uint8 -> scale bytes (seq_len, 4) uint8."""
    return _index_pages(buf, page_indices, seq_len, page_size)[1]


def get_k_and_s(
    buf: torch.Tensor,
    page_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_len_sum: int,
    max_seq_len: int,
    page_size: int,
    index_head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``_get_k_and_s_triton``: page_indices (B, max_pages), seq_lens (B,) -> bytes of all requests in a row.

    Returns keys (seq_len_sum, 128) and scales (seq_len_sum, 4), uint8. Raises ValueError when lengths do not add up.
    """
    lengths = seq_lens.tolist()
    if sum(lengths) != seq_len_sum:
        raise ValueError(f"seq_lens sum to {sum(lengths)}, not {seq_len_sum}")
    parts = [_index_pages(buf, page_indices[row], length, page_size) for row, length in enumerate(lengths)]
    return torch.cat([keys for keys, _ in parts]), torch.cat([scales for _, scales in parts])


def set_k_and_s(
    buf: torch.Tensor, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor, page_size: int
) -> None:
    """Twin of ``_set_k_and_s_triton``: writes keys (N, 128) fp8 and scales (N,) or (N, 1) fp32 at slots loc (N,)."""
    loc = _locations(loc, buf.shape[0] * page_size)
    page, offset = (loc // page_size)[:, None], (loc % page_size)[:, None]
    byte = torch.arange(INDEX_HEAD_DIM)
    buf[page, offset * INDEX_HEAD_DIM + byte] = index_k.view(torch.uint8)
    scale_bytes = index_k_scale.reshape(-1, 1).contiguous().view(torch.uint8)
    buf[page, page_size * INDEX_HEAD_DIM + offset * 4 + byte[:4]] = scale_bytes


def act_quant(
    x: torch.Tensor, block_size: int = 128, scale_fmt: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``act_quant``: x (..., N) -> fp8 e4m3 of the same shape and fp32 scales (..., N / block_size).

    With any scale_fmt the scale is rounded up to a power of two. Raises ValueError when N is not a multiple.
    """
    if x.shape[-1] % block_size:
        raise ValueError(f"last dimension {x.shape[-1]} is not a multiple of {block_size}")
    blocks = x.float().reshape(*x.shape[:-1], -1, block_size)
    # Times the rounded reciprocal, not divided by 448: the kernel does that, and it is one ulp off at times.
    scale = blocks.abs().amax(-1).clamp_(min=AMAX_FLOOR) * torch.tensor(1.0 / FP8_MAX, dtype=torch.float32)
    if scale_fmt is not None:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return to_fp8(blocks / scale[..., None]).view(x.shape), scale


def fused_store_index_k_cache(
    key: torch.Tensor, index_k_with_scale: torch.Tensor, out_cache_loc: torch.Tensor, page_size: int = 64
) -> None:
    """Reference of the CUDA kernel behind ``fused_store_index_k_cache``: quantise keys and write them at their slots.

    key (N, 128) bf16 or reshapeable to it; index_k_with_scale (pages, page_size * 132) uint8; out_cache_loc (N,)
    int64. The scale is plain fp32 (``max(amax, 1e-4) / 448``) whatever the model's scale format, and keys are
    multiplied by its reciprocal, so its bytes differ from those of the act_quant branch, on a GPU too.
    Raises TypeError for another dtype.
    """
    dtypes = (key.dtype, index_k_with_scale.dtype, out_cache_loc.dtype)
    if dtypes != (torch.bfloat16, torch.uint8, torch.int64):
        raise TypeError(f"fused_store_index_k_cache takes bfloat16 keys, uint8 buffer, int64 locations, not {dtypes}")
    values = key.reshape(-1, INDEX_HEAD_DIM).float()
    scale = values.abs().amax(-1, keepdim=True).clamp_(min=AMAX_FLOOR) / FP8_MAX
    set_k_and_s(index_k_with_scale, out_cache_loc, to_fp8(values * scale.reciprocal()), scale, page_size)


# ---------------------------------------------------------------------------------------------- MLA KV buffer


def set_mla_kv_buffer(
    kv_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
) -> None:
    """Twin of ``set_mla_kv_buffer_triton``: kv_buffer[loc] = [nope | rope], both of kv_buffer's element size.

    kv_buffer (slots, 1, D); loc (N,); nope (N, 1, d) and rope (N, 1, D - d), the 1 optional.
    Raises ValueError when nope and rope do not fill a slot.
    """
    nope, rope = (part.reshape(loc.numel(), part.shape[-1]) for part in (cache_k_nope, cache_k_rope))
    row = torch.cat([nope, rope], -1)
    if row.element_size() != kv_buffer.element_size() or row.shape[1] != kv_buffer.shape[-1]:
        raise ValueError(f"{tuple(row.shape)} {row.dtype} does not fill slots of {kv_buffer.shape} {kv_buffer.dtype}")
    row = row.view(kv_buffer.dtype)
    if row.element_size() == 1:
        # torch has no scatter for fp8 dtypes on a CPU.
        row, kv_buffer = row.view(torch.uint8), kv_buffer.view(torch.uint8)
    kv_buffer[_locations(loc, kv_buffer.shape[0])] = row.view(loc.numel(), *kv_buffer.shape[1:])


def set_mla_kv_buffer_skipping(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    cache_k_nope: torch.Tensor,
    cache_k_rope: torch.Tensor,
    *,
    reserved_skip_index: int = 0,
) -> None:
    """``set_mla_kv_buffer`` that leaves out rows for the slot reserved_skip_index, as the kernel of later releases."""
    kept = loc != reserved_skip_index
    set_mla_kv_buffer(kv_buffer, loc[kept], cache_k_nope[kept], cache_k_rope[kept])


def set_mla_kv_buffer_dcp_sharded(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    cache_k_nope: torch.Tensor,
    cache_k_rope: torch.Tensor,
    *,
    reserved_skip_index: int = 0,
) -> None:
    """Twin of ``set_mla_kv_buffer_dcp_sharded_triton`` without decode CP, where every row is this rank's."""
    set_mla_kv_buffer_skipping(kv_buffer, loc, cache_k_nope, cache_k_rope, reserved_skip_index=reserved_skip_index)


def get_mla_kv_buffer(
    kv_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
) -> None:
    """Twin of ``get_mla_kv_buffer_triton``: fills nope (N, 1, d) and rope (N, 1, r) from kv_buffer[loc], converting."""
    rows = kv_buffer[_locations(loc, kv_buffer.shape[0])].view(loc.numel(), -1)
    d, r = cache_k_nope.shape[-1], cache_k_rope.shape[-1]
    cache_k_nope.copy_(rows[:, :d].view(cache_k_nope.shape))
    cache_k_rope.copy_(rows[:, d : d + r].view(cache_k_rope.shape))


def quantize_k_cache_separate(
    k_nope: torch.Tensor, k_rope: torch.Tensor, tile_size: int = MLA_TILE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``quantize_k_cache_separate``: bf16 nope (N, 512) and rope (N, 64) -> uint8 (N, 1, 528), (N, 1, 128).

    The first part is 512 fp8 values and 4 fp32 scales, the second the bf16 bytes of rope.
    Raises ValueError for other widths.
    """
    nope = k_nope.reshape(-1, k_nope.shape[-1])
    rope = k_rope.reshape(-1, k_rope.shape[-1])
    if nope.shape[1] != MLA_NOPE_DIM or rope.shape[1] != MLA_ROPE_DIM or len(nope) != len(rope):
        raise ValueError(f"fp8 MLA tokens are {MLA_NOPE_DIM} + {MLA_ROPE_DIM} wide, not {nope.shape} and {rope.shape}")
    tiles = nope.float().view(len(nope), -1, tile_size)
    scale = tiles.abs().amax(-1) / FP8_MAX
    # An all-zero tile is 0 * inf = NaN here; the kernel's clamp drops NaN for its lower bound, times scale 0 again.
    scaled = (tiles * scale.reciprocal()[..., None]).nan_to_num(nan=-FP8_MAX)
    values = to_fp8(scaled).view(len(nope), -1).view(torch.uint8)
    nope_bytes = torch.cat([values, scale.view(torch.uint8)], -1)
    return nope_bytes[:, None], rope.contiguous().view(torch.uint8)[:, None]


def quantize_k_cache(cache_k: torch.Tensor) -> torch.Tensor:
    """Twin of ``quantize_k_cache``: bf16 (blocks, block_size, 1, 576) -> fp8 e4m3 view (.., 656) of MLA tokens."""
    nope, rope = quantize_k_cache_separate(
        cache_k.reshape(-1, cache_k.shape[-1])[:, :MLA_NOPE_DIM],
        cache_k.reshape(-1, cache_k.shape[-1])[:, MLA_NOPE_DIM:],
    )
    return torch.cat([nope, rope], -1).view(*cache_k.shape[:-1], -1).view(torch.float8_e4m3fn)


def dequantize_k_cache_paged(
    quant_k_cache: torch.Tensor, page_table_1_flattened: torch.Tensor, group_size: int = MLA_TILE
) -> torch.Tensor:
    """Twin of ``dequantize_k_cache_paged``: slots (.., 656) fp8, a slot list (N,) -> (N, 1, 576) bf16."""
    slots = quant_k_cache.reshape(-1, quant_k_cache.shape[-1]).view(torch.uint8)
    return dequantize_mla(slots[_locations(page_table_1_flattened, len(slots))])[:, None]


TWINS: dict[str, Callable[..., Any]] = {
    twin.__name__: twin
    for twin in (
        get_k,
        get_s,
        get_k_and_s,
        set_k_and_s,
        act_quant,
        set_mla_kv_buffer,
        set_mla_kv_buffer_skipping,
        set_mla_kv_buffer_dcp_sharded,
        get_mla_kv_buffer,
        quantize_k_cache,
        quantize_k_cache_separate,
        dequantize_k_cache_paged,
    )
}


def install() -> None:
    """Replace the stock kernels that the installed release has by their twins, wherever SGLang looks them up."""
    places = installed_row().places
    for name, twin in TWINS.items():
        if name in places:
            replace_everywhere(places[name], twin)
