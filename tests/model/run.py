"""Run the machine for a number of steps; one that found nothing says how often each rule and situation was met.

    cd tests && ../.venv/bin/python -m model.run --steps 1000000 [--seed N]

A step is a rule that did something. Seeds are counted up from a random one; a failure names the seed that repeats it,
and Hypothesis prints the shortest sequence of rules that it found.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from typing import Any

STEPS_OF_A_MACHINE = 50
MACHINES_OF_A_SEED = 40


def run(steps: int, seed: int, *, shrink: bool = True, progress: bool = False) -> dict[str, Any]:
    """Run machines until so many steps are done.

    Args:
        steps: rules that do something, at least.
        seed: the first seed; a run with the same seed does the same.
        shrink: look for the shortest counter-example; else say the first.
        progress: print a line a seed to the standard error.

    Returns:
        ``steps``, ``rules`` and ``seen`` of :class:`machine.Tally`.

    Raises:
        AssertionError: an invariant does not hold; a note names the seed.
    """
    from cp_shared_kv_cpu.launch import apply_cpu_environment

    apply_cpu_environment(1)
    import hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    from .machine import TALLY, SharedKV

    settings = hypothesis.settings(
        max_examples=MACHINES_OF_A_SEED,
        stateful_step_count=STEPS_OF_A_MACHINE,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    TALLY.clear()
    start = time.monotonic()
    while TALLY.steps < steps:
        try:
            run_state_machine_as_test(hypothesis.seed(seed)(SharedKV), settings=settings)
        except BaseException as error:
            error.add_note(f"repeat with: python -m model.run --seed {seed} --steps 1")
            raise
        if progress:
            done = TALLY.steps
            rate = done / (time.monotonic() - start)
            print(f"seed {seed}: {done} steps, {rate:.0f} a second", file=sys.stderr, flush=True)
        seed += 1
    return {"steps": TALLY.steps, "rules": dict(TALLY.rules), "seen": dict(TALLY.seen)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model.run", description="Model-based test of shared KV.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps to do (default %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="first seed (default random)")
    arguments = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
    report = run(arguments.steps, seed, progress=True)
    for title in ("rules", "seen"):
        print(f"{title}:")
        for name, count in sorted(report[title].items()):
            print(f"  {name:32} {count:>10,}")
    print(f"{report['steps']:,} steps from seed {seed}, nothing found")


if __name__ == "__main__":
    main()
