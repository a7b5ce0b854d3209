"""Stand-in for deep_gemm: the logits kernels of the NSA indexer, as PyTorch references."""

from cp_shared_kv_cpu.kernels import fp8_mqa_logits, fp8_paged_mqa_logits, get_num_sms, get_paged_mqa_logits_metadata

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits", "get_num_sms", "get_paged_mqa_logits_metadata"]
