"""Random lives of requests on a group of ranks keep every invariant, and a broken product does not."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from cp_shared_kv_cpu import launch

from .run import run

#: Of one core; the default limit of a test is for a machine that does nothing else.
pytestmark = pytest.mark.timeout(900)

STEPS = 10_000
#: Names as in ``sabotage.BROKEN``, which cannot be imported without SGLang.
BROKEN = (
    "owner of a page",
    "unwritten rows of a new page",
    "index-K is not kept",
    "boundary page is not gathered",
    "boundary page is not kept",
    "kept as another page",
    "surplus in another order",
    "ranks of the gather",
    "origin of KV positions",
    "pairs of index-K pages",
    "a page is handed out twice",
    "a freed page is lost",
    "ranks free in another order",
)
#: Each must be met this often for the steps to be worth their name.
RULES = {
    "add": 1000,
    "prefill": 1000,
    "deliver": 500,
    "finish": 300,
    "interrupt": 300,
    "evict": 200,
    "idle": 200,
    "flush": 10,
}
SEEN = {
    "cached prefix": 300,
    "prefix ends inside a page": 200,
    "gathered": 500,
    "gathered with padding": 200,
    "broadcast of a surplus": 50,
    "several requests in a batch": 200,
    "evicted to make room": 20,
    "page freed": 1000,
    "page arrived": 300,
    "piece without pages": 100,
    "decode has a prefix": 50,
    "refused: decode lacks a page": 50,
    "abort: between chunks": 10,
    "abort: when computed": 10,
    "abort, cached: between chunks": 10,
    "abort, cached: when computed": 10,
    "retract: between chunks": 10,
    "retract: when computed": 10,
}

InSglang = Callable[..., Any]


@pytest.fixture(scope="module")
def in_sglang() -> Iterator[InSglang]:
    """Runs a function in a process that can import SGLang; returns its result or raises its error."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=launch.apply_cpu_environment, initargs=(1,)) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="module")
def report(in_sglang: InSglang) -> dict[str, Any]:
    return in_sglang(run, STEPS, 0)


def test_ten_thousand_steps_keep_every_invariant(report: dict[str, Any]) -> None:
    print(report)
    assert report["steps"] == sum(report["rules"].values()) >= STEPS


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_applied_often(report: dict[str, Any], rule: str) -> None:
    assert report["rules"].keys() == RULES.keys()
    assert report["rules"][rule] >= RULES[rule]


@pytest.mark.parametrize("situation", SEEN)
def test_each_situation_is_met(report: dict[str, Any], situation: str) -> None:
    assert report["seen"].get(situation, 0) >= SEEN[situation]


def what_is_found(broken: str) -> str:
    """The error by which a product that is broken so is found; ``""`` for none."""
    from .sabotage import BROKEN

    with BROKEN[broken]():
        try:
            run(2000, 0, shrink=False)
        except AssertionError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_product_is_found(in_sglang: InSglang, broken: str) -> None:
    assert in_sglang(what_is_found, broken)


def sabotage_names() -> list[str]:
    from .sabotage import BROKEN

    return list(BROKEN)


def test_every_sabotage_is_tried(in_sglang: InSglang) -> None:
    assert in_sglang(sabotage_names) == list(BROKEN)


def kernel_beside_stand_in(cases: list[tuple[list[int], list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Slots by SGLang's kernel, interpreted, and by its stand-in."""
    import torch
    from sglang.srt.utils import next_power_of_2

    from .bookkeeping import REPLACED, ExtendKernel, install

    if not REPLACED:
        install(64)

    free = torch.tensor([9, 4, 7, 2, 8, 1])
    found = []
    for prefix_lens, seq_lens, last in cases:
        slots = [torch.full((sum(seq_lens) - sum(prefix_lens),), -1) for _ in range(2)]
        for kernel, out in zip((REPLACED[0], ExtendKernel()), slots, strict=True):
            arguments = (torch.tensor(prefix_lens), torch.tensor(seq_lens), torch.tensor(last), free, out)
            kernel[(len(seq_lens),)](*arguments, next_power_of_2(len(seq_lens)), 64)
        found.append((slots[0].tolist(), slots[1].tolist()))
    return found


def test_the_stand_in_for_the_allocation_kernel_hands_out_the_kernels_slots(in_sglang: InSglang) -> None:
    cases = [
        ([0], [1], [-1]),
        ([0], [64], [-1]),
        ([0], [200], [-1]),
        ([30], [31], [350]),
        ([30], [64], [350]),
        ([30, 0, 128], [200, 64, 129], [350, -1, 447]),
        ([64, 65], [130, 70], [383, 640]),
    ]
    for kernel, stand_in in in_sglang(kernel_beside_stand_in, cases):
        assert kernel == stand_in
        assert -1 not in kernel
