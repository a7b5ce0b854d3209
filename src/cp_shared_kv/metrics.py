"""Counts of what shared KV did in this process, and its log lines."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from cp_shared_kv.config import LOG_LEVEL_ENV, ConfigError

SHARD_POLICY = "page_interleaved"

logger = logging.getLogger("cp_shared_kv")


@dataclass
class Counters:
    """Monotonic counts of one process. Pages are pages of one layer; bytes are over all layers.

    Attributes:
        forwards: forwards that had a plan with requests in it.
        prefix_pages: distinct prefix pages read, summed over forwards.
        host_page_reads: times that page ids were not known on the host and the device was waited for.
        gather_calls: gathers of one layer's MLA KV or index-K.
        gathered_bytes: bytes received from other ranks, padding included.
        kv_pages_sent, kv_bytes_sent: MLA KV pages handed to the transfer engine for decode, and their bytes.
        state_pages_sent, state_bytes_sent: the same for index-K.
        transfers_refused: requests failed because their pages did not fit those that decode registered.
    """

    forwards: int = 0
    prefix_pages: int = 0
    host_page_reads: int = 0
    gather_calls: int = 0
    gathered_bytes: int = 0
    kv_pages_sent: int = 0
    kv_bytes_sent: int = 0
    state_pages_sent: int = 0
    state_bytes_sent: int = 0
    transfers_refused: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: int) -> None:
        """Add to several counts at once; transfer threads and the scheduler share them."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def snapshot(self) -> Mapping[str, int]:
        """Copy of all counts."""
        with self._lock:
            return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}


COUNTERS = Counters()


def configure_logging() -> None:
    """Give the product's logger a level of its own where ``CP_SHARED_KV_LOG_LEVEL`` names one."""
    level = os.environ.get(LOG_LEVEL_ENV, "").strip().upper()
    if level:
        try:
            logger.setLevel(level)
        except ValueError:
            raise ConfigError(
                f"{LOG_LEVEL_ENV}={level!r} is not understood: accepted are DEBUG, INFO, WARNING, ERROR, CRITICAL"
            ) from None
