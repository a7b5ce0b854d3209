"""The rules that drive a group of ranks, and what must hold after each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from cp_shared_kv.plan import workspace_pages
from cp_shared_kv.pool import ActivePlan

from .collective import Exchange
from .collective import install as install_collectives
from .decode import Decode, Destination
from .oracle import KV_BYTES, LAYERS, PAGE, Oracle, Slots, index_rows, pages_held, rows_of
from .rank import Rank
from .rank import install as install_bookkeeping

torch.set_num_threads(1)
install_collectives()
install_bookkeeping()

LONGEST = 6 * PAGE
REQUESTS = 6
#: Pages of one rank's pool, by the number of ranks: a few requests fill the group's.
POOL_PAGES = {1: 12, 2: 7, 3: 5, 4: 4}
WORKSPACES = {
    "no slack": lambda ranks: LONGEST // PAGE + 1,
    "product's": lambda ranks: workspace_pages(LONGEST, PAGE, ranks),
    "three contexts": lambda ranks: 3 * LONGEST // PAGE + 1,
}


@dataclass(frozen=True)
class Prompt:
    """A prompt of ``length`` tokens: the story's own up to ``fork``, from there on those of a branch (0 is the story).

    A token names story, branch, fork and position, so it stands for all tokens before it too.
    """

    story: int
    length: int
    branch: int = 0
    fork: int = 0

    def tokens(self) -> list[int]:
        """Token ids, positive."""
        own = min(self.fork, self.length) if self.branch else self.length
        forked = ((self.branch * 8 + self.story) * 512 + self.fork) * 512
        told = range(self.story * 512 + 1, self.story * 512 + 1 + own)
        return [*told, *range(forked + own + 1, forked + self.length + 1)]


@dataclass
class Live:
    """A request, as the machine knows it.

    Attributes:
        computed: tokens whose KV is in the pools.
        undelivered: ranks whose last piece is still queued; None before all is computed.
    """

    name: str
    tokens: list[int]
    destination: Destination
    started: bool = False
    computed: int = 0
    undelivered: set[int] | None = None
    failed: bool = False

    @property
    def pages(self) -> int:
        """Pages of the whole request."""
        return -(-len(self.tokens) // PAGE)


@dataclass
class Tally:
    """What has been done by all machines of this process.

    Attributes:
        rules: times that each rule did something.
        seen: situations that were met.
    """

    rules: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def steps(self) -> int:
        """Rules that did something."""
        return self.rules.total()

    def clear(self) -> None:
        """Count from zero."""
        self.rules.clear()
        self.seen.clear()


TALLY = Tally()

prompts = st.builds(
    Prompt,
    story=st.integers(0, 1),
    length=st.integers(1, LONGEST) | st.integers(1, LONGEST // PAGE).map(lambda pages: pages * PAGE),
    branch=st.integers(0, 2),
    fork=st.sampled_from([0, 64, 100, 128, 192, 250]),
)
chunk_lengths = st.sampled_from([LONGEST, 1, 63, 64, 65, 128]) | st.integers(1, LONGEST)
picks = st.integers(0, REQUESTS - 1)


class SharedKV(RuleBasedStateMachine):
    """A group of ranks that serves requests, beside an oracle."""

    @initialize(
        ranks=st.sampled_from([2, 3, 4, 1]), workspace=st.sampled_from(list(WORKSPACES)), need_sort=st.booleans()
    )
    def start(self, ranks: int, workspace: str, need_sort: bool) -> None:
        pages = POOL_PAGES[ranks]
        self.workspace = WORKSPACES[workspace](ranks)
        self.capacity = ranks * pages
        self.exchange = Exchange(ranks)
        self.ranks = [
            Rank(
                number,
                ranks,
                pages=pages,
                workspace_pages=self.workspace,
                longest=LONGEST,
                requests=REQUESTS,
                need_sort=need_sort,
                exchange=self.exchange,
            )
            for number in range(ranks)
        ]
        self.held = pages_held(ranks, pages)
        self.oracle = Oracle(self.capacity)
        for rank, held in zip(self.ranks, self.held, strict=True):
            for layer in range(LAYERS):
                rank.kv[layer][:] = self.oracle.kv[layer, held]
                rank.index[layer][:] = self.oracle.index[layer, held]
        self.decode = Decode(REQUESTS * LONGEST // PAGE)
        self.live: dict[str, Live] = {}
        self.added = 0
        self.time = 0
        self.last: dict[str, int] = {}
        self.free = set(range(1, self.capacity + 1))

    def done(self, rule_name: str, said: str) -> None:
        """Count a step, say what it did in a counter-example, and poison the pages that it freed."""
        TALLY.rules[rule_name] += 1
        self.last[rule_name] = self.time
        note(f"    # {said}")
        self.time += 1
        free = set(self.ranks[0].free_pages().tolist())
        for page in sorted(free - self.free):
            if 1 <= page <= self.capacity:
                self.poison(page)
        TALLY.seen["page freed"] += len(free - self.free)
        self.free = free

    def poison(self, page: int) -> None:
        """Fill a freed page, in the oracle and on the rank that must hold it."""
        self.oracle.poison(page, self.time)
        for rank, held in zip(self.ranks, self.held, strict=True):
            for physical in np.flatnonzero(held == page):
                for layer in range(LAYERS):
                    rank.kv[layer][physical] = self.oracle.kv[layer, page]
                    rank.index[layer][physical] = self.oracle.index[layer, page]

    def is_due(self, rule_name: str, pause: int) -> bool:
        """Whether a rule that would else crowd out the others has not been applied for a while."""
        return self.time - self.last.get(rule_name, 0) > pause

    def pick(self, requests: list[Live], number: int) -> Live:
        """One of the requests, which are in order of age."""
        return requests[number % len(requests)]

    def schedulable(self) -> list[Live]:
        """Requests with tokens to compute."""
        return [live for live in self.live.values() if live.undelivered is None]

    def started(self) -> list[Live]:
        """Requests that hold slots."""
        return [live for live in self.live.values() if live.started]

    def finishable(self) -> list[Live]:
        """Requests that are computed, and delivered or failed."""
        return [
            live for live in self.started() if live.undelivered is not None and (live.failed or not live.undelivered)
        ]

    # Requests.

    @precondition(lambda self: len(self.live) < REQUESTS)
    @rule(
        prompt=prompts,
        decode_cached=st.integers(0, 3),
        decode_lacks=st.sampled_from(["", "", "", "", "", "kv", "state"]),
    )
    def add(self, prompt: Prompt, decode_cached: int, decode_lacks: str) -> None:
        """A request arrives; decode has its first pages cached, and may have registered a page too few."""
        name = f"r{self.added}"
        self.added += 1
        tokens = prompt.tokens()
        pages = -(-len(tokens) // PAGE)
        live = Live(name, tokens, self.decode.register(pages, min(decode_cached, pages - 1), decode_lacks))
        self.live[name] = live
        for rank in self.ranks:
            rank.add(name, tokens, live.destination)
        self.done("add", f"{name}: {pages} pages, {live.destination.prefix_pages} cached on decode")

    @precondition(lambda self: self.schedulable())
    @rule(chunks=st.lists(st.tuples(picks, chunk_lengths), min_size=1, max_size=3))
    def prefill(self, chunks: list[tuple[int, int]]) -> None:
        """One forward: chunks of requests, each request picked by age, as long as given or as fits."""
        candidates = self.schedulable()
        batch: list[tuple[Live, int]] = []
        pages = 0
        for number, length in chunks:
            live = self.pick(candidates, number)
            if any(live is other for other, _ in batch):
                continue
            first = not live.started
            prefix = self.same(rank.admit(live.name, first) for rank in self.ranks)
            assert prefix == live.computed or first
            TALLY.seen["cached prefix"] += first and prefix > 0
            taken = sum(tokens for _, tokens in batch) + (len(batch) + 1) * PAGE
            room = min(self.ranks[0].budget() - taken, (self.workspace - 1 - pages) * PAGE - prefix)
            tokens = min(length, len(live.tokens) - prefix, room)
            if tokens < 1:
                for rank in self.ranks:
                    rank.refuse(live.name, first)
                continue
            live.started = True
            live.computed = prefix
            pages += -(-(prefix + tokens) // PAGE)
            batch.append((live, tokens))
        if batch:
            self.forward(batch)
        else:
            TALLY.seen["no room"] += 1

    def forward(self, batch: list[tuple[Live, int]]) -> None:
        """Allocate, compute, cache and send a batch of requests with the tokens that each adds."""
        before = self.same(rank.allocator.available_size() for rank in self.ranks)
        chunks = [(live.name, tokens) for live, tokens in batch]
        slots = [rank.allocate(chunks) for rank in self.ranks]
        for other in slots:
            assert np.array_equal(other, slots[0]), "ranks hand out different slots"
        TALLY.seen["evicted to make room"] += before < sum(-(-tokens // PAGE) * PAGE for _, tokens in batch)
        added = [np.array(live.tokens[live.computed : live.computed + tokens]) for live, tokens in batch]
        self.compute(batch, slots[0], np.concatenate(added))
        said = []
        for live, tokens in batch:
            where = self.ranks[0].slots_of(live.name)[live.computed :: PAGE] // PAGE
            said.append(f"{live.name}[{live.computed}:{live.computed + tokens}] first on page {where[:1].tolist()}")
            live.computed += tokens
            for rank in self.ranks:
                rank.after_chunk(live.name)
            if live.computed == len(live.tokens):
                live.undelivered = set(range(len(self.ranks)))
            self.note_problem(live)
        self.done("prefill", ", ".join(said))

    def compute(self, batch: list[tuple[Live, int]], slots: Slots, tokens: Slots) -> None:
        """The model's part of a forward on all ranks: rows of traceable bytes, written and read layer by layer."""
        self.time += 1
        padding = -len(slots) % len(self.ranks)
        padded_slots = np.concatenate([slots, np.zeros(padding, dtype=np.int64)])
        padded_tokens = np.concatenate([tokens, np.full(padding, -1)])
        names = [live.name for live, _ in batch]
        active = [rank.begin(names, len(padded_slots)) for rank in self.ranks]
        plan = active[0].plan
        TALLY.seen["prefix ends inside a page"] += any(live.computed % PAGE for live, _ in batch)
        TALLY.seen["gathered"] += plan.gathered_pages > 0
        TALLY.seen["gathered with padding"] += plan.gathered_pages > plan.prefix_pages
        TALLY.seen["broadcast of a surplus"] += bool(plan.surplus)
        TALLY.seen["several requests in a batch"] += len(batch) > 1
        for layer in range(LAYERS):
            rows = rows_of(padded_tokens, self.time, layer)
            with self.exchange.bringing():
                for rank, ours in zip(self.ranks, active, strict=True):
                    rank.bring(ours, rank.pool.physical_index_k_with_scale_buffer, layer)
            for rank in self.ranks:
                rank.store_index(layer, padded_slots, rows)
            with self.exchange.bringing():
                for rank, ours in zip(self.ranks, active, strict=True):
                    rank.bring(ours, rank.pool.physical_kv_buffer, layer)
            for rank in self.ranks:
                rank.store_kv(layer, padded_slots, rows)
            self.oracle.write(layer, slots, rows_of(tokens, self.time, layer))
            for i, (live, added) in enumerate(batch):
                self.check_reads(active, layer, i, live, live.computed + added)
        self.exchange.check_answered()
        for rank in self.ranks:
            rank.pool.end_forward()

    def check_reads(self, active: list[ActivePlan], layer: int, i: int, live: Live, end: int) -> None:
        """What each rank's kernels read of a request is what the oracle holds, and are the request's own tokens."""
        logical = self.ranks[0].slots_of(live.name)
        kv_right = self.oracle.kv_rows(layer, logical)
        index_right = index_rows(self.oracle.index[layer, logical[::PAGE] // PAGE], end)
        for rank, ours in zip(self.ranks, active, strict=True):
            kv, index = rank.read(ours, layer, i, end)
            where = f"rank {rank.number}, layer {layer}, {live.name}[:{end}]"
            found = np.ascontiguousarray(kv).view(np.int64)[:, 0]
            assert np.array_equal(found, live.tokens[:end]), f"{where}: MLA KV read is of other tokens: {found}"
            assert np.array_equal(kv, kv_right), f"{where}: MLA KV read differs"
            for name, got, right in zip(("keys", "scales"), index_rows(index, end), index_right, strict=True):
                assert np.array_equal(got, right), f"{where}: index-K {name} read differ"

    def note_problem(self, live: Live) -> None:
        """Fail a request that decode has no page for; every rank must say so in the same turn."""
        problem = self.same(rank.reqs[live.name].disagg_kv_sender.problem for rank in self.ranks)
        if problem is None or live.failed:
            return
        registered = len(live.destination.dst_kv_indices), len(live.destination.dst_state_indices[0])
        assert registered != (live.pages - live.destination.prefix_pages, live.pages), problem
        live.failed = True
        TALLY.seen["refused: decode lacks a page"] += 1

    @precondition(lambda self: any(rank.queue for rank in self.ranks))
    @rule(number=picks, what=st.sampled_from(["all", "all of a rank", "one piece"]))
    def deliver(self, number: int, what: str) -> None:
        """Transfer threads send what is queued; one rank's may lag behind the others'."""
        busy = [rank for rank in self.ranks if rank.queue]
        said = []
        for rank in busy if what == "all" else [busy[number % len(busy)]]:
            for _ in range(1 if what == "one piece" else len(rank.queue)):
                piece = rank.deliver(self.decode)
                if piece.state is not None:
                    self.live[piece.request].undelivered.remove(rank.number)
                TALLY.seen["piece without pages"] += not len(piece.pages)
                said.append(f"rank {rank.number} {len(piece.pages)} pages of {piece.request}")
        self.done("deliver", ", ".join(said))

    @precondition(lambda self: self.finishable())
    @rule(number=picks)
    def finish(self, number: int) -> None:
        """A request's transfer is over: decode has all pages, unless it failed; slots go to the radix cache."""
        live = self.pick(self.finishable(), number)
        if not live.failed:
            self.check_arrival(live)
        TALLY.seen["decode has a prefix"] += not live.failed and live.destination.prefix_pages > 0
        self.release(live, insert=True)
        self.done("finish", live.name)

    def check_arrival(self, live: Live) -> None:
        """Decode has every page of a request once, with the oracle's bytes."""
        pages = self.ranks[0].slots_of(live.name)[::PAGE] // PAGE
        kv, state = live.destination.dst_kv_indices, live.destination.dst_state_indices[0]
        sent = pages[live.destination.prefix_pages :]
        assert (len(kv), len(state)) == (len(sent), len(pages)), f"{live.name} was not refused though pages lack"
        assert (self.decode.kv_writes[kv] == 1).all(), f"{live.name}: KV writes {self.decode.kv_writes[kv]}"
        assert (self.decode.index_writes[state] == 1).all(), f"{live.name}: writes {self.decode.index_writes[state]}"
        cached = live.destination.prefix_pages
        assert not self.decode.kv_writes[state[:cached]].any(), f"{live.name}: decode's cached pages are overwritten"
        assert np.array_equal(self.decode.kv[:, kv], self.oracle.kv[:, sent]), f"{live.name}: other KV arrived"
        assert np.array_equal(self.decode.index[:, state], self.oracle.index[:, pages]), f"{live.name}: other index-K"
        rows = self.decode.kv[0, kv].reshape(-1, KV_BYTES).view(np.int64)[:, 0]
        asked = live.tokens[cached * PAGE :]
        assert np.array_equal(rows[: len(asked)], asked), f"{live.name}: other tokens arrived"
        TALLY.seen["page arrived"] += len(kv)

    def release(self, live: Live, insert: bool) -> None:
        """Forget a request on all ranks."""
        for rank in self.ranks:
            if live.started:
                rank.release(live.name, insert)
            del rank.reqs[live.name]
        self.decode.release(live.destination, live.pages)
        del self.live[live.name]

    @precondition(lambda self: self.is_due("interrupt", 5) and self.started())
    @rule(number=picks, how=st.sampled_from(["abort, cached", "abort", "retract"]))
    def interrupt(self, number: int, how: str) -> None:
        """A request ends wherever it is, its slots cached or not; or it loses its slots and waits again."""
        live = self.pick(self.started(), number)
        TALLY.seen[f"{how}: {'between chunks' if live.undelivered is None else 'when computed'}"] += 1
        if how == "retract":
            self.retract(live)
        else:
            self.release(live, insert=how == "abort, cached")
        self.done("interrupt", f"{how} {live.name} at {live.computed} of {len(live.tokens)} tokens")

    def retract(self, live: Live) -> None:
        """Take a request's slots away on all ranks; decode registers anew."""
        self.decode.release(live.destination, live.pages)
        destination = self.decode.register(live.pages, live.destination.prefix_pages, "")
        self.live[live.name] = Live(live.name, live.tokens, destination)
        for rank in self.ranks:
            rank.retract(live.name, destination)

    # The cache.

    @precondition(lambda self: self.ranks[0].tree.evictable_size())
    @rule(tokens=st.integers(1, 4 * PAGE))
    def evict(self, tokens: int) -> None:
        """The least recently used pages leave the radix cache."""
        for rank in self.ranks:
            rank.evict(tokens)
        self.done("evict", f"{len(self.ranks[0].free_pages()) - len(self.free)} pages freed")

    @precondition(lambda self: self.is_due("flush", 20) and not self.started() and self.ranks[0].tree.evictable_size())
    @rule()
    def flush(self) -> None:
        """All that is cached is forgotten."""
        for rank in self.ranks:
            rank.flush()
        self.done("flush", "")

    @precondition(lambda self: self.is_due("idle", 10))
    @rule(rows=st.integers(1, 5))
    def idle(self, rows: int) -> None:
        """A batch without requests, as SGLang relabels one: nothing but the workspace changes."""
        for rank in self.ranks:
            rank.begin([], rows, ForwardMode.IDLE)
            slots, written = np.zeros(rows, dtype=np.int64), rows_of(np.full(rows, -1), 0, 0)
            for layer in range(LAYERS):
                rank.store_index(layer, slots, written)
                rank.store_kv(layer, slots, written)
            rank.pool.end_forward()
        self.done("idle", "")

    # What holds after every rule.

    def same(self, values: Iterable[Any]) -> Any:
        """What every rank says."""
        first, *others = values
        assert all(other == first for other in others), f"ranks differ: {[first, *others]}"
        return first

    @invariant()
    def holds(self) -> None:
        self.ranks_agree()
        self.every_page_has_one_owner()
        self.each_rank_holds_the_oracles_bytes_of_its_pages_and_no_others()
        self.slots_hold_the_tokens_they_are_kept_for()
        assert self.decode.stray_writes() == 0, "something was sent to a page that no request has"

    def ranks_agree(self) -> None:
        """Allocators, page tables and radix caches are the same on all ranks."""
        self.same(rank.free_pages().tolist() for rank in self.ranks)
        self.same(rank.cached_slots().tobytes() for rank in self.ranks)
        self.same([(len(node.value), node.lock_ref) for node in rank.nodes()] for rank in self.ranks)
        for name in self.live:
            self.same(rank.slots_of(name).tobytes() for rank in self.ranks)

    def every_page_has_one_owner(self) -> None:
        """A page is free, or in the radix cache, or held by one request; together they are all there are."""
        rank = self.ranks[0]
        free = rank.free_pages().tolist()
        cached, protected = self.pages_of(rank.cached_slots()), set()
        assert len(rank.cached_slots()) % PAGE == 0, "part of a page is cached"
        for node in rank.nodes():
            protected |= set(self.pages_of(node.value.numpy())) if node.lock_ref else set()
        private: list[int] = []
        for live in self.started():
            pages = self.pages_of(rank.slots_of(live.name))
            assert len(set(pages)) == len(pages), f"{live.name} has a page twice: {pages}"
            unprotected = set(pages) & set(cached) - protected
            assert not (unprotected and rank.nodes()), (
                f"{live.name} uses pages that may be evicted: {sorted(unprotected)}"
            )
            private += set(pages) - set(cached)
        owned = sorted([*free, *cached, *private])
        assert owned == list(range(1, self.capacity + 1)), f"{free=} {cached=} {private=}"
        tokens = self.same(
            rank.allocator.available_size() + rank.tree.evictable_size() + rank.tree.protected_size()
            for rank in self.ranks
        )
        assert tokens + len(private) * PAGE == self.capacity * PAGE, f"{tokens=} {private=}"
        if rank.nodes():
            assert rank.tree.protected_size() == len(protected) * PAGE, f"{protected=}"

    def pages_of(self, slots: Slots) -> list[int]:
        """Pages of slots in request order, which must fill each page from its start."""
        pages = slots[::PAGE] // PAGE
        positions = np.arange(len(slots))
        assert np.array_equal(slots, pages[positions // PAGE] * PAGE + positions % PAGE), f"slots out of order: {slots}"
        return pages.tolist()

    def each_rank_holds_the_oracles_bytes_of_its_pages_and_no_others(self) -> None:
        """Whole pools, the dummy page and unwritten rows included: what a rule may not write, it has not written."""
        for rank, held in zip(self.ranks, self.held, strict=True):
            for layer in range(LAYERS):
                for name, found, oracle in (
                    ("MLA KV", rank.kv, self.oracle.kv),
                    ("index-K", rank.index, self.oracle.index),
                ):
                    right = oracle[layer, held]
                    if not np.array_equal(found[layer], right):
                        wrong = held[(found[layer] != right).any(axis=1)]
                        raise AssertionError(f"rank {rank.number}, layer {layer}: {name} of pages {wrong} differs")

    def slots_hold_the_tokens_they_are_kept_for(self) -> None:
        """Slots of requests and of the radix cache hold those very tokens, behind the same prefix."""
        rank = self.ranks[0]
        for live in self.started():
            found = self.oracle.tokens(rank.slots_of(live.name))
            assert np.array_equal(found, live.tokens[: live.computed]), f"{live.name}: slots hold {found}"
        for node in rank.nodes():
            found = self.oracle.tokens(node.value.numpy())
            assert np.array_equal(found, list(node.key.token_ids)), f"cached slots hold {found}"
