"""Throughput of the shared allocator over stock's, and how often each waits for the device.

``python -m benchmarks.allocator [--device cuda]``; included in ``python -m benchmarks``. On a CPU a NumPy function
stands for stock's Triton kernel, which is interpreted there, and its time is taken off both sides.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from .processes import sglang_process
from .rows import Row, table

PAGE = 64
CP_SIZES = (2, 8)
#: Pages of one rank's pool of DeepSeek-V3.2 on 8 H200.
PHYSICAL_PAGES = 3708
ROUNDS = 31
#: A round goes on for so long on each side, for noise to even out and merges to be in it as often as they come.
ROUND_S = 0.02


class NumpyKernel:
    """Stands for ``alloc_extend_kernel`` on a CPU; ``seconds`` is the time it took so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self.launch

    def launch(
        self, prefix_lens: Any, seq_lens: Any, last_loc: Any, pages: Any, out: Any, batch: int, page_size: int
    ) -> None:
        """Write the slots of each request's new tokens to ``out``."""
        begin = time.perf_counter()
        slots, new = out.numpy(), pages.numpy()
        for prefix, seq, last in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
            filled = min(seq - prefix, -prefix % page_size)
            slots[:filled] = np.arange(last + 1, last + 1 + filled)
            count = -(-seq // page_size) - -(-prefix // page_size)
            fresh = (new[:count, None] * page_size + np.arange(page_size)).reshape(-1)
            slots[filled : seq - prefix] = fresh[: seq - prefix - filled]
            slots, new = slots[seq - prefix :], new[count:]
        self.seconds += time.perf_counter() - begin


class Mix(ABC):
    """One kind of traffic on one allocator, which ``cycle`` leaves with as many free pages as it found.

    Args:
        allocator: stock or shared, all pages free.
        told: say with ``continue_after`` where prefixes end, as the product does, since it knows its pages.
    """

    name = ""

    def __init__(self, allocator: Any, told: bool) -> None:
        self.allocator = allocator
        self.told = told
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Bring the pool into the state that the traffic meets."""

    @abstractmethod
    def cycle(self) -> None:
        """Allocate, and free what was allocated."""

    def lengths(self, values: list[int]) -> tuple[Any, Any]:
        """Lengths on the device and on the host."""
        import torch

        host = torch.tensor(values, dtype=torch.int64)
        return host.to(self.allocator.device), host

    def extend(self, prefix: tuple[Any, Any], seq: tuple[Any, Any], last: Any, tokens: int, pages: list[int]) -> Any:
        """``alloc_extend``, after ``continue_after`` with the last pages where that is wanted."""
        if self.told:
            self.allocator.continue_after(pages)
        return self.allocator.alloc_extend(*prefix, *seq, last, tokens)


class Chunks(Mix):
    """One request in chunks, freed as a whole."""

    name = "1 request, 16 chunks of 8,192 tokens"
    chunk, count = 8192, 16

    def prepare(self) -> None:
        self.ends = [self.lengths([i * self.chunk]) for i in range(self.count + 1)]
        self.start = self.lengths([-1])[0]

    def cycle(self) -> None:
        import torch

        last, pages, parts = self.start, [0], []
        for prefix, seq in itertools.pairwise(self.ends):
            parts.append(self.extend(prefix, seq, last, self.chunk, pages))
            last = parts[-1][-1:]
            if self.told:
                pages = [int(new[-1]) for new in self.allocator.drawn]
        self.allocator.free(torch.cat(parts))


class Batch(Mix):
    """A batch of requests, each freed by itself."""

    def set_up(self, new: list[int], prefix: int = 0) -> None:
        """Build a batch of requests with so many new tokens each, and allocate a prefix for each of them."""
        self.new = new
        self.before = self.lengths([prefix] * len(new))
        self.after = self.lengths([prefix + tokens for tokens in new])
        ends = [int(self.allocator.alloc(prefix)[-1]) if prefix else -1 for _ in new]
        self.last = self.lengths(ends)[0]
        self.last_pages = [max(end, 0) // PAGE for end in ends]

    def allocate(self) -> tuple[Any, ...]:
        """New slots of each request."""
        slots = self.extend(self.before, self.after, self.last, sum(self.new), self.last_pages)
        return slots.split(self.new)

    def cycle(self) -> None:
        for slots in self.allocate():
            self.allocator.free(slots)


class Short(Batch):
    """Many short prompts, freed in one group."""

    name = "32 requests of 100 to 500 tokens"

    def prepare(self) -> None:
        self.set_up(random.Random(1).choices(range(100, 501), k=32))

    def cycle(self) -> None:
        parts = self.allocate()
        self.allocator.free_group_begin()
        for slots in parts:
            self.allocator.free(slots)
        self.allocator.free_group_end()


class Cached(Batch):
    """Prompts that begin with a cached prefix."""

    name = "8 requests of 512 tokens on 4,096 cached ones"

    def prepare(self) -> None:
        self.set_up([512] * 8, prefix=4096)


class NearlyFull(Batch):
    """A pool of which one page in 32 is free, anywhere, so that every batch needs what the last one freed."""

    name = "4 requests that take all of a pool's last pages"

    def prepare(self) -> None:
        import torch

        free = self.allocator.num_pages // 32
        held = self.allocator.alloc(self.allocator.size)
        pages = random.Random(2).sample(range(self.allocator.num_pages), free)
        self.allocator.free(held[torch.tensor(pages, device=held.device) * PAGE])
        self.set_up([free // 4 * PAGE] * 4)


MIXES: tuple[tuple[type[Mix], bool], ...] = (
    (Chunks, False),
    (Chunks, True),
    (Short, False),
    (Cached, False),
    (Cached, True),
    (NearlyFull, False),
)


def make(cp_size: int, device: str, shared: bool) -> Any:
    """An allocator of the group's size that sorts what is freed, as prefill servers do."""
    import torch
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    from cp_shared_kv.allocator import CPSharedPagedTokenToKVPoolAllocator

    physical = PHYSICAL_PAGES * PAGE
    if not shared:
        return PagedTokenToKVPoolAllocator(physical * cp_size, PAGE, torch.bfloat16, device, None, True)
    return CPSharedPagedTokenToKVPoolAllocator(
        physical * cp_size, physical, PAGE, torch.bfloat16, device, None, True, cp_size, 0
    )


def throughput(cp_size: int, device: str, mix: type[Mix], told: bool, rounds: int, round_s: float) -> float:
    """Cycles a second of the shared allocator over stock's: median over rounds, in each of which both take turns."""
    import torch

    kernel = NumpyKernel()
    sides = [mix(make(cp_size, device, shared=False), False), mix(make(cp_size, device, shared=True), told)]

    def seconds(side: Mix, cycles: int) -> float:
        kernel.seconds = 0.0
        begin = time.perf_counter()
        for _ in range(cycles):
            side.cycle()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin - kernel.seconds

    with nullcontext() if device == "cuda" else patch("sglang.srt.mem_cache.allocator.alloc_extend_kernel", kernel):
        once = [seconds(side, 3) / 3 for side in sides]
        cycles = max(1, round(round_s / max(once)))
        ratios = []
        for turn in range(rounds):
            order = sides if turn % 2 else sides[::-1]
            took = {side: seconds(side, cycles) for side in order}
            ratios.append(took[sides[0]] / took[sides[1]])
    return median(ratios)


class NoKernel:
    """Stands for ``alloc_extend_kernel`` where only the allocator's own doings count."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments: None


def waits(device: str, call: Callable[..., Any], *values: list[int]) -> int:
    """How often a call with tensors of some values waits for the device; on a CPU, how often it would."""
    import torch

    if device == "cuda":
        tensors = [torch.tensor(value, device=device) for value in values]
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            call(*tensors)
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
    from unit.test_allocator import on_device

    marked = [on_device(*value) for value in values]
    call(*(tensor for tensor, _ in marked))
    return sum(len(counted) for _, counted in marked)


def waits_of_batch(device: str, shared: bool, prefix: int, told: bool) -> int:
    """Waits of ``alloc_extend`` for 4 requests of 300 new tokens."""
    import torch

    allocator = make(2, device, shared)
    before, after, last = [prefix] * 4, [prefix + 300] * 4, [prefix + PAGE - 1 if prefix else -1] * 4
    if told:
        allocator.continue_after([slot // PAGE for slot in last])
    with patch("sglang.srt.mem_cache.allocator.alloc_extend_kernel", NoKernel()):
        return waits(
            device,
            lambda *on: allocator.alloc_extend(on[0], torch.tensor(before), on[1], torch.tensor(after), on[2], 4 * 300),
            before,
            after,
            last,
        )


def waits_of_free(device: str, shared: bool) -> int:
    """Waits of ``free`` for 512 slots."""
    return waits(device, make(2, device, shared).free, list(range(PAGE, PAGE + 512)))


def measure(device: str = "cpu", rounds: int = ROUNDS, round_s: float = ROUND_S) -> list[dict[str, Any]]:
    """Rows of the table; in a process that can import SGLang."""
    rows = []

    def row(name: str, value: float, unit: str, budget: float | None, how: str, higher_is_better: bool = False) -> None:
        rows.append({"name": name, "value": value, "unit": unit, "budget": budget, "how": how})
        rows[-1]["higher_is_better"] = higher_is_better

    how = f"allocations and frees a second; median of {rounds} rounds in one process, in turn"
    if device != "cuda":
        how += "; without the time of stock's kernel"
    for cp_size, (mix, told) in itertools.product(CP_SIZES, MIXES):
        ratio = throughput(cp_size, device, mix, told, rounds, round_s)
        end = ", last pages told" if told else ""
        row(f"throughput, CP {cp_size}, {mix.name}{end}", ratio, "x stock", 0.9, how, higher_is_better=True)
    counted = "synchronizing CUDA operations" if device == "cuda" else "calls on tensors of the device that would wait"
    for name, prefix, told, budget in (
        ("without prefix", 0, False, 0),
        ("with prefixes", 4096, False, 1),
        ("with prefixes, last pages told", 4096, True, 0),
    ):
        row(f"host syncs, batch {name}", waits_of_batch(device, True, prefix, told), "syncs", budget, counted)
    row("host syncs, free", waits_of_free(device, True), "syncs", waits_of_free(device, False), f"{counted}; as stock")
    return rows


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    if device == "cuda":
        rows = measure(device)
    else:
        with sglang_process() as call:
            rows = call(measure, device)
    print(table({"allocator": [Row.of(row) for row in rows]}))


if __name__ == "__main__":
    main()
