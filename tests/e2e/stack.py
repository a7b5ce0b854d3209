"""``Stack``: a pair of engines on which faults are tried, and the proof that a fault did no harm."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from .faults import Holding, Write
from .harness import Pair
from .prompts import tokens
from .spec import Answer, Spec

BOTH = ("prefill", "decode")
#: How long SGLang waits by itself. Requests must end long before that, by END_S, since everybody is told.
TIMEOUT_S, END_S = 120, 45
TIMEOUTS = (
    ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", str(TIMEOUT_S)),
    ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", str(TIMEOUT_S)),
    ("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2"),
    ("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "2"),
)
#: Six pages in three chunks, the same for another question, and a prompt of eight chunks.
PROMPT, OTHER, LONG = tokens(330), tokens(300), tokens(1000)


def spec(*, guarded: bool) -> Spec:
    """CP 2 with shared KV and one decode rank, which is stock unless guarded."""
    return Spec(
        (),
        2,
        True,
        1024,
        chunk=128,
        decode_tokens=2560,
        decode_shared=guarded,
        environ=TIMEOUTS,
        decode_environ=TIMEOUTS,
    )


@dataclasses.dataclass(frozen=True)
class Request:
    """One request, on either side."""

    rid: str
    prompt: tuple[int, ...]
    room: int


class Stack:
    """A pair of engines with the answers and the bookkeeping of an undisturbed start."""

    def __init__(self, spec: Spec) -> None:
        self.pair = Pair(spec)
        self.spec = spec
        self._room = 10_000
        self.start = self.state()
        asked = [self.submit(prompt) for prompt in (PROMPT, OTHER, LONG)]
        self.clean = {request.prompt: self.answer(request, "decode") for request in asked}
        answers = list(self.clean.values())
        assert all(answer is not None and answer.error is None for answer in answers), answers
        assert self.ready(), "the engines do not come to rest"

    def ready(self) -> bool:
        """Empty the cache of prefill and see whether both sides are as at the start."""
        try:
            self.pair.order("prefill", faults=[], hold_batches=False, flush=True)
            return not late_writes(self.assert_at_rest())
        except (RuntimeError, AssertionError):
            return False

    def state(self) -> dict[str, list[dict[str, Any]]]:
        """Bookkeeping of every rank of both sides."""
        return {role: self.pair.order(role) for role in BOTH}

    def submit(self, prompt: tuple[int, ...], *sides: str, request: Request | None = None) -> Request:
        """Send a new request, or one that the other side has got before."""
        if request is None:
            self._room += 1
            request = Request(f"r{self._room}", prompt, self._room)
        for side in sides or BOTH:
            self.pair.submit(side, request.rid, prompt, request.room)
        return request

    def abort(self, request: Request, sides: tuple[str, ...]) -> None:
        """Have the client go away on these sides."""
        for side in sides:
            self.pair.abort(side, request.rid)

    def answer(self, request: Request, side: str) -> Answer | None:
        """Answer to a request on one side, None where it did not end in time."""
        answer: Answer | None = self.pair.wait([(side, request.rid)], END_S).get((side, request.rid))
        return answer

    def wait_for(self, side: str, queue: str) -> None:
        """Wait until a request is in a queue of all ranks of a side."""
        self._until(side, lambda rank: rank["queues"][queue] > 0, queue)

    def wait_for_write(self, rank: int, kind: str = "kv") -> None:
        """Wait until a prefill rank is held in a write."""
        self._until(
            "prefill",
            lambda state: state["rank"] != rank or any(w.end is None and w.kind == kind for w in state["writes"]),
            f"write of {kind}",
        )

    def _until(self, side: str, condition: Any, what: str) -> None:
        end = time.monotonic() + END_S
        while not all(map(condition, ranks := self.pair.order(side))):
            assert time.monotonic() < end, f"no {what} on {side}: {[rank['queues'] for rank in ranks]}"

    def pass_turns(self) -> None:
        """Give whoever would act wrongly the time to do so."""
        for _ in range(10):
            self.state()

    def assert_ended(self, request: Request, *, failed: bool) -> None:
        """The request has ended on both sides: with an error on both, or with an error or the right answer on each."""
        for side in BOTH:
            answer = self.answer(request, side)
            assert answer is not None, f"{request.rid} does not end on {side}"
            if failed:
                assert answer.error is not None, f"{side} answers {answer.ids}"
            elif answer.error is None:
                expected = self.clean[request.prompt]
                assert answer.ids == (expected.ids if side == "decode" else expected.ids[:1])

    def assert_unharmed(self) -> None:
        """Bookkeeping is back at the start, later requests get the right answers, and no write came late."""
        self.assert_at_rest()
        asked = [self.submit(prompt) for prompt in (PROMPT, OTHER)]
        for request in asked:
            for side in BOTH:
                answer, expected = self.answer(request, side), self.clean[request.prompt]
                assert answer is not None, f"a later request does not end on {side}"
                assert answer.error is None, f"a later request fails on {side}: {answer.error}"
                assert answer.ids == (expected.ids if side == "decode" else expected.ids[:1])
            assert answer.logprobs == expected.logprobs, "a later answer's tokens have other logprobs"
        late = late_writes(self.assert_at_rest())
        assert not late, "\n".join(late)

    def assert_at_rest(self) -> dict[str, list[dict[str, Any]]]:
        """Wait until both sides are as at the start; what they are like then."""
        wanted = {role: [books(rank) for rank in ranks] for role, ranks in self.start.items()}
        end = time.monotonic() + END_S
        while True:
            state = self.state()
            found = {role: [books(rank) for rank in ranks] for role, ranks in state.items()}
            if found == wanted:
                return state
            assert time.monotonic() < end, "\n".join(_differences(found, wanted))


def books(rank: dict[str, Any]) -> dict[str, Any]:
    """What must be the same before and after on a rank; cached tokens count as free."""
    rooms = {name: held for name, held in rank["rooms"].items() if name != "failure_records"}
    names = ("rank", "total", "protected", "request_slots", "metadata_slots", "queues", "transfer_threads")
    fixed = {name: rank[name] for name in names if name in rank}
    return {**fixed, "rooms": rooms, "free": rank["available"] + rank["evictable"]}


def _differences(found: dict[str, list[dict[str, Any]]], wanted: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [
        f"{role} rank {rank['rank']}: {name} is {rank[name]}, was {before[name]}"
        for role in found
        for rank, before in zip(found[role], wanted[role], strict=True)
        for name in before
        if rank[name] != before[name]
    ]


def late_writes(state: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Writes that went to pages or a metadata slot that the request did not hold, or no longer held at their end."""
    [decode] = state["decode"]
    holdings = {holding.room: holding for holding in decode["holdings"]}
    return [
        f"{write.kind} write of rank {rank['rank']}, room {write.room}: {problem}"
        for rank in state["prefill"]
        for write in rank["writes"]
        if write.room in holdings and (problem := _problem(write, holdings[write.room], decode["memory"][write.kind]))
    ]


def _problem(write: Write, holding: Holding, memory: list[tuple[int, int, int]]) -> str | None:
    held, released = holding.pages, holding.pages_released
    if write.kind == "aux":
        held, released = {holding.slot}, holding.slot_released
    stray = _places(write, memory) - held
    if stray:
        return f"places {sorted(stray)} are not the request's"
    end = write.end or float("inf")
    if released is not None and end > released:
        return f"ended {end - released:.3f} s after the places were released"
    return None


def _places(write: Write, memory: list[tuple[int, int, int]]) -> set[Any]:
    """Pages, or metadata slots, that a write touches."""
    found = set()
    for address, length in write.blocks:
        start, _, item = next(tensor for tensor in memory if tensor[0] <= address < tensor[0] + tensor[1])
        found |= set(range((address - start) // item, (address + length - 1 - start) // item + 1))
    return found
