"""Run the mutants; see the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "setup.cfg", "README.md", "Makefile")
LIMIT_S = 900
#: pytest's exit status where tests ran and some failed; any other is no verdict.
TESTS_FAILED = 1


def copy_tree(to: Path) -> None:
    """The parts of the tree that the tests use."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, to / name)


def run_tests(tree: Path, selection: tuple[str, ...]) -> tuple[int, str]:
    """Exit status and last line of the tests in a copy of the tree."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *selection],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines = failed or done.stdout.strip().splitlines() or ["no output"]
    return done.returncode, lines[-1]


def verdict(mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests see the mutant, and by which."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        path = tree / "src" / "cp_shared_kv" / mutant.file
        path.write_text(mutant.apply(path.read_text()))
        try:
            status, line = run_tests(tree, mutant.tests)
        except subprocess.TimeoutExpired:
            return False, f"no verdict in {LIMIT_S} s"
    return status == TESTS_FAILED, line


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name or word in m.file for word in words)]
    if not chosen:
        print("No mutant has such a word in its name or file. There are:", *(m.name for m in MUTANTS), sep="\n  ")
        return 2
    survivors = []
    for number, mutant in enumerate(chosen, 1):
        began = time.monotonic()
        seen, line = verdict(mutant)
        word = "killed" if seen else "SURVIVED"
        print(f"{number:3}/{len(chosen)} {word:8} {time.monotonic() - began:4.0f} s  {mutant.name}: {line}", flush=True)
        if not seen:
            survivors.append(mutant)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
