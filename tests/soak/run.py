"""Traffic in rounds. After each round both sides come to rest, are counted, and the answers are compared with stock's.

Stock is a pair without the plugin and without context parallelism, which answers each distinct prompt once, later in
the same round. It is asked for the same answer to the last bit, whatever was cached, batched or chunked here. With fp8
that holds only with chunks of one page: stock attends to unquantized KV in a chunk that has no prefix, so the answer
depends on how far that chunk reaches.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections import deque
from typing import Any

from e2e.host import Pair
from e2e.spec import Answer, Spec
from e2e.stack import books, late_writes

from .report import Report, difference
from .traffic import SIDES, Request, Traffic

#: Of all prefill ranks together, in tokens; small, so that much is evicted.
LOGICAL = 2048
#: SGLang's prefill budget: prompt + 1 + a page must be below the capacity.
LIMIT = LOGICAL - 64 - 2
IN_FLIGHT = 4
#: Chunk sizes ordered amid bf16 traffic; most end inside a page.
CHUNKS = (64, 100, 128, 200, 256, 333)
TIMEOUT_S = 120
#: After this long the router aborts, on the other side, a request that was aborted on one side only.
HALF_ABORTED_S = 8
HANG_S, REST_S = 100, 60
TIMEOUTS = (
    ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", str(TIMEOUT_S)),
    ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", str(TIMEOUT_S)),
)


def shared_spec(cp_size: int, fp8: bool) -> Spec:
    """The pair under test: shared KV on prefill, the plugin on at decode."""
    return Spec(
        (),
        cp_size,
        True,
        LOGICAL // cp_size,
        "fp8_e4m3" if fp8 else "bfloat16",
        chunk=64 if fp8 else 256,
        context_length=4096,
        decode_tokens=4096,
        decode_shared=True,
        environ=TIMEOUTS,
        decode_environ=TIMEOUTS,
    )


def stock_spec(fp8: bool) -> Spec:
    """The pair that knows the answers; one prompt a batch, which matters with fp8."""
    shared = shared_spec(1, fp8)
    return dataclasses.replace(
        shared,
        shared=False,
        decode_shared=False,
        tokens=16384,
        decode_tokens=16384,
        overrides=(("prefill_max_requests", 1),),
    )


@dataclasses.dataclass
class Live:
    """A request that has not ended on both sides."""

    request: Request
    begun: float
    abort_at: float | None
    sent: list[str] = dataclasses.field(default_factory=list)
    aborted: dict[str, float] = dataclasses.field(default_factory=dict)
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)

    def waiting(self) -> list[tuple[str, str]]:
        """Sides that have not answered, as ``(side, rid)``."""
        return [(side, self.request.rid) for side in SIDES if side not in self.answers]


class Stock:
    """Stock's answers; each prompt is computed once."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._room = 0
        self.answers: dict[tuple[int, ...], Answer] = {}

    def learn(self, prompts: set[tuple[int, ...]]) -> None:
        """Have answers to these prompts."""
        asked = {}
        for prompt in sorted(prompts - self.answers.keys()):
            self._room += 1
            asked["decode", rid := f"stock{self._room:08}"] = prompt
            for side in SIDES:
                self._pair.submit(side, rid, prompt, self._room)
        end = time.monotonic() + HANG_S + 5 * len(asked)
        while len(answers := self._pair.wait(list(asked), 1.0)) < len(asked):
            if time.monotonic() > end:
                raise RuntimeError(f"stock has answered {len(answers)} of {len(asked)} prompts")
        for request, answer in answers.items():
            if answer.error is not None:
                raise RuntimeError(f"stock fails a prompt of {len(asked[request])} tokens: {answer.error}")
            self.answers[asked[request]] = answer


class Soak:
    """The run; ``report`` is complete at any time.

    Args:
        pair: the engines under test.
        stock: the pair that knows the answers.
        traffic: what to ask.
        report: where figures go.
        requests: how many to send at most; None for as many as the time allows.
        breaks: mechanism of ``e2e.control.BREAKS`` that is broken while there is traffic, or None.
    """

    def __init__(
        self,
        pair: Pair,
        stock: Pair,
        traffic: Traffic,
        report: Report,
        *,
        requests: int | None = None,
        breaks: str | None = None,
    ) -> None:
        self.pair, self.stock, self.traffic, self.report = pair, Stock(stock), traffic, report
        self.breaks = breaks
        self._random = random.Random(report.options["seed"])  # of its own: requests depend on nothing but the seed
        self._left = math.inf if requests is None else requests
        self._start = {side: [books(rank) for rank in ranks] for side, ranks in self._state().items()}
        self._live: list[Live] = []
        self._ended: list[Live] = []
        self._durations: deque[float] = deque([1.0], maxlen=50)

    def run(self, seconds: float) -> None:
        """Rounds until the time is over, all requests are sent, or something is wrong."""
        begun, over = time.monotonic(), False
        while not over and not self.report.problems:
            self._round(begun + seconds)
            over = self._left <= 0 or time.monotonic() > begun + seconds
            if not self.report.problems:
                self._rest(flush=over or self._random.random() < 0.3)
            self._compare()
            self.report.seconds = time.monotonic() - begun
            print(f"{self.report.seconds:4.0f} s, {self.report.requests} requests", flush=True)

    def _round(self, end: float) -> None:
        planned = [self.traffic.next() for _ in range(int(min(self._random.randrange(10, 40), self._left)))]
        self._left -= len(planned)
        self._order(None)
        last, not_before = time.monotonic(), 0.0
        while self._live or (planned and time.monotonic() < end):
            now = time.monotonic()
            if planned and now < end and now >= not_before and len(self._live) < IN_FLIGHT:
                request = planned.pop(0)
                self._submit(request)
                not_before = now + request.pause_s
            for live in self._live:
                self._send_due(live, now)
                self._abort_due(live, now)
            if self._receive():
                last = time.monotonic()
            dead = [side for side in SIDES if not self.pair.engines.processes[side].is_alive()]
            if dead or time.monotonic() > last + HANG_S:
                waiting = [(*place, live.request.kind, live.aborted) for live in self._live for place in live.waiting()]
                self.report.problems.append(f"no answer in {HANG_S} s, or died ({dead}); without an answer: {waiting}")
                return

    def _order(self, chunk: int | None) -> None:
        self.pair.engines.order("prefill", chunk=chunk, breaks=self.breaks)

    def _submit(self, request: Request) -> None:
        if request.chunk is not None:
            self._order(request.chunk)
        now = time.monotonic()
        abort_at = now + request.abort_after * statistics.median(self._durations) if request.aborts else None
        self._live.append(Live(request, now, abort_at))

    def _send_due(self, live: Live, now: float) -> None:
        request = live.request
        for side in sorted(SIDES, key=lambda side: side != request.first):
            if side not in live.sent and (side == request.first or now >= live.begun + request.gap_s):
                live.sent.append(side)
                self.pair.submit(side, request.rid, request.prompt, request.number)

    def _abort_due(self, live: Live, now: float) -> None:
        due: tuple[str, ...] = ()
        if live.abort_at is not None and now >= live.abort_at and not live.aborted:
            due = live.request.aborts
        elif live.aborted and now > min(live.aborted.values()) + HALF_ABORTED_S:
            due = SIDES
        for side in due:
            if side in live.sent and side not in live.aborted:
                live.aborted[side] = now
                self.pair.abort(side, live.request.rid)

    def _receive(self) -> bool:
        """Take in answers; whether there were any."""
        waiting = [place for live in self._live for place in live.waiting()]
        self.pair.wait(waiting, 0.02)
        found = False
        for live in list(self._live):
            for side, rid in live.waiting():
                if (answer := self.pair.answers.pop((side, rid), None)) is not None:
                    live.answers[side] = answer
                    found = True
            if not live.waiting():
                self._live.remove(live)
                self._end(live)
        return found

    def _end(self, live: Live) -> None:
        report, request = self.report, live.request
        prefill, decode = live.answers["prefill"], live.answers["decode"]
        self._ended.append(live)
        if request.kind == "too long":
            report.rejected += 1
            if decode.error is None or f"maximum allowed length ({LIMIT} tokens)" not in (prefill.error or ""):
                self._wrong(live, f"is {len(request.prompt)} tokens long and is not refused", prefill, decode)
            return
        if decode.error is not None or prefill.error is not None:
            if not live.aborted:
                self._wrong(live, "fails", prefill, decode)
            if decode.error is not None:
                report.aborted += 1
                return
        self._durations.append(time.monotonic() - live.begun)
        report.served += 1
        report.prompt_tokens += len(request.prompt)
        report.new_tokens += len(decode.ids)
        report.longest = max(report.longest, len(request.prompt))
        report.hits += prefill.cached > 0
        report.cached_tokens += prefill.cached

    def _wrong(self, live: Live, what: str, *answers: Answer) -> None:
        request = live.request
        self.report.problems.append(
            f"request {request.number} of seed {self.report.options['seed']} ({request.kind}, {len(request.prompt)} "
            f"tokens, aborted on {list(live.aborted)}) {what}\n  prompt {list(request.prompt)}\n"
            + "\n".join(f"  {answer}" for answer in answers)
        )

    def _compare(self) -> None:
        """Compare all answers since the last time, of either side."""
        served = [
            (live, side, answer)
            for live in self._ended
            for side, answer in live.answers.items()
            if answer.error is None and live.request.kind != "too long"
        ]
        self._ended.clear()
        self.stock.learn({live.request.prompt for live, _, _ in served})
        self.report.prompts = len(self.stock.answers)
        for live, side, answer in served:
            expected = self.stock.answers[live.request.prompt]
            if side == "prefill":  # it answers with the first token
                expected = Answer(expected.ids[:1], expected.logprobs[:1])
            self.report.compared += 1
            if (problem := difference(answer, expected)) is not None:
                self.report.mismatches += 1
                self._wrong(live, f"is answered otherwise on {side}: {problem}", answer, expected)

    def _state(self, **orders: Any) -> dict[str, list[dict[str, Any]]]:
        return {side: self.pair.order(side, **orders) for side in SIDES}

    def _rest(self, flush: bool) -> None:
        """Wait until both sides are as at the start, count their pages and memory, and perhaps empty their caches."""
        report = self.report
        end = time.monotonic() + REST_S
        while True:
            state = self._state()
            found = {side: [books(rank) for rank in ranks] for side, ranks in state.items()}
            if found == self._start:
                break
            if time.monotonic() > end:
                report.problems.append(f"not as at the start: {found}\nat the start: {self._start}")
                lost = [
                    (before["free"] - after["free"]) // 64
                    for side in SIDES
                    for before, after in zip(self._start[side], found[side], strict=True)
                ]
                report.pages_leaked += sum(abs(pages) for pages in lost)
                return
        if late := late_writes(state):
            report.late_writes += len(late)
            report.problems += late
        ranks = [(side, rank) for side, ranks in self._state(at_rest=True).items() for rank in ranks]
        report.rests += 1
        report.evicted_tokens = max(rank["evicted_tokens"] for _, rank in ranks)
        report.memory.append((report.requests, {f"{side}{rank['rank']}": rank["memory_bytes"] for side, rank in ranks}))
        if wrong := {f"{side}{rank['rank']}": rank["wrong_pages"] for side, rank in ranks if rank["wrong_pages"]}:
            report.pages_leaked += sum(wrong.values())
            report.problems.append(f"pages that are not exactly once free or cached: {wrong}")
        if kept := {f"{side}{rank['rank']}": rank["kept"] for side, rank in ranks if any(rank["kept"].values())}:
            report.problems.append(f"kept by the plugin of requests that are over: {kept}")
        if flush:
            report.flushes += 1
            emptied = [rank for ranks in self._state(flush=True).values() for rank in ranks]
            if any(rank["available"] != rank["total"] for rank in emptied):
                report.problems.append(f"available after a flush: {[rank['available'] for rank in emptied]}")
