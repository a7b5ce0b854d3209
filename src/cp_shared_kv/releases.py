"""SGLang releases as data: where each seam lies, how it looked, and what its arguments are called.

Releases that are alike share a row. Nothing outside this module asks for a version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cp_shared_kv.seams import SeamError, Target


@dataclass(frozen=True)
class ArgumentNames:
    """Names of ``ServerArgs`` fields, and of flags in messages, that differ between releases.

    Attributes:
        prefill_cp: field that turns prefill CP on.
        prefill_cp_flag: its flag.
        cp_mode: field with the split mode.
        cp_mode_flag: its flag.
        in_seq_split: value of the split mode that shared KV supports.
        prefill_backend: field with the NSA prefill backend.
        prefill_backend_flag: its flag.
        decode_backend: field with the NSA decode backend.
    """

    prefill_cp: str
    prefill_cp_flag: str
    cp_mode: str
    cp_mode_flag: str
    in_seq_split: str
    prefill_backend: str
    prefill_backend_flag: str
    decode_backend: str


@dataclass(frozen=True)
class Release:
    """One row.

    Attributes:
        versions: the releases it covers.
        arguments: their argument names.
        targets: their seams, id -> place and look.
        stock_loses_pages: whether stock loses pages when all CP ranks send, where page ids are not ascending.
    """

    versions: tuple[str, ...]
    arguments: ArgumentNames
    targets: Mapping[str, Target]
    stock_loses_pages: bool = False


_NSA_ARGUMENTS = ArgumentNames(
    prefill_cp="enable_nsa_prefill_context_parallel",
    prefill_cp_flag="--enable-nsa-prefill-context-parallel",
    cp_mode="nsa_prefill_cp_mode",
    cp_mode_flag="--nsa-prefill-cp-mode",
    in_seq_split="in-seq-split",
    prefill_backend="nsa_prefill_backend",
    prefill_backend_flag="--nsa-prefill-backend",
    decode_backend="nsa_decode_backend",
)

_TARGETS_0_5_12_POST1: dict[str, Target] = {
    "server_args.add_cli_args": Target(
        "sglang.srt.server_args",
        "ServerArgs.add_cli_args",
        ("parser",),
        "1a3e26d9cf1e0f01",
    ),
    "server_args.from_cli_args": Target(
        "sglang.srt.server_args",
        "ServerArgs.from_cli_args",
        ("cls", "args"),
        "fb2f7d7cab056cea",
    ),
    "server_args.check_server_args": Target(
        "sglang.srt.server_args",
        "ServerArgs.check_server_args",
        ("self",),
        "e4ed89d9219ec4b0",
    ),
    "scheduler.init": Target(
        "sglang.srt.managers.scheduler",
        "Scheduler.__init__",
        (
            "self",
            "server_args",
            "port_args",
            "gpu_id",
            "tp_rank",
            "moe_ep_rank",
            "pp_rank",
            "attn_cp_rank",
            "moe_dp_rank",
            "dp_rank",
        ),
        "a18f1c2b06925473",
    ),
    "capacity.profile_available_bytes": Target(
        "sglang.srt.model_executor.model_runner_kv_cache_mixin",
        "ModelRunnerKVCacheMixin._profile_available_bytes",
        ("self", "pre_model_load_memory"),
        "ddeb51527127fafa",
    ),
    "capacity.init_pools": Target(
        "sglang.srt.model_executor.model_runner_kv_cache_mixin",
        "ModelRunnerKVCacheMixin._init_pools",
        ("self",),
        "c090378592d822e8",
    ),
    "capacity.mla_kv_cache_dim": Target(
        "sglang.srt.model_executor.model_runner_kv_cache_mixin",
        "ModelRunnerKVCacheMixin.calculate_mla_kv_cache_dim",
        ("self",),
        "6e0ca5eacb19b963",
    ),
    "allocator.init": Target(
        "sglang.srt.mem_cache.allocator",
        "PagedTokenToKVPoolAllocator.__init__",
        ("self", "size", "page_size", "dtype", "device", "kvcache", "need_sort"),
        "02a4c83269c42c0e",
    ),
    "allocator.alloc": Target(
        "sglang.srt.mem_cache.allocator",
        "PagedTokenToKVPoolAllocator.alloc",
        ("self", "need_size"),
        "f410e4e600ef9bf2",
    ),
    "allocator.alloc_extend": Target(
        "sglang.srt.mem_cache.allocator",
        "PagedTokenToKVPoolAllocator.alloc_extend",
        (
            "self",
            "prefix_lens",
            "prefix_lens_cpu",
            "seq_lens",
            "seq_lens_cpu",
            "last_loc",
            "extend_num_tokens",
            "num_new_pages",
        ),
        "800188eb3e4140dd",
    ),
    "allocator.alloc_decode": Target(
        "sglang.srt.mem_cache.allocator",
        "PagedTokenToKVPoolAllocator.alloc_decode",
        ("self", "seq_lens", "seq_lens_cpu", "last_loc"),
        "5ec496acfb3c5ab8",
    ),
    "allocator.free": Target(
        "sglang.srt.mem_cache.allocator",
        "PagedTokenToKVPoolAllocator.free",
        ("self", "free_index"),
        "22cc7ae3ce6ff549",
    ),
    "allocator.clear": Target(
        "sglang.srt.mem_cache.allocator",
        "PagedTokenToKVPoolAllocator.clear",
        ("self",),
        "e0f7d7cf23d86450",
    ),
    "allocator.free_group_begin": Target(
        "sglang.srt.mem_cache.allocator",
        "BaseTokenToKVPoolAllocator.free_group_begin",
        ("self",),
        "3185b778d5ae499f",
    ),
    "allocator.free_group_end": Target(
        "sglang.srt.mem_cache.allocator",
        "BaseTokenToKVPoolAllocator.free_group_end",
        ("self",),
        "652ff4ae1df672a4",
    ),
    "allocator.available_size": Target(
        "sglang.srt.mem_cache.allocator",
        "BaseTokenToKVPoolAllocator.available_size",
        ("self",),
        "cdb7477002ce2ef2",
    ),
    "allocator.backup_state": Target(
        "sglang.srt.mem_cache.allocator",
        "BaseTokenToKVPoolAllocator.backup_state",
        ("self",),
        "d6ce92eaf3193354",
    ),
    "allocator.restore_state": Target(
        "sglang.srt.mem_cache.allocator",
        "BaseTokenToKVPoolAllocator.restore_state",
        ("self", "state"),
        "300f5a54ef35a50d",
    ),
    "allocator.merge_and_sort_free": Target(
        "sglang.srt.mem_cache.allocator",
        "BaseTokenToKVPoolAllocator.merge_and_sort_free",
        ("self",),
        "62e3bd78e17e0860",
    ),
    "allocator.alloc_extend_kernel": Target(
        "sglang.srt.mem_cache.allocator",
        "alloc_extend_kernel",
        (
            "pre_lens_ptr",
            "seq_lens_ptr",
            "last_loc_ptr",
            "free_page_ptr",
            "out_indices",
            "bs_upper",
            "page_size",
        ),
        "989b6925a0005ab0",
        source_only=True,
    ),
    "allocator.alloc_decode_kernel": Target(
        "sglang.srt.mem_cache.allocator",
        "alloc_decode_kernel",
        ("seq_lens_ptr", "last_loc_ptr", "free_page_ptr", "out_indices", "bs_upper", "page_size"),
        "1ac360150c812ece",
        source_only=True,
    ),
    "radix_cache.tree_node_init": Target(
        "sglang.srt.mem_cache.radix_cache",
        "TreeNode.__init__",
        ("self", "id", "priority"),
        "e08dad57bce540c5",
    ),
    "cache.alloc_for_extend": Target(
        "sglang.srt.mem_cache.common",
        "alloc_for_extend",
        ("batch",),
        "10ccdbdfa35a2eea",
    ),
    "radix_cache.cache_unfinished_req": Target(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache.cache_unfinished_req",
        ("self", "req", "chunked"),
        "c653cd8acf1a6b8c",
    ),
    "radix_cache.split_node": Target(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache._split_node",
        ("self", "key", "child", "split_len"),
        "1234270ed6bd5fa0",
    ),
    "radix_cache.insert_helper": Target(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache._insert_helper",
        ("self", "node", "key", "value", "priority", "chunked"),
        "a86897857a1ab672",
    ),
    "radix_cache.match_prefix_helper": Target(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache._match_prefix_helper",
        ("self", "node", "key"),
        "6aa410e2ee7f79a7",
    ),
    "chunk_cache.cache_unfinished_req": Target(
        "sglang.srt.mem_cache.chunk_cache",
        "ChunkCache.cache_unfinished_req",
        ("self", "req", "chunked"),
        "a528b6a018510128",
    ),
    "pool.init": Target(
        "sglang.srt.mem_cache.memory_pool",
        "NSATokenToKVPool.__init__",
        (
            "self",
            "size",
            "page_size",
            "kv_lora_rank",
            "dtype",
            "qk_rope_head_dim",
            "layer_num",
            "device",
            "index_head_dim",
            "enable_memory_saver",
            "kv_cache_dim",
            "start_layer",
            "end_layer",
            "index_buf_size",
        ),
        "5b1a778ab1880dd4",
    ),
    "pool.set_mla_kv_buffer": Target(
        "sglang.srt.mem_cache.memory_pool",
        "MLATokenToKVPool.set_mla_kv_buffer",
        ("self", "layer", "loc", "cache_k_nope", "cache_k_rope"),
        "c29635286c8169d3",
    ),
    "pool.get_key_buffer": Target(
        "sglang.srt.mem_cache.memory_pool",
        "MLATokenToKVPool.get_key_buffer",
        ("self", "layer_id"),
        "3b7b8736b8c26b1c",
    ),
    "pool.get_index_k_with_scale_buffer": Target(
        "sglang.srt.mem_cache.memory_pool",
        "NSATokenToKVPool.get_index_k_with_scale_buffer",
        ("self", "layer_id"),
        "509e3f5ace93394e",
    ),
    "pool.get_index_k_continuous": Target(
        "sglang.srt.mem_cache.memory_pool",
        "NSATokenToKVPool.get_index_k_continuous",
        ("self", "layer_id", "seq_len", "page_indices"),
        "5493f7f454b6a535",
    ),
    "pool.get_index_k_scale_continuous": Target(
        "sglang.srt.mem_cache.memory_pool",
        "NSATokenToKVPool.get_index_k_scale_continuous",
        ("self", "layer_id", "seq_len", "page_indices"),
        "6cfee4e37cb27a33",
    ),
    "pool.get_index_k_scale_buffer": Target(
        "sglang.srt.mem_cache.memory_pool",
        "NSATokenToKVPool.get_index_k_scale_buffer",
        ("self", "layer_id", "seq_len_tensor", "page_indices", "seq_len_sum", "max_seq_len"),
        "bb49d7029a8e658c",
    ),
    "pool.set_index_k_scale_buffer": Target(
        "sglang.srt.mem_cache.memory_pool",
        "NSATokenToKVPool.set_index_k_scale_buffer",
        ("self", "layer_id", "loc", "index_k", "index_k_scale"),
        "9365626960c721f1",
    ),
    "pool.get_contiguous_buf_infos": Target(
        "sglang.srt.mem_cache.memory_pool",
        "MLATokenToKVPool.get_contiguous_buf_infos",
        ("self",),
        "f21f025507bd3bdd",
    ),
    "pool.get_state_buf_infos": Target(
        "sglang.srt.mem_cache.memory_pool",
        "NSATokenToKVPool.get_state_buf_infos",
        ("self",),
        "6daff0ed74d57b23",
    ),
    "attention.init_forward_metadata": Target(
        "sglang.srt.layers.attention.nsa_backend",
        "NativeSparseAttnBackend.init_forward_metadata",
        ("self", "forward_batch"),
        "7a7a9f9d67c57f21",
    ),
    "attention.model_forward": Target(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.forward",
        (
            "self",
            "forward_batch",
            "skip_attn_backend_init",
            "pp_proxy_tensors",
            "reinit_attn_backend",
            "split_forward_count",
        ),
        "de8983877323e2ec",
    ),
    "attention.forward_extend": Target(
        "sglang.srt.layers.attention.nsa_backend",
        "NativeSparseAttnBackend.forward_extend",
        (
            "self",
            "q",
            "k",
            "v",
            "layer",
            "forward_batch",
            "save_kv_cache",
            "q_rope",
            "k_rope",
            "topk_indices",
            "cos_sin_cache",
            "is_neox",
            "llama_4_scaling",
        ),
        "ee765a8a5b2975f6",
    ),
    "indexer.store_index_k_cache": Target(
        "sglang.srt.layers.attention.nsa.nsa_indexer",
        "Indexer._store_index_k_cache",
        ("self", "forward_batch", "layer_id", "key", "act_quant"),
        "b342022c9d3e98ee",
    ),
    "transfer.manager_init": Target(
        "sglang.srt.disaggregation.common.conn",
        "CommonKVManager.__init__",
        ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend"),
        "ee4a8d00ada0d6fc",
    ),
    "transfer.filter_kv_indices": Target(
        "sglang.srt.disaggregation.utils",
        "filter_kv_indices_for_cp_rank",
        ("kv_mgr", "kv_indices", "index_slice"),
        "7cce33d97d7bb0cc",
    ),
    "transfer.record_transfer_indices": Target(
        "sglang.srt.disaggregation.common.conn",
        "CommonKVSender._record_transfer_indices",
        ("self", "kv_indices", "state_indices"),
        "b8ffa092bd2e712e",
    ),
    "transfer.add_transfer_request": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVManager.add_transfer_request",
        ("self", "bootstrap_room", "kv_indices", "index_slice", "is_last_chunk", "aux_index", "state_indices"),
        "9125b9a0786314c6",
    ),
    "transfer.send_kvcache": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVManager.send_kvcache",
        ("self", "mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices", "executor"),
        "faa82a07edeb4797",
    ),
    "transfer.maybe_send_extra": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVManager.maybe_send_extra",
        ("self", "req", "prefill_state_indices", "executor", "target_rank_registration_info"),
        "2948e9d959c09a1f",
    ),
    "transfer.send_aux": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVManager.send_aux",
        ("self", "req", "prefill_aux_index", "dst_aux_ptrs"),
        "106b4ad5ded6a9ae",
    ),
    "transfer.transfer_worker": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVManager.transfer_worker",
        ("self", "queue", "executor", "staging_buffer"),
        "3b4b245a8eab5548",
    ),
    "transfer.sender_send": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVSender.send",
        ("self", "kv_indices", "state_indices"),
        "7b3bfd8aeed83034",
    ),
    "transfer.sync_status": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVManager.sync_status_to_decode_endpoint",
        ("self", "remote", "dst_port", "room", "status", "prefill_rank"),
        "efdd9425749e2129",
    ),
    "prefill.queue_add": Target(
        "sglang.srt.disaggregation.prefill",
        "PrefillBootstrapQueue.add",
        ("self", "req", "num_kv_heads"),
        "f99af85affefb5b0",
    ),
    "prefill.queue_pop_bootstrapped": Target(
        "sglang.srt.disaggregation.prefill",
        "PrefillBootstrapQueue.pop_bootstrapped",
        ("self", "return_failed_reqs", "rids_to_check"),
        "a20185261cdea99a",
    ),
    "prefill.send_kv_chunk": Target(
        "sglang.srt.disaggregation.prefill",
        "SchedulerDisaggregationPrefillMixin.send_kv_chunk",
        ("self", "req", "last_chunk", "end_idx"),
        "6c62cc68ff8b82c5",
    ),
    "transfer.poll": Target(
        "sglang.srt.disaggregation.utils",
        "poll_and_all_reduce_attn_cp_tp_group",
        ("pollers", "attn_cp_cpu_group", "attn_tp_cpu_group"),
        "7dcc177789e2e145",
    ),
    "transfer.sender_clear": Target(
        "sglang.srt.disaggregation.common.conn",
        "CommonKVSender.clear",
        ("self",),
        "dddc475f7147ec7c",
    ),
    "transfer.sender_abort": Target(
        "sglang.srt.disaggregation.common.conn",
        "CommonKVSender.abort",
        ("self",),
        "598ab28ba3a7d466",
    ),
    "transfer.update_status": Target(
        "sglang.srt.disaggregation.common.conn",
        "CommonKVManager.update_status",
        ("self", "bootstrap_room", "status"),
        "6273367650ff9cf4",
    ),
    "transfer.queue_put": Target(
        "sglang.srt.disaggregation.common.utils",
        "FastQueue.put",
        ("self", "item"),
        "0994c8de01b96825",
    ),
    "transfer.queue_get": Target(
        "sglang.srt.disaggregation.common.utils",
        "FastQueue.get",
        ("self",),
        "3ff8459e5a449c66",
    ),
    "transfer.start_prefill_thread": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVManager.start_prefill_thread",
        ("self",),
        "2002c8063932902a",
    ),
    "prefill.process_inflight_queue": Target(
        "sglang.srt.disaggregation.prefill",
        "SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue",
        ("self", "rids_to_check"),
        "ddb2a679bbf49ba7",
    ),
    "scheduler.abort_request": Target(
        "sglang.srt.managers.scheduler",
        "Scheduler.abort_request",
        ("self", "recv_req"),
        "9cdee8695e533198",
    ),
    "decode.receiver_poll": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVReceiver.poll",
        ("self",),
        "8ccccc44cdcbba48",
    ),
    "decode.receiver_clear": Target(
        "sglang.srt.disaggregation.common.conn",
        "CommonKVReceiver.clear",
        ("self",),
        "016533819b64ba35",
    ),
    "decode.receiver_abort": Target(
        "sglang.srt.disaggregation.common.conn",
        "CommonKVReceiver.abort",
        ("self",),
        "598ab28ba3a7d466",
    ),
    "decode.receiver_send_metadata": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVReceiver.send_metadata",
        ("self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len"),
        "bfb82425ea0ad188",
    ),
    "decode.node_failure": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVManager._handle_node_failure",
        ("self", "failed_bootstrap_addr"),
        "7fbf2d74d1fe76f3",
    ),
    "decode.start_decode_thread": Target(
        "sglang.srt.disaggregation.mooncake.conn",
        "MooncakeKVManager.start_decode_thread",
        ("self",),
        "4c3bb3f9c31edf5d",
    ),
    "decode.pop_transferred": Target(
        "sglang.srt.disaggregation.decode",
        "DecodeTransferQueue.pop_transferred",
        ("self", "rids_to_check"),
        "4487b5b1e0697e11",
    ),
    "scheduler.add_one_req": Target(
        "sglang.srt.managers.schedule_policy",
        "PrefillAdder.add_one_req",
        (
            "self",
            "req",
            "has_chunked_req",
            "truncation_align_size",
        ),
        "5766fa08ecf5bd31",
    ),
    "pool.get_value_buffer": Target(
        "sglang.srt.mem_cache.memory_pool",
        "MLATokenToKVPool.get_value_buffer",
        (
            "self",
            "layer_id",
        ),
        "1df0e25d1866bc74",
    ),
    "pool.get_kv_size_bytes": Target(
        "sglang.srt.mem_cache.memory_pool",
        "NSATokenToKVPool.get_kv_size_bytes",
        ("self",),
        "d7306e33f05ed82d",
    ),
    "pool.clear_buffers": Target(
        "sglang.srt.mem_cache.memory_pool",
        "NSATokenToKVPool._clear_buffers",
        ("self",),
        "97f91e6c8f33e3d2",
    ),
}

RELEASES: tuple[Release, ...] = (
    Release(("0.5.12.post1",), _NSA_ARGUMENTS, _TARGETS_0_5_12_POST1, stock_loses_pages=True),
)


def supported_versions() -> tuple[str, ...]:
    """All releases with a row, oldest first."""
    return tuple(version for release in RELEASES for version in release.versions)


def release_for(version: str) -> Release:
    """Row of a release; a local part such as ``+cu130`` does not count.

    Raises:
        SeamError: the release has no row.
    """
    public = version.split("+", 1)[0]
    for release in RELEASES:
        if public in release.versions:
            return release
    raise SeamError(
        [f"SGLang {version} is not a supported release: supported are {', '.join(supported_versions())}; install one"]
    )
