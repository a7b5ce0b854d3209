"""The command line: run sections, print one table, write the JSON and the page."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import ROOT, capacity, engine, gather, ops, page, slopes, transfer
from .processes import sglang_process
from .rows import Measured, Row, cells, table

#: The JSON that the page in docs was written from.
PUBLISHED = Path(__file__).with_name("published.json")
DOCS = ROOT / "docs"


def _rows_of(module: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = importlib.import_module(module).measure()
    return rows


def _module(name: str) -> Callable[[], Measured]:
    """Section of a module whose ``measure()`` needs SGLang and returns rows as dictionaries."""

    def measure() -> Measured:
        with sglang_process() as call:
            return Measured([Row.of(row) for row in call(_rows_of, f"{__package__}.{name}")])

    return measure


SECTIONS: dict[str, Callable[[], Measured]] = {
    "capacity": capacity.measure,
    "gather": gather.measure,
    "slopes": slopes.measure,
    "allocator": _module("allocator"),
    "ops": ops.measure,
    "transfer": transfer.measure,
    "engine": engine.measure,
}


def environment() -> dict[str, Any]:
    """What a reader must know of where the figures come from."""
    versions = {"Python": sys.version.split()[0], "torch": version("torch"), "SGLang": version("sglang")}
    return {"versions": versions, "cpus": len(os.sched_getaffinity(0))}


def run(sections: Mapping[str, Callable[[], Measured]], write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure sections one after another; the results, which ``write`` gets after each of them."""
    results: dict[str, Any] = {"environment": environment(), "sections": {}, "curves": {}, "seconds": {}}
    for name, measure in sections.items():
        print(f"measuring {name}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        measured = measure()
        results["seconds"][name] = round(time.monotonic() - begin, 1)
        results["sections"][name] = [row.as_json() for row in measured.rows]
        results["curves"] |= {curve: dataclasses.asdict(points) for curve, points in measured.curves.items()}
        write(results)
    return results


def write_docs(results: Mapping[str, Any], docs: Path) -> None:
    """Write the page and its pictures into a directory."""
    for name, text in page.render(results).items():
        (docs / name).write_text(text)


def report(results: Mapping[str, Any]) -> int:
    """Print the table and the budgets that do not hold; the exit status."""
    sections = {name: [Row.of(row) for row in rows] for name, rows in results["sections"].items()}
    print(table(sections))
    budgets = [row for rows in sections.values() for row in rows if row.budget is not None]
    failed = [row for row in budgets if not row.holds]
    print()
    for row in failed:
        name, value, unit, budget, *_ = cells(row)
        print(f"FAILED  {name}: {value} {unit}, budget {budget}")
    print(f"{len(budgets) - len(failed)} of {len(budgets)} budgets hold. {sum(results['seconds'].values()):.0f} s.")
    return 1 if failed else 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks; about 8 minutes on 2 cores.")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), metavar="NAME", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench.json", metavar="FILE", help="results")
    parser.add_argument(
        "--docs",
        nargs="?",
        const="",
        metavar="FILE",
        help="also write docs/benchmarks.md, its pictures and benchmarks/published.json; from FILE, the results of an "
        "earlier run, if it is given; not with --only",
    )
    options = parser.parse_args(arguments)
    if options.docs is not None and options.only:
        parser.error("--docs needs all sections, so it does not go with --only")
    if options.docs and not Path(options.docs).is_file():
        parser.error(f"--docs: there is no file {options.docs}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 1 if a budget does not hold."""
    options = parse_arguments(arguments)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # SGLang warns in each process that it finds no GPU

    def write(results: dict[str, Any]) -> None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")

    if options.docs:
        results = json.loads(Path(options.docs).read_text())
    else:
        results = run({name: SECTIONS[name] for name in options.only or SECTIONS}, write)
    if options.docs is not None:
        write_docs(results, DOCS)
        PUBLISHED.write_text(json.dumps(results, indent=1) + "\n")
    return report(results)
