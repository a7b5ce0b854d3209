"""The CPU platform: stock SGLang's NSA path, prefill context parallelism included, on a machine without a GPU.

SGLang loads this package in every process as one of its plugins (entry point group ``sglang.srt.plugins``,
name ``cp_shared_kv_cpu``, value ``cp_shared_kv_cpu:activate``). Only vendor GPU kernels and the ``torch.cuda``
surface are stood in for, by plain PyTorch references; every other line that runs is SGLang's own.

It serves tests and the demo. The product never imports it, and it does nothing unless it is asked for by name.
This module imports nothing heavy: SGLang imports it on GPU hosts too, just to find ``activate``.
"""

from __future__ import annotations

import logging
import os

PLUGIN_NAME = "cp_shared_kv_cpu"

logger = logging.getLogger(__name__)
_active = False


def requested(environ: os._Environ[str] | dict[str, str] | None = None) -> bool:
    """True when SGLANG_PLUGINS names this plugin and SGLANG_USE_CPU_ENGINE is 1: both are needed."""
    environ = os.environ if environ is None else environ
    named = {name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",")}
    return PLUGIN_NAME in named and environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"


def is_active() -> bool:
    """True once ``activate`` has patched this process."""
    return _active


def activate() -> None:
    """Entry point: turn this process into the CPU platform, once.

    Inert, touching nothing, unless ``requested()``. Raises SystemExit with one message when it was requested but a
    precondition is missing (SGLang only logs ordinary exceptions of plugins, and would go on without the platform).
    """
    global _active
    if _active or not requested():
        return
    from .preconditions import check_preconditions

    try:
        check_preconditions()
        from . import cuda_surface, dispatch, interpreter, triton_twins

        cuda_surface.install()
        interpreter.install()
        dispatch.install()
        if os.environ.get("CP_SHARED_KV_CPU_INTERPRET", "0") != "1":
            triton_twins.install()
    except Exception as error:
        # Exception, not BaseException: a SystemExit already carries its message.
        raise SystemExit(f"{PLUGIN_NAME}: cannot set up the CPU platform: {type(error).__name__}: {error}") from error
    _active = True
    logger.info("%s: CPU platform active", PLUGIN_NAME)
