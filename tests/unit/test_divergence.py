"""The divergence guard as far as it goes without a group; ranks that do differ are in ``tests/gloo``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cp_shared_kv import divergence
from cp_shared_kv.divergence import CHECK_EVERY_ENV, DivergenceGuard, check_every


class TestCheckEvery:
    @pytest.mark.parametrize(("environ", "every"), [({}, 1), ({CHECK_EVERY_ENV: " "}, 1), ({CHECK_EVERY_ENV: "0"}, 0)])
    def test_is_1_unless_a_number_is_given(self, environ: dict[str, str], every: int):
        assert check_every(environ) == every

    @pytest.mark.parametrize("value", ["-1", "1.5", "often", "1e3"])
    def test_anything_but_a_whole_number_is_refused_with_what_is_accepted(self, value: str):
        with pytest.raises(ValueError, match="must be a whole number of forwards, 0 for no comparison") as refused:
            check_every({CHECK_EVERY_ENV: value})
        assert str(refused.value).startswith(f"CP_SHARED_KV_CHECK_EVERY={value!r}")

    def test_the_environment_of_the_process_is_the_default(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv(CHECK_EVERY_ENV, "7")
        assert check_every() == 7


class TestGuard:
    """With a gather that hears only this rank."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Notes every comparison."""
        said: list[Any] = []

        def all_gather(outputs: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
            said.append(mine.tolist())
            for output in outputs:
                output.copy_(mine)

        monkeypatch.setattr(divergence.dist, "all_gather", all_gather)
        return said

    @staticmethod
    def guard(every: int, world_size: int = 2) -> DivergenceGuard:
        return DivergenceGuard(SimpleNamespace(world_size=world_size, rank_in_group=0, cpu_group=None), every)

    @staticmethod
    def checksum(*forwards: tuple[list[list[int]], list[int], list[int]]) -> int:
        guard = TestGuard.guard(1000)
        for pages, prefix_lens, seq_lens in forwards:
            guard.observe([np.array(part) for part in pages], prefix_lens, seq_lens)
        return guard.checksum

    def test_compares_at_every_nth_forward_only(self, calls: list[Any]):
        guard = self.guard(3)
        for _ in range(7):
            guard.observe([np.array([1, 2])], [0], [65])
        assert [forwards for forwards, _ in calls] == [3, 6]

    @pytest.mark.parametrize(("every", "world_size"), [(0, 2), (1, 1)])
    def test_makes_no_collective_call_where_switched_off_or_alone(self, calls: list[Any], every: int, world_size: int):
        guard = self.guard(every, world_size)
        for _ in range(3):
            guard.observe([np.array([1])], [0], [1])
        assert calls == []

    def test_the_same_forwards_give_the_same_checksum_whatever_the_dtype(self):
        guard = self.guard(1000)
        guard.observe([np.array([1, 2], dtype=np.int32)], [0], [65])
        assert guard.checksum == self.checksum(([[1, 2]], [0], [65]))

    @pytest.mark.parametrize(
        "other",
        [
            [([[1, 3]], [0], [65])],
            [([[2, 1]], [0], [65])],
            [([[1, 2]], [64], [65])],
            [([[1, 2]], [0], [66])],
            [([[1, 2]], [0], [65]), ([[4]], [0], [1])],
        ],
        ids=["page", "order", "prefix", "length", "forward"],
    )
    def test_any_difference_changes_the_checksum(self, other: list[Any]):
        assert self.checksum(*other) != self.checksum(([[1, 2]], [0], [65]))

    def test_an_earlier_difference_is_still_seen_later(self):
        last = ([[9]], [0], [1])
        assert self.checksum(([[1]], [0], [1]), last) != self.checksum(([[2]], [0], [1]), last)
