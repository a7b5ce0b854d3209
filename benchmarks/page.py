"""``docs/benchmarks.md`` and its pictures, from the JSON of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .rows import HEAD, Curve, Row, cells
from .svg import draw

PAGE_NAME = "benchmarks.md"

HEADING = """\
# Benchmarks

Ratios and counts, each measured in one run, so that they mean the same on any machine. `make bench` prints them, writes
`build/bench.json` and fails if a budget does not hold. `make bench BENCH_FLAGS="--only gather slopes"` runs some
sections, `BENCH_FLAGS=--docs` writes this page too. Wall times have no budget: those below come from {cpus} CPU cores
that may have had other work, with stand-ins for GPU kernels, and say nothing of a GPU.

Measured with {versions}.
"""

#: Title and text of each section.
TEXTS: dict[str, tuple[str, str]] = {
    "capacity": (
        "Capacity",
        """\
How many times the tokens of stock a group of N ranks can keep: N, less the workspace: two layers of one context,
one with `CP_SHARED_KV_PREFETCH=0`. (SGLang's cell size takes an fp8 token for 576 bytes of KV a layer where its pool
stores 656, so a pool of fp8 KV takes more than its budget, stock or shared.)""",
    ),
    "gather": (
        "Gather",
        """\
A dense view of a prefix needs (N-1)/N of its bytes from other ranks. What the gather receives beyond that is padding to
the largest share, a page or so for each rank: much of a short prefix, little of a long one. An all-reduce of a
zero-filled view receives twice the bound. The times are those of gloo, which copies what an all-gather brings once more
and sums an all-reduce in place, on cores that share the memory that its wire is made of: on NVLink bytes decide.""",
    ),
    "slopes": (
        "Slopes",
        """\
What one forward costs at a multiple of one size, over what it costs at the base. Nothing grows with the pool.""",
    ),
    "allocator": ("Allocator", "The shared allocator beside stock's over the same logical pages."),
    "ops": ("Operations and waits", "Operations that launch work, and waits for the device, shared beside stock."),
    "transfer": (
        "Transfer to decode",
        """\
Each page is sent once, by the rank that holds it. **What decides the number of descriptors:** SGLang merges pages that
are neighbours on both sides. Owners are cyclic along a request, so a rank's pages go to every N-th position of decode's
list: they may be neighbours in that rank's pool, but decode's neighbours come from different ranks. So nothing merges,
and there is one descriptor for each page, store and layer, whatever the page lists look like; each rank hands over its
N-th part of them. Stock's one rank merges where both sides are contiguous, and has as many where decode is not.""",
    ),
    "engine": (
        "Engine",
        """\
Real SGLang servers with a tiny DeepSeek-V3.2 on the CPU platform, stock and shared side by side; each prompt goes to
both in turn. Requests are prefilled and sent nowhere, so that decode does not count.""",
    ),
}
PICTURES = {"capacity": "capacity", "gather": "gather", "transfer": "descriptors"}


def picture_name(curve: str) -> str:
    """File name of a curve's picture."""
    return f"benchmark-{curve}.svg"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(rows: list[Row]) -> list[str]:
    lines = [HEAD, ["---", "--:", "---", "--:", "---", "---"], *(cells(row) for row in rows)]
    return ["| " + " | ".join(map(_cell, line)) + " |" for line in lines]


def render(results: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text of the page and its pictures.

    Args:
        results: the JSON of a run.
    """
    environment = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    parts = [HEADING.format(cpus=environment["cpus"], versions=versions)]
    files: dict[str, str] = {}
    for section, given in results["sections"].items():
        title, text = TEXTS[section]
        parts += [f"## {title}", "", text, ""]
        curve = PICTURES.get(section, "")
        if curve in results["curves"]:
            drawn = _curve(results["curves"][curve])
            files[picture_name(curve)] = draw(drawn)
            parts += [f"![{drawn.y}, over {drawn.x}]({picture_name(curve)})", ""]
        parts += [*_table([Row.of(row) for row in given]), ""]
    files[PAGE_NAME] = "\n".join(parts)
    return files


def _curve(given: Mapping[str, Any]) -> Curve:
    series = {label: [(x, y) for x, y in points] for label, points in given["series"].items()}
    return Curve(given["x"], given["y"], series, tuple(given["groups"]))
