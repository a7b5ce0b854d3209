"""The capacity multiple: prompt tokens that a group can keep with shared KV, over what it can keep as stock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .forward import PAGE
from .processes import sglang_process
from .rows import Curve, Measured, Row

GIB = 2**30
#: KV budget of one rank, about what 8 H200 leave beside the weights: 237,312 tokens of V3.2 in bf16 take 17.3 GiB.
KV_GIB = 20
# Layers and dimensions of the public config.json files, deepseek-ai/DeepSeek-V3.2 and zai-org/GLM-5; layers and latent
# dimensions are also the defaults of transformers' DeepseekV3Config and GlmMoeDsaConfig.
GEOMETRIES = {
    "DeepSeek-V3.2": {"architecture": "DeepseekV32ForCausalLM", "layers": 61},
    "GLM-5": {"architecture": "GlmMoeDsaForCausalLM", "layers": 78},
}
LATENT, ROPE, INDEX, TOPK = 512, 64, 128, 2048
CONTEXTS = {"32K": 2**15, "128K": 2**17, "1M": 2**20}
#: Least multiple, as a part of the number of ranks.
BUDGETS = {"32K": 0.97, "128K": 0.97, "1M": 0.85}
DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


def multiple(model: str, cp_size: int, context_len: int, dtype: str) -> tuple[float, int]:
    """The capacity multiple and the bytes charged for the workspace; needs SGLang.

    Args:
        model: a key of ``GEOMETRIES``.
        dtype: a key of ``DTYPES``.
    """
    import sglang.srt.model_executor.pool_configurator as pool_configurator
    import torch
    from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin

    from cp_shared_kv.patches.capacity import workspace_bytes_for

    pool_configurator.get_attention_tp_size = lambda: 1  # prefill CP spans the whole group
    geometry = GEOMETRIES[model]
    runner: Any = ModelRunnerKVCacheMixin()
    runner.model_config = SimpleNamespace(
        context_len=context_len,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        hf_config=SimpleNamespace(architectures=[geometry["architecture"]], index_head_dim=INDEX, index_topk=TOPK),
    )
    runner.server_args = SimpleNamespace(
        attn_cp_size=cp_size, nsa_prefill_backend="flashmla_sparse", nsa_decode_backend="flashmla_sparse"
    )
    runner.kv_cache_dtype = getattr(torch, DTYPES[dtype])
    runner.page_size = PAGE
    runner.num_effective_layers = geometry["layers"]
    runner.use_mla_backend = True
    runner.mambaish_config = None
    runner.spec_algorithm = SimpleNamespace(is_dflash=lambda: False)
    configurator = pool_configurator.DefaultPoolConfigurator(runner)
    charge = workspace_bytes_for(runner, cp_size)
    tokens = [configurator.calculate_pool_sizes(KV_GIB * GIB - paid, PAGE).max_total_num_tokens for paid in (0, charge)]
    return cp_size * tokens[1] / tokens[0], charge


def measure(
    models: Sequence[str] = tuple(GEOMETRIES),
    cp_sizes: Sequence[int] = (2, 4, 8),
    dtypes: Sequence[str] = tuple(DTYPES),
) -> Measured:
    """Rows for all combinations with the contexts, and the curves of the first model."""
    measured, points = Measured(), {}
    with sglang_process() as call:
        for model, dtype, cp_size in itertools.product(models, dtypes, cp_sizes):
            for name, context_len in CONTEXTS.items():
                value, charge = call(multiple, model, cp_size, context_len, dtype)
                how = f"{KV_GIB} GiB of KV a rank less a workspace of {charge / GIB:.2f} GiB, by SGLang's cell size"
                title = f"{model} {dtype}, CP {cp_size}, context {name}"
                measured.rows.append(Row(title, value, "x stock", how, BUDGETS[name] * cp_size, "at least"))
        for dtype, cp_size in itertools.product(dtypes, cp_sizes):
            points[f"CP {cp_size}, {dtype}"] = [
                (2**k, call(multiple, models[0], cp_size, 2 ** (k + 10), dtype)[0]) for k in range(4, 11)
            ]
    measured.curves["capacity"] = Curve("context length, K tokens", "capacity, multiple of stock", points)
    return measured
