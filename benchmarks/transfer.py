"""Bytes, shares and descriptors of a transfer to decode: real pools, senders and Mooncake over TCP, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .forward import draw_pages
from .processes import sglang_process
from .rows import Curve, Measured, Row

#: Pages of the request, the chunks that prefill sends it in, and logical pages of the prefill side.
PAGES, CHUNKS, POOL = 50, 3, 192


@dataclass(frozen=True)
class Lists:
    """How the page lists of the two sides look: prefill's pool used before, and decode's pages in one piece."""

    used: bool
    contiguous: bool

    def __str__(self) -> str:
        return f"{'used' if self.used else 'fresh'} pool, decode {'contiguous' if self.contiguous else 'scattered'}"


LISTS = (Lists(False, True), Lists(True, True), Lists(False, False))


@dataclass(frozen=True)
class Sent:
    """KV and index-K that each prefill rank sent: bytes, and descriptors, which are addresses handed to Mooncake."""

    bytes: list[int]
    descriptors: list[int]


def send(pages: Sequence[int], cp_size: int, shared: bool, contiguous: bool) -> Sent:
    """Transfer one request whose logical pages are given; as stock, CP rank 0 alone sends.

    Raises:
        RuntimeError: the request failed, or decode holds a wrong page.
    """
    from pd.harness import run
    from pd.scenario import KINDS, PAGE_SIZE, SUCCESS, Request, Scenario

    ends = tuple(len(pages) * (i + 1) // CHUNKS * PAGE_SIZE for i in range(CHUNKS))
    scenario = Scenario(
        cp_size,
        ((Request(1, tuple(pages), ends[-1], ends),),),
        transfer="shared" if shared else "stock",
        all_cp_ranks_send=shared,
        logical_pages=POOL,
        contiguous_destination=contiguous,
    )
    report = run(scenario)
    [decode] = report.decode
    outcome = decode.outcomes[1]
    if outcome.status != SUCCESS or any(outcome.wrong_pages.values()):
        raise RuntimeError(f"the transfer did not succeed: {outcome}")
    pools = [region for region in decode.regions if region.kind in KINDS]
    blocks = [[block for write in rank.traffic.writes for block in write.destinations] for rank in report.prefill]
    return Sent(
        [sum(rank.traffic.bytes[kind] for kind in KINDS) for rank in report.prefill],
        [sum(any(pool.holds(*block) for pool in pools) for block in mine) for mine in blocks],
    )


def measure(cp_sizes: Sequence[int] = (2, 4, 8), pages: int = PAGES) -> Measured:
    """Rows, and the picture of the descriptors."""
    from pd.scenario import ITEM_LEN, LAYERS

    measured = Measured()
    page_bytes = LAYERS * sum(ITEM_LEN.values())
    bars: dict[str, list[tuple[float, float]]] = {}
    with sglang_process() as call:
        for cp_size in (1, *cp_sizes):
            shared = cp_size > 1
            name = f"CP shared KV, CP {cp_size}" if shared else "stock, one rank sends"
            drawn = {
                used: call(draw_pages, "shared" if shared else "stock", cp_size, POOL, pages, used)
                for used in (False, True)
            }
            sent = [send(drawn[lists.used], max(cp_size, 2), shared, lists.contiguous) for lists in LISTS]
            for lists, each in zip(LISTS, sent, strict=True):
                busiest = max(each.descriptors) // LAYERS
                how = f"{pages} pages in {CHUNKS} chunks, both stores; the busiest rank hands over {busiest}"
                title = f"descriptors per request and layer, {name}, {lists}"
                measured.rows.append(Row(title, sum(each.descriptors) // LAYERS, "count", how))
            bars[name] = [(i, sum(each.descriptors) // LAYERS) for i, each in enumerate(sent)]
            how = f"at Mooncake's write call, worst of {len(LISTS)} requests of {pages} pages"
            ratios = [sum(each.bytes) / (pages * page_bytes) for each in sent]
            worst = max(ratios, key=lambda ratio: abs(ratio - 1))
            title = f"bytes over all ranks / bytes of the request, {name}"
            measured.rows.append(Row(title, worst, "ratio", how, 1.0, "exactly"))
            if shared:
                apart = max(max(each.bytes) - min(each.bytes) for each in sent) / page_bytes
                measured.rows.append(Row(f"largest share less smallest, {name}", apart, "pages", how, 1))
    measured.curves["descriptors"] = Curve(
        "page lists of prefill and decode", "descriptors per request and layer", bars, tuple(map(str, LISTS))
    )
    return measured
