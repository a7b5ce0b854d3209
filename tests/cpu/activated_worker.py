"""Run in a process of its own by the tests: the activated CPU platform, with the stock Triton kernels interpreted.

Writes to the path in argv[1] what the stock kernels made of fixed inputs, which seams activation replaced, and how
SGLang parses the flags of ``launch``. The inputs are stored with the results.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

import torch

from cp_shared_kv_cpu import activate, is_active, launch
from cp_shared_kv_cpu.releases import installed_row

PAGE = 64


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kernel(name: str) -> Any:
    """The function that now lies where the installed release has the kernel of a reference."""
    module, _, attribute = installed_row().places[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def run_stock_kernels() -> dict[str, dict[str, Any]]:
    """Inputs and results by kernel; small, since the interpreter takes milliseconds a program."""
    places = installed_row().places
    results: dict[str, dict[str, Any]] = {}

    def record(name: str, variant: str = "", **inputs: Any) -> Any:
        stored = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        output = kernel(name)(**inputs)
        # Kernels that write in place leave their result in an input.
        results[f"{name} {variant}".strip()] = {"inputs": stored, "output": output, "after": inputs}
        return output

    x = normal(3, 2, 256, seed=1).bfloat16()
    x[0, 0, :128] = 0  # below the floor of the maximum
    x[1, 1] *= 1e4
    x[2, 0] = torch.linspace(-1, 1, 256).bfloat16()  # every exponent, also the subnormal ones
    for scale_fmt in (None, "ue8m0"):
        record("act_quant", str(scale_fmt), x=x, block_size=128, scale_fmt=scale_fmt)

    buf = torch.randint(0, 256, (5, PAGE * 132), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    pages = torch.tensor([[3, 1, 0], [4, 0, 0]], dtype=torch.int32)
    common = {"buf": buf, "page_size": PAGE, "index_head_dim": 128}
    for name in ("get_k", "get_s"):
        if name in places:
            record(name, page_indices=pages[0], seq_len=PAGE + 5, **common)
    record(
        "get_k_and_s",
        page_indices=pages,
        seq_lens=torch.tensor([PAGE + 5, 7]),
        seq_len_sum=PAGE + 12,
        max_seq_len=PAGE + 5,
        **common,
    )
    record(
        "set_k_and_s",
        buf=buf.clone(),
        loc=torch.tensor([2 * PAGE - 1, 2 * PAGE, 5 * PAGE - 1, 0]),
        index_k=normal(4, 128, seed=3).to(torch.float8_e4m3fn),
        index_k_scale=normal(4, 1, seed=4).abs(),
        page_size=PAGE,
    )

    nope, rope = normal(4, 1, 512, seed=5).bfloat16(), normal(4, 1, 64, seed=6).bfloat16()
    nope[1, 0, 128:256] = 0  # a tile whose scale is 0
    # A tie that y * (1 / scale) rounds up and y / scale rounds down.
    nope[0, 0, :128] = 0
    nope[0, 0, :2] = torch.tensor([1.078125, 0.80859375])
    nope[2] *= 1e-3
    nope[3, 0] = torch.linspace(-1, 1, 512).bfloat16()
    parts = record("quantize_k_cache_separate", k_nope=nope, k_rope=rope)
    whole = torch.cat([nope, rope], -1)[:, None]
    quantized = record("quantize_k_cache", cache_k=whole)
    slots = quantized.view(4, 1, 656)
    table = torch.tensor([3, 0, 2, 2], dtype=torch.int32)
    record("dequantize_k_cache_paged", quant_k_cache=slots, page_table_1_flattened=table)
    loc = torch.tensor([5, 0, 2, 7])
    kv_buffer = normal(8, 1, 576, seed=7).bfloat16()
    write = {"loc": loc, "cache_k_nope": nope, "cache_k_rope": rope}
    for name in ("set_mla_kv_buffer", "set_mla_kv_buffer_skipping"):
        if name in places:
            record(name, "bf16", kv_buffer=kv_buffer.clone(), **write)
            record(
                name,
                "fp8",
                kv_buffer=torch.zeros(8, 1, 656, dtype=torch.uint8),
                loc=loc,
                cache_k_nope=parts[0],
                cache_k_rope=parts[1],
            )
    for dtype in (torch.bfloat16, torch.float32):
        record(
            "get_mla_kv_buffer",
            str(dtype),
            kv_buffer=kv_buffer,
            loc=loc,
            cache_k_nope=torch.zeros(4, 1, 512, dtype=dtype),
            cache_k_rope=torch.zeros(4, 1, 64, dtype=dtype),
        )
    return results


def store_under_a_scalar_condition() -> list[list[float]]:
    """What a Triton kernel stores whose mask is 3 lanes of 4 and a condition on a scalar, met and then unmet."""
    import triton
    import triton.language as tl

    @triton.jit
    def store(destination, condition):
        lane = tl.arange(0, 4)
        met = tl.load(condition) == 1
        tl.store(destination + lane, lane + 1.0, mask=(lane < 3) & met)

    stored = []
    for condition in (1, 0):
        destination = torch.zeros(4)
        store[(1,)](destination, torch.tensor([condition]))
        stored.append(destination.tolist())
    return stored


def seam_owners() -> dict[str, str]:
    """Module of the function found at the place of each kernel, and where SGLang has imported the kernel by name."""
    row = installed_row()
    found = {name: kernel(name).__module__ for name in row.places}
    for path in ("sglang.srt.mem_cache.memory_pool", row.sparse_backend, row.indexer):
        module = importlib.import_module(path)
        for name, place in row.places.items():
            function = vars(module).get(place.partition(":")[2])
            if function is not None:
                found[f"{path.rpartition('.')[2]} {name}"] = function.__module__
    indexer = importlib.import_module(row.indexer)
    parallel_state = importlib.import_module("sglang.srt.distributed.parallel_state")
    found["indexer deep_gemm"] = indexer.deep_gemm.fp8_mqa_logits.__module__
    found["parallel_state inplace_all_reduce"] = parallel_state.inplace_all_reduce.__module__
    for name in row.cuda_imports:
        found[f"indexer {name}"] = getattr(indexer, name).__module__
    return found


def cpu_claims() -> list[str]:
    """Modules that still take themselves for a CPU's, of those where the NSA path must be answered as on a GPU."""
    row = installed_row()
    claims = [path for path in row.cpu_branches if importlib.import_module(path)._is_cpu]
    return claims + [path for path in row.cpu_refusals if importlib.import_module(path).current_platform.is_cpu()]


def parsed_flags() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of engine arguments and what SGLang's own parser makes of the flags for the same options."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    pairs = []
    for options in (
        {},
        {"role": "prefill", "cp_size": 2, "bootstrap_port": 8999, "port": 30001, "chunked_prefill_size": 256},
        {"role": "decode", "kv_cache_dtype": "fp8_e4m3", "context_length": 2048, "max_total_tokens": 1024},
    ):
        parsed = vars(parser.parse_args(launch.server_flags("tiny", **options)))
        # Two flags carry another name in the parser than in ServerArgs.
        parsed["tp_size"] = parsed.pop("tensor_parallel_size", parsed.get("tp_size"))
        pairs.append((launch.engine_arguments("tiny", **options), parsed))
    return pairs


def main() -> None:
    """Activate with the interpreter kept, record, then install the twins and look at the seams again."""
    os.environ["CP_SHARED_KV_CPU_INTERPRET"] = "1"
    launch.apply_cpu_environment(1)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    result: dict[str, Any] = {"active": is_active(), "interpreted": seam_owners(), "kernels": run_stock_kernels()}
    result["cpu_claims"] = cpu_claims()
    result["indexed_device"] = hasattr(
        importlib.import_module(installed_row().indexer).Indexer._get_topk_ragged, "__wrapped__"
    )
    result["scalar_mask"] = store_under_a_scalar_condition()

    from cp_shared_kv_cpu import triton_twins

    triton_twins.install()
    result["twins"] = seam_owners()
    activate()
    result["again"] = seam_owners()
    result["capability"] = torch.cuda.get_device_capability()
    result["device"] = torch.zeros(1, device="cuda").device.type
    result["cuda_available"] = torch.cuda.is_available()
    result["flags"] = parsed_flags()
    torch.save(result, sys.argv[1])


if __name__ == "__main__":
    main()
