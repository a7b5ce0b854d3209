"""The comparison with stock sees each mechanism broken: exact answers elsewhere are not an accident.

One run, one broken mechanism a step. Prompts are new in each step, chunks of 200 end inside a page, and a broken
mechanism leaves wrong pages in the cache, so later steps use prefixes of their own.
"""

from __future__ import annotations

import pytest

from .harness import run
from .prompts import tokens
from .spec import Spec, Step

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BROKEN = ("kv_gather", "index_gather", "boundary", "state", "position")


def _steps() -> tuple[Step, ...]:
    steps = []
    for name in BROKEN:
        prompt = tokens(900)
        steps.append(Step(f"{name} warm", (prompt,), chunk=200))
        steps.append(Step(f"{name} broken", (prompt + tokens(500),), chunk=200, breaks=name))
        steps.append(Step(f"{name} mended", (tokens(900),), chunk=200))
    return tuple(steps)


STEPS = _steps()


@pytest.mark.parametrize("mechanism", BROKEN)
def test_broken_mechanism_changes_logprobs_and_the_next_request_is_exact_again(mechanism: str) -> None:
    shared, stock = run(Spec(STEPS, 2, True, 8192)), run(Spec(STEPS, 2, False, 16384))
    assert shared.failure is None, f"{shared.failure}\n{shared.log[-3000:]}"
    assert stock.failure is None, f"{stock.failure}\n{stock.log[-3000:]}"

    def difference(step: str) -> float:
        pairs = zip(shared.answers[step][0].logprobs, stock.answers[step][0].logprobs, strict=True)
        return max(abs(a - b) for a, b in pairs)

    assert difference(f"{mechanism} warm") == 0.0
    assert difference(f"{mechanism} broken") > 0.0
    assert difference(f"{mechanism} mended") == 0.0
