"""PyTorch references for the vendor kernels that SGLang's NSA path calls.

Each function has the name, the argument names and the result of the kernel that it stands for, and is written for
exactness rather than speed. Where a kernel leaves cells unspecified the reference writes NaN, so that a caller who
reads them is found out; where a kernel would read outside its tensors the reference raises.

Page layout of the index-K buffer: ``page_size * 128`` bytes of fp8 keys, then ``page_size`` fp32 scales.
Layout of one fp8 MLA token, 656 bytes: 512 fp8 | 4 fp32 scales, one for each 128 values | 64 bf16 rope values.
"""

from __future__ import annotations

from typing import Any

import torch

INDEX_HEAD_DIM = 128
MLA_NOPE_DIM, MLA_ROPE_DIM, MLA_TILE, MLA_FP8_BYTES = 512, 64, 128, 656
_ATTENTION_ROWS = 64  # query rows handled at once: bounds the gathered keys to a few MB


# ---------------------------------------------------------------------------------------------- deep_gemm


def get_num_sms() -> int:
    """deep_gemm.get_num_sms: an H100's count. Only schedules depend on it, and the references have none."""
    return 132


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """deep_gemm.get_paged_mqa_logits_metadata: a schedule, (num_sms + 1, 2) int32, that the reference ignores."""
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32)


def _mqa_logits(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``scale_k * sum_h weights[s, h] * relu(q[s, h] . k)``; q (S, H, D), k (K, D), result (S, K) fp32.

    In float64, where sums of products of fp8 values are exact: the result cannot depend on how rows are grouped, so
    every CP size sees the same scores.
    """
    heads = torch.einsum("shd,kd->shk", q.double(), k.double()).relu_()
    return (torch.einsum("shk,sh->sk", heads, weights.double()) * scale.double()).float()


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
) -> torch.Tensor:
    """deep_gemm.fp8_mqa_logits: indexer scores against contiguous keys.

    q (S, H, 128) fp8; kv = keys (K, 128) fp8 and scales (K,) fp32; weights (S, H) fp32; start and end (S,) int32.
    Returns (S, K) fp32, rows 16 bytes aligned. Cells outside [start, end) are -inf with clean_logits, else unspecified
    (here NaN). Raises ValueError when an end lies beyond K.
    """
    k, scale = kv
    if len(cu_seq_len_k_end) and int(cu_seq_len_k_end.max()) > k.shape[0]:
        raise ValueError(f"fp8_mqa_logits: end {int(cu_seq_len_k_end.max())} beyond {k.shape[0]} keys")
    logits = _mqa_logits(q, k, scale.view(-1), weights)
    column = torch.arange(k.shape[0])
    outside = (column < cu_seq_len_k_start[:, None]) | (column >= cu_seq_len_k_end[:, None])
    logits.masked_fill_(outside, float("-inf") if clean_logits else float("nan"))
    return torch.nn.functional.pad(logits, (0, -logits.shape[1] % 4), value=float("nan"))[:, : logits.shape[1]]


def split_index_page(pages: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index-K pages (P, page_size * 132) uint8 -> key bytes (P * page_size, 128) and scale bytes (.., 4), uint8."""
    boundary = page_size * INDEX_HEAD_DIM
    return pages[:, :boundary].reshape(-1, INDEX_HEAD_DIM), pages[:, boundary:].reshape(-1, 4)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    fused_kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = True,
) -> torch.Tensor:
    """deep_gemm.fp8_paged_mqa_logits: indexer scores against paged keys, one query token a request.

    q (B, 1, H, 128) fp8; fused_kv_cache (pages, page_size, 1, 132) uint8 (the page layout above); weights (B, H)
    fp32; context_lens (B, 1) int32; block_table (B, max_pages) int32. Returns (B, max_context_len) fp32. Cells at or
    beyond context_lens are -inf with clean_logits, else unspecified (here NaN).
    Raises ValueError for more than one query token a request or a context longer than the table or the result.
    """
    batch, next_n = q.shape[:2]
    if next_n != 1 or context_lens.numel() != batch:
        raise ValueError(f"fp8_paged_mqa_logits: one query token a request, not q {q.shape}, {context_lens.shape}")
    page_size = fused_kv_cache.shape[1]
    flat = fused_kv_cache.reshape(fused_kv_cache.shape[0], -1)
    logits = torch.full((batch, max_context_len), float("-inf") if clean_logits else float("nan"))
    for row, length in enumerate(context_lens.view(-1).tolist()):
        used = -(-length // page_size)
        if length > max_context_len or used > block_table.shape[1]:
            raise ValueError(f"fp8_paged_mqa_logits: context {length} beyond {max_context_len} or the block table")
        keys, scales = split_index_page(flat[block_table[row, :used].long()], page_size)
        k, scale = keys[:length].view(torch.float8_e4m3fn), scales[:length].contiguous().view(torch.float32)
        logits[row, :length] = _mqa_logits(q[row], k, scale.view(-1), weights[row : row + 1])[0]
    return logits


# ---------------------------------------------------------------------------------------------- sgl_kernel top-k


def _topk_rows(score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None) -> torch.Tensor:
    """(B, topk) int64: per row the positions, counted from its start, of the topk best scores; -1 beyond length.

    Ascending, and ties go to the lower position: the kernel promises neither, but results must not depend on how rows
    are grouped. A row no longer than topk takes every position without reading a score, as the kernel does.
    """
    rows = score.shape[0]
    if lengths.numel() != rows or (row_starts is not None and row_starts.numel() != rows):
        raise ValueError(f"top-k: {rows} rows of scores, but {lengths.numel()} lengths or a different row_starts")
    lengths = lengths.view(-1, 1).long()
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts.view(-1, 1).long()
    position = torch.arange(topk).expand(rows, topk)
    result = torch.where(position < lengths, position, -1)
    long_rows = (lengths[:, 0] > topk).nonzero()[:, 0]
    if not len(long_rows):
        return result
    lengths, starts = lengths[long_rows], starts[long_rows]
    if int((starts + lengths).max()) > score.shape[1]:
        raise ValueError(f"top-k: a row reaches beyond the {score.shape[1]} columns of scores")
    offset = torch.arange(int(lengths.max()))
    columns = (starts + offset).clamp_(max=score.shape[1] - 1)
    values = score[long_rows[:, None], columns].masked_fill_(offset >= lengths, float("-inf"))
    if values.isnan().any():
        raise ValueError("top-k: NaN inside a row; it reads a cell that a logits kernel left unspecified")
    # Stable, so equal scores keep their order; the masked tail lies behind every real -inf.
    best = torch.sort(values, dim=1, descending=True, stable=True).indices[:, :topk]
    result[long_rows] = best.sort(dim=1).values
    return result


def fast_topk_v2(
    score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """sgl_kernel.fast_topk_v2: score (B, L) fp32, lengths (B,) int32, row_starts (B,) int32 or None -> (B, topk) int32.

    Row b considers columns row_starts[b] + [0, lengths[b]); results are relative to its start, padded with -1.
    Raises ValueError for mismatched sizes, rows beyond the scores and NaN scores.
    """
    return _topk_rows(score, lengths, topk, row_starts).int()


def fast_topk_transform_fused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    page_table_size_1: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """sgl_kernel.fast_topk_transform_fused: fast_topk_v2, then positions looked up in the request's slot table.

    page_table_size_1 (requests, max_len) int32 holds one token slot a position; cu_seqlens_q (requests + 1,) int32
    says which rows belong to which request. Returns (B, topk) int32 slots, padded with -1.
    Positions beyond the table give -1. Raises ValueError when the rows of cu_seqlens_q are not the rows of score.
    """
    positions = _topk_rows(score, lengths, topk, row_starts)
    counts = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
    if int(counts.sum()) != score.shape[0] or len(counts) != page_table_size_1.shape[0]:
        raise ValueError(f"top-k: cu_seqlens_q of {len(counts)} requests and {int(counts.sum())} rows, but "
                         f"{page_table_size_1.shape[0]} table rows and {score.shape[0]} score rows")  # fmt: skip
    table = page_table_size_1[torch.repeat_interleave(torch.arange(len(counts)), counts)]
    # SGLang pads a CP batch to a multiple of the ranks; the padding rows reach past the table, where the vendor kernel
    # reads what follows in memory. Their outputs are dropped, so here they select nothing there.
    known = (positions >= 0) & (positions < table.shape[1])
    slots = torch.gather(table.long(), 1, positions.clamp(min=0, max=table.shape[1] - 1))
    return torch.where(known, slots, -1).int()


def fast_topk_transform_ragged_fused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk_indices_offset: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """sgl_kernel.fast_topk_transform_ragged_fused: fast_topk_v2 plus topk_indices_offset (B,) int32 on valid entries.

    Returns (B, topk) int32, padded with -1. Raises ValueError for mismatched sizes.
    """
    positions = _topk_rows(score, lengths, topk, row_starts)
    if topk_indices_offset.numel() != score.shape[0]:
        raise ValueError(f"top-k: {topk_indices_offset.numel()} offsets for {score.shape[0]} rows")
    offset = topk_indices_offset.view(-1, 1).long()
    return torch.where(positions >= 0, positions + offset, -1).int()


# ---------------------------------------------------------------------------------------------- SGLang's JIT top-k


def plan_topk_v2(seq_lens: torch.Tensor, static_threshold: int = 0, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """plan_topk_v2 of SGLang: a schedule (B + 1, 2) in the dtype of seq_lens, that the reference ignores."""
    return seq_lens.new_zeros(seq_lens.shape[0] + 1, 2) if out is None else out.zero_()


def _check_scores(scores: torch.Tensor) -> None:
    """Raise ValueError where the kernels could not read ``scores``."""
    if scores.dtype != torch.float32 or scores.stride(1) != 1 or scores.stride(0) % 4:
        raise ValueError(f"top-k: fp32 scores in rows of 16 bytes are read, not {scores.dtype} {scores.stride()}")


def topk_transform_paged_v2(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    metadata: torch.Tensor,
) -> None:
    """topk_transform_paged_v2 of SGLang: the best positions of each row, looked up in the row's page table.

    scores (B, L) fp32; seq_lens (B,); page_tables (B, pages) int32; fills out_page_indices (B, topk) int32 with slots
    ``page * page_size + offset``, padded with -1. Raises ValueError for a negative length, mismatched sizes and scores
    that the kernel could not read.
    """
    _check_scores(scores)
    if len(page_tables) != len(scores) or len(metadata) != len(scores) + 1 or bool((seq_lens < 0).any()):
        raise ValueError(f"top-k: {len(scores)} rows, {len(page_tables)} of pages, plan {len(metadata)}, {seq_lens}")
    positions = _topk_rows(scores, seq_lens, out_page_indices.shape[1], None)
    page = positions.clamp(min=0) // page_size
    known = (positions >= 0) & (page < page_tables.shape[1])
    pages = torch.gather(page_tables.long(), 1, page.clamp(max=page_tables.shape[1] - 1))
    out_page_indices.copy_(torch.where(known, pages * page_size + positions % page_size, -1))


def topk_transform_ragged_v2(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out_offsets: torch.Tensor,
    out_indices: torch.Tensor,
    row_starts: torch.Tensor | None = None,
) -> None:
    """topk_transform_ragged_v2 of SGLang: ``fast_topk_transform_ragged_fused`` into out_indices (B, topk) int32.

    Raises ValueError for a negative length, mismatched sizes and scores that the kernel could not read.
    """
    _check_scores(scores)
    if bool((seq_lens < 0).any()):
        raise ValueError(f"top-k: negative length in {seq_lens}")
    topk = out_indices.shape[1]
    out_indices.copy_(fast_topk_transform_ragged_fused(scores, seq_lens, out_offsets, topk, row_starts))


# ---------------------------------------------------------------------------------------------- FlashMLA


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sgl_kernel.flash_mla.flash_mla_sparse_fwd: attention of each query over its own list of tokens.

    q (S, H, D) bf16; kv (T, 1, D) bf16, its first d_v values are the value; indices (S, 1, topk) int32, where -1 and
    anything outside [0, T) is ignored, and so is what lies beyond topk_length (S,), if given, in a row.
    Returns out (S, H, d_v) in q's dtype, max_logits (S, H) and lse (S, H) fp32. A query without a valid index has out 0
    and lse +inf. Raises ValueError for an attention sink, which no NSA model has.
    """
    if attn_sink is not None:
        raise ValueError("flash_mla_sparse_fwd: the reference knows no attention sink")
    rows, heads, dim = q.shape
    indices = indices.reshape(rows, -1).long()
    if topk_length is not None:
        indices = indices.masked_fill(torch.arange(indices.shape[1]) >= topk_length.view(rows, 1), -1)
    tokens = kv.reshape(-1, dim)
    out = torch.zeros(rows, heads, d_v)
    max_logits = torch.empty(rows, heads)
    lse = torch.empty(rows, heads)
    for first in range(0, rows, _ATTENTION_ROWS):
        part = slice(first, first + _ATTENTION_ROWS)
        ignored = (indices[part] < 0) | (indices[part] >= len(tokens))
        # Ignored rows become zeros: they carry no weight, and 0 * NaN of an unwritten slot would spoil the sum.
        keys = tokens[indices[part].masked_fill(ignored, 0)].float().masked_fill_(ignored[..., None], 0.0)
        logits = torch.einsum("shd,skd->shk", q[part].float(), keys) * sm_scale
        logits.masked_fill_(ignored[:, None], float("-inf"))
        max_logits[part] = logits.amax(-1)
        lse[part] = torch.logsumexp(logits, -1)
        weights = torch.softmax(logits, -1).masked_fill(ignored.all(-1)[:, None, None], 0.0)
        out[part] = torch.einsum("shk,skd->shd", weights, keys[..., :d_v])
    lse.masked_fill_(lse == float("-inf"), float("inf"))
    return out.to(q.dtype), max_logits, lse


def get_mla_metadata(cache_seqlens: torch.Tensor, **schedule: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """sgl_kernel.flash_mla.get_mla_metadata: a tile schedule (1, 8) and splits (B + 1,), int32, that are ignored."""
    return torch.zeros(1, 8, dtype=torch.int32), torch.zeros(cache_seqlens.shape[0] + 1, dtype=torch.int32)


def dequantize_mla(tokens: torch.Tensor) -> torch.Tensor:
    """fp8 MLA tokens (..., 656) of any one-byte dtype -> (N, 576) bf16: each tile times its scale, rope as it is.

    Raises ValueError for another width.
    """
    if tokens.shape[-1] != MLA_FP8_BYTES:
        raise ValueError(f"an fp8 MLA token has {MLA_FP8_BYTES} bytes, not {tokens.shape[-1]}")
    raw = tokens.reshape(-1, MLA_FP8_BYTES).view(torch.uint8)
    rope_at = MLA_FP8_BYTES - 2 * MLA_ROPE_DIM
    scale = raw[:, MLA_NOPE_DIM:rope_at].contiguous().view(torch.float32)
    values = raw[:, :MLA_NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float().view(len(raw), -1, MLA_TILE)
    nope = (values * scale[..., None]).to(torch.bfloat16).view(len(raw), MLA_NOPE_DIM)
    return torch.cat([nope, raw[:, rope_at:].contiguous().view(torch.bfloat16)], -1)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    kv_format: str = "V32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """sgl_kernel.flash_mla.flash_mla_with_kvcache, its sparse form: attention over listed slots of a paged cache.

    q (B, S, H, 576) bf16; k_cache (pages, page_size, 1, 656) fp8 or (.., 576) bf16; indices (B, S, topk) int32, token
    slots (page * page_size + offset), anything outside the cache ignored. block_table, cache_seqlens and the schedule
    are not read in sparse mode. Returns out (B, S, H, head_dim_v) in q's dtype and lse (B, H, S) fp32.
    Raises ValueError without indices, for causal, which the sparse kernel refuses, and for another layout than that of
    V3.2, the 656 bytes above.
    """
    if indices is None or causal or kv_format != "V32":
        raise ValueError(
            "flash_mla_with_kvcache: the reference covers sparse attention only (indices, not causal, V32)"
        )
    batch, length, heads, dim = q.shape
    slots = k_cache.reshape(-1, k_cache.shape[-1])
    picked = indices.reshape(batch * length, -1).long()
    valid = (picked >= 0) & (picked < len(slots))
    # Dequantise the listed slots only; the cache is far larger than any list.
    used, position = torch.unique(picked.masked_fill(~valid, 0), return_inverse=True)
    # Bytes, since torch has no gather for fp8 dtypes on a CPU.
    tokens = dequantize_mla(slots.view(torch.uint8)[used]) if is_fp8_kvcache else slots[used]
    out, _, lse = flash_mla_sparse_fwd(
        q.reshape(batch * length, heads, dim),
        tokens[:, None],
        torch.where(valid, position, -1)[:, None],
        dim**-0.5 if softmax_scale is None else softmax_scale,
        head_dim_v,
    )
    return out.view(batch, length, heads, head_dim_v), lse.view(batch, length, heads).transpose(1, 2)


# ---------------------------------------------------------------------------------------------- hadamard


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """sglang.jit_kernel.hadamard.hadamard_transform: ``scale * x @ H`` with Sylvester's H over the last dimension.

    x (..., n) with n a power of two; computed in fp32, returned in x's dtype. Raises ValueError for another n.
    """
    n = x.shape[-1]
    if n == 0 or n & (n - 1):
        raise ValueError(f"hadamard_transform: {n} is not a power of two")
    y = x.float().reshape(-1, n)
    half = 1
    while half < n:
        pairs = y.view(-1, n // (2 * half), 2, half)
        y = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(-1, n)
        half *= 2
    return (y * scale).to(x.dtype).view(x.shape)


# ---------------------------------------------------------------------------------------------- rotary embedding


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
