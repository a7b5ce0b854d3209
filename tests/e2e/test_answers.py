"""Answers of shared KV are those of stock SGLang, to the last bit of every logprob, and so are the pools' bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from .facts import chunks_may_end_in_a_page, cp_sizes
from .harness import run
from .prompts import CONCURRENT_STEPS, ODD_STEPS, STEPS
from .spec import Report, Spec

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ALL = tuple(
    step
    for step in STEPS + ODD_STEPS + CONCURRENT_STEPS
    if step.chunk is None or step.chunk % 64 == 0 or chunks_may_end_in_a_page()
)
#: Steps after which two runs must have cached the same.
IN_STEP = {step.name for step in STEPS + ODD_STEPS} & {step.name for step in ALL}
LOGICAL = 6144

#: What every release is run on; the rest on the primary one.
RELEASE = ("bfloat16", cp_sizes()[0])

SHARED = [
    pytest.param(
        Spec(ALL, cp, True, LOGICAL // cp, kv, dump=True),
        id=f"{kv}-cp{cp}",
        marks=[pytest.mark.release] if (kv, cp) == RELEASE else [],
    )
    for kv in ("bfloat16", "fp8_e4m3")
    for cp in cp_sizes()
]


def stock_like(spec: Spec) -> Spec:
    """Stock prefill CP with the same logical capacity, so that both cache the same."""
    return Spec(spec.steps, spec.cp_size, False, LOGICAL, spec.kv, dump=True)


def assert_same_answers(report: Report, reference: Report) -> None:
    assert report.failure is None, f"{report.failure}\n{report.log[-3000:]}"
    assert reference.failure is None, f"{reference.failure}\n{reference.log[-3000:]}"
    assert report.answers.keys() == reference.answers.keys()
    for name, answers in report.answers.items():
        for answer, expected in zip(answers, reference.answers[name], strict=True):
            assert answer.error is None, f"{name}: {answer.error}"
            assert answer.ids == expected.ids, name
            assert answer.logprobs == expected.logprobs, name
        if name in IN_STEP:
            cached = [answer.cached for answer in report.prefill_answers[name]]
            assert cached == [answer.cached for answer in reference.prefill_answers[name]], name


def greatest_difference(report: Report, reference: Report) -> float:
    """Of all logprobs of both runs."""
    return max(
        abs(a - b)
        for name, answers in report.answers.items()
        for answer, expected in zip(answers, reference.answers[name], strict=True)
        for a, b in zip(answer.logprobs, expected.logprobs, strict=True)
    )


@pytest.mark.parametrize("spec", SHARED)
def test_logprobs_equal_stock_prefill_cp(spec: Spec, record_property: Callable[[str, object], None]) -> None:
    report, reference = run(spec), run(stock_like(spec))
    assert_same_answers(report, reference)
    record_property("requests compared with stock CP", sum(len(answers) for answers in report.answers.values()))
    record_property("greatest logprob difference to stock CP", greatest_difference(report, reference))


@pytest.mark.parametrize(
    "cp_size", [pytest.param(cp, marks=[pytest.mark.release] if cp == RELEASE[1] else []) for cp in cp_sizes()]
)
def test_logprobs_equal_stock_without_cp(cp_size: int, record_property: Callable[[str, object], None]) -> None:
    # bf16 only: with fp8, stock itself answers differently at CP 1, which batches differently.
    # CP 1 is not limited to one request a batch, which changes nothing for bf16 but the cached-token counts.
    report = run(Spec(ALL, cp_size, True, LOGICAL // cp_size, dump=True))
    reference = run(Spec(ALL, 1, False, LOGICAL))
    assert report.failure is None
    assert reference.failure is None
    for name, answers in report.answers.items():
        expected = reference.answers[name]
        assert [a.ids for a in answers] == [a.ids for a in expected], name
        assert [a.logprobs for a in answers] == [a.logprobs for a in expected], name
    record_property("greatest logprob difference to CP 1", greatest_difference(report, reference))


@pytest.mark.parametrize("spec", SHARED)
def test_each_rank_holds_exactly_its_pages_of_the_unsharded_pool(
    spec: Spec, record_property: Callable[[str, object], None]
) -> None:
    """Every cached page of every layer, after every step; pages that are not owned do not exist, page 0 is untouched.

    The allocators hand out other pages, so pages are told by the tokens that they and those before them hold.
    """
    report, reference = run(spec), run(stock_like(spec))
    compared = 0
    for name, ranks in report.dumps.items():
        oracle = reference.dumps[name][0]
        if name in IN_STEP:
            assert ranks[0]["cached"].keys() == oracle["cached"].keys(), name
        both = sorted(ranks[0]["cached"].keys() & oracle["cached"].keys())
        assert len(both) > 3, name
        pages = np.array([oracle["cached"][tokens][0] for tokens in both])
        for rank, dump in enumerate(ranks):
            shared = np.array([dump["cached"][tokens][0] for tokens in both])
            mine = (shared - 1) % spec.cp_size == rank
            for kind in ("kv", "index"):
                for layer, stock in enumerate(oracle[kind]):
                    held = dump[kind][layer]
                    assert len(held) == (len(stock) - 1) // spec.cp_size + 1
                    same = held[(shared[mine] - 1) // spec.cp_size + 1] == stock[pages[mine]]
                    assert same.all(), (name, kind, layer, rank)
                    compared += len(same)
                    assert not held[0].any(), (name, kind, layer, rank)
    record_property("pages compared with the unsharded pool", compared)


@pytest.mark.parametrize("spec", SHARED)
def test_owners_are_cyclic_along_every_cached_prompt(spec: Spec) -> None:
    """Not where requests with a common prefix run at once: the tree then goes from one's pages on to the other's."""
    seen = 0
    for name in IN_STEP:
        for page, before in run(spec).dumps[name][0]["cached"].values():
            if before:
                assert page % spec.cp_size == (before + 1) % spec.cp_size, name
                seen += 1
    assert seen > 50


@pytest.mark.parametrize("spec", SHARED)
def test_no_forward_asks_the_device_for_page_ids(spec: Spec) -> None:
    for dump in list(run(spec).dumps.values())[-1]:
        assert dump["counters"]["forwards"] > 10
        assert dump["counters"]["host_page_reads"] == 0


def test_without_prefetch_answers_and_bytes_received_are_the_same() -> None:
    cp = cp_sizes()[0]
    spec = Spec(ALL, cp, True, LOGICAL // cp, dump=True)
    report, other = run(spec), run(dataclasses.replace(spec, environ=(("CP_SHARED_KV_PREFETCH", "0"),)))
    assert other.failure is None, f"{other.failure}\n{other.log[-3000:]}"
    assert "prefetch=on" in report.log
    assert "prefetch=off" in other.log
    for name, answers in report.answers.items():
        assert [a.logprobs for a in answers] == [a.logprobs for a in other.answers[name]], name
    last = list(report.dumps)[-1]
    for dump, without in zip(report.dumps[last], other.dumps[last], strict=True):
        assert dump["counters"]["gathered_bytes"] == without["counters"]["gathered_bytes"]


@pytest.mark.parametrize("spec", SHARED)
def test_no_page_is_lost_and_all_ranks_allocate_alike(spec: Spec) -> None:
    report = run(spec)
    for name, ranks in report.dumps.items():
        assert all(dump["free_pages"] == ranks[0]["free_pages"] for dump in ranks), name
        for dump in ranks:
            assert dump["available"] + dump["evictable"] == LOGICAL, name


@pytest.mark.parametrize("spec", SHARED)
def test_memory_per_rank_is_that_of_the_physical_pages_and_the_request_limit_stays(spec: Spec) -> None:
    report, reference = run(spec), run(stock_like(spec))
    dump, oracle = list(report.dumps.values())[-1][0], list(reference.dumps.values())[-1][0]
    per_page = oracle["pool_bytes"] // (LOGICAL // 64 + 1)
    assert dump["pool_bytes"] == per_page * (LOGICAL // spec.cp_size // 64 + 1)
    assert dump["max_requests"] == oracle["max_requests"]


@pytest.mark.parametrize("spec", SHARED)
def test_ranks_together_send_each_page_once(spec: Spec) -> None:
    report = run(spec)
    ranks = list(report.dumps.values())[-1]
    prompts = [prompt for step in spec.steps for prompt in step.prompts]
    pages = sum(-(-len(prompt) // 64) for prompt in prompts)
    assert sum(dump["counters"]["kv_pages_sent"] for dump in ranks) == pages
    assert sum(dump["counters"]["state_pages_sent"] for dump in ranks) == pages
    per_page = {"bfloat16": 64 * 576 * 2, "fp8_e4m3": 64 * 656}[spec.kv] * 2
    assert sum(dump["counters"]["kv_bytes_sent"] for dump in ranks) == pages * per_page
    assert sum(dump["counters"]["state_bytes_sent"] for dump in ranks) == pages * 64 * 132 * 2
    assert all(dump["counters"]["transfers_refused"] == 0 for dump in ranks)


def test_overlap_scheduling_changes_nothing() -> None:
    spec = Spec(STEPS + CONCURRENT_STEPS, 2, True, LOGICAL // 2, overlap=True)
    report, reference = run(spec), run(Spec(ALL, 2, False, LOGICAL, dump=True))
    assert report.failure is None, f"{report.failure}\n{report.log[-3000:]}"
    for name, answers in report.answers.items():
        assert [a.logprobs for a in answers] == [a.logprobs for a in reference.answers[name]], name


def test_without_chunking_answers_equal_stock() -> None:
    report = run(Spec(STEPS + CONCURRENT_STEPS[:2], 2, True, LOGICAL // 2, chunk=-1, decode_plugin=True))
    reference = run(Spec(ALL, 2, False, LOGICAL, dump=True))
    assert report.failure is None, f"{report.failure}\n{report.log[-3000:]}"
    for name, answers in report.answers.items():
        # Chunk boundaries change the split of a prompt over ranks, never its tokens.
        assert [a.ids for a in answers] == [a.ids for a in reference.answers[name]], name
    assert "CP shared KV: on for this decode server (SGLANG_PLUGINS names cp_shared_kv)" in report.decode_log
