"""Prompts that reach every path of prefill CP; the tiny model's vocabulary has 512 tokens."""

from __future__ import annotations

import random

from .spec import Step

_random = random.Random(20)


def tokens(count: int) -> tuple[int, ...]:
    """``count`` token ids, new ones at each call, the same in each process."""
    return tuple(_random.randrange(2, 500) for _ in range(count))


_base, _long, _odd, _odd2 = tokens(700), tokens(1500), tokens(710), tokens(1433)
_mixed = tuple(tokens(n) for n in (300, 150, 700, 40, 1200))

#: One request at a time: fresh, repeated, shared prefixes, batches too short to split, exact pages, chunks.
STEPS: tuple[Step, ...] = (
    Step("fresh 700", (_base,)),
    Step("hit of whole pages", (_base + tokens(90),)),
    Step("hit, tail shorter than the split", (_base[:640] + tokens(3),)),
    *(Step(f"short {n}", (tokens(n),)) for n in (1, 3, 5, 7)),
    Step("exactly four pages", (tokens(256),)),
    Step("chunked 1500", (_long,)),
    Step("chunked hit", (_long + tokens(33),)),
    Step("long prefix, new tail", (_long + tokens(300),)),
)

#: Chunks that end inside a page: the next chunk's prefix is a partial page.
ODD_STEPS: tuple[Step, ...] = (
    Step("chunks of 200", (_odd,), chunk=200),
    Step("chunks of 200, hit", (_odd + tokens(411),), chunk=200),
    Step("chunks of 333", (_odd2,), chunk=333),
    Step("chunks of 100", (_odd2 + tokens(250),), chunk=100),
)

#: Several requests at a time. The order in which they finish, and with it the numbers of the pages that are drawn next,
#: depends on timing, so that two runs may use other pages from here on.
CONCURRENT_STEPS: tuple[Step, ...] = (
    Step("five at once", _mixed),
    Step(
        "four at once, shared prefixes",
        (_mixed[4] + tokens(70), _mixed[2] + tokens(3), _base + tokens(100), tokens(500)),
    ),
    Step("chunks of 333, concurrent", (_odd2 + tokens(40), _odd + tokens(77), tokens(290)), chunk=333),
    Step("after all", (_long + tokens(200),)),
)
