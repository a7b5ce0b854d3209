"""What differs between SGLang's releases for this harness, by the first release that each fact holds for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from cp_shared_kv.releases import installed, supported_versions

_SINCE = {
    # Mooncake's prefill side heeds how much of a prompt decode has cached.
    "heeds_decode_prefix": "0.5.12",
    # A failure that decode hears of late does not bring back a request that is over.
    "forgets_failed_requests": "0.5.12",
    # Decode tells prefill of its aborts.
    "tells_prefill_of_aborts": "0.5.13",
    # The configuration is published process-wide, and SGLang reads it there.
    "publishes_configuration": "0.5.16",
    # Of a request that is aborted between its chunks, no more is computed.
    "aborts_between_chunks": "0.5.14",
    # A request keeps its KV record, emptied, when its KV is released.
    "keeps_kv_record": "0.5.19",
    # Decode holds the pages of a request that fails until prefill says that it has stopped writing.
    "holds_failed_pages": "0.5.21",
    # Where one CP rank alone sends, page numbers are copied to pinned memory while the GPU computes.
    "pins_page_numbers": "0.5.23",
    # Process groups are made as wide as the published configuration says.
    "groups_from_configuration": "0.5.21",
}


def made(constructor: Callable[..., Any], **arguments: Any) -> Any:
    """Call a constructor of SGLang's with those of the arguments that it takes in this release."""
    taken = inspect.signature(constructor).parameters
    return constructor(**{name: value for name, value in arguments.items() if name in taken})


@cache
def holds(fact: str) -> bool:
    """Whether a fact holds for the installed release."""
    if find_spec("sglang") is None:
        return False  # nothing of this harness runs
    order = supported_versions()
    return order.index(installed().version) >= order.index(_SINCE[fact])
