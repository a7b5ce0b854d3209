"""What the demo measures: figures read from the servers' logs, the checks on them, the table and the JSON file."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PAGE_SIZE = 64
MIB = 2**20

# SGLang's own account of a request, one line a prefill rank (--enable-request-time-stats-logging); stock has it too.
# `input_len` is the prompt that was really computed. Ranks are named only where there are several.
_STATS = re.compile(
    r"(?:ATTN_CP(?P<rank>\d+).*)?ReqTimeStats\(rid=(?P<rid>[^,]+), bootstrap_room=(?P<room>\d+), "
    r"input_len=(?P<input>\d+), cached_input_len=(?P<cached>\d+), .*type=prefill\).*transfer_total=(?P<mib>[\d.]+) MB"
)
# The plugin's, exact to the byte (CP_SHARED_KV_LOG_LEVEL=debug).
_TRANSFER = re.compile(
    r"CP shared KV transfer: rank=(?P<rank>\d+) pages=(?P<pages>\d+) bytes=(?P<bytes>\d+) "
    r"state_pages=(?P<state_pages>\d+) state_bytes=(?P<state_bytes>\d+) room=(?P<room>\d+)"
)
_ENABLED = re.compile(
    r"CP shared KV enabled\. physical_tokens_per_rank=(?P<physical>\d+), logical_tokens=(?P<logical>\d+).*"
    r"workspace_bytes=(?P<workspace>\d+), prefetch=(?P<prefetch>on|off)"
)
_POOL = re.compile(r"(?:ATTN_CP(?P<rank>\d+).*)?KV Cache is allocated\. #tokens: (?P<tokens>\d+)")


@dataclass(frozen=True)
class Prompt:
    """One request of the demo."""

    name: str
    tokens: list[int] = field(repr=False)

    @property
    def pages(self) -> int:
        """Pages that its KV fills."""
        return -(-len(self.tokens) // PAGE_SIZE)


@dataclass(frozen=True)
class RankTransfer:
    """What one prefill rank says of one request: prompt computed, prefix found in the cache, pages sent to decode."""

    rank: int
    input_tokens: int
    cached_tokens: int
    reported_bytes: int  # SGLang's figure, rounded to 0.01 MiB
    pages: int | None = None
    bytes: int | None = None
    state_pages: int | None = None
    state_bytes: int | None = None


@dataclass
class Answer:
    """What came back through the router for one prompt, and what the prefill ranks did for it."""

    prompt: str
    status: int
    seconds: float
    output_ids: list[int]
    logprobs: list[float]
    error: str = ""
    ranks: list[RankTransfer] = field(default_factory=list)


@dataclass
class Pass:
    """One set of servers and the answers it gave.

    ``capacity_tokens`` is what the prefill scheduler may hold, ``pool_tokens`` what the pool of one rank was built for.
    """

    name: str
    cp_size: int
    capacity_tokens: int = 0
    pool_tokens: list[int] = field(default_factory=list)
    workspace_bytes: int = 0
    workspace_layers: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    seconds_to_start: float = 0.0
    seconds_of_requests: float = 0.0


@dataclass(frozen=True)
class Check:
    """One thing that must hold for the demo to succeed."""

    name: str
    holds: bool
    detail: str


def rank_transfers(log: Path, rid: str, ranks: int, shared: bool, patience: float = 20.0) -> list[RankTransfer]:
    """Every prefill rank's lines about one request; the ranks write them a moment after decode has answered.

    Fewer than ``ranks`` when they have not appeared within ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        text = log.read_text(errors="replace")
        stats = {int(m["rank"] or 0): m for m in _STATS.finditer(text) if m["rid"] == rid}
        rooms = {m["room"] for m in stats.values()}
        sent = {int(m["rank"]): m for m in _TRANSFER.finditer(text) if m["room"] in rooms}
        complete = len(stats) >= ranks and (not shared or len(sent) >= ranks)
        if complete or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    found = []
    for rank, line in sorted(stats.items()):
        exact = (
            {key: int(sent[rank][key]) for key in ("pages", "bytes", "state_pages", "state_bytes")}
            if shared and rank in sent
            else {}
        )
        found.append(
            RankTransfer(rank, int(line["input"]), int(line["cached"]), round(float(line["mib"]) * MIB), **exact)
        )
    return found


def pool_figures(log: Path) -> tuple[list[int], int, str]:
    """From a prefill server's log: tokens in the pool of each rank, and bytes and layers of a rank's workspace.

    Stock has none: 0 bytes.
    """
    text = log.read_text(errors="replace")
    pools = {int(m["rank"] or 0): int(m["tokens"]) for m in _POOL.finditer(text)}
    enabled = _ENABLED.search(text)
    tokens = [pools[rank] for rank in sorted(pools)]
    if enabled is None:
        return tokens, 0, ""
    return tokens, int(enabled["workspace"]), "two layers" if enabled["prefetch"] == "on" else "one layer"


def page_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of one page over all layers: bf16 latent KV with its rope part, and fp8 index-K with an fp32 scale."""
    latent = (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 2
    index = config["index_head_dim"] + config["index_head_dim"] // 128 * 4
    return config["num_hidden_layers"] * PAGE_SIZE * (latent + index)


def greatest_difference(one: Answer, other: Answer) -> float | None:
    """Greatest |logprob difference| of two answers; None when they are not the same tokens or there is none."""
    if not one.logprobs or one.output_ids != other.output_ids or len(one.logprobs) != len(other.logprobs):
        return None
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


@dataclass
class Comparison:
    """The three passes on the same prompts; the last prompt is longer than the pool of one rank."""

    prompts: Sequence[Prompt]
    stock: Pass
    reference: Pass
    shared: Pass
    page_bytes: int

    @property
    def long(self) -> Prompt:
        """The prompt that only shared KV can serve."""
        return self.prompts[-1]

    def difference(self, prompt: Prompt) -> float | None:
        """Shared KV against stock, and against the reference where stock cannot serve the prompt."""
        other = self.reference if prompt is self.long else self.stock
        return greatest_difference(self.shared.answers[prompt.name], other.answers[prompt.name])

    def stock_pages(self, prompt: Prompt) -> list[int]:
        """Pages that each stock rank sent, from the bytes that SGLang reports."""
        return [round(r.reported_bytes / self.page_bytes) for r in self.stock.answers[prompt.name].ranks]

    def shared_pages(self, prompt: Prompt) -> list[int]:
        """Pages that each rank of shared KV held of this prompt and sent."""
        return [r.pages or 0 for r in self.shared.answers[prompt.name].ranks]

    def checks(self) -> list[Check]:
        """Everything that must hold."""
        return [
            *self._capacity_checks(),
            *(c for p in self.prompts for c in self._prompt_checks(p)),
            *self._long_checks(),
        ]

    def _capacity_checks(self) -> Iterable[Check]:
        cp, stock, shared = self.shared.cp_size, self.stock, self.shared
        yield Check(
            "same pool on every rank",
            len(shared.pool_tokens) == cp and set(shared.pool_tokens) == set(stock.pool_tokens),
            f"stock {stock.pool_tokens}, shared {shared.pool_tokens} tokens",
        )
        yield Check(
            f"capacity times {cp}",
            shared.capacity_tokens == cp * stock.capacity_tokens > 0,
            f"stock {stock.capacity_tokens}, shared {shared.capacity_tokens} tokens",
        )

    def _prompt_checks(self, prompt: Prompt) -> Iterable[Check]:
        cp, difference = self.shared.cp_size, self.difference(prompt)
        yield Check(
            f"{prompt.name}: tokens and logprobs equal",
            difference == 0.0,
            f"greatest difference {difference}, None if the tokens differ or an answer is missing",
        )
        ranks = self.shared.answers[prompt.name].ranks
        pages = self.shared_pages(prompt)
        state = [r.state_pages or 0 for r in ranks]
        sent = sum((r.bytes or 0) + (r.state_bytes or 0) for r in ranks)
        yield Check(
            f"{prompt.name}: shared KV sends each page once",
            len(ranks) == cp
            and sum(pages) == sum(state) == prompt.pages
            and sent == prompt.pages * self.page_bytes
            and all(abs(r.reported_bytes - (r.bytes or 0) - (r.state_bytes or 0)) < 0.01 * MIB for r in ranks),
            f"{prompt.pages} pages; KV {pages}, index-K {state}, {sent} bytes",
        )
        yield Check(
            f"{prompt.name}: ranks share it evenly",
            bool(pages) and max(pages) - min(pages) <= 1 and pages == state,
            f"KV {pages}, index-K {state}",
        )
        if prompt is not self.long:
            yield Check(
                f"{prompt.name}: stock sends from rank 0 alone",
                self.stock_pages(prompt) == [prompt.pages] + [0] * (cp - 1),
                f"{prompt.pages} pages; {self.stock_pages(prompt)}",
            )

    def _long_checks(self) -> Iterable[Check]:
        stock, reference = self.stock.answers[self.long.name], self.reference.answers[self.long.name]
        computed = sorted({r.input_tokens for r in stock.ranks})
        yield Check(
            f"{self.long.name}: reference computed all of it",
            reference.status == 200 and {r.input_tokens for r in reference.ranks} == {len(self.long.tokens)},
            f"HTTP {reference.status} {reference.error}",
        )
        yield Check(
            f"{self.long.name}: stock cannot serve it",
            greatest_difference(stock, reference) != 0.0 and len(self.long.tokens) not in computed,
            f"HTTP {stock.status}, prefill computed {computed} tokens of {len(self.long.tokens)}",
        )

    def as_json(self) -> dict[str, Any]:
        """All figures, for programs."""
        checks = self.checks()
        return {
            "cp_size": self.shared.cp_size,
            "page_size": PAGE_SIZE,
            "page_bytes": self.page_bytes,
            "holds": all(check.holds for check in checks),
            "prompts": [
                {
                    "name": prompt.name,
                    "tokens": len(prompt.tokens),
                    "pages": prompt.pages,
                    "pages_sent_by_rank": {"stock": self.stock_pages(prompt), "shared": self.shared_pages(prompt)},
                    "compared_with": "reference" if prompt is self.long else "stock",
                    "greatest_logprob_difference": self.difference(prompt),
                }
                for prompt in self.prompts
            ],
            "passes": {p.name: asdict(p) for p in (self.stock, self.reference, self.shared)},
            "checks": [asdict(check) for check in checks],
        }
