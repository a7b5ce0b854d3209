"""Page copies and page-table expansion: torch against plain Python, Triton's interpreter against torch, and the PTX.

Triton decides at decoration whether a kernel is interpreted, so the module is executed once more for either mode.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends import backends
from triton.backends.compiler import GPUTarget

from cp_shared_kv import kernels
from cp_shared_kv.collectives import page_rows

SENTINEL = -77
GUARD = 4096  # more than a store without its mask would write


def execute_kernels(interpret: bool) -> ModuleType:
    """``cp_shared_kv.kernels`` anew, with kernels that Triton interprets on CPU tensors, or compiles."""
    spec = importlib.util.spec_from_file_location("cp_shared_kv.kernels", kernels.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    return execute_kernels(interpret=True)


def pages_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(256, (rows, width * size), dtype=torch.uint8, generator=generator).view(dtype)


# ------------------------------------------------------------------------------------------------------- copy_pages

COPIES = {
    "bfloat16 MLA KV, 9 whole blocks": (torch.int64, 9216, [4, 1, 2], [6, 0, 3]),
    "fp8 MLA KV, a ragged sixth block": (torch.int64, 5248, [1], [2]),
    "index-K, a ragged second block": (torch.int64, 1056, [5, 0, 3], [1, 5, 2]),
    "one source page twice": (torch.int64, 1056, [2, 5], [0, 0]),
    "one word": (torch.int64, 1, [0, 5], [6, 1]),
    "bytes, a word short of a block": (torch.uint8, 1023, [5, 1], [0, 6]),
    "bytes, one block": (torch.uint8, 1024, [5, 1], [0, 6]),
    "bytes, a word more than a block": (torch.uint8, 1025, [5, 1], [0, 6]),
    "no page": (torch.int64, 1056, [], []),
}


def assert_copies(
    copy: Callable[..., None], dtype: torch.dtype, width: int, target_pages: list[int], source_pages: list[int]
) -> None:
    """Run ``copy`` from 7 rows into 6 rows within a longer memory; compare all with a loop."""
    memory = random_rows(1, GUARD + 6 * width + GUARD, dtype).flatten()
    source = random_rows(7, width, dtype, seed=1)
    expected, source_before = memory.clone(), source.clone()
    for target_page, source_page in zip(target_pages, source_pages, strict=True):
        for word in range(width):
            expected[GUARD + target_page * width + word] = source[source_page, word]
    copy(memory[GUARD:-GUARD].view(6, width), pages_of(*target_pages), source, pages_of(*source_pages))
    assert torch.equal(memory, expected)
    assert torch.equal(source, source_before)


@pytest.mark.parametrize("case", COPIES)
def test_copy_pages_copies_the_named_rows_and_no_other(case: str):
    assert_copies(kernels.copy_pages, *COPIES[case])


@pytest.mark.parametrize("case", [case for case in COPIES if COPIES[case][2]])
def test_the_copy_kernel_copies_the_named_rows_and_no_other(interpreted: ModuleType, case: str):
    assert_copies(interpreted._launch_copy_pages, *COPIES[case])


def test_the_copy_kernel_addresses_more_words_than_int32_counts(interpreted: ModuleType):
    # 4 GiB of addresses, not of memory. The rows begin in the middle, so a wrapped offset finds its start.
    words = torch.empty(2**32 + 1024, dtype=torch.uint8)
    row = random_rows(1, 1024, torch.uint8)
    words[:1024], words[-1024:] = 0, row[0]
    pool = words[2**31 :].view(-1, 1024)
    last = pages_of(len(pool) - 1)
    other = torch.zeros(2, 1024, dtype=torch.uint8)
    interpreted._launch_copy_pages(other, pages_of(1), pool, last)
    assert torch.equal(other, torch.cat([torch.zeros_like(row), row]))
    interpreted._launch_copy_pages(pool, last, other, pages_of(0))
    assert not pool[-1].any()


@pytest.mark.parametrize(
    "change",
    [
        {"target": torch.zeros(3, 5, dtype=torch.int64)},
        {"target": torch.zeros(3, 4, dtype=torch.uint8)},
        {"target": torch.zeros(4, 3, dtype=torch.int64).T},
        {"target": torch.zeros(3, 4, dtype=torch.int64, device="meta")},
        {"source": torch.zeros(3, 8, dtype=torch.int64)[:, ::2]},
        {"target_pages": pages_of(0)},
        {"target_pages": torch.tensor([0, 1], dtype=torch.int32)},
        {"source_pages": pages_of(0, 1, 2, 3)[::2]},
    ],
    ids=["width", "dtype", "strides", "device", "source strides", "lengths", "index dtype", "index strides"],
)
def test_copy_pages_refuses_tensors_that_the_kernel_would_misread(change: dict[str, torch.Tensor]):
    rows = {"target": torch.zeros(3, 4, dtype=torch.int64), "source": torch.zeros(3, 4, dtype=torch.int64)}
    arguments = rows | {"target_pages": pages_of(0, 1), "source_pages": pages_of(0, 1)} | change
    with pytest.raises(ValueError, match="copy_pages cannot copy between these"):
        kernels.copy_pages(**arguments)


# ------------------------------------------------------------------------------------------------ expand_page_table


def expand_by_loop(
    page_table: torch.Tensor, spans: torch.Tensor, page_size: int, width: int, rows: int, trash_slot: int
) -> tuple[list[list[int]], list[int]]:
    """What ``expand_page_table`` is to return, position by position."""
    tables = page_table.tolist()

    def slot(request: int, position: int) -> int:
        page_at, offset = divmod(position, page_size)
        return tables[request][page_at] * page_size + offset if page_at < len(tables[request]) else trash_slot

    write_slots = [trash_slot] * rows
    for request, (prefix, length, first) in enumerate(spans.T.tolist()):
        for position in range(prefix, length):
            write_slots[first + position - prefix] = slot(request, position)
    return [[slot(request, at) for at in range(width)] for request in range(len(tables))], write_slots


def batch_of(
    page_size: int, pages: int, requests: list[tuple[int, int]], width: int, padding: int, trash_slot: int = 999_936
) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    """Arguments of ``expand_page_table`` for requests of (prefix, length), their rows one after the other."""
    table = torch.randperm(len(requests) * pages, generator=torch.Generator().manual_seed(pages)) + 1
    chunks = [length - prefix for prefix, length in requests]
    spans = [[prefix, length, sum(chunks[:i])] for i, (prefix, length) in enumerate(requests)]
    return (
        table.to(torch.int32).view(len(requests), pages),
        torch.tensor(spans, dtype=torch.int64).view(len(requests), 3).T.contiguous(),
        page_size,
        width,
        sum(chunks) + padding,
        trash_slot,
    )


EXPANSIONS = {
    "a chunk from the start": batch_of(64, 5, [(0, 300)], width=300, padding=0),
    "a chunk that starts and ends within pages": batch_of(64, 40, [(1111, 2500)], width=2560, padding=0),
    "whole pages": batch_of(64, 33, [(1024, 2048)], width=2048, padding=0),
    "padding rows past a block": batch_of(64, 20, [(10, 1200)], width=1279, padding=1000),
    "a width past the table": batch_of(64, 3, [(64, 150)], width=1500, padding=3),
    "a width short of the table": batch_of(64, 20, [(64, 1200)], width=1, padding=0),
    "three requests, one with nothing new": batch_of(64, 20, [(0, 70), (1280, 1280), (63, 1250)], 1290, padding=5),
    "three requests of more than a block": batch_of(64, 33, [(1, 1100), (64, 2111), (0, 65)], 2111, padding=1),
    "pages of one token": batch_of(1, 40, [(3, 40), (0, 1)], width=41, padding=2),
    "a chunk longer than its table": batch_of(64, 1, [(0, 100), (3, 130)], width=130, padding=1),
    "a table without pages": batch_of(64, 0, [(0, 0)], width=70, padding=9),
    "no request": batch_of(64, 3, [], width=10, padding=1100),
    "no row": batch_of(64, 3, [(5, 5)], width=130, padding=0),
    "no position": batch_of(64, 3, [(5, 130)], width=0, padding=3),
    "no position and no row": batch_of(64, 3, [(5, 5)], width=0, padding=0),
    "no request and no row": batch_of(64, 3, [], width=10, padding=0),
}


def assert_expands(expand: Callable[..., tuple[torch.Tensor, torch.Tensor]], arguments: tuple[Any, ...]) -> None:
    token_table, write_slots = expand(*arguments)
    page_table, _, _, width, rows, _ = arguments
    assert (token_table.dtype, token_table.shape) == (torch.int32, (len(page_table), width))
    assert (write_slots.dtype, write_slots.shape) == (torch.int64, (rows,))
    assert (token_table.tolist(), write_slots.tolist()) == expand_by_loop(*arguments)


@contextmanager
def guarded_memory() -> Iterator[None]:
    """Makes ``torch.empty`` give filled memory between guards; afterwards the guards must be as they were."""
    guards: list[torch.Tensor] = []

    def empty(size: Any, **kwargs: Any) -> torch.Tensor:
        shape = torch.Size([size] if isinstance(size, int) else size)
        memory = torch.full((GUARD + shape.numel() + GUARD,), SENTINEL, **kwargs)
        guards.extend([memory[:GUARD], memory[-GUARD:]])
        return memory[GUARD:-GUARD].view(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    assert len(guards) == 4
    assert all(bool((guard == SENTINEL).all()) for guard in guards)


@pytest.mark.parametrize("case", EXPANSIONS)
def test_expand_page_table_gives_the_slot_of_every_position_and_row(case: str):
    assert_expands(kernels.expand_page_table, EXPANSIONS[case])


@pytest.mark.parametrize("case", EXPANSIONS)
def test_the_expand_kernel_writes_every_element_and_nothing_else(interpreted: ModuleType, case: str):
    with guarded_memory():
        assert_expands(interpreted._launch_expand_page_table, EXPANSIONS[case])


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    page_size, pages = draw(st.sampled_from([1, 4, 64])), draw(st.integers(0, 6))
    requests = draw(st.lists(st.tuples(*[st.integers(0, page_size * pages)] * 2).map(sorted), max_size=4))
    width, padding = draw(st.integers(0, page_size * pages + 70)), draw(st.integers(0, 20))
    return batch_of(page_size, pages, [(prefix, length) for prefix, length in requests], width, padding)


@given(arguments=batches())
@settings(max_examples=100, deadline=None)
def test_torch_and_kernel_expand_any_batch_alike(interpreted: ModuleType, arguments: tuple[Any, ...]):
    by_torch = kernels.expand_page_table(*arguments)
    with guarded_memory():
        by_kernel = interpreted._launch_expand_page_table(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(by_torch, by_kernel, strict=True))
    assert_expands(kernels.expand_page_table, arguments)


@pytest.mark.parametrize(
    ("page_table", "spans"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)),
        (torch.zeros(3, 2, dtype=torch.int32).T, torch.zeros(3, 2, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64).T),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)),
        (torch.zeros(6, dtype=torch.int32), torch.zeros(3, 6, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int64, device="meta")),
    ],
    ids=["table dtype", "span dtype", "strides", "span strides", "batch", "spans", "dimensions", "device"],
)
def test_expand_page_table_refuses_tensors_that_the_kernel_would_misread(page_table: torch.Tensor, spans: torch.Tensor):
    with pytest.raises(ValueError, match="expand_page_table takes another page table or other spans"):
        kernels.expand_page_table(page_table, spans, 64, 10, 10, 0)


# ------------------------------------------------------------------------------------------------ launches and syncs


class Launches:
    """Stands in for a kernel: ``kernel[grid](..)`` notes the grid, and compiles if a kernel was given."""

    def __init__(self, kernel: Any = None) -> None:
        self.kernel = kernel
        self.grids: list[tuple[int, ...]] = []
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.grids.append(grid)
            if self.kernel is not None:
                self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launches]:
    """Kernels of the module that note their launches and do nothing."""
    stand_ins = {"copy": Launches(), "expand": Launches()}
    monkeypatch.setattr(kernels, "_copy_pages_kernel", stand_ins["copy"])
    monkeypatch.setattr(kernels, "_expand_page_table_kernel", stand_ins["expand"])
    return stand_ins


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in tensors]


@pytest.mark.parametrize("pages", [0, 1, 70_000])
def test_copy_pages_on_cuda_is_one_launch_or_none_without_pages(launches: dict[str, Launches], pages: int):
    with FakeTensorMode():
        rows, indices = on("cuda", torch.empty(3, 1056, dtype=torch.int64), torch.empty(pages, dtype=torch.int64))
        kernels.copy_pages(rows, indices, rows, indices)
    assert launches["copy"].grids == ([(2 * pages,)] if pages else [])


@pytest.mark.parametrize(
    ("width", "rows", "grids"), [(0, 0, []), (1, 0, [(1, 3)]), (0, 2048, [(2, 3)]), (2049, 70, [(3, 3)])]
)
def test_expand_page_table_on_cuda_is_one_launch_or_none_without_elements(
    launches: dict[str, Launches], width: int, rows: int, grids: list[tuple[int, int]]
):
    page_table, spans, *_ = batch_of(64, 3, [(0, 5), (6, 9)], 0, 0)
    with FakeTensorMode():
        token_table, write_slots = kernels.expand_page_table(*on("cuda", page_table, spans), 64, width, rows, 9)
    assert launches["expand"].grids == grids
    assert (token_table.device.type, token_table.dtype, token_table.shape) == ("cuda", torch.int32, (2, width))
    assert (write_slots.device.type, write_slots.dtype, write_slots.shape) == ("cuda", torch.int64, (rows,))


@pytest.mark.parametrize("function", ["copy_pages", "expand_page_table"])
def test_on_cuda_nothing_but_the_outputs_is_allocated_and_no_operation_is_dispatched(
    launches: dict[str, Launches], function: str
):
    seen: list[str] = []

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    page_table, spans, *_ = batch_of(64, 3, [(0, 5), (6, 9)], 0, 0)
    with FakeTensorMode():
        table, spans, rows, pages = on("cuda", page_table, spans, torch.empty(3, 8).long(), torch.empty(2).long())
        with Noting():
            if function == "expand_page_table":
                kernels.expand_page_table(table, spans, 64, 100, 50, 9)
            else:
                kernels.copy_pages(rows, pages, rows, pages)
    assert seen == ["aten.empty.memory_format"] * (2 if function == "expand_page_table" else 0)


def test_the_torch_paths_read_no_value_on_the_host():
    # A meta tensor has no values, so reading one raises.
    page_table, spans, *sizes = EXPANSIONS["three requests, one with nothing new"]
    token_table, write_slots = kernels.expand_page_table(*on("meta", page_table, spans), *sizes)
    assert (token_table.shape, write_slots.shape) == ((3, sizes[1]), (sizes[2],))
    rows, indices = on("meta", torch.empty(3, 8, dtype=torch.int64), pages_of(0, 1))
    kernels.copy_pages(rows, indices, rows.clone(), indices)


# --------------------------------------------------------------------------------------------------------- compiled

h200 = [
    pytest.mark.skipif("nvidia" not in backends, reason="this Triton has no CUDA backend"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
MODEL_PAGES = {
    "bfloat16 MLA KV": torch.empty(3 * 64, 1, 576, dtype=torch.bfloat16),
    "fp8 MLA KV": torch.empty(3 * 64, 1, 656, dtype=torch.float8_e4m3fn),
    "index-K": torch.empty(3, 64 * 132, dtype=torch.uint8),
}


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module with kernels whose launches compile for an H200, specialised as a launch specialises them."""
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    module = execute_kernels(interpret=False)
    monkeypatch.setattr(module, "_copy_pages_kernel", Launches(module._copy_pages_kernel))
    monkeypatch.setattr(module, "_expand_page_table_kernel", Launches(module._expand_page_table_kernel))
    return module


class TestCompiledForH200:
    pytestmark = h200

    @pytest.mark.parametrize("what", MODEL_PAGES)
    def test_copy_of_model_pages_loads_and_stores_16_bytes_a_time(self, compiling: ModuleType, what: str):
        source = page_rows(MODEL_PAGES[what], 3)
        compiling._launch_copy_pages(torch.empty_like(source), pages_of(1), source, pages_of(2))
        (compiled,) = compiling._copy_pages_kernel.compiled
        assert compiled.asm["cubin"]
        assert ".target sm_90a" in compiled.asm["ptx"]
        stores = [line for line in compiled.asm["ptx"].splitlines() if "st.global" in line]
        assert len(stores) == 4  # 8 words a thread
        assert all("st.global.v2.b64" in line for line in stores)
        assert compiled.asm["ptx"].count("ld.global.v2.b64") == 4

    def test_copy_of_byte_pages_compiles(self, compiling: ModuleType):
        source = random_rows(3, 1025, torch.uint8)
        compiling._launch_copy_pages(source.clone(), pages_of(1), source, pages_of(2))
        (compiled,) = compiling._copy_pages_kernel.compiled
        assert compiled.asm["cubin"]

    def test_expansion_compiles(self, compiling: ModuleType):
        compiling._launch_expand_page_table(*EXPANSIONS["three requests of more than a block"])
        (compiled,) = compiling._expand_page_table_kernel.compiled
        assert compiled.asm["cubin"]
        assert ".target sm_90a" in compiled.asm["ptx"]

    def test_another_number_or_alignment_of_pages_compiles_nothing_anew(self, compiling: ModuleType):
        source = random_rows(20, 1056, torch.int64)
        upload = torch.arange(20)
        for part in (upload[:1], upload[:16], upload[1:4]):
            compiling._launch_copy_pages(torch.empty_like(source), part, source, part)
        assert len({id(kernel) for kernel in compiling._copy_pages_kernel.compiled}) == 1

    def test_another_batch_compiles_nothing_anew(self, compiling: ModuleType):
        for arguments in EXPANSIONS.values():
            if arguments[2] == 64:
                page_table, spans, *sizes = arguments
                shifted = torch.cat([torch.zeros(1, dtype=torch.int32), page_table.flatten()])[1:]
                shifted_spans = torch.cat([torch.zeros(1, dtype=torch.int64), spans.flatten()])[1:]
                compiling._launch_expand_page_table(page_table, spans, *sizes)
                compiling._launch_expand_page_table(
                    shifted.view_as(page_table), shifted_spans.view_as(spans), *sizes[:-1], 1
                )
        assert len({id(kernel) for kernel in compiling._expand_page_table_kernel.compiled}) == 1
