"""A tiny DeepSeek-V3.2 or GLM-5 checkpoint that stock SGLang loads: ``python -m cp_shared_kv_cpu.model PATH``.

Small where it may be (hidden size, heads, layers) and as large as the real one where the kernels fix the size:
kv_lora_rank 512, rope 64, index head 128. index_topk is small, so that top-k really selects in short prompts. All
layers are dense: an expert layer needs DeepEP under context parallelism, and rounds differently for each CP size.
Weights are saved rather than drawn at load (``load_format=dummy``), which would differ between CP sizes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEEPSEEK, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
MODEL_TYPES = {DEEPSEEK: "deepseek_v32", GLM: "glm_moe_dsa"}
PLAIN_ARCHITECTURE = "DeepseekV3ForCausalLM"


def tiny_config(
    *,
    layers: int = 2,
    index_topk: int = 64,
    nsa: bool = True,
    max_position_embeddings: int = 8192,
    architecture: str = DEEPSEEK,
) -> dict[str, Any]:
    """The config.json of the tiny model; without ``nsa`` a DeepSeek-V3 one, with no indexer.

    ``architecture`` is one of MODEL_TYPES. Raises ValueError when a size is not positive, and for another architecture.
    """
    for name, value in (
        ("layers", layers),
        ("index_topk", index_topk),
        ("max_position_embeddings", max_position_embeddings),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if not nsa:
        architecture, model_type = PLAIN_ARCHITECTURE, "deepseek_v3"
    elif architecture in MODEL_TYPES:
        model_type = MODEL_TYPES[architecture]
    else:
        raise ValueError(f"architecture must be one of {', '.join(MODEL_TYPES)}, not {architecture}")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        # SGLang's CPU engine only has the yarn variant of the rotary embedding for MLA.
        "rope_scaling": {
            "type": "yarn",
            "factor": 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": max(1, max_position_embeddings // 2),
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
    }
    if nsa:
        config.update(index_head_dim=128, index_n_heads=2, index_topk=index_topk)
    if architecture == GLM:
        config.update(indexer_rope_interleave=True)
    return config


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Checkpoint tensors by name for a ``tiny_config``: bf16, drawn by ``seed``, each row of about unit gain."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Any] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        drawn = torch.randn(rows, columns, generator=generator)
        weights[f"{name}.weight"] = (drawn / columns**0.5).to(torch.bfloat16)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    vocabulary = torch.randn(config["vocab_size"], hidden, generator=generator)
    weights["model.embed_tokens.weight"] = vocabulary.to(torch.bfloat16)
    linear("lm_head", config["vocab_size"], hidden)
    norm("model.norm", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norm(f"{prefix}.input_layernorm", hidden)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        linear(f"{attention}.q_a_proj", q_rank, hidden)
        norm(f"{attention}.q_a_layernorm", q_rank)
        linear(f"{attention}.q_b_proj", heads * (nope + rope), q_rank)
        linear(f"{attention}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
        norm(f"{attention}.kv_a_layernorm", kv_rank)
        linear(f"{attention}.kv_b_proj", heads * (nope + value), kv_rank)
        linear(f"{attention}.o_proj", hidden, heads * value)
        if "index_topk" in config:
            indexer, index_dim = f"{attention}.indexer", config["index_head_dim"]
            linear(f"{indexer}.wq_b", config["index_n_heads"] * index_dim, q_rank)
            linear(f"{indexer}.wk", index_dim, hidden)
            linear(f"{indexer}.weights_proj", config["index_n_heads"], hidden)
            # SGLang keeps this LayerNorm in fp32, unlike every other norm.
            weights[f"{indexer}.k_norm.weight"] = torch.ones(index_dim)
            weights[f"{indexer}.k_norm.bias"] = torch.zeros(index_dim)
        linear(f"{mlp}.gate_proj", config["intermediate_size"], hidden)
        linear(f"{mlp}.up_proj", config["intermediate_size"], hidden)
        linear(f"{mlp}.down_proj", hidden, config["intermediate_size"])
    return weights


def write_tiny_model(
    path: str | os.PathLike[str],
    *,
    layers: int = 2,
    index_topk: int = 64,
    seed: int = 0,
    nsa: bool = True,
    max_position_embeddings: int = 8192,
    architecture: str = DEEPSEEK,
) -> Path:
    """Write config.json and model.safetensors to the directory ``path`` and return it; same arguments, same bytes.

    ``nsa=False`` gives a DeepSeek-V3 model, which has no indexer; ``architecture`` is as in ``tiny_config``, and so are
    the errors.
    """
    from safetensors.torch import save_file

    config = tiny_config(
        layers=layers,
        index_topk=index_topk,
        nsa=nsa,
        max_position_embeddings=max_position_embeddings,
        architecture=architecture,
    )
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tiny_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: write a tiny model and print where."""
    parser = argparse.ArgumentParser(prog="python -m cp_shared_kv_cpu.model", description=main.__doc__)
    parser.add_argument("path", help="directory to write, created when missing")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--index-topk", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-position-embeddings", type=int, default=8192)
    parser.add_argument("--architecture", choices=tuple(MODEL_TYPES), default=DEEPSEEK)
    parser.add_argument("--no-nsa", dest="nsa", action="store_false", help="DeepSeek-V3, with no indexer")
    options = vars(parser.parse_args(argv))
    try:
        print(write_tiny_model(options.pop("path"), **options))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
