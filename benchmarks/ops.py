"""Operations that launch work, and waits for the device: forwards of real servers, shared beside stock.

Counted by ``tests/e2e/operations.py``: views and allocations do not count, a kernel of the product counts as the one
launch that it is on a GPU, and stand-ins for vendor kernels are the same code on both sides.
"""

from __future__ import annotations

from .rows import Measured, Row

LAUNCHES_A_LAYER = 8


def measure() -> Measured:
    """Rows of the table."""
    from e2e.counted import difference, pairs

    rows = []
    for cp_size, kv in ((2, "bfloat16"), (2, "fp8_e4m3")):
        made = pairs(cp_size, kv)
        for name, has_prefix in (("without prefix", False), ("with prefix", True)):
            forwards = [(ours, theirs) for ours, theirs in made if bool(ours["prefix"]) == has_prefix]
            layers = [
                sum(difference(mine["operations"], stock["operations"]).values())
                for ours, theirs in forwards
                for mine, stock in zip(ours["layers"], theirs["layers"], strict=True)
            ]
            outside = []
            for ours, theirs in forwards:
                all_more = sum(ours["operations"].values()) - sum(theirs["operations"].values())
                in_layers = sum(
                    sum(mine["operations"].values()) - sum(stock["operations"].values())
                    for mine, stock in zip(ours["layers"], theirs["layers"], strict=True)
                )
                outside.append(all_more - in_layers)
            waits = [sum(ours["waits"].values()) - sum(theirs["waits"].values()) for ours, theirs in forwards]
            reads = max(ours["host_page_reads"] for ours, _ in forwards)
            case = f"CP {cp_size}, {kv}, {name}"
            how = f"most of {len(forwards)} forwards"
            rows += [
                Row(f"launches a layer more than stock, {case}", max(layers), "launches", how, LAUNCHES_A_LAYER),
                Row(f"launches a forward outside layers more than stock, {case}", max(outside), "launches", how),
                Row(f"waits a forward more than stock, {case}", max(waits), "waits", how, 0),
                Row(f"reads of page ids from the device before a forward, {case}", reads, "waits", "in all, so far", 0),
            ]
    return Measured(rows)
