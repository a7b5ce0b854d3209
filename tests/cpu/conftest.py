"""Results of one activated process, shared by the tests that compare with stock SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def activated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``activated_worker.py`` recorded; it takes about 15 seconds, most of it the import of sglang."""
    path = tmp_path_factory.mktemp("activated") / "result.pt"
    worker = Path(__file__).with_name("activated_worker.py")
    done = subprocess.run([sys.executable, str(worker), str(path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(path, weights_only=False)
