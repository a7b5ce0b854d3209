"""The process that imports SGLang, forks both pairs of engines and runs the soak; ``__main__`` starts it."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from .report import Report

#: The tail of an engine's output that is shown when something is wrong.
SHOWN = 4000


def _prepare(model: str) -> None:
    """Import SGLang and lay the test hooks, as ``e2e.host`` does, before engines are forked from here."""
    import sglang
    import sglang.srt.disaggregation.decode
    import sglang.srt.disaggregation.mooncake.conn
    import sglang.srt.disaggregation.prefill
    import sglang.srt.entrypoints.engine
    import sglang.srt.layers.attention.nsa_backend
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.models.deepseek_v2  # noqa: F401

    from cp_shared_kv_cpu import activate
    from cp_shared_kv_cpu.model import write_tiny_model
    from e2e import control

    from . import probe

    activate()
    control.install()
    probe.install()
    write_tiny_model(model)


def _soak(options: dict[str, Any], report: Report, model: str) -> None:
    from e2e.host import Pair

    from .run import CHUNKS, LIMIT, Soak, shared_spec, stock_spec
    from .traffic import Traffic

    _prepare(model)
    pairs: list[Pair] = []
    try:
        for spec in (shared_spec(options["cp"], options["fp8"]), stock_spec(options["fp8"])):
            pairs.append(Pair(spec, model))
        traffic = Traffic(options["seed"], LIMIT, () if options["fp8"] else CHUNKS)
        print("engines are up", flush=True)
        soak = Soak(*pairs, traffic, report, requests=options["requests"], breaks=options["breaks"])
        soak.run(options["seconds"])
        report.judge()
    except Exception:
        report.problems.append(traceback.format_exc())
    finally:
        for name, pair in zip(("shared", "stock"), pairs, strict=False):
            for role in ("prefill", "decode"):
                if options["logs"]:
                    shutil.copy(pair.engines.logs[role], Path(options["logs"], f"{name}.{role}.log"))
                if report.problems and name == "shared":
                    print(f"--- end of the {role} log\n{pair.log(role)[-SHOWN:]}")
            pair.close()


def main(options: dict[str, Any]) -> int:
    from e2e.host import die_with_parent

    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by the watchdog"))
    report = Report(options)
    with tempfile.TemporaryDirectory(prefix="soak-model-") as model:
        try:
            _soak(options, report, model)
        except SystemExit as end:
            report.problems.append(str(end))
    for problem in report.problems[:3]:
        print(f"PROBLEM: {problem}")
    print(report)
    print(f"{len(report.problems)} problem(s)", flush=True)
    if options["json"]:
        Path(options["json"]).write_text(json.dumps(report.as_json(), indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
