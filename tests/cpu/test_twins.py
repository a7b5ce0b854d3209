"""Torch twins against the stock Triton kernels: the same bytes, also for zero tiles, subnormals and saturation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_shared_kv_cpu import triton_twins
from cp_shared_kv_cpu.interpreter import to_fp8
from cp_shared_kv_cpu.releases import installed_row

PAGE = 64
RECORDED = (
    "act_quant None",
    "act_quant ue8m0",
    "get_k",
    "get_s",
    "get_k_and_s",
    "set_k_and_s",
    "quantize_k_cache_separate",
    "quantize_k_cache",
    "dequantize_k_cache_paged",
    "set_mla_kv_buffer bf16",
    "set_mla_kv_buffer fp8",
    "set_mla_kv_buffer_skipping bf16",
    "set_mla_kv_buffer_skipping fp8",
    "get_mla_kv_buffer torch.bfloat16",
    "get_mla_kv_buffer torch.float32",
)
# Those that the installed release has.
HERE = [name for name in RECORDED if name.partition(" ")[0] in installed_row().places]


def assert_same_bytes(actual: Any, expected: Any, what: str) -> None:
    if isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bytes(a, b, f"{what}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
        a, b = (t.contiguous().view(torch.uint8) for t in (actual, expected))
        assert torch.equal(a, b), f"{what}: {int((a != b).sum())} of {a.numel()} bytes differ"
    else:
        assert actual == expected, what


@pytest.mark.parametrize("name", HERE)
def test_twin_equals_the_stock_kernel_bit_for_bit(activated: dict[str, Any], name: str):
    recorded = activated["kernels"][name]
    inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in recorded["inputs"].items()}
    output = triton_twins.TWINS[name.partition(" ")[0]](**inputs)
    assert_same_bytes(output, recorded["output"], f"{name}: result")
    for key, value in recorded["after"].items():
        assert_same_bytes(inputs[key], value, f"{name}: {key}")


def test_every_twin_that_the_release_uses_is_compared(activated: dict[str, Any]):
    assert set(activated["kernels"]) == set(HERE)
    # The place for decode CP does the same as another without it.
    of_the_release = set(triton_twins.TWINS) & set(installed_row().places) - {"set_mla_kv_buffer_dcp_sharded"}
    assert {name.partition(" ")[0] for name in HERE} == of_the_release


def test_fp8_rounds_to_nearest_even_with_carry_and_saturates():
    # 1.9375 carries into the exponent; 1.0625 and 1.1875 are ties; 2**-10 is half of the smallest subnormal.
    values = torch.tensor([1.9375, 1.0625, 1.1875, 460.0, -1e9, 2.0**-9, 2.0**-10, 3 * 2.0**-10, -0.0])
    expected = torch.tensor([2.0, 1.0, 1.25, 448.0, -448.0, 2.0**-9, 0.0, 2.0**-8, -0.0])
    assert torch.equal(to_fp8(values).float(), expected)
    assert to_fp8(torch.tensor([float("nan")])).float().isnan().all()
    assert to_fp8(torch.tensor([float("inf"), -float("inf")])).float().tolist() == [448.0, -448.0]


def test_a_mask_with_a_scalar_condition_is_interpreted(activated: dict[str, Any]):
    assert activated["scalar_mask"] == [[1.0, 2.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_every_fp8_value_survives_the_rounding():
    every = torch.arange(256).to(torch.uint8)
    every = every[every.view(torch.float8_e4m3fn).float().isfinite()]
    assert torch.equal(to_fp8(every.view(torch.float8_e4m3fn).float()).view(torch.uint8), every)


class TestFusedStore:
    def test_writes_plain_fp32_scales_and_rounded_keys_at_the_slots(self):
        key = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
        key[1] = 0
        buf = torch.full((3, PAGE * 132), 7, dtype=torch.uint8)
        loc = torch.tensor([PAGE + 63, 2 * PAGE, 5])
        triton_twins.fused_store_index_k_cache(key, buf, loc, PAGE)
        written = torch.zeros_like(buf, dtype=torch.bool)
        for row, slot in enumerate(loc.tolist()):
            page, offset = divmod(slot, PAGE)
            amax = max(max(abs(v) for v in key[row].float().tolist()), 1e-4)
            keys, scale_at = slice(offset * 128, offset * 128 + 128), PAGE * 128 + offset * 4
            scale = buf[page, scale_at : scale_at + 4].clone().view(torch.float32)
            assert float(scale) == pytest.approx(amax / 448, rel=1e-6)
            stored = buf[page, keys].clone().view(torch.float8_e4m3fn).float()
            assert float((stored * scale - key[row].float()).abs().max()) <= amax / 448 * 16
            assert float(stored.abs().max()) == (448.0 if row != 1 else 0.0)
            written[page, keys] = True
            written[page, scale_at : scale_at + 4] = True
        assert (buf[~written] == 7).all()

    def test_multiplies_by_the_reciprocal_of_the_scale(self):
        # Dividing by the scale would round this tie down, to byte 122.
        key = torch.zeros(1, 128).bfloat16()
        key[0, :2] = torch.tensor([1.078125, 0.80859375])
        buf = torch.zeros(1, PAGE * 132, dtype=torch.uint8)
        triton_twins.fused_store_index_k_cache(key, buf, torch.tensor([0]), PAGE)
        assert buf[0, :3].tolist() == [126, 123, 0]

    def test_a_wrong_dtype_is_refused(self):
        with pytest.raises(TypeError, match="bfloat16 keys"):
            triton_twins.fused_store_index_k_cache(
                torch.zeros(1, 128), torch.zeros(1, PAGE * 132, dtype=torch.uint8), torch.tensor([0])
            )


@pytest.mark.parametrize("slot", [-1, 2 * PAGE])
class TestLocationsOutsideTheBuffer:
    """A GPU kernel writes there without a word; the twins must not let a fault pass."""

    def test_index_store(self, slot: int):
        buf = torch.zeros(2, PAGE * 132, dtype=torch.uint8)
        with pytest.raises(IndexError, match="outside the buffer"):
            triton_twins.set_k_and_s(
                buf, torch.tensor([slot]), torch.zeros(1, 128).to(torch.float8_e4m3fn), torch.ones(1, 1), PAGE
            )

    def test_kv_store_and_load(self, slot: int):
        buffer = torch.zeros(2 * PAGE, 1, 576).bfloat16()
        nope, rope = torch.zeros(1, 1, 512).bfloat16(), torch.zeros(1, 1, 64).bfloat16()
        for function in (triton_twins.set_mla_kv_buffer, triton_twins.get_mla_kv_buffer):
            with pytest.raises(IndexError, match="outside the buffer"):
                function(buffer, torch.tensor([slot]), nope, rope)

    def test_dequantisation(self, slot: int):
        with pytest.raises(IndexError, match="outside the buffer"):
            triton_twins.dequantize_k_cache_paged(
                torch.zeros(2 * PAGE, 1, 656, dtype=torch.uint8), torch.tensor([slot])
            )


def test_a_sequence_longer_than_its_page_list_is_refused():
    with pytest.raises(IndexError, match="65 tokens need 2 pages, the list has 1"):
        triton_twins.get_k(torch.zeros(2, PAGE * 132, dtype=torch.uint8), torch.tensor([1]), 65, PAGE, 128)


@pytest.mark.parametrize("name", ["set_mla_kv_buffer_skipping", "set_mla_kv_buffer_dcp_sharded"])
def test_later_kernels_leave_the_reserved_slot_as_it_is(name: str):
    buffer = torch.zeros(3, 1, 576).bfloat16()
    nope, rope = torch.ones(2, 1, 512).bfloat16(), torch.ones(2, 1, 64).bfloat16()
    triton_twins.TWINS[name](buffer, torch.tensor([0, 2]), nope, rope)
    assert buffer.float().amax((1, 2)).tolist() == [0.0, 0.0, 1.0]
    triton_twins.TWINS[name](buffer, torch.tensor([0, 2]), nope, rope, reserved_skip_index=-1)
    assert buffer.float().amax((1, 2)).tolist() == [1.0, 0.0, 1.0]


def test_a_row_that_does_not_fill_a_slot_is_refused():
    with pytest.raises(ValueError, match="does not fill slots"):
        triton_twins.set_mla_kv_buffer(
            torch.zeros(4, 1, 576).bfloat16(),
            torch.tensor([1]),
            torch.zeros(1, 500).bfloat16(),
            torch.zeros(1, 64).bfloat16(),
        )
