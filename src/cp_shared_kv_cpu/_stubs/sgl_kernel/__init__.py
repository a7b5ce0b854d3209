"""Stand-in for sgl_kernel (no CPU build exists): the top-k kernels of the NSA indexer, as PyTorch references."""

from collections.abc import Callable
from typing import Any, NoReturn

from cp_shared_kv_cpu.kernels import fast_topk_transform_fused, fast_topk_transform_ragged_fused, fast_topk_v2

__version__ = "0+cp.shared.kv.cpu"
__all__ = ["fast_topk_transform_fused", "fast_topk_transform_ragged_fused", "fast_topk_v2"]


def __getattr__(name: str) -> Callable[..., Any]:
    """SGLang's CPU engine imports the kernels of its CPU build by name; the NSA path calls none of them."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no reference in cp_shared_kv_cpu")

    return unavailable
