"""Device code of the pool: one Triton launch for a tensor on a GPU, plain torch operations anywhere else.

No function waits for the device, and none allocates on a GPU but what it returns. Indices are not checked there: a page
outside its tensor is an illegal or a foreign address.

A value that changes from forward to forward must not make Triton compile anew while a server answers requests, so
arguments are specialised only where the code gains by it: a page's width, which is one of two for a server.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Of a page's 64-bit words 8 KiB a program, so that one page of MLA KV already occupies several SMs.
_COPY_BLOCK = 1024
#: 64 bytes a thread: four 16-byte loads in flight each, enough to saturate HBM at the occupancy of a plain copy.
_COPY_WARPS = 4
#: 128K tokens make 128 programs, one wave on an H200; the kernel is one launch a forward and bound by its latency.
_EXPAND_BLOCK = 1024
#: 8 elements a thread: the dependent loads of page and slot overlap without spending registers on int64 positions.
_EXPAND_WARPS = 4


def copy_pages(
    target: torch.Tensor, target_pages: torch.Tensor, source: torch.Tensor, source_pages: torch.Tensor
) -> None:
    """``target[target_pages[i]] = source[source_pages[i]]`` for every i.

    Args:
        target, source: rows as :func:`cp_shared_kv.collectives.page_rows` gives them, int64 or uint8, of one width;
            they must not overlap.
        target_pages: int64 ``(n,)``, distinct.
        source_pages: int64 ``(n,)``.

    Raises:
        ValueError: shapes, dtypes, devices or strides are others than these.
    """
    if (
        target.shape[1:] != source.shape[1:]
        or target.dtype != source.dtype
        or target_pages.shape != source_pages.shape
        or not (target_pages.dtype == source_pages.dtype == torch.int64)
        or not (target.device == source.device == target_pages.device == source_pages.device)
        or not (target.is_contiguous() and source.is_contiguous())
        or not (target_pages.is_contiguous() and source_pages.is_contiguous())
    ):
        described = (
            f"{tuple(t.shape)} {t.dtype} {t.device} strides {t.stride()}"
            for t in (target, target_pages, source, source_pages)
        )
        raise ValueError("copy_pages cannot copy between these: " + ", ".join(described))
    if not target_pages.shape[0]:
        return
    if target.device.type == "cuda":
        _launch_copy_pages(target, target_pages, source, source_pages)
    else:
        target.index_copy_(0, target_pages, source.index_select(0, source_pages))


def expand_page_table(
    page_table: torch.Tensor, spans: torch.Tensor, page_size: int, width: int, rows: int, trash_slot: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of a batch's tokens, and of the rows that a chunk brings.

    Args:
        page_table: page of each page position, int32 ``(batch, pages)``.
        spans: int64 ``(3, batch)``: prefix length, sequence length, first row of each request's chunk; the chunks'
            rows do not overlap.
        page_size: tokens per page.
        width: token positions of a request in the result.
        rows: rows of the chunk, padding included.
        trash_slot: slot of positions past the page table and of padding rows.

    Returns:
        token_table, int32 ``(batch, width)``: slot of each token position;
        write_slots, int64 ``(rows,)``: slot of each row of the chunk. Row ``first + i`` holds position ``prefix + i``.

    Raises:
        ValueError: shapes, dtypes, devices or strides are others than these.
    """
    if (
        page_table.dim() != 2
        or spans.shape != (3, page_table.shape[0])
        or (page_table.dtype, spans.dtype) != (torch.int32, torch.int64)
        or page_table.device != spans.device
        or not (page_table.is_contiguous() and spans.is_contiguous())
    ):
        described = (f"{tuple(t.shape)} {t.dtype} {t.device} strides {t.stride()}" for t in (page_table, spans))
        raise ValueError("expand_page_table takes another page table or other spans: " + ", ".join(described))
    expand = _launch_expand_page_table if page_table.device.type == "cuda" else _expand_page_table_torch
    return expand(page_table, spans, page_size, width, rows, trash_slot)


def _launch_copy_pages(
    target: torch.Tensor, target_pages: torch.Tensor, source: torch.Tensor, source_pages: torch.Tensor
) -> None:
    width = target.shape[1]
    # One axis, a page's blocks side by side: no limit of 65,535 pages, and neighbours stay in one page of the TLB.
    _copy_pages_kernel[(target_pages.shape[0] * triton.cdiv(width, _COPY_BLOCK),)](
        target, target_pages, source, source_pages, WIDTH=width, BLOCK=_COPY_BLOCK, num_warps=_COPY_WARPS
    )


# The index lists are parts of one upload and begin anywhere in it.
@triton.jit(do_not_specialize_on_alignment=["target_pages", "source_pages"])
def _copy_pages_kernel(
    target,  # type: ignore[no-untyped-def]
    target_pages,
    source,
    source_pages,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    item = tl.program_id(0) // blocks
    words = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = words < WIDTH
    # Pages are int64 and make the offsets so: a pool exceeds 2**31 words.
    values = tl.load(source + tl.load(source_pages + item) * WIDTH + words, mask=inside)
    tl.store(target + tl.load(target_pages + item) * WIDTH + words, values, mask=inside)


def _expand_page_table_torch(
    page_table: torch.Tensor, spans: torch.Tensor, page_size: int, width: int, rows: int, trash_slot: int
) -> tuple[torch.Tensor, torch.Tensor]:
    device = page_table.device
    offsets = torch.arange(page_size, dtype=torch.int32, device=device)
    slots = (page_table.unsqueeze(-1) * page_size + offsets).flatten(1)
    end = slots.shape[1]
    slots = torch.nn.functional.pad(slots, (0, 1), value=trash_slot)  # column `end` is trash
    token_table = slots.index_select(1, torch.arange(width, device=device).clamp_(max=end))

    prefix, length, first = spans.unsqueeze(-1).unbind(0)
    row = torch.arange(rows, device=device)
    position = row - first + prefix  # (batch, rows)
    known = (row >= first) & (position < length) & (position < end)
    picked = slots.gather(1, torch.where(known, position, end))
    # At most one request knows a row, so the sum holds its slot, or trash if none does, also in a batch of none.
    return token_table, (picked - trash_slot).sum(0) + trash_slot


def _launch_expand_page_table(
    page_table: torch.Tensor, spans: torch.Tensor, page_size: int, width: int, rows: int, trash_slot: int
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, pages = page_table.shape
    token_table = torch.empty((batch, width), dtype=torch.int32, device=page_table.device)
    write_slots = torch.empty(rows, dtype=torch.int64, device=page_table.device)
    longest = max(width, rows)
    if longest:
        _expand_page_table_kernel[(triton.cdiv(longest, _EXPAND_BLOCK), batch + 1)](
            page_table,
            spans,
            token_table,
            write_slots,
            batch,
            pages,
            width,
            rows,
            trash_slot,
            PAGE_SIZE=page_size,
            BLOCK=_EXPAND_BLOCK,
            num_warps=_EXPAND_WARPS,
        )
    return token_table, write_slots


@triton.jit(
    do_not_specialize=["batch", "pages", "width", "rows", "trash_slot"],
    do_not_specialize_on_alignment=["page_table", "spans"],
)
def _expand_page_table_kernel(
    page_table,  # type: ignore[no-untyped-def]
    spans,
    token_table,
    write_slots,
    batch,
    pages,
    width,
    rows,
    trash_slot,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Second coordinate: a request, whose row of the token table is written, or past the last one the write slots.
    request = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if request < batch:
        page_at = at // PAGE_SIZE
        known = page_at < pages
        page = tl.load(page_table + request.to(tl.int64) * pages + page_at, mask=known, other=0)
        slot = tl.where(known, page * PAGE_SIZE + at % PAGE_SIZE, trash_slot)
        tl.store(token_table + request.to(tl.int64) * width + at, slot, mask=at < width)
    else:
        write_slot = tl.full([BLOCK], trash_slot, tl.int64)
        table = page_table
        for other in range(batch):
            # Rows hold the request's positions in order, so the row finds its position without a search.
            prefix = tl.load(spans + other)
            length = tl.load(spans + batch + other)
            first = tl.load(spans + 2 * batch + other)
            position = at - first + prefix
            page_at = position // PAGE_SIZE
            known = (at >= first) & (position < length) & (page_at < pages)
            page = tl.load(table + page_at, mask=known, other=0)
            write_slot = tl.where(known, page * PAGE_SIZE + position % PAGE_SIZE, write_slot)
            table += pages
        tl.store(write_slots + at, write_slot, mask=at < rows)
