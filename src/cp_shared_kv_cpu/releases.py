"""What the CPU platform has to know of each SGLang release, as rows of data; nothing else tests a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata


@dataclass(frozen=True)
class Row:
    """Releases of SGLang that are alike.

    Attributes:
        versions: the releases.
        attention: ``nsa`` or ``dsa``, the name of the attention backend and the prefix of its arguments.
        cp_arguments: SGLang's arguments for prefill CP: with one early and one late block of a sequence on each rank
            ("zigzag") where the release can do so for NSA models, else with every n-th token ("interleave").
        indexer: module of the class ``Indexer``.
        sparse_backend: module of the attention backend.
        places: ``module:name`` in SGLang of each kernel that is stood in for, by the name of the reference.
        cuda_imports: kernels of ``indexer_fusion`` that the indexer imports where it finds CUDA.
        unimportable: modules on the NSA path that need a package without a CPU build.
        cpu_branches: modules whose branch for a CPU calls what no NSA backend has.
        cpu_refusals: modules that ask ``current_platform`` and refuse fp8 pools of MLA on a CPU.
        indexed_device: the indexer needs an index in the device of its queries.
        extra_requirements: pip requirements beyond ``requirements.txt``, to be installed with ``--no-deps``.
    """

    versions: tuple[str, ...]
    attention: str
    cp_arguments: Mapping[str, str | bool | int]
    indexer: str
    sparse_backend: str
    places: Mapping[str, str]
    cuda_imports: tuple[str, ...] = ()
    unimportable: tuple[str, ...] = ()
    cpu_branches: tuple[str, ...] = ()
    cpu_refusals: tuple[str, ...] = ()
    indexed_device: bool = False
    extra_requirements: tuple[str, ...] = ()


def _places(
    *,
    index_buffer: str,
    act_quant: str,
    mla_buffer: str,
    quantize: str,
    dequantize: str,
    hadamard: str,
    fused_store: str,
    can_fuse_store: str,
    pdl: str,
) -> dict[str, str]:
    """``Row.places`` from the modules of the kernels."""
    return {
        "get_k": f"{index_buffer}:_get_k_triton",
        "get_s": f"{index_buffer}:_get_s_triton",
        "get_k_and_s": f"{index_buffer}:_get_k_and_s_triton",
        "set_k_and_s": f"{index_buffer}:_set_k_and_s_triton",
        "act_quant": f"{act_quant}:act_quant",
        "set_mla_kv_buffer": f"{mla_buffer}:set_mla_kv_buffer_triton",
        "get_mla_kv_buffer": f"{mla_buffer}:get_mla_kv_buffer_triton",
        "quantize_k_cache": f"{quantize}:quantize_k_cache",
        "quantize_k_cache_separate": f"{quantize}:quantize_k_cache_separate",
        "dequantize_k_cache_paged": f"{dequantize}:dequantize_k_cache_paged",
        "hadamard_transform": f"{hadamard}:hadamard_transform",
        "fused_store_index_k_cache": f"{fused_store}:fused_store_index_k_cache",
        "can_fuse_store": f"{fused_store}:{can_fuse_store}",
        "is_arch_support_pdl": f"{pdl}:is_arch_support_pdl",
    }


_NSA = "sglang.srt.layers.attention.nsa"
_DSA = "sglang.srt.layers.attention.dsa"
_OPS = "sglang.kernels.ops"
_FLASH_MLA = f"{_OPS}.attention.flash_mla_interface"

_0_5_11 = Row(
    versions=("0.5.11",),
    attention="nsa",
    cp_arguments={"enable_nsa_prefill_context_parallel": True, "nsa_prefill_cp_mode": "in-seq-split"},
    indexer=f"{_NSA}.nsa_indexer",
    sparse_backend="sglang.srt.layers.attention.nsa_backend",
    places=_places(
        index_buffer=f"{_NSA}.index_buf_accessor",
        act_quant=f"{_NSA}.triton_kernel",
        mla_buffer="sglang.srt.mem_cache.utils",
        quantize=f"{_NSA}.quant_k_cache",
        dequantize=f"{_NSA}.dequant_k_cache",
        hadamard="sglang.jit_kernel.hadamard",
        fused_store="sglang.jit_kernel.fused_store_index_cache",
        can_fuse_store="can_use_nsa_fused_store",
        pdl="sglang.jit_kernel.utils",
    ),
)
_0_5_12 = replace(_0_5_11, versions=("0.5.12", "0.5.12.post1"))
_0_5_13 = replace(
    _0_5_12,
    versions=("0.5.13", "0.5.13.post1"),
    attention="dsa",
    extra_requirements=("prometheus-client==0.26.0",),
    cp_arguments={"enable_dsa_prefill_context_parallel": True, "dsa_prefill_cp_mode": "in-seq-split"},
    indexed_device=True,
    indexer=f"{_DSA}.dsa_indexer",
    sparse_backend="sglang.srt.layers.attention.dsa_backend",
    places=_places(
        index_buffer=f"{_DSA}.index_buf_accessor",
        act_quant=f"{_DSA}.triton_kernel",
        mla_buffer="sglang.srt.mem_cache.triton_ops.mla_buffer",
        quantize=f"{_DSA}.quant_k_cache",
        dequantize=f"{_DSA}.dequant_k_cache",
        hadamard="sglang.jit_kernel.hadamard",
        fused_store="sglang.jit_kernel.fused_store_index_cache",
        can_fuse_store="can_use_dsa_fused_store",
        pdl="sglang.jit_kernel.utils",
    ),
)
_0_5_14 = replace(_0_5_13, versions=("0.5.14",), cp_arguments={"enable_prefill_cp": True, "cp_strategy": "zigzag"})
_0_5_15 = replace(
    _0_5_14,
    places={
        **_0_5_14.places,
        "plan_topk_v2": "sglang.jit_kernel.dsv4.topk:plan_topk_v2",
        "topk_transform_paged_v2": "sglang.jit_kernel.dsv4.topk:topk_transform_512_v2",
    },
    versions=("0.5.15", "0.5.15.post1"),
    unimportable=("sglang.jit_kernel.dsa.cutedsl_paged_mqa_logits",),
    cuda_imports=(
        "fused_q_indexer_rope_first_quant",
        "fused_k_indexer_norm_rope",
        "fused_k_indexer_norm_rope_store",
    ),
)
_0_5_16 = replace(
    _0_5_15,
    versions=("0.5.16",),
    places={
        **_0_5_15.places,
        **_places(
            index_buffer=f"{_OPS}.attention.dsa.index_buf_accessor",
            act_quant=f"{_OPS}.attention.dsa.triton_kernel",
            mla_buffer=f"{_OPS}.kvcache.mla_buffer",
            quantize=f"{_OPS}.attention.dsa.quant_k_cache",
            dequantize=f"{_OPS}.attention.dsa.dequant_k_cache",
            hadamard="sglang.jit_kernel.hadamard",
            fused_store="sglang.jit_kernel.fused_store_index_cache",
            can_fuse_store="can_use_dsa_fused_store",
            pdl="sglang.jit_kernel.utils.arch",
        ),
    },
    unimportable=(),
    extra_requirements=("prometheus-client==0.26.0", "xgrammar==0.2.1", "apache-tvm-ffi==0.1.11"),
)
_0_5_17 = replace(
    _0_5_16,
    versions=("0.5.17", "0.5.18"),
    places={
        **_0_5_16.places,
        "hadamard_transform": f"{_OPS}.quantization.hadamard:hadamard_transform",
        "fused_store_index_k_cache": f"{_OPS}.attention.fused_store_index_cache:fused_store_index_k_cache",
        "can_fuse_store": f"{_OPS}.attention.fused_store_index_cache:can_use_dsa_fused_store",
        "is_arch_support_pdl": "sglang.kernels.jit.utils.arch:is_arch_support_pdl",
        "plan_topk_v2": f"{_OPS}.attention.dsv4.topk:plan_topk_v2",
        "topk_transform_paged_v2": f"{_OPS}.attention.dsv4.topk:topk_transform_512_v2",
    },
)
_0_5_19 = replace(
    _0_5_17,
    versions=("0.5.19",),
    places={
        **{name: place for name, place in _0_5_17.places.items() if name != "set_mla_kv_buffer"},
        "set_mla_kv_buffer_skipping": f"{_OPS}.kvcache.mla_buffer:set_mla_kv_buffer_triton",
        "topk_transform_ragged_v2": f"{_OPS}.attention.dsv4.topk:topk_transform_ragged_v2",
    },
    cpu_branches=("sglang.srt.model_executor.forward_batch_info",),
)
_0_5_20 = replace(
    _0_5_19,
    versions=("0.5.20", "0.5.21"),
    # Zigzag is refused for DeepSeek; GLM is admitted, but there is no gather for its index keys. With interleave dense
    # layers are tensor parallel unless told otherwise, which rounds differently for each CP size.
    cp_arguments={"enable_prefill_cp": True, "cp_strategy": "interleave", "moe_dense_tp_size": 1},
    cpu_refusals=("sglang.srt.mem_cache.kv_cache_configurator",),
    places={
        **_0_5_19.places,
        "set_mla_kv_buffer_dcp_sharded": f"{_OPS}.kvcache.mla_buffer:set_mla_kv_buffer_dcp_sharded_triton",
        "topk_transform_paged_v2": f"{_OPS}.attention.dsv4.topk:topk_transform_paged_v2",
    },
)
_0_5_22 = replace(
    _0_5_20,
    versions=("0.5.22",),
    extra_requirements=("prometheus-client==0.26.0", "xgrammar==0.2.7", "apache-tvm-ffi==0.1.11"),
)
_0_5_23 = replace(
    _0_5_22,
    versions=("0.5.23",),
    unimportable=(_FLASH_MLA,),
    places={
        **{
            name: f"{_FLASH_MLA}:{name}"
            for name in ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata")
        },
        # It reads pages with get_k_and_s alone.
        **{name: place for name, place in _0_5_22.places.items() if name not in ("get_k", "get_s")},
        "get_k_and_s": f"{_OPS}.kvcache.dsa_index_k_cache:_get_k_and_s_triton",
        "set_k_and_s": f"{_OPS}.kvcache.dsa_index_k_cache:_set_k_and_s_triton",
        "act_quant": f"{_OPS}.quantization.act_quant_triton:act_quant",
        "quantize_k_cache": f"{_OPS}.quantization.dsa_quant_k_cache:quantize_k_cache",
        "quantize_k_cache_separate": f"{_OPS}.quantization.dsa_quant_k_cache:quantize_k_cache_separate",
        "dequantize_k_cache_paged": f"{_OPS}.attention.dsa.dequant_k_cache:dequantize_k_cache_paged_dsa",
        "fused_store_index_k_cache": f"{_OPS}.kvcache.dsa_fused_store_index_cache:fused_store_index_k_cache",
        "can_fuse_store": f"{_OPS}.kvcache.dsa_fused_store_index_cache:can_use_dsa_fused_store",
    },
)

ROWS = (
    _0_5_11,
    _0_5_12,
    _0_5_13,
    _0_5_14,
    _0_5_15,
    _0_5_16,
    _0_5_17,
    _0_5_19,
    _0_5_20,
    _0_5_22,
    _0_5_23,
)


def supported_versions() -> tuple[str, ...]:
    """Every release that has a row, oldest first."""
    return tuple(version for row in ROWS for version in row.versions)


def row_for(version: str) -> Row:
    """The row of a release. Raises ValueError, naming the known ones, where it has none."""
    for row in ROWS:
        if version in row.versions:
            return row
    raise ValueError(f"SGLang {version} is not known to the CPU platform; known are {', '.join(supported_versions())}")


def installed_version() -> str | None:
    """Version of the installed sglang distribution; None when there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def installed_row() -> Row:
    """The row of the installed release. Raises ValueError where it has none."""
    return row_for(installed_version() or "(not installed)")
