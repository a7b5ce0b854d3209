"""What is asked, drawn from a seed. The tiny model's vocabulary has 512 tokens."""

from __future__ import annotations

import dataclasses
import random
from collections import deque

SIDES = ("prefill", "decode")
#: Lengths of the shared prefixes at the root, and what each level below adds; pages have 64 tokens.
ROOTS, BRANCHES = (64, 200, 320), (1, 64, 100, 257)
REPEATABLE = 24


@dataclasses.dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: counted from 1.
        kind: "short", "fresh", "long", "shared prefix", "repeat", "next turn" or "too long".
        prompt: token ids.
        first: the side that gets it first.
        gap_s: seconds until the other side gets it.
        aborts: sides on which the client goes away.
        abort_after: when it does, as a fraction of how long a request usually takes.
        pause_s: seconds until the next request may be sent.
        chunk: chunk size to order before it, or None to leave what holds.
    """

    number: int
    kind: str
    prompt: tuple[int, ...]
    first: str
    gap_s: float
    aborts: tuple[str, ...]
    abort_after: float
    pause_s: float
    chunk: int | None

    @property
    def rid(self) -> str:
        """Of fixed width: SGLang aborts every request whose rid begins with the given one."""
        return f"soak{self.number:08}"


class Traffic:
    """Requests without end.

    Args:
        seed: of everything random.
        limit: shortest prompt, in tokens, that the prefill server refuses.
        chunks: chunk sizes that may be ordered; empty for none.
    """

    def __init__(self, seed: int, limit: int, chunks: tuple[int, ...]) -> None:
        self._random = random.Random(seed)
        self._limit = limit
        self._chunks = chunks
        self._number = 0
        self._earlier: deque[tuple[int, ...]] = deque(maxlen=REPEATABLE)
        self._prefixes = [self._tokens(count) for count in ROOTS]
        for parent in list(self._prefixes):
            self._prefixes += [parent + self._tokens(self._random.choice(BRANCHES)) for _ in range(2)]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(2, 500) for _ in range(count))

    def _prompt(self) -> tuple[str, tuple[int, ...]]:
        draw, longest = self._random, self._limit - 1
        kinds = {
            "short": 2,
            "fresh": 1.5,
            "long": 0.7,
            "shared prefix": 6,
            "repeat": 3,
            "next turn": 2,
            "too long": 0.6,
        }
        [kind] = draw.choices(list(kinds), list(kinds.values()))
        if kind in ("repeat", "next turn") and not self._earlier:
            kind = "fresh"
        if kind == "too long":
            return kind, self._tokens(draw.choice((self._limit, self._limit + draw.randrange(1, 600))))
        if kind == "shared prefix":
            return kind, (draw.choice(self._prefixes) + self._tokens(draw.randrange(1, 200)))[:longest]
        if kind == "repeat":
            return kind, draw.choice(self._earlier)
        if kind == "next turn":
            return kind, (draw.choice(self._earlier) + self._tokens(draw.randrange(1, 130)))[:longest]
        lengths = {"short": (1, 64), "fresh": (65, longest // 4), "long": (longest // 2, longest)}
        return kind, self._tokens(draw.randint(*lengths[kind]))

    def next(self) -> Request:
        """The next request."""
        draw = self._random
        kind, prompt = self._prompt()
        if kind != "too long":
            self._earlier.append(prompt)
        self._number += 1
        aborted = kind != "too long" and draw.random() < 0.2
        return Request(
            self._number,
            kind,
            prompt,
            first=draw.choice(SIDES),
            gap_s=draw.choice((0.0, 0.0, 0.0, 0.3)),
            aborts=draw.choice((SIDES, SIDES[:1], SIDES[1:])) if aborted else (),
            abort_after=draw.uniform(0.0, 1.2),
            pause_s=draw.choice((0.0, 0.0, 0.0, 0.1, 0.4)),
            chunk=draw.choice(self._chunks) if self._chunks and draw.random() < 0.2 else None,
        )
