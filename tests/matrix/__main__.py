"""Command line of the matrix; see the package."""

from __future__ import annotations

import argparse
import importlib.metadata
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cp_shared_kv.releases import supported_versions
from cp_shared_kv_cpu.releases import row_for

from . import environments, page, scenarios
from .environments import EnvironmentFault
from .page import PAGE, PageFault, Result, describe
from .scenarios import FAILED, SCENARIOS, Outcome

#: A release and the scenarios to run on it, one after the other.
Plan = list[tuple[str, list[str]]]


def parse(arguments: Sequence[str] | None, supported: Sequence[str], primary: str) -> tuple[Plan, argparse.Namespace]:
    """What to run, and the options. Leaves with status 2 and one message where the arguments do not fit."""
    parser = argparse.ArgumentParser(prog="python -m matrix", description="Run the tests on each release of SGLang.")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="run these; all that are supported by default")
    parser.add_argument(
        "--only", nargs="+", metavar="SCENARIO", choices=[*SCENARIOS], help=f"of {', '.join(SCENARIOS)}"
    )
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the page; docs/releases.md by default")
    parser.add_argument("--render", action="store_true", help="run nothing, write the page anew from its own results")
    parser.add_argument("--no-page", action="store_true", help="write no page")
    parser.add_argument(
        "--ci",
        action="store_true",
        help="seams on all releases, e2e on the oldest, the newest and the one that .venv has; writes no page",
    )
    options = parser.parse_args(arguments)
    if unknown := [release for release in options.releases if release not in supported]:
        parser.error(f"not a supported release: {', '.join(unknown)}; supported are {', '.join(supported)}")
    if options.ci + options.render + bool(options.releases or options.only) > 1:
        parser.error("--ci and --render take neither releases nor --only, nor each other")
    if options.render:
        return [], options
    if options.ci:
        few = dict.fromkeys([supported[0], primary, supported[-1]])
        return [*((release, ["seams"]) for release in supported), *((release, ["e2e"]) for release in few)], options
    wanted = [name for name in SCENARIOS if name in (options.only or SCENARIOS)]
    return [(release, wanted) for release in supported if release in (options.releases or supported)], options


def run_release(release: str, names: Sequence[str]) -> Result:
    """Run scenarios on a release, with a line for each. A fault of its environment fails the scenarios that need it."""
    logs = scenarios.LOGS / release
    logs.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    environment = fault = None
    pins: dict[str, str] = {}
    for name in names:
        began = time.monotonic()
        log = logs / f"{name}.log"
        try:
            if fault:
                raise fault
            wheel = environments.sglang_wheel(release)
            pins = pins or environments.pins_of(wheel)
            if name == "seams":
                outcomes[name] = scenarios.compare_seams(wheel, log)
            else:
                if environment is None:
                    directory = environments.build(release, row_for(release).extra_requirements)
                    environment = environments.check(release, directory)
                outcomes[name] = scenarios.run_tests(name, environment.python, log)
        except (EnvironmentFault, ValueError) as error:
            fault = error
            outcomes[name] = scenarios.failed(f"no environment: {error}")
        print(f"{release:13} {name:5} {describe(outcomes[name])} in {time.monotonic() - began:.0f} s", flush=True)
    return Result(environment.versions if environment else {}, pins, outcomes)


def primary_version() -> str:
    """The release that the repository's ``.venv`` holds."""
    return importlib.metadata.version("sglang")


def main(arguments: Sequence[str] | None = None) -> int:
    supported = supported_versions()
    plan, options = parse(arguments, supported, primary_version())
    try:
        results = page.read(options.page)
    except PageFault as error:
        print(error, file=sys.stderr)
        return 2
    broken = []
    for release, names in plan:
        new = run_release(release, names)
        broken += [f"{release} {name}" for name, outcome in new.outcomes.items() if outcome.verdict == FAILED]
        results[release] = results.get(release, Result()).updated(new)
        if not (options.ci or options.no_page):
            page.write(options.page, results, supported)
    if options.render:
        page.write(options.page, results, supported)
    if broken:
        print(f"Failed: {', '.join(broken)}; logs are in {scenarios.LOGS}")
    return 1 if broken else 0


if __name__ == "__main__":
    scenarios.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
