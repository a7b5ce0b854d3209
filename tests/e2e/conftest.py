"""Releases that cannot run these models in the split that shared KV supports run only what shows the refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from cp_shared_kv.releases import installed

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = installed().no_zigzag
    if reason is None:
        return
    for item in items:
        if HERE in item.path.parents and "any_release" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"refused: {reason}"))
