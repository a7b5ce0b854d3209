"""Processes that can import SGLang on a machine without a GPU; ``gloo.forked`` forks ranks from them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from cp_shared_kv_cpu.launch import apply_cpu_environment


def _prepare() -> None:
    atexit.register(os._exit, 0)  # Triton's bindings print what they leaked when an interpreter is taken down
    apply_cpu_environment(1)
    import torch

    from cp_shared_kv_cpu import activate

    activate()
    torch.set_num_threads(1)


@contextmanager
def sglang_process() -> Iterator[Callable[..., Any]]:
    """A function that calls a module-level function in a fresh process of the CPU platform and returns its result."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare) as pool:
        yield lambda function, *arguments, **options: pool.submit(function, *arguments, **options).result()


def bytes_written() -> int:
    """Bytes that this process has written so far, to sockets too: gloo sends with ``writev``, which Linux counts."""
    with open("/proc/self/io") as lines:
        return int(dict(line.split(":") for line in lines)["wchar"])
