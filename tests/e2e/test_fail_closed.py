"""Shared KV is wholly on or wholly off; a server that cannot be sure stops."""

from __future__ import annotations

import pytest

from cp_shared_kv.releases import installed

from .harness import run
from .prompts import tokens
from .spec import Spec, Step

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

_prompt = tokens(700)
STEPS = (Step("fresh", (_prompt,)), Step("hit", (_prompt + tokens(90),)))


def test_named_plugin_without_flag_turns_itself_on_where_every_requirement_holds() -> None:
    report, stock = run(Spec(STEPS, 2, True, 1024, auto=True)), run(Spec(STEPS, 2, False, 2048))
    assert report.failure is None, f"{report.failure}\n{report.log[-3000:]}"
    assert report.answers == stock.answers
    assert "CP shared KV: on for this server (SGLANG_PLUGINS names cp_shared_kv)" in report.log


def test_switched_off_plugin_leaves_no_trace() -> None:
    report = run(Spec(STEPS, 2, False, 2048))
    assert report.failure is None
    assert "cp_shared_kv" in report.log  # it was loaded
    assert "CP shared KV" not in report.log


@pytest.mark.release
def test_seam_replaced_by_somebody_else_stops_the_server_before_pools_are_built() -> None:
    report = run(Spec(STEPS, 2, True, 1024, foreign_patch=True))
    assert report.failure is not None
    # Already in the launching process, where the module is imported there.
    said = report.log + report.failure
    assert f"already patched: {installed().targets['indexer.store_index_k_cache'].path}" in said
    assert "KV Cache is allocated" not in report.log


def test_ranks_that_allocate_differently_stop_the_server() -> None:
    steps = (STEPS[0], Step("diverge", (tokens(300),), breaks="allocation"))
    report = run(Spec(steps, 2, True, 1024, environ=(("CP_SHARED_KV_CHECK_EVERY", "1"),)))
    assert report.answers.keys() == {"fresh"}
    assert report.failure is not None
    assert "the attention-CP ranks use different pages for the same requests" in report.log
    assert "5 of 5 pages differ from rank 0" in report.log


def test_bad_check_interval_stops_the_launch() -> None:
    report = run(Spec(STEPS, 2, True, 1024, environ=(("CP_SHARED_KV_CHECK_EVERY", "often"),)))
    assert report.failure is not None
    assert "CP_SHARED_KV_CHECK_EVERY='often' must be a whole number of forwards" in report.log + report.failure
