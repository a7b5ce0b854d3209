"""What is run on each release, in a process of its own, and what is read from it."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import psutil

from .environments import ROOT

LOGS = ROOT / ".cache" / "matrix"
PASSED, REFUSED, FAILED = "passed", "refused", "failed"
#: Property of a test, and beginning of a skip's reason, that mark a refusal; see the package.
REFUSAL, REFUSAL_PREFIX = "refused", "refused: "
#: Failed tests that are named; the log has all.
NAMED_FAILURES = 10
#: Longest text that is kept of a test's message.
TEXT_LIMIT = 240
#: What a scenario's processes may still take to end by themselves after it.
GRACE_S = 3
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Scenario:
    """Tests that run in a release's environment; `seams` has none, and needs only the wheel.

    Attributes:
        what: a line for the page.
        limit_s: when it is ended.
        pytest: arguments of pytest.
    """

    what: str
    limit_s: float
    pytest: tuple[str, ...] = ()


#: In the order in which they run.
SCENARIOS: Mapping[str, Scenario] = {
    "seams": Scenario(
        "every function that the plugin builds on is found in SGLang's source as the release table has it", 120
    ),
    "unit": Scenario(
        "tests of the modules, and of the CPU platform against stock SGLang", 2400, ("tests/unit", "tests/cpu")
    ),
    "pd": Scenario("pages sent to decode over real Mooncake are compared byte by byte", 2400, ("tests/pd",)),
    "e2e": Scenario(
        "real engines with a tiny model: CP shared KV, stock CP and CP 1 give the same tokens and logprobs",
        2400,
        ("-m", "release", "tests/e2e"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What came out of a scenario.

    Attributes:
        verdict: passed, refused or failed.
        counts: tests, or seams, by what became of them, ``failed`` first; without zeros.
        figures: name -> value that tests reported.
        refusals: why the gate or SGLang refuses, each reason once.
        skips: reason -> tests that were skipped for it.
        failures: a text for each failed test (the first :data:`NAMED_FAILURES`), or for what kept all from running.
        source: the plugin's source that was run; see :func:`source_digest`.
    """

    verdict: str
    counts: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    refusals: Sequence[str] = field(default_factory=list)
    skips: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[str] = field(default_factory=list)
    source: str = ""


def source_digest(root: Path = ROOT) -> str:
    """First 12 hex digits of the SHA-256 over ``src/``, which tell results of one plugin from those of another."""
    digest = hashlib.sha256()
    for path in sorted((root / "src").rglob("*")):
        if path.is_file() and path.suffix in {".py", ".json", ".txt"} and ".egg-info" not in str(path):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def plain(text: str) -> str:
    """The first line of a message, without this machine's directories, not longer than :data:`TEXT_LIMIT`."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    line = re.sub(r"(?<![\w./])/(?:[\w.+@-]+/)+", "", line.replace(f"{ROOT}/", ""))
    return line if len(line) <= TEXT_LIMIT else line[: TEXT_LIMIT - 3] + "..."


def failed(*texts: str) -> Outcome:
    """A scenario that could not be run, or brought no result."""
    return Outcome(FAILED, failures=[plain(text) for text in texts], source=source_digest())


def _figure(name: str, values: Sequence[str]) -> str:
    """One value of a figure that several tests reported; see the package."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return ", ".join(dict.fromkeys(values))
    total = max(numbers) if name.startswith("greatest") else sum(numbers)
    return str(int(total)) if all(value.lstrip("+-").isdigit() for value in values) else repr(total)


def _message(broken: ElementTree.Element) -> str:
    """What went wrong. Of an error outside a test's body the message tells only where; the exception is in the text."""
    raised = re.findall(r"^E +(\S.*)$", broken.text or "", re.MULTILINE) if broken.tag == "error" else []
    return raised[-1] if raised else broken.get("message", "")


def read_junit(path: Path) -> Outcome:
    """The outcome that a junit file tells, properties of its tests included.

    Raises:
        OSError, ElementTree.ParseError: there is no such file, or it is not complete.
    """
    counts: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    values: dict[str, list[str]] = {}
    refusals: list[str] = []
    failures: list[str] = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        reasons = []
        for item in case.iterfind("properties/property"):
            name, value = item.get("name", ""), item.get("value", "")
            if name == REFUSAL:
                reasons.append(value)
            else:
                values.setdefault(name, []).append(value)
        broken = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        skipped = case.find("skipped")
        if skipped is not None and skipped.get("message", "").startswith(REFUSAL_PREFIX):
            reasons.append(skipped.get("message", "").removeprefix(REFUSAL_PREFIX))
        if broken is not None:
            counts["failed"] += 1
            test = "::".join(filter(None, (case.get("classname"), case.get("name")))).removeprefix("tests.")
            failures.append(f"{test}: {plain(_message(broken))}")
        elif reasons:
            counts["refused"] += 1
            refusals += [reason for reason in map(plain, reasons) if reason not in refusals]
        elif skipped is not None:
            counts["skipped"] += 1
            skips[plain(skipped.get("message", ""))] += 1
        else:
            counts["passed"] += 1
    if failures or not (counts["passed"] or counts["refused"]):
        verdict = FAILED
        failures = failures or ["no test ran to its end"]
    else:
        verdict = PASSED if counts["passed"] else REFUSED
    return Outcome(
        verdict,
        {kind: counts[kind] for kind in ("failed", "passed", "refused", "skipped") if counts[kind]},
        {name: plain(_figure(name, found)) for name, found in values.items()},
        refusals,
        dict(skips),
        failures[:NAMED_FAILURES],
        source_digest(),
    )


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind, so that it can be found and ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_process(command: Sequence[str], directory: Path, log: Path, limit_s: float) -> int | None:
    """Exit status, or None where the time was over; nothing that it started is left. The log takes all output."""
    # Settings of the caller's shell for servers of its own would change what is measured.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CP_SHARED_KV", "SGLANG_"))}
    before = set(psutil.Process().children(recursive=True))
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        grace_s = 0.0
        try:
            status = process.wait(limit_s)
            grace_s = GRACE_S
            return status
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(before, grace_s)
            process.wait()


def _end(before: set[psutil.Process], grace_s: float) -> None:
    """End all descendants but those of ``before``; servers lie in sessions of their own, so no group holds them all."""
    psutil.wait_procs(_running(before), timeout=grace_s)
    while left := _running(before):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.1)


def _running(before: set[psutil.Process]) -> list[psutil.Process]:
    """Descendants but those of ``before`` that have not ended; who has to reap one may be a process above this one."""
    found = []
    for process in set(psutil.Process().children(recursive=True)) - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_tests(name: str, python: Path, log: Path) -> Outcome:
    """Run the tests of a scenario with a release's interpreter."""
    return run_pytest(SCENARIOS[name].pytest, python, log, SCENARIOS[name].limit_s)


def run_pytest(arguments: Sequence[str], python: Path, log: Path, limit_s: float) -> Outcome:
    """Run pytest and read its junit file, which is left beside the log."""
    junit = log.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    status = run_process([*command, f"--junit-xml={junit}", *arguments], ROOT, log, limit_s)
    if status is None:
        return failed(f"no verdict in {limit_s:.0f} s")
    try:
        outcome = read_junit(junit)
    except (OSError, ElementTree.ParseError):
        outcome = None
    if outcome is None or (status and outcome.verdict != FAILED):
        return failed(f"pytest ended with status {status} and without full results: {_last_line(log)}")
    return outcome


def compare_seams(wheel: Path, log: Path) -> Outcome:
    """Compare the seams of a release with the source in its wheel, which is not installed for that."""
    limit_s = SCENARIOS["seams"].limit_s
    command = [sys.executable, "-m", "cp_shared_kv", "seams", str(wheel), "--json"]
    status = run_process(command, ROOT, log, limit_s)
    if status is None:
        return failed(f"no verdict in {limit_s:.0f} s")
    text = log.read_text()
    try:
        found, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except ValueError:
        return failed(f"ended with status {status}: {_last_line(log)}")
    problems = [*found["problems"], *found["changed"]]
    problems += [f"ServerArgs has no field {name}" for name in found["missing_names"]]
    if problems:
        texts = [plain(problem) for problem in problems[:NAMED_FAILURES]]
        return Outcome(FAILED, {"failed": len(problems)}, failures=texts, source=source_digest())
    return Outcome(PASSED, {"passed": found["targets"]}, source=source_digest())


def _last_line(log: Path) -> str:
    return next((line.strip() for line in reversed(log.read_text().splitlines()) if line.strip()), "no output")
