"""What SGLang loads: a thin shell around ``plugin.load``, so that an import that fails is not merely logged.

SGLang turns an exception while it loads an entry point into a log line and goes on with stock code. This module imports
nothing that can be missing, and imports the rest where it can answer for it.
"""

from __future__ import annotations

import logging
import os

from cp_shared_kv.config import DECISION_ENV, SWITCH_ENV, is_true

logger = logging.getLogger("cp_shared_kv")


def load() -> None:
    """Entry point ``cp_shared_kv`` of group ``sglang.srt.plugins``; idempotent.

    Raises:
        SystemExit: shared KV was asked for by the environment, and the plugin cannot be imported or put in place.
    """
    try:
        from cp_shared_kv import plugin
    except Exception as error:
        message = f"CP shared KV cannot be loaded: {type(error).__name__}: {error}; reinstall sglang-cp-shared-kv"
        if is_true(os.environ.get(SWITCH_ENV)) or os.environ.get(DECISION_ENV):
            raise SystemExit(message) from error
        logger.warning(message)
        return
    plugin.load()
