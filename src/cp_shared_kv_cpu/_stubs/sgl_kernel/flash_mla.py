"""Stand-in for sgl_kernel.flash_mla: FlashMLA as PyTorch references."""

from cp_shared_kv_cpu.kernels import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]
