"""The allocator the scheduler sees: stock paging over logical slots.

Nothing here knows of physical pages but the size check. Every rank runs the same allocator on the same requests in
the same order, so all ranks hand out the same logical pages; the layout then says who holds each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

from cp_shared_kv.layout import CpSharedKVLayout

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.memory_pool import KVCache


class CPSharedPagedTokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """Paged allocator over the logical slots of one attention-CP group.

    Args:
        logical_size: token slots the group offers; exactly ``physical_size * cp_size``.
        physical_size: token slots that one rank's pool holds (page 0 not counted).
        page_size: tokens per page.
        dtype: dtype of the KV cache, as the stock allocator takes it.
        device: device of the index tensors.
        kvcache: the rank's KV pool.
        need_sort: keep freed pages apart and sort them before reuse, as stock does for disaggregation.
        cp_size: ranks in the group.
        cp_rank: this rank in the group.

    Raises:
        ValueError: a size is not a multiple of the page size, or the two sizes do not fit ``cp_size``.
    """

    def __init__(
        self,
        logical_size: int,
        physical_size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: KVCache,
        need_sort: bool,
        cp_size: int,
        cp_rank: int,
    ) -> None:
        self.layout = CpSharedKVLayout(page_size=page_size, cp_size=cp_size, cp_rank=cp_rank)
        for name, size in (("logical_size", logical_size), ("physical_size", physical_size)):
            if size <= 0 or size % page_size:
                raise ValueError(f"{name} must be a positive multiple of page_size={page_size}, got {size}")
        if logical_size != physical_size * cp_size:
            raise ValueError(
                f"logical_size must be physical_size * cp_size = {physical_size} * {cp_size} = "
                f"{physical_size * cp_size}, got {logical_size}"
            )
        self.physical_size = physical_size
        super().__init__(logical_size, page_size, dtype, device, kvcache, need_sort)

    @property
    def logical_size(self) -> int:
        """Token slots that the group offers."""
        return self.size
