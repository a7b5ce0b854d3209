"""The torch.cuda surface, the seam helper and the rotary embedding, each without touching this process for good."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

from cp_shared_kv_cpu import cuda_surface, dispatch, kernels, seams, stubs


class TestCudaToCpu:
    @pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0), "cpu", torch.device("cpu"), None])
    def test_every_way_to_name_the_device_gives_cpu(self, device: str | torch.device | None):
        with cuda_surface.CudaToCpu():
            made = [torch.zeros(2, device=device), torch.arange(3, device=device), torch.ones(2).to(device=device)]
            if device is not None:
                made.append(torch.ones(2).to(device))
        assert {tensor.device.type for tensor in made} == {"cpu"}

    def test_other_devices_are_left_alone(self):
        with cuda_surface.CudaToCpu():
            assert torch.empty(2, device="meta").device.type == "meta"
        assert cuda_surface.to_cpu("cudalike") == "cudalike"

    def test_pinning_and_cuda_calls_return_the_tensor_itself(self):
        tensor = torch.ones(2)
        with cuda_surface.CudaToCpu():
            assert tensor.cuda() is tensor
            assert tensor.pin_memory() is tensor
            assert not torch.zeros(2, pin_memory=True).is_pinned()

    def test_dtype_conversions_still_happen(self):
        with cuda_surface.CudaToCpu():
            assert torch.ones(2).to("cuda", torch.bfloat16).dtype == torch.bfloat16
            assert torch.ones(2).to(torch.int32).dtype == torch.int32

    def test_events_take_the_arguments_of_cuda_events(self):
        event = cuda_surface.Event(enable_timing=True, blocking=False)
        event.record()
        event.synchronize()


def test_a_tensor_on_device_zero_computes_like_any_other():
    tensor = torch.arange(3.0).as_subclass(dispatch.OnDeviceZero)
    assert tensor.device == torch.device("cpu", 0)
    doubled = tensor[1:] * 2
    assert type(doubled) is torch.Tensor
    assert doubled.tolist() == [2.0, 4.0]


def test_the_indexer_finds_an_index_in_the_device_of_its_queries():
    class Indexer:
        def _get_topk_ragged(self, dual: bool, batch: str, layer: int, q_fp8: torch.Tensor, *rest: str, **named: int):
            return (dual, batch, layer, q_fp8.device.index, q_fp8.tolist(), rest, named)

    dispatch._give_queries_a_device_index(Indexer)
    found = Indexer()._get_topk_ragged(False, "batch", 3, torch.ones(2), "weights", topk_result=1)
    assert found == (False, "batch", 3, 0, [1.0, 1.0], ("weights",), {"topk_result": 1})


def test_a_platform_off_the_cpu_answers_all_else_as_before():
    platform = dispatch.OffCpu(types.SimpleNamespace(is_cpu=lambda: True, is_out_of_tree=lambda: "asked"))
    assert platform.is_cpu() is False
    assert platform.is_out_of_tree() == "asked"


def test_stand_ins_import_every_name_and_run_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "sglang_needs_a_gpu", raising=False)
    stubs.stand_in_for(("sglang_needs_a_gpu",))
    module = sys.modules.pop("sglang_needs_a_gpu")
    with pytest.raises(NotImplementedError, match=r"sglang_needs_a_gpu\.run has no CPU reference"):
        module.run(1)
    with pytest.raises(AttributeError):
        _ = module.__path__
    with pytest.raises(RuntimeError, match="sys was imported before"):
        stubs.stand_in_for(("sys",))


class TestSeams:
    @pytest.fixture
    def owner(self, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
        module = types.ModuleType("seam_owner")
        module.Thing = type("Thing", (), {"method": 1})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "seam_owner", module)
        return module

    def test_replaces_in_a_class_and_returns_what_was_there(self, owner: types.ModuleType):
        assert seams.replace("seam_owner:Thing", "method", 2) == 1
        assert owner.Thing.method == 2

    @pytest.mark.parametrize(("path", "name"), [("seam_owner", "gone"), ("seam_owner:Gone", "x")])
    def test_a_name_that_is_gone_is_an_error(self, owner: types.ModuleType, path: str, name: str):
        with pytest.raises(seams.SeamError, match="does not fit this SGLang"):
            seams.replace(path, name, None)

    def test_a_function_is_replaced_wherever_sglang_imported_it(
        self, owner: types.ModuleType, monkeypatch: pytest.MonkeyPatch
    ):
        owner.run = len  # type: ignore[attr-defined]
        importers = {name: types.ModuleType(name) for name in ("sglang.importer", "sglang.other", "elsewhere")}
        for name, module in importers.items():
            module.run = sum if name == "sglang.other" else len  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)
        seams.replace_everywhere("seam_owner:run", max)
        found = {name: module.run for name, module in importers.items()}
        assert owner.run is max
        assert found == {"sglang.importer": max, "sglang.other": sum, "elsewhere": len}


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("heads", [None, 3])
def test_rotary_embedding_turns_each_pair_by_its_angle(heads: int | None, is_neox_style: bool):
    tokens, rotary_dim, dim = 4, 6, 8
    shape = (tokens, dim) if heads is None else (tokens, heads, dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    angle = torch.randn(tokens, rotary_dim // 2, generator=torch.Generator().manual_seed(1))
    turned = kernels.rotate(x, angle.cos(), angle.sin(), rotary_dim, is_neox_style)
    assert turned.shape == x.shape
    for token in range(tokens):
        for before, after in zip(x[token].view(-1, dim), turned[token].view(-1, dim), strict=True):
            for pair in range(rotary_dim // 2):
                i, j = (pair, pair + rotary_dim // 2) if is_neox_style else (2 * pair, 2 * pair + 1)
                c, s = math.cos(angle[token, pair]), math.sin(angle[token, pair])
                assert float(after[i]) == pytest.approx(float(before[i]) * c - float(before[j]) * s, abs=1e-5)
                assert float(after[j]) == pytest.approx(float(before[j]) * c + float(before[i]) * s, abs=1e-5)
            assert torch.equal(after[rotary_dim:], before[rotary_dim:])


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_fused_store_is_the_default(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool):
    if value is None:
        monkeypatch.delenv("CP_SHARED_KV_CPU_FUSED_STORE", raising=False)
    else:
        monkeypatch.setenv("CP_SHARED_KV_CPU_FUSED_STORE", value)
    assert dispatch.fused_store_enabled() is expected
