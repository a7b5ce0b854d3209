"""Figures of a soak, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from e2e.spec import Answer

#: What a scheduler process may grow by in 1,000 requests, and from how many requests after warm-up on that is judged.
GROWTH_LIMIT_BYTES, JUDGED_FROM = 32 << 20, 200
#: Part of the requests after which caches of libraries are taken to be warm.
WARM = 0.3


def difference(answer: Answer, expected: Answer) -> str | None:
    """How an answer differs from stock's, tokens first and then logprobs, which must be equal to the last bit."""
    if answer.ids != expected.ids:
        return f"tokens {answer.ids}, stock {expected.ids}"
    if answer.logprobs != expected.logprobs:
        return f"logprobs {answer.logprobs}, stock {expected.logprobs}"
    return None


@dataclasses.dataclass
class Report:
    """Figures so far.

    Attributes:
        options: what the run was asked for.
        served, aborted, rejected: requests by how they ended on decode.
        compared: answers compared with stock's, those of both sides.
        prompts: distinct ones that stock has computed.
        prompt_tokens, new_tokens: of served requests.
        hits, cached_tokens: served requests that prefill had a prefix of, and the length of those prefixes.
        longest: longest prompt served.
        evicted_tokens, flushes: what left prefill's radix cache, and how often both caches were emptied.
        rests: times that both sides were found as at the start, and their pages counted.
        mismatches: answers that differ from stock's.
        pages_leaked: pages that were lost, or given out twice, of any rank at any rest.
        late_writes: writes to places that the request did not hold any more.
        problems: what is wrong, in words; the first is the one to look at.
        memory: ``(requests ended, {process: bytes})`` at each rest.
        seconds: how long traffic and comparison took.
    """

    options: dict[str, Any]
    served: int = 0
    aborted: int = 0
    rejected: int = 0
    compared: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    hits: int = 0
    cached_tokens: int = 0
    longest: int = 0
    evicted_tokens: int = 0
    flushes: int = 0
    rests: int = 0
    mismatches: int = 0
    pages_leaked: int = 0
    late_writes: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)
    memory: list[tuple[int, dict[str, int]]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        """Requests that have ended."""
        return self.served + self.aborted + self.rejected

    def growth(self) -> tuple[int, dict[str, float]]:
        """Requests between the first and the last sample after warm-up, and each process's bytes per 1,000 of them."""
        samples = [(ended, sizes) for ended, sizes in self.memory if ended >= WARM * self.requests]
        if len(samples) < 3:
            return 0, {}
        ended = [count for count, _ in samples]
        slopes = {
            process: statistics.linear_regression(ended, [sizes[process] for _, sizes in samples]).slope * 1000
            for process in samples[0][1]
        }
        return ended[-1] - ended[0], slopes

    def judge(self) -> None:
        """Add what only the whole run shows to the problems."""
        judged, growth = self.growth()
        if judged >= JUDGED_FROM:
            self.problems += [
                f"{process} grows by {grown / 2**20:.1f} MiB in 1,000 requests"
                for process, grown in growth.items()
                if grown > GROWTH_LIMIT_BYTES
            ]

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        judged, growth = self.growth()
        return {
            **dataclasses.asdict(self),
            "requests": self.requests,
            "growth_over_requests": judged,
            "growth_bytes_per_1000_requests": growth,
        }

    def __str__(self) -> str:
        judged, growth = self.growth()
        grown = ", ".join(f"{process} {bytes_ / 2**20:+.2f}" for process, bytes_ in growth.items()) or "too few samples"
        rows = {
            "requests": f"{self.requests} ({self.served} served, {self.aborted} aborted, {self.rejected} rejected)",
            "tokens": f"{self.prompt_tokens} of prompts, {self.new_tokens} generated; longest prompt {self.longest}",
            "prefix-cache hits": f"{self.hits} requests, {self.cached_tokens} tokens",
            "evicted tokens": f"{self.evicted_tokens}, and {self.flushes} flushes of both sides",
            "answers compared": f"{self.compared}, with {self.prompts} of stock",
            "mismatches": self.mismatches,
            "pages leaked": f"{self.pages_leaked} at {self.rests} rests",
            "late writes": self.late_writes,
            "MiB per 1,000 requests": f"{grown} (over {judged} requests)",
            "seconds": f"{self.seconds:.0f}",
            "options": " ".join(f"{name}={value}" for name, value in self.options.items()),
        }
        return "\n".join(f"{name:24}{value}" for name, value in rows.items())
