"""The entry point answers for an import that fails, where SGLang would only log it."""

from __future__ import annotations

import subprocess
import sys

import pytest

BROKEN = """
import sys
sys.modules["wrapt"] = None  # as if it were not installed
from cp_shared_kv.entry import load
load()
print("stock")
"""


def run(**environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, env=environ, timeout=60)


@pytest.mark.parametrize("environ", [{"CP_SHARED_KV": "1"}, {"CP_SHARED_KV_DECISION": "{}"}])
def test_an_import_that_fails_stops_a_process_that_is_to_share_kv(environ: dict[str, str]) -> None:
    done = run(**environ)
    assert done.returncode == 1
    assert "CP shared KV cannot be loaded: ModuleNotFoundError" in done.stderr
    assert "reinstall sglang-cp-shared-kv" in done.stderr


@pytest.mark.parametrize("environ", [{}, {"CP_SHARED_KV": "0"}, {"SGLANG_PLUGINS": "cp_shared_kv"}])
def test_an_import_that_fails_leaves_other_processes_stock(environ: dict[str, str]) -> None:
    done = run(**environ)
    assert done.returncode == 0
    assert done.stdout == "stock\n"
