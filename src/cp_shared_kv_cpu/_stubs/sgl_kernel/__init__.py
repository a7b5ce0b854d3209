"""Stand-in for sgl_kernel (no CPU build exists): the top-k kernels of the NSA indexer, as PyTorch references."""

from cp_shared_kv_cpu.kernels import fast_topk_transform_fused, fast_topk_transform_ragged_fused, fast_topk_v2

__version__ = "0+cp.shared.kv.cpu"
__all__ = ["fast_topk_transform_fused", "fast_topk_transform_ragged_fused", "fast_topk_v2"]
