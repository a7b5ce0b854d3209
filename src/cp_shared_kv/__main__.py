"""Command line: ``cp-shared-kv``, also as ``python -m cp_shared_kv``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cp_shared_kv._version import __version__
from cp_shared_kv.compare import compare, open_source, record
from cp_shared_kv.seams import SeamError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cp-shared-kv", description="Tools of the SGLang plugin sglang-cp-shared-kv.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    seams = commands.add_parser(
        "seams",
        help="compare an SGLang with what the plugin knows of its release",
        description="Says which functions of SGLang that the plugin builds on are where and what they were when the "
        "release was taken up, which changed, and what the gate would say. Nothing of SGLang is imported. "
        "Exit status: 0 where the plugin would run, 1 where it would refuse, 2 for a wrong command line.",
    )
    seams.add_argument(
        "sglang",
        nargs="?",
        type=Path,
        metavar="SGLANG",
        help="a wheel, or the directory that holds sglang/ (default: the installed one)",
    )
    seams.add_argument("--release", metavar="X", help="row to compare with (default: its own, else the closest)")
    seams.add_argument("--json", action="store_true", help="print JSON")
    seams.add_argument(
        "--record",
        action="store_true",
        help="write changed fingerprints and parameters into seams.json of this checkout (see docs/new-release.md)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        with open_source(options.sglang) as source:
            if options.record:
                recorded, left = record(source)
                print(f"recorded for SGLang {source.version}: {', '.join(recorded) or 'nothing new'}")
                for line in left:
                    print(f"to be placed by hand: {line}")
                return int(bool(left))
            comparison = compare(source, options.release)
    except SeamError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    print(json.dumps(comparison.to_json(), indent=1) if options.json else "\n".join(comparison.lines()))
    return int(not comparison.ok)


if __name__ == "__main__":
    sys.exit(main())
