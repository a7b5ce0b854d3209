"""Below the bound: what it saves to gather MLA KV only where a chunk's top-k points; ``python -m benchmarks.topk``.

A dense gather brings a rank (N-1)/N of the prefix's index-K and MLA KV. NSA reads all index-K, but MLA KV only of the
tokens that some query of the rank selected. Selections are int32 ``(queries, top-k)``, positions in the request; those
from the prefix length on lie in the chunk, which every rank has. ``docs/below-the-bound.md`` discusses the figures.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .processes import sglang_process
from .rows import Row, table

PAGE = 64
#: Bytes of a token and layer of DeepSeek-V3.2: MLA KV by dtype, and index-K.
KV_BYTES = {"bf16": 576 * 2, "fp8": 656}
INDEX_BYTES = 132
CP_SIZES = (2, 4, 8)
#: What must be saved for the selective gather to be built.
GOAL = 0.3

Selection = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Draw = Callable[[np.random.Generator], Selection]


@dataclass(frozen=True)
class Turn:
    """A chunk that extends a cached prefix, in tokens, and how many tokens each of its queries selects."""

    prefix: int
    chunk: int
    topk: int


#: The turn of an agent with a long context.
AGENT = Turn(2**17, 1024, 2048)
#: The same ratio of prefix to top-k, for the tiny model: a query selects as many tokens as the prefix has pages.
TINY = Turn(4096, 1024, 64)


# What a rank needs.


def queries_of(rank: int, cp_size: int, chunk: int) -> npt.NDArray[np.int64]:
    """Rows of the chunk that in-seq-split gives a rank: of 2N segments the one of its number and that one's mirror."""
    segments = np.array_split(np.arange(chunk), 2 * cp_size)
    return np.concatenate([segments[rank], segments[-1 - rank]])


def needed(selection: Selection, prefix: int, unit: int) -> Flags:
    """Units of ``unit`` tokens of the prefix in which some row selects: bool ``(prefix / unit,)``."""
    flags = np.zeros(prefix // unit, dtype=bool)
    flags[selection[selection < prefix] // unit] = True
    return flags


def needed_by_rank(selection: Selection, prefix: int, cp_size: int, unit: int) -> Flags:
    """The same for the rows of each rank: bool ``(ranks, prefix / unit)``."""
    rows = (queries_of(rank, cp_size, len(selection)) for rank in range(cp_size))
    return np.stack([needed(selection[mine], prefix, unit) for mine in rows])


# What that costs.


def dense_bytes(prefix: int, cp_size: int, kv_bytes: int) -> float:
    """Bytes that a rank receives per layer when all of the prefix is gathered."""
    return (cp_size - 1) / cp_size * prefix * (kv_bytes + INDEX_BYTES)


def request_bytes(prefix: int, cp_size: int, unit: int) -> float:
    """Bytes that a rank receives per layer to know what the others need of its units: a bit for each."""
    return (cp_size - 1) / cp_size * prefix / unit / 8


def units_received(need: Flags, unit: int, exchange: str) -> int:
    """Units of MLA KV that the busiest rank receives from the others; owners of pages take turns.

    Args:
        need: by rank, as :func:`needed_by_rank` gives it.
        unit: tokens of a unit.
        exchange: "exact", each pair of ranks by its own count; "equal", all pairs by the largest count, as an
            all-to-all of equal splits has it; "group", what any rank needs, to all, by the largest share of an owner.
    """
    ranks = len(need)
    owners = np.arange(need.shape[1]) * unit // PAGE % ranks
    pairs = np.stack([need[:, owners == owner].sum(1) for owner in range(ranks)], axis=1)
    np.fill_diagonal(pairs, 0)
    if exchange == "exact":
        return int(pairs.sum(1).max())
    if exchange == "equal":
        return (ranks - 1) * int(pairs.max())
    union = need.any(0)
    return (ranks - 1) * max(int(union[owners == owner].sum()) for owner in range(ranks))


def saved(need: Flags, unit: int, kv_bytes: int, exchange: str = "exact") -> float:
    """Share of the dense gather's bytes that the busiest rank is spared; negative where it receives more."""
    ranks, units = need.shape
    prefix = units * unit
    index = (ranks - 1) / ranks * prefix * INDEX_BYTES
    # One all-gather tells every rank what all others need; the exchange of pairs takes each owner's part only.
    requests = request_bytes(prefix, ranks, unit) * (ranks if exchange == "group" else 1)
    received = units_received(need, unit, exchange) * unit * kv_bytes
    return 1 - (index + requests + received) / dense_bytes(prefix, ranks, kv_bytes)


def most_needed(cp_size: int, kv_bytes: int, unit: int = PAGE, goal: float = GOAL) -> float:
    """Share of the prefix's MLA KV that ranks may need for the gather to spare them ``goal`` of the bytes."""
    requests = request_bytes(1, cp_size, unit) / dense_bytes(1, cp_size, kv_bytes)
    return 1 - (goal + requests) * (kv_bytes + INDEX_BYTES) / kv_bytes


def neighbours_share(selection: Selection, pairs: int = 64) -> float:
    """Share of a query's selection that the next query selects too, mean over ``pairs`` places in the chunk."""
    at = np.linspace(0, len(selection) - 2, min(pairs, len(selection) - 1)).astype(int)
    return float(np.mean([np.isin(selection[i], selection[i + 1]).mean() for i in at]))


# Selections of stated locality.


def _distinct(rng: np.random.Generator, population: int, count: int) -> npt.NDArray[np.int64]:
    return rng.choice(population, count, replace=False, shuffle=False)


def draw_shared(rng: np.random.Generator, turn: Turn = AGENT, share: float = 0.0, run: int = 1) -> Selection:
    """Runs of adjacent tokens: a share of them the same for all queries, the others drawn anew by each.

    With share 0 queries are independent, with runs of 1 tokens besides they are uniform.

    Args:
        run: tokens of a run, a power of two up to 64; runs begin at multiples of it.
    """
    slots, wanted = turn.prefix // run, turn.topk // run
    common = _distinct(rng, slots, round(share * wanted))
    others = np.setdiff1d(np.arange(slots), common)
    fresh = [others[_distinct(rng, len(others), wanted - len(common))] for _ in range(turn.chunk)]
    tokens = np.stack([np.concatenate([common, drawn]) for drawn in fresh])[:, :, None] * run + np.arange(run)
    return tokens.reshape(turn.chunk, -1).astype(np.int32)


def draw_recent(rng: np.random.Generator, turn: Turn = AGENT, share: float = 0.5, sinks: int = PAGE) -> Selection:
    """The first ``sinks`` tokens, a share drawn anew by each query from those between, and the most recent tokens."""
    wanted = round(share * turn.topk)
    recent = np.arange(turn.topk - sinks - wanted)
    between = turn.prefix - len(recent) - sinks
    rows = [
        np.concatenate([np.arange(sinks), sinks + _distinct(rng, between, wanted), turn.prefix + at - recent])
        for at in range(turn.chunk)
    ]
    return np.stack(rows).astype(np.int32)


def _best(rows: Callable[[], npt.NDArray[np.float32]], turn: Turn) -> Selection:
    """The ``topk`` places with the greatest scores of each row; the rows are draws of one distribution."""
    first = rows()
    least = np.partition(first, -turn.topk * 5 // 4)[-turn.topk * 5 // 4]  # leaves little to sort
    best = []
    for _ in range(turn.chunk):
        scores = rows()
        likely = np.flatnonzero(scores > least)
        if len(likely) < turn.topk:
            likely = np.arange(turn.prefix)
        best.append(likely[np.argpartition(scores[likely], -turn.topk)[-turn.topk :]])
    return np.stack(best).astype(np.int32)


def draw_zipf(rng: np.random.Generator, turn: Turn = AGENT, exponent: float = 1.0) -> Selection:
    """Tokens without replacement by weight: that of a page is its rank to the power of -exponent, for all queries."""
    ranks = rng.permutation(turn.prefix // PAGE) + 1.0
    pace = np.repeat(ranks**exponent, PAGE).astype(np.float32)
    return _best(lambda: -pace * rng.standard_exponential(turn.prefix, dtype=np.float32), turn)


def draw_scores(rng: np.random.Generator, turn: Turn = AGENT, common: float = 0.5, run: int = 1) -> Selection:
    """The best of normal scores: one part of a token's score is the same for all queries, the rest each query's own.

    Args:
        common: part of the score's variance that all queries have in common.
        run: adjacent tokens that have the common part in common.
    """
    fixed = np.repeat(rng.standard_normal(turn.prefix // run, dtype=np.float32), run) * np.float32(common**0.5)
    own = np.float32((1 - common) ** 0.5)
    return _best(lambda: fixed + own * rng.standard_normal(turn.prefix, dtype=np.float32), turn)


SYNTHETIC: dict[str, Draw] = {
    "uniform": draw_shared,
    **{f"independent runs of {run}": partial(draw_shared, run=run) for run in (4, 16, 64)},
    **{f"Zipf pages, exponent {s}": partial(draw_zipf, exponent=s) for s in (0.5, 1.0, 2.0)},
    **{f"sink, recent, {100 * u:g}% uniform": partial(draw_recent, share=u) for u in (0.5, 0.05, 0.005)},
    **{
        f"{share:.1%} shared, runs of {run}": partial(draw_shared, share=share, run=run)
        for share, run in ((0.9, 1), (0.95, 1), (0.99, 1), (0.95, 16), (0.5, 64))
    },
    **{f"scores, {common:.0%} common": partial(draw_scores, common=common) for common in (0.5, 0.9, 0.99)},
    "scores, 99% common, runs of 64": partial(draw_scores, common=0.99, run=64),
}


# Where it breaks even.


def expected_needed(queries: int, share: float, run: int, unit: int, turn: Turn = AGENT) -> float:
    """Expected share of the prefix's units that so many queries of :func:`draw_shared` need."""
    slots, wanted = turn.prefix // run, turn.topk / run
    common = share * wanted
    fresh, cold = wanted - common, slots - common
    untouched = untouched_by_one = 1.0
    for i in range(max(1, unit // run)):
        untouched *= 1 - common / (slots - i)
        untouched_by_one *= 1 - fresh / (cold - i)
    return 1 - untouched * untouched_by_one**queries


def least_share(cp_size: int, run: int, unit: int, kv_bytes: int, turn: Turn = AGENT) -> float:
    """Least share of :func:`draw_shared` with which ranks are spared ``GOAL`` of the bytes; to a ten-thousandth."""
    allowed, queries = most_needed(cp_size, kv_bytes, unit), turn.chunk // cp_size
    low, high = 0.0, 1.0
    if expected_needed(queries, low, run, unit, turn) <= allowed:
        return low
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if expected_needed(queries, middle, run, unit, turn) <= allowed else (middle, high)
    return high


def least_neighbours_share(cp_size: int, kv_bytes: int, turn: Turn = AGENT) -> float:
    """Least :func:`neighbours_share` with which a gather by rows spares ``GOAL`` of the bytes, whatever is selected.

    A rank's queries are two runs. The first of each brings ``topk`` tokens, any other those that its neighbour lacks;
    at worst none of them comes twice and the rank owns none.
    """
    allowed = most_needed(cp_size, kv_bytes, 1) * turn.prefix * (cp_size - 1) / cp_size
    return 1 - (allowed / turn.topk - 2) / (turn.chunk / cp_size - 2)


# What a real indexer selects.

TRACE_ENV = "CP_SHARED_KV_BENCH_TOPK"
TRACE_S = 300


def traced_scheduler(*arguments: Any) -> None:
    """A scheduler process of SGLang that saves what indexers select, as ``LAYER.RANK.QUERIES.npy``."""
    from cp_shared_kv_cpu import activate

    activate()  # before SGLang's layers are imported, as they look for the device then
    import sglang.srt.layers.attention.nsa.nsa_indexer as nsa_indexer
    from sglang.srt.managers.scheduler import run_scheduler_process

    rank = arguments[3]

    def save(layer_id: int, topk_indices: Any) -> Any:
        np.save(Path(os.environ[TRACE_ENV], f"{layer_id}.{rank}.{len(topk_indices)}.npy"), topk_indices.numpy())
        return topk_indices

    nsa_indexer.maybe_capture_indexer_topk = save
    run_scheduler_process(*arguments)


def traced_engine(work: str, turn: Turn, layers: int, cp_size: int) -> None:
    """Body of a process of its own: prefill a prefix of random tokens, then the same with a chunk of others."""
    try:
        cached = _prefill(Path(work), turn, layers, cp_size)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(cached != turn.prefix)  # at once, since threads of the engine go on


def _prefill(work: Path, turn: Turn, layers: int, cp_size: int) -> int:
    from cp_shared_kv_cpu import activate
    from cp_shared_kv_cpu.launch import apply_cpu_environment, engine_arguments
    from cp_shared_kv_cpu.model import write_tiny_model

    apply_cpu_environment(cp_size)
    activate()
    from sglang.srt.entrypoints.engine import Engine

    from e2e.host import free_ports

    class TracedEngine(Engine):
        run_scheduler_process_func = staticmethod(traced_scheduler)

    tokens = turn.prefix + turn.chunk
    engine = TracedEngine(
        **engine_arguments(
            write_tiny_model(work / "model", layers=layers, index_topk=turn.topk),
            cp_size=cp_size,
            max_total_tokens=2 * tokens,
            chunked_prefill_size=tokens,
            port=free_ports(1)[0],
            log_level="error",
        )
    )
    draw = random.Random(7)
    prompt = [draw.randrange(2, 500) for _ in range(tokens)]
    for part in (prompt[: turn.prefix], prompt):
        answer = engine.generate(input_ids=part, sampling_params={"temperature": 0, "max_new_tokens": 1})
    engine.shutdown()
    return int(answer["meta_info"]["cached_tokens"])


def trace(turn: Turn = TINY, layers: int = 3, cp_size: int = 2) -> list[Selection]:
    """What each layer's indexer of the tiny model selects for a chunk on a cached prefix; needs the CPU platform.

    Raises:
        RuntimeError: the engine failed, the prefix was not cached, or a query selected what is not before it.
    """
    from . import topk  # by its name, also where this module is the main one

    selections = [np.empty((turn.chunk, turn.topk), dtype=np.int32) for _ in range(layers)]
    with tempfile.TemporaryDirectory(prefix="cp-shared-kv-topk-") as work:
        os.environ[TRACE_ENV] = work
        arguments = work, turn, layers, cp_size
        engine = multiprocessing.get_context("spawn").Process(target=topk.traced_engine, args=arguments)
        engine.start()
        engine.join(TRACE_S)
        if engine.exitcode != 0:
            engine.kill()
            raise RuntimeError(f"the engine ended with {engine.exitcode} (None: not within {TRACE_S} s)")
        for (layer, selection), rank in itertools.product(enumerate(selections), range(cp_size)):
            mine = queries_of(rank, cp_size, turn.chunk)
            # Slots; a pool that was never used gives the pages of both requests in order, from page 1 on.
            selection[mine] = np.load(Path(work, f"{layer}.{rank}.{len(mine)}.npy")) - PAGE
    ends = turn.prefix + np.arange(turn.chunk)[:, None]
    if any((selection < 0).any() or (selection > ends).any() for selection in selections):
        raise RuntimeError("a query selected what is not before it")
    return selections


# The table.


def _row(name: str, value: float, unit: str, how: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "budget": None, "how": how}


def rows_of(name: str, selection: Selection, prefix: int) -> list[dict[str, Any]]:
    """What a selection needs, and what it would save CP 8 with bf16 KV; other cases in the line on how."""
    counts = [1, 8, 32, 128, 256, 512]
    shares = {count: needed(selection[:count], prefix, PAGE).mean() for count in counts}
    how = "; ".join(f"{count}: {share:.1%}" for count, share in shares.items())
    how += f"; neighbours share {neighbours_share(selection):.1%} of a selection"
    rows = [_row(f"pages needed by 128 queries, {name}", float(shares[128]), "ratio", how)]
    for unit, what in ((PAGE, "pages"), (1, "rows")):
        need = {cp_size: needed_by_rank(selection, prefix, cp_size, unit) for cp_size in CP_SIZES}
        spare = {cp_size: saved(need[cp_size], unit, KV_BYTES["bf16"]) for cp_size in CP_SIZES}
        equal, group = (saved(need[8], unit, KV_BYTES["bf16"], exchange) for exchange in ("equal", "group"))
        how = (
            f"a rank needs {need[8].mean():.1%}; equal splits {equal:.3f}, one all-gather {group:.3f}, "
            f"fp8 {saved(need[8], unit, KV_BYTES['fp8']):.3f}, CP 4 {spare[4]:.3f}, CP 2 {spare[2]:.3f}"
        )
        rows.append(_row(f"bytes saved by {what}, {name}", spare[8], "ratio", how))
    return rows


def geometry_rows(turn: Turn) -> list[dict[str, Any]]:
    """Rows that follow from sizes alone."""
    rows = []
    bf16 = KV_BYTES["bf16"]
    for cp_size in CP_SIZES:
        requests = request_bytes(turn.prefix, cp_size, PAGE)
        how = f"bf16; a bit for each page adds {requests:,.0f} bytes, for each row {requests * PAGE:,.0f}"
        dense = dense_bytes(turn.prefix, cp_size, bf16) / 1e6
        rows.append(_row(f"received per layer, dense gather, CP {cp_size}", dense, "MB", how))
    for dtype, kv_bytes in KV_BYTES.items():
        how = "of the prefix, by a rank; index-K is gathered whole"
        name = f"most pages needed for {GOAL:.0%} fewer bytes, {dtype}"
        rows.append(_row(name, most_needed(8, kv_bytes), "ratio", how))
    for unit, run in ((PAGE, 1), (PAGE, 16), (PAGE, 64), (1, 1)):
        what = f"pages, runs of {run}" if unit > 1 else "rows"
        for cp_size in CP_SIZES:
            share = least_share(cp_size, run, unit, bf16, turn)
            how = "bf16; part of a selection that all queries have in common, each draws the rest anew"
            rows.append(_row(f"least share for {GOAL:.0%} fewer bytes, {what}, CP {cp_size}", share, "ratio", how))
    for cp_size in CP_SIZES:
        how = "bf16; share of a selection that the next query selects too, whatever is selected"
        name = f"neighbours share enough for {GOAL:.0%} fewer bytes, rows, CP {cp_size}"
        rows.append(_row(name, least_neighbours_share(cp_size, bf16, turn), "ratio", how))
    return rows


def measure(
    turn: Turn = AGENT, synthetic: dict[str, Draw] = SYNTHETIC, traced: Callable[[], list[Selection]] = trace
) -> list[dict[str, Any]]:
    """Rows of the table; in a process of the CPU platform."""
    rows = geometry_rows(turn)
    for layer, selection in enumerate(traced()):
        rows += rows_of(f"tiny model, random weights, layer {layer}", selection, TINY.prefix)
    for seed, (name, draw) in enumerate(synthetic.items()):
        rows += rows_of(name, draw(np.random.default_rng(seed)), turn.prefix)
    return rows


def main() -> None:
    """Print the rows."""
    argparse.ArgumentParser(prog="python -m benchmarks.topk", description=__doc__).parse_args()
    with sglang_process() as call:
        rows = call(measure)
    print(table({"below the bound": [Row.of(row) for row in rows]}))


if __name__ == "__main__":
    main()
