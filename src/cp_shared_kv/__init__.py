"""CP shared KV for SGLang: each page of the NSA/MLA KV cache is kept by one attention-CP rank.

Importing this package imports neither sglang nor torch; the allocator is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cp_shared_kv._version import __version__
from cp_shared_kv.layout import CpSharedKVLayout, filter_kv_pages_for_cp_shared_kv

if TYPE_CHECKING:
    from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator

__all__ = [
    "CPSharedPagedTokenToKVPoolAllocator",
    "CpSharedKVLayout",
    "__version__",
    "filter_kv_pages_for_cp_shared_kv",
]


def __getattr__(name: str) -> Any:
    if name == "CPSharedPagedTokenToKVPoolAllocator":
        from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator

        return CPSharedPagedTokenToKVPoolAllocator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
