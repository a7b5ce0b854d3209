"""Each kernel reference against the formula of its kernel, written out as loops in float64."""

from __future__ import annotations

import math

import pytest
import torch

from cp_shared_kv_cpu import kernels

PAGE = 64


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive_logit(q: torch.Tensor, k: torch.Tensor, scale: float, weights: torch.Tensor) -> float:
    """One indexer score: q (H, D), k (D,), weights (H,)."""
    total = 0.0
    for head in range(q.shape[0]):
        dot = sum(a * b for a, b in zip(q[head].double().tolist(), k.double().tolist(), strict=True))
        total += max(dot, 0.0) * float(weights[head])
    return total * scale


class TestMqaLogits:
    def test_contiguous_keys_follow_the_formula_within_their_range(self):
        q, k, scale, weights = fp8(3, 2, 128), fp8(7, 128, seed=1), normal(7, seed=2).abs(), normal(3, 2, seed=3)
        start, end = torch.tensor([0, 2, 3]), torch.tensor([7, 5, 3])
        logits = kernels.fp8_mqa_logits(q, (k, scale), weights, start.int(), end.int(), clean_logits=True)
        assert logits.shape == (3, 7)
        assert logits.dtype == torch.float32
        for row in range(3):
            for column in range(7):
                if start[row] <= column < end[row]:
                    expected = naive_logit(q[row], k[column], float(scale[column]), weights[row])
                    assert float(logits[row, column]) == pytest.approx(expected, rel=1e-6, abs=1e-9)
                else:
                    assert float(logits[row, column]) == -math.inf

    def test_cells_outside_the_range_are_poisoned_when_not_cleaned(self):
        logits = kernels.fp8_mqa_logits(
            fp8(1, 2, 128),
            (fp8(4, 128), torch.ones(4)),
            torch.ones(1, 2),
            torch.tensor([1]),
            torch.tensor([3]),
            clean_logits=False,
        )
        assert logits.isnan().tolist() == [[True, False, False, True]]

    @pytest.mark.parametrize("keys", [4, 5, 7])
    def test_rows_begin_at_16_bytes_whatever_their_length(self, keys: int):
        logits = kernels.fp8_mqa_logits(
            fp8(2, 2, 128),
            (fp8(keys, 128), torch.ones(keys)),
            torch.ones(2, 2),
            torch.zeros(2, dtype=torch.int32),
            torch.full((2,), keys),
        )
        assert logits.shape == (2, keys)
        assert logits.stride(0) % 4 == 0
        assert logits.isfinite().all()

    def test_scores_do_not_depend_on_the_grouping_of_rows(self):
        q, k, scale, weights = fp8(64, 2, 128), fp8(300, 128, seed=1), normal(300).abs(), normal(64, 2)
        start, end = torch.zeros(64, dtype=torch.int32), torch.full((64,), 300, dtype=torch.int32)
        whole = kernels.fp8_mqa_logits(q, (k, scale), weights, start, end)
        for row in (0, 31, 63):
            one = slice(row, row + 1)
            alone = kernels.fp8_mqa_logits(q[one], (k, scale), weights[one], start[one], end[one])
            assert torch.equal(alone[0], whole[row])

    def test_a_range_beyond_the_keys_is_refused(self):
        with pytest.raises(ValueError, match="end 5 beyond 4 keys"):
            kernels.fp8_mqa_logits(
                fp8(1, 1, 128), (fp8(4, 128), torch.ones(4)), torch.ones(1, 1), torch.tensor([0]), torch.tensor([5])
            )

    def test_paged_keys_follow_the_formula_on_partly_filled_pages(self):
        pages = 4
        buf = torch.randint(0, 256, (pages, PAGE * 132), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
        lengths, table = [0, 1, PAGE, PAGE + 3], torch.tensor([[1, 0], [3, 0], [2, 0], [2, 1]], dtype=torch.int32)
        keys: dict[tuple[int, int], torch.Tensor] = {}
        for page in range(pages):
            for offset in range(PAGE):
                key = fp8(128, seed=page * PAGE + offset)
                keys[page, offset] = key
                buf[page, offset * 128 : offset * 128 + 128] = key.view(torch.uint8)
                at = PAGE * 128 + offset * 4
                buf[page, at : at + 4] = torch.tensor([1.0 + page + offset / 64]).view(torch.uint8)
        q, weights = fp8(4, 1, 2, 128, seed=9), normal(4, 2)
        logits = kernels.fp8_paged_mqa_logits(
            q,
            buf.view(pages, PAGE, 1, 132),
            weights,
            torch.tensor(lengths, dtype=torch.int32)[:, None],
            table,
            None,
            2 * PAGE,
            clean_logits=False,
        )
        assert logits.shape == (4, 2 * PAGE)
        for row, length in enumerate(lengths):
            assert logits[row, length:].isnan().all()
            for position in {0, length // 2, length - 1} if length else set():
                page, offset = int(table[row, position // PAGE]), position % PAGE
                expected = naive_logit(q[row, 0], keys[page, offset], 1.0 + page + offset / 64, weights[row])
                assert float(logits[row, position]) == pytest.approx(expected, rel=1e-6, abs=1e-9)

    def test_a_context_beyond_the_block_table_is_refused(self):
        with pytest.raises(ValueError, match="context 65"):
            kernels.fp8_paged_mqa_logits(
                fp8(1, 1, 2, 128),
                torch.zeros(2, PAGE, 1, 132, dtype=torch.uint8),
                torch.ones(1, 2),
                torch.tensor([[65]]),
                torch.tensor([[1]]),
                None,
                128,
            )

    def test_more_than_one_query_token_a_request_is_refused(self):
        with pytest.raises(ValueError, match="one query token"):
            kernels.fp8_paged_mqa_logits(
                fp8(1, 2, 2, 128),
                torch.zeros(1, PAGE, 1, 132, dtype=torch.uint8),
                torch.ones(2, 2),
                torch.tensor([[1]]),
                torch.tensor([[0]]),
                None,
                64,
            )


def naive_topk(score: list[float], start: int, length: int, topk: int) -> list[int]:
    ranked = sorted(range(length), key=lambda position: (-score[start + position], position))
    return sorted(ranked[:topk])


class TestTopk:
    topk = 4

    def test_rows_select_from_their_start_and_pad_short_rows(self):
        score = normal(4, 20)
        lengths, starts = torch.tensor([9, 2, 4, 10]), torch.tensor([3, 0, 7, 10])
        picked = kernels.fast_topk_v2(score, lengths.int(), self.topk, row_starts=starts.int())
        assert picked.dtype == torch.int32
        for row in range(4):
            expected = naive_topk(score[row].tolist(), int(starts[row]), int(lengths[row]), self.topk)
            assert picked[row].tolist() == expected + [-1] * (self.topk - len(expected))

    def test_ties_go_to_the_lower_position_whatever_the_row_length(self):
        for length in (5, 17, 300):
            picked = kernels.fast_topk_v2(torch.zeros(1, length), torch.tensor([length]), self.topk)
            assert picked.tolist() == [[0, 1, 2, 3]]

    def test_unspecified_cells_behind_a_row_are_never_read(self):
        score = torch.tensor([[math.nan, 1.0, 5.0, 2.0, 4.0, 3.0, math.nan]])
        assert kernels.fast_topk_v2(score, torch.tensor([5]), 4, torch.tensor([1])).tolist() == [[1, 2, 3, 4]]
        with pytest.raises(ValueError, match="NaN inside a row"):
            kernels.fast_topk_v2(score, torch.tensor([6]), 4, torch.tensor([1]))

    def test_a_short_row_reads_no_score_at_all(self):
        score = torch.full((1, 4), math.nan)
        assert kernels.fast_topk_v2(score, torch.tensor([3]), self.topk).tolist() == [[0, 1, 2, -1]]

    def test_a_row_beyond_the_scores_is_refused(self):
        with pytest.raises(ValueError, match="beyond the 8 columns"):
            kernels.fast_topk_v2(torch.zeros(1, 8), torch.tensor([6]), self.topk, torch.tensor([3]))

    def test_mismatched_lengths_are_refused(self):
        with pytest.raises(ValueError, match="2 rows of scores, but 1 lengths"):
            kernels.fast_topk_v2(torch.zeros(2, 8), torch.tensor([6]), self.topk)

    def test_positions_become_slots_of_the_right_request(self):
        score = normal(5, 9, seed=2)
        lengths = torch.tensor([7, 9, 2, 6, 8])
        table = torch.arange(100, 118).view(2, 9).int()
        slots = kernels.fast_topk_transform_fused(score, lengths, table, torch.tensor([0, 2, 5]), self.topk)
        for row in range(5):
            request = 0 if row < 2 else 1
            expected = [int(table[request, p]) for p in naive_topk(score[row].tolist(), 0, int(lengths[row]), 4)]
            assert slots[row].tolist() == expected + [-1] * (4 - len(expected))

    def test_rows_that_belong_to_no_request_are_refused(self):
        with pytest.raises(ValueError, match="1 table rows and 3 score rows"):
            kernels.fast_topk_transform_fused(
                torch.zeros(3, 8), torch.tensor([1, 1, 1]), torch.zeros(1, 8).int(), torch.tensor([0, 2]), self.topk
            )

    def test_a_position_beyond_the_table_selects_nothing(self):
        # The rows that pad a CP batch reach past the table; their outputs are dropped.
        slots = kernels.fast_topk_transform_fused(
            torch.zeros(1, 8), torch.tensor([3]), torch.tensor([[7, 8]]).int(), torch.tensor([0, 1]), self.topk
        )
        assert slots.tolist() == [[7, 8, -1, -1]]

    def test_ragged_adds_the_offset_to_valid_entries_only(self):
        score, lengths = normal(2, 9), torch.tensor([9, 2])
        picked = kernels.fast_topk_transform_ragged_fused(score, lengths, torch.tensor([50, 60]), self.topk)
        assert picked[0].tolist() == [50 + p for p in naive_topk(score[0].tolist(), 0, 9, 4)]
        assert picked[1].tolist() == [60, 61, -1, -1]


class TestJitTopk:
    """SGLang's own top-k kernels, which take page tables and write into a given tensor."""

    topk = 4

    def paged(self, score: torch.Tensor, lengths: list[int], table: list[list[int]]) -> list[list[int]]:
        out = torch.full((len(lengths), self.topk), -7, dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        plan = kernels.plan_topk_v2(seq_lens)
        kernels.topk_transform_paged_v2(score, seq_lens, torch.tensor(table, dtype=torch.int32), out, PAGE, plan)
        return out.tolist()

    def test_positions_become_slots_of_the_pages_of_the_row(self):
        score = normal(3, 3 * PAGE, seed=3)
        lengths, table = [2 * PAGE + 9, 3, 0], [[5, 2, 9], [7, 0, 0], [1, 1, 1]]
        slots = self.paged(score, lengths, table)
        for row, length in enumerate(lengths):
            best = naive_topk(score[row].tolist(), 0, length, self.topk)
            expected = [table[row][p // PAGE] * PAGE + p % PAGE for p in best]
            assert slots[row] == expected + [-1] * (self.topk - len(expected))

    def test_positions_beyond_the_table_select_nothing(self):
        assert self.paged(torch.zeros(1, 2 * PAGE), [PAGE + 1], [[3]])[0] == [3 * PAGE + i for i in range(4)]
        score = torch.zeros(1, 2 * PAGE)
        score[0, PAGE:] = 1
        assert self.paged(score, [2 * PAGE], [[3]])[0] == [-1] * 4

    @pytest.mark.parametrize(
        ("score", "lengths", "message"),
        [
            (torch.zeros(1, 8), [-4], "top-k"),
            (torch.zeros(2, 8), [1, 1], "2 rows, 1 of pages"),
            (torch.zeros(1, 6), [1], "rows of 16 bytes"),
            (torch.zeros(1, 8).double(), [1], "fp32 scores"),
        ],
    )
    def test_what_the_kernel_cannot_take_is_refused(self, score: torch.Tensor, lengths: list[int], message: str):
        with pytest.raises(ValueError, match=message):
            self.paged(score, lengths, [[0]])

    def test_a_plan_is_written_where_asked(self):
        seq_lens, out = torch.tensor([3, 4], dtype=torch.int32), torch.ones(3, 2, dtype=torch.int32)
        assert kernels.plan_topk_v2(seq_lens, -1, out=out) is out
        assert kernels.plan_topk_v2(seq_lens).shape == (3, 2)

    def test_ragged_rows_select_from_their_start(self):
        score, out = normal(2, 12, seed=4), torch.empty(2, self.topk, dtype=torch.int32)
        lengths, starts = torch.tensor([9, 2]), torch.tensor([2, 5])
        kernels.topk_transform_ragged_v2(
            score, lengths, out_offsets=torch.tensor([50, 60]), out_indices=out, row_starts=starts
        )
        assert out[0].tolist() == [50 + p for p in naive_topk(score[0].tolist(), 2, 9, 4)]
        assert out[1].tolist() == [60, 61, -1, -1]
        with pytest.raises(ValueError, match="negative length"):
            kernels.topk_transform_ragged_v2(score, -lengths, out_offsets=starts, out_indices=out)


def naive_attention(q: torch.Tensor, tokens: torch.Tensor, scale: float, d_v: int) -> torch.Tensor:
    """One query row: q (H, D), tokens (K, D) -> (H, d_v), float64."""
    out = torch.zeros(q.shape[0], d_v, dtype=torch.float64)
    for head in range(q.shape[0]):
        logits = [float(q[head].double() @ token.double()) * scale for token in tokens]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        for weight, token in zip(weights, tokens, strict=True):
            out[head] += weight / sum(weights) * token[:d_v].double()
    return out


class TestFlashMla:
    def test_sparse_attention_follows_the_formula_and_ignores_padding(self):
        rows, tokens = 70, 12  # more rows than one block of the reference
        q = normal(rows, 2, 576).bfloat16()
        kv = normal(tokens, 1, 576, seed=1).bfloat16()
        indices = torch.randint(0, tokens, (rows, 1, 5), generator=torch.Generator().manual_seed(2)).int()
        indices[3, 0, 2:] = -1
        indices[69, 0, 0] = tokens  # beyond the tokens: ignored too
        out, max_logits, lse = kernels.flash_mla_sparse_fwd(q, kv, indices, 0.05, 512)
        assert out.shape == (rows, 2, 512)
        assert out.dtype == torch.bfloat16
        for row in (0, 3, 64, 69):
            valid = [int(i) for i in indices[row, 0] if 0 <= i < tokens]
            expected = naive_attention(q[row], kv[valid, 0], 0.05, 512)
            torch.testing.assert_close(out[row].double(), expected, rtol=1e-2, atol=1e-2)
            logits = [float(q[row, 0].double() @ kv[i, 0].double()) * 0.05 for i in valid]
            assert float(max_logits[row, 0]) == pytest.approx(max(logits), rel=1e-5)
            assert float(lse[row, 0]) == pytest.approx(math.log(sum(map(math.exp, logits))), rel=1e-5)

    def test_a_query_without_tokens_gives_zeros(self):
        out, _, lse = kernels.flash_mla_sparse_fwd(
            normal(1, 2, 576).bfloat16(), normal(3, 1, 576).bfloat16(), torch.full((1, 1, 4), -1).int(), 1.0
        )
        assert not out.any()
        assert (lse == math.inf).all()

    def test_indices_beyond_the_length_of_a_row_are_ignored(self):
        kv = normal(5, 1, 576).bfloat16()
        q, indices = normal(2, 2, 576, seed=1).bfloat16(), torch.tensor([[[0, 3, 4]], [[2, 1, 0]]])
        cut, _, _ = kernels.flash_mla_sparse_fwd(q, kv, indices, 0.1, topk_length=torch.tensor([1, 2]))
        expected, _, _ = kernels.flash_mla_sparse_fwd(q, kv, torch.tensor([[[0, -1, -1]], [[2, 1, -1]]]), 0.1)
        assert torch.equal(cut, expected)

    def test_an_attention_sink_is_refused(self):
        with pytest.raises(ValueError, match="no attention sink"):
            kernels.flash_mla_sparse_fwd(
                normal(1, 2, 576), normal(1, 1, 576), torch.zeros(1, 1, 1), 0.1, attn_sink=torch.zeros(2)
            )

    def test_unwritten_slots_never_leak_through_padding(self):
        kv = torch.full((3, 1, 576), math.nan).bfloat16()
        kv[2] = 1.0
        out, _, _ = kernels.flash_mla_sparse_fwd(normal(1, 2, 576).bfloat16(), kv, torch.tensor([[[2, -1, 9]]]), 0.1)
        assert (out == 1.0).all()

    def test_dequantisation_reads_the_656_byte_layout(self):
        raw = torch.zeros(2, 656, dtype=torch.uint8)
        values, scales, rope = fp8(512), [0.5, 2.0, 0.25, 3.0], normal(64).bfloat16()
        raw[1, :512] = values.view(torch.uint8)
        raw[1, 512:528] = torch.tensor(scales).view(torch.uint8)
        raw[1, 528:] = rope.view(torch.uint8)
        token = kernels.dequantize_mla(raw.view(torch.float8_e4m3fn)[:, None])[1]
        assert token.dtype == torch.bfloat16
        for at in range(512):
            assert token[at] == torch.tensor(float(values[at].float()) * scales[at // 128]).bfloat16()
        assert torch.equal(token[512:], rope)

    def test_dequantisation_refuses_another_width(self):
        with pytest.raises(ValueError, match="656 bytes, not 576"):
            kernels.dequantize_mla(torch.zeros(1, 576, dtype=torch.uint8))

    @pytest.mark.parametrize("is_fp8", [True, False])
    def test_paged_attention_reads_slots_of_the_cache(self, is_fp8: bool):
        if is_fp8:
            cache = torch.zeros(3 * PAGE, 656, dtype=torch.uint8)
            cache[:, :512] = fp8(3 * PAGE, 512).view(torch.uint8)
            cache[:, 512:528] = (normal(3 * PAGE, 4).abs() + 0.1).view(torch.uint8)
            cache[:, 528:] = normal(3 * PAGE, 64).bfloat16().view(torch.uint8)
            dequantised = kernels.dequantize_mla(cache)
            k_cache = cache.view(torch.float8_e4m3fn).view(3, PAGE, 1, 656)
        else:
            dequantised = normal(3 * PAGE, 576).bfloat16()
            k_cache = dequantised.view(3, PAGE, 1, 576)
        q = normal(2, 1, 3, 576, seed=4).bfloat16()
        indices = torch.tensor([[[70, 3, 190, -1]], [[5, -1, 3 * PAGE, 64]]], dtype=torch.int32)
        out, lse = kernels.flash_mla_with_kvcache(
            q=q,
            k_cache=k_cache,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            softmax_scale=0.03,
            is_fp8_kvcache=is_fp8,
            indices=indices,
        )
        assert out.shape == (2, 1, 3, 512)
        assert lse.shape == (2, 3, 1)
        for batch, valid in enumerate(([70, 3, 190], [5, 64])):
            expected = naive_attention(q[batch, 0], dequantised[valid], 0.03, 512)
            torch.testing.assert_close(out[batch, 0].double(), expected, rtol=1e-2, atol=1e-2)

    def test_another_cache_layout_is_refused(self):
        with pytest.raises(ValueError, match="V32"):
            kernels.flash_mla_with_kvcache(
                normal(1, 1, 2, 576),
                normal(1, PAGE, 1, 576),
                None,
                None,
                512,
                indices=torch.zeros(1, 1, 1).int(),
                kv_format="V32_NO_ROPE",
            )

    def test_dense_attention_is_refused(self):
        with pytest.raises(ValueError, match="sparse attention only"):
            kernels.flash_mla_with_kvcache(normal(1, 1, 2, 576), normal(1, PAGE, 1, 576), None, None, 512)


class TestHadamard:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("n", [1, 2, 16, 128])
    def test_equals_the_matrix_with_signs_by_parity(self, n: int, dtype: torch.dtype):
        x = normal(3, 2, n).to(dtype)
        matrix = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]).double()
        expected = (x.double() @ matrix * 0.5).to(dtype)
        result = kernels.hadamard_transform(x, scale=0.5)
        assert result.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("n", [0, 3, 96])
    def test_a_size_that_is_no_power_of_two_is_refused(self, n: int):
        with pytest.raises(ValueError, match="not a power of two"):
            kernels.hadamard_transform(torch.zeros(1, n))
