"""The pool raises rather than return data of another layer, another request or no request at all."""

from __future__ import annotations

from functools import cache

import pytest

from .ranks import call

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]

SAID = {
    "read outside a forward": "read of MLA KV of layer 0 outside a forward",
    "index read outside a forward": "read of index-K of layer 0 outside a forward",
    "write outside a forward": "write of MLA KV of layer 0 outside a forward",
    "shape of the buffers outside a forward": "",
    "read before the layer is written": "the workspace holds layer None",
    "write of other rows": "brings 99 rows but the plan has 100",
    "write": "",
    "read": "",
    "read of another layer": "read of MLA KV of layer 1 but the workspace holds layer 0",
    "index read of a layer whose KV alone is there": "read of index-K of layer 0 but the workspace holds layer None",
    "write of non-MLA rows": "set_kv_buffer",
    "read by logical slot": "get_mla_kv_buffer",
    "copy to the host": "get_cpu_copy",
    "move between slots": "move_kv_cache",
    "the forward's own error": "KeyError",
    "read after a forward that raised": "outside a forward",
    "write of a batch without requests": "",
    "rows kept of a batch without requests": "0",
}


@cache
def said() -> dict[str, str]:
    return call("misuse", 1)[0]


@pytest.mark.parametrize("use", SAID)
def test_use(use: str) -> None:
    expected = SAID[use]
    assert expected in said()[use] if expected else said()[use] == ""
