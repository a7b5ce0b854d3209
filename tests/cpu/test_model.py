"""The tiny checkpoint: what it holds, that it is deterministic, and that bad sizes are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cp_shared_kv_cpu import model


def test_same_arguments_give_the_same_bytes_and_another_seed_gives_others(tmp_path: Path):
    first, second, other = (model.write_tiny_model(tmp_path / n, seed=s) for n, s in (("a", 3), ("b", 3), ("c", 4)))
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_nsa_model_has_the_sizes_that_the_kernels_fix(tmp_path: Path):
    path = model.write_tiny_model(tmp_path / "m", layers=3, index_topk=32)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV32ForCausalLM"]
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["index_head_dim"]) == (512, 64, 128)
    assert (config["index_topk"], config["num_hidden_layers"], config["first_k_dense_replace"]) == (32, 3, 3)
    weights = load_file(path / "model.safetensors")
    assert sum(name.endswith("indexer.wk.weight") for name in weights) == 3
    assert tuple(weights["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"].shape) == (576, 128)
    assert not [name for name in weights if "experts" in name]


def test_glm_model_rotates_interleaved_pairs_and_has_the_same_weights(tmp_path: Path):
    glm = model.write_tiny_model(tmp_path / "glm", architecture="GlmMoeDsaForCausalLM")
    deepseek = model.write_tiny_model(tmp_path / "deepseek")
    config, other = (json.loads((path / "config.json").read_text()) for path in (glm, deepseek))
    assert (config.pop("architectures"), config.pop("model_type")) == (["GlmMoeDsaForCausalLM"], "glm_moe_dsa")
    assert config.pop("indexer_rope_interleave") is True
    assert config.items() <= other.items()
    assert (glm / "model.safetensors").read_bytes() == (deepseek / "model.safetensors").read_bytes()


def test_an_unknown_architecture_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="must be one of DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM, not Llama"):
        model.write_tiny_model(tmp_path / "m", architecture="Llama")


def test_plain_model_has_no_indexer(tmp_path: Path):
    path = model.write_tiny_model(tmp_path / "m", nsa=False)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert not [name for name in config if name.startswith("index_")]
    assert not [name for name in load_file(path / "model.safetensors") if "indexer" in name]


@pytest.mark.parametrize("size", ["layers", "index_topk", "max_position_embeddings"])
def test_a_size_below_one_is_refused(size: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"{size} must be at least 1, not 0"):
        model.write_tiny_model(tmp_path / "m", **{size: 0})


def test_command_line_writes_the_model_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert model.main([str(tmp_path / "m"), "--layers", "1", "--no-nsa"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["num_hidden_layers"] == 1


def test_command_line_names_a_bad_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        model.main([str(tmp_path / "m"), "--layers", "0"])
    assert "layers must be at least 1" in capsys.readouterr().err
