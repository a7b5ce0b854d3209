"""References of the fused indexer kernels against their formulas, written out as loops in float64."""

from __future__ import annotations

import math

import pytest
import torch

from cp_shared_kv_cpu import indexer_fusion

PAGE = 64
EPS = 1e-6


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def cache() -> torch.Tensor:
    """Rows of [cos | sin] for 8 positions, each pair with an angle of its own."""
    angle = normal(8, 32, seed=9)
    return torch.cat([angle.cos(), angle.sin()], -1)


def turned(row: list[float], cos_sin: torch.Tensor) -> list[float]:
    """The leading 64 values turned in interleaved pairs."""
    result = list(row)
    for pair in range(32):
        c, s = float(cos_sin[pair]), float(cos_sin[32 + pair])
        a, b = row[2 * pair], row[2 * pair + 1]
        result[2 * pair], result[2 * pair + 1] = a * c - b * s, b * c + a * s
    return result


def naive_key(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, cos_sin: torch.Tensor) -> list[float]:
    x = row.double().tolist()
    mean = sum(x) / len(x)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x) + EPS)
    normed = [(v - mean) / deviation * float(w) + float(b) for v, w, b in zip(x, weight, bias, strict=True)]
    return turned(normed, cos_sin)


class TestKeys:
    weight, bias = normal(128, seed=2), normal(128, seed=3)

    def test_are_normed_then_turned_also_from_a_slice(self, cache: torch.Tensor):
        # SGLang passes the columns of a wider projection.
        k = normal(3, 130, seed=1).bfloat16()[:, :128]
        positions = torch.tensor([4, 0, 7])
        key = indexer_fusion.fused_k_indexer_norm_rope(k, self.weight, self.bias, EPS, cache, positions)
        assert key.dtype == torch.bfloat16
        for row, position in enumerate(positions.tolist()):
            expected = naive_key(k[row], self.weight, self.bias, cache[position])
            torch.testing.assert_close(key[row].double(), torch.tensor(expected).double(), rtol=1e-2, atol=1e-2)

    def test_are_rounded_once(self, cache: torch.Tensor):
        k = normal(64, 128, seed=4)
        positions = torch.arange(64) % 8
        exact = indexer_fusion.fused_k_indexer_norm_rope(k, self.weight, self.bias, EPS, cache, positions)
        rounded = indexer_fusion.fused_k_indexer_norm_rope(
            k.bfloat16().float(), self.weight, self.bias, EPS, cache, positions
        )
        half = indexer_fusion.fused_k_indexer_norm_rope(k.bfloat16(), self.weight, self.bias, EPS, cache, positions)
        assert exact.dtype == torch.float32
        assert torch.equal(half, rounded.bfloat16())

    def test_are_stored_quantised_at_their_slots(self, cache: torch.Tensor):
        k = normal(2, 128, seed=5).bfloat16()
        positions, loc = torch.tensor([1, 2]), torch.tensor([PAGE + 3, 5])
        buf = torch.full((2, PAGE * 132), 7, dtype=torch.uint8)
        indexer_fusion.fused_k_indexer_norm_rope_store(k, buf, loc, self.weight, self.bias, EPS, cache, positions, PAGE)
        key = indexer_fusion.fused_k_indexer_norm_rope(k, self.weight, self.bias, EPS, cache, positions).float()
        for row, slot in enumerate(loc.tolist()):
            page, offset = divmod(slot, PAGE)
            at = PAGE * 128 + offset * 4
            scale = buf[page, at : at + 4].clone().view(torch.float32)
            assert float(scale) == pytest.approx(float(key[row].abs().max()) / 448, rel=1e-6)
            stored = buf[page, offset * 128 : offset * 128 + 128].clone().view(torch.float8_e4m3fn).float()
            torch.testing.assert_close(stored * scale, key[row], rtol=0.07, atol=float(scale))
        assert int((buf != 7).sum()) <= 2 * 132


class TestQueries:
    def test_are_turned_and_quantised_with_the_scale_in_the_head_weights(self, cache: torch.Tensor):
        q, weight = normal(3, 2, 128, seed=6).bfloat16(), normal(3, 2, seed=7).bfloat16()
        positions = torch.tensor([3, 3, 6])
        q_fp8, weights = indexer_fusion.fused_q_indexer_rope_first_quant(q, weight, 0.25, cache, positions)
        assert (q_fp8.dtype, q_fp8.shape) == (torch.float8_e4m3fn, (3, 2, 128))
        assert (weights.dtype, weights.shape) == (torch.float32, (3, 2, 1))
        for row, position in enumerate(positions.tolist()):
            for head in range(2):
                expected = turned(q[row, head].double().tolist(), cache[position])
                scale = max(map(abs, expected)) / 448
                assert float(weights[row, head]) == pytest.approx(float(weight[row, head]) * 0.25 * scale, rel=1e-5)
                dequantised = q_fp8[row, head].double() * scale
                torch.testing.assert_close(dequantised, torch.tensor(expected).double(), rtol=0.07, atol=scale)
        assert (q_fp8.float().abs().amax(-1) == 448).all()

    def test_of_zero_have_the_floor_as_scale(self, cache: torch.Tensor):
        zero = torch.zeros(1, 1, 128).bfloat16()
        q_fp8, weights = indexer_fusion.fused_q_indexer_rope_first_quant(
            zero, torch.ones(1, 1), 1.0, cache, torch.tensor([0])
        )
        assert not q_fp8.float().any()
        assert float(weights) == pytest.approx(1e-4 / 448, rel=1e-6)
