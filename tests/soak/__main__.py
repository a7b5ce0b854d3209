"""Command line of the soak, and its watchdog."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
#: Import of SGLang and start of both pairs; and the longest that the last round may take after the time is over.
START_S, LAST_ROUND_S, GRACE_S = 300, 300, 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak", description="Mixed traffic, compared with stock SGLang.")
    parser.add_argument("--seconds", type=float, default=600, help="how long traffic and comparison last")
    parser.add_argument("--requests", type=int, help="send no more than these")
    parser.add_argument("--cp", type=int, default=2, help="prefill ranks")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic")
    parser.add_argument("--fp8", action="store_true", help="fp8_e4m3 KV rather than bfloat16")
    parser.add_argument("--breaks", help="mechanism of e2e.control.BREAKS to break, to see it noticed")
    parser.add_argument("--json", type=os.path.abspath, metavar="FILE", help="write the figures there too")
    parser.add_argument("--logs", type=os.path.abspath, metavar="DIR", help="keep the engines' output there")
    options = vars(parser.parse_args())
    if options["logs"]:
        Path(options["logs"]).mkdir(parents=True, exist_ok=True)

    from cp_shared_kv_cpu.launch import cpu_environment

    environment = {**os.environ, **cpu_environment(1, plugins=("cp_shared_kv",)), "CP_SHARED_KV": "0"}
    # oneDNN and ideep keep code for 1,024 shapes each, and a prompt length is a shape: growth that is no leak.
    environment.update(ONEDNN_PRIMITIVE_CACHE_CAPACITY="8", LRU_CACHE_CAPACITY="8")
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment["PYTHONPATH"]])
    worker = subprocess.Popen(
        [sys.executable, "-m", "soak.worker", json.dumps(options)], env=environment, stdin=subprocess.DEVNULL
    )
    try:
        return worker.wait(START_S + options["seconds"] + LAST_ROUND_S)
    except subprocess.TimeoutExpired:
        worker.terminate()
        try:
            worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()  # the system ends its engines with it
        return 2


if __name__ == "__main__":
    sys.exit(main())
