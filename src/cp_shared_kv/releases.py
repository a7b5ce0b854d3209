"""SGLang releases as data: where each seam lies, how it looked, and what things are called.

Each fact is written once, at the first release it holds for; releases that are alike so share it. ``seams.json`` holds
the seams in the same way. Nothing outside this module asks for a version; code asks the row of the installed release.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from cp_shared_kv.seams import SeamError, SourceTree, Target

#: All supported releases, oldest first.
VERSIONS = (
    "0.5.11",
    "0.5.12",
    "0.5.12.post1",
    "0.5.13",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)


@dataclass(frozen=True)
class ArgumentNames:
    """Names of ``ServerArgs`` fields, and of flags in messages, that differ between releases.

    Attributes:
        prefill_cp: field that turns prefill CP on.
        prefill_cp_flag: its flag.
        cp_mode: field with the split mode.
        cp_mode_flag: its flag.
        in_seq_split: value of the split mode that shared KV supports.
        prefill_backend: field with the NSA prefill backend.
        prefill_backend_flag: its flag.
        decode_backend: field with the NSA decode backend.
        attention_backend: name of the attention backend of these models.
        cuda_graph_phases: phases of ``cuda_graph_config``; none where one switch turns CUDA graphs off.
    """

    prefill_cp: str
    prefill_cp_flag: str
    cp_mode: str
    cp_mode_flag: str
    in_seq_split: str
    prefill_backend: str
    prefill_backend_flag: str
    decode_backend: str
    attention_backend: str
    cuda_graph_phases: tuple[str, ...] = ()


_NSA = ArgumentNames(
    prefill_cp="enable_nsa_prefill_context_parallel",
    prefill_cp_flag="--enable-nsa-prefill-context-parallel",
    cp_mode="nsa_prefill_cp_mode",
    cp_mode_flag="--nsa-prefill-cp-mode",
    in_seq_split="in-seq-split",
    prefill_backend="nsa_prefill_backend",
    prefill_backend_flag="--nsa-prefill-backend",
    decode_backend="nsa_decode_backend",
    attention_backend="nsa",
)
_DSA = ArgumentNames(
    prefill_cp="enable_dsa_prefill_context_parallel",
    prefill_cp_flag="--enable-dsa-prefill-context-parallel",
    cp_mode="dsa_prefill_cp_mode",
    cp_mode_flag="--dsa-prefill-cp-mode",
    in_seq_split="in-seq-split",
    prefill_backend="dsa_prefill_backend",
    prefill_backend_flag="--dsa-prefill-backend",
    decode_backend="dsa_decode_backend",
    attention_backend="dsa",
)
_CP_STRATEGY = ArgumentNames(
    prefill_cp="enable_prefill_cp",
    prefill_cp_flag="--enable-prefill-cp",
    cp_mode="cp_strategy",
    cp_mode_flag="--cp-strategy",
    in_seq_split="zigzag",
    prefill_backend="dsa_prefill_backend",
    prefill_backend_flag="--dsa-prefill-backend",
    decode_backend="dsa_decode_backend",
    attention_backend="dsa",
    cuda_graph_phases=("prefill", "decode"),
)

_LAYER_SPLIT = (
    "with an interleaved split, SGLang's own --enable-dsa-cache-layer-split lets each CP rank keep the cache of some "
    "layers only"
)
_UPSTREAM_SHARDING = (
    "on Blackwell with fp8_e4m3 KV, SGLang's own --enable-kv-cache-sharding does what CP shared KV does, in "
    "--cp-strategy interleave with the trtllm backends and --page-size 64; use it there: upstream maintains it, and "
    "trtllm is the faster backend"
)

_NO_ZIGZAG = (
    "this release cannot run NSA/DSA models with --cp-strategy zigzag: it refuses it for DeepSeek-V3.2, and with GLM-5 "
    "the first chunk raises NotImplementedError (no DSA indexer key gather)"
)

#: Fact -> first release that it holds for -> value; what a fact means is said in :class:`Release`.
_FACTS: dict[str, dict[str, Any]] = {
    "arguments": {"0.5.11": _NSA, "0.5.13": _DSA, "0.5.14": _CP_STRATEGY},
    "stock_loses_pages": {"0.5.11": True, "0.5.14": False},
    "no_zigzag": {"0.5.11": None, "0.5.20": _NO_ZIGZAG},
    "index_k_state": {"0.5.11": "nsa", "0.5.13": "dsa"},
    "state_by_component": {"0.5.11": False, "0.5.12": True},
    "state_after_prefix": {"0.5.11": False, "0.5.23": True},
    "heeds_state_failures": {"0.5.11": False, "0.5.17": True},
    "counts_chunks": {"0.5.11": False, "0.5.18": True},
    "makes_sender_apart": {"0.5.11": False, "0.5.13": True},
    "answers_rejected": {"0.5.11": False, "0.5.21": True},
    "stream_output": {"0.5.11": "stream_output", "0.5.13": "output_streamer.stream_output"},
    "pools_on_batch": {"0.5.11": True, "0.5.13": False},
    "pools_in_result": {"0.5.11": False, "0.5.16": True},
    "index_key_cache": {"0.5.11": False, "0.5.18": True},
    "request_kv": {"0.5.11": False, "0.5.19": True},
    "request_prefix_len": {"0.5.11": False, "0.5.22": True},
    "tree_namespace": {"0.5.11": ("extra_key",), "0.5.18": ("extra_key", "cache_salt")},
    "upstream": {"0.5.11": (), "0.5.16": (_LAYER_SPLIT,), "0.5.23": (_UPSTREAM_SHARDING, _LAYER_SPLIT)},
}

#: Name here -> first release that it holds for -> ``module:object``.
_SYMBOLS: dict[str, dict[str, str | None]] = {
    # From here on ServerArgs keep what the user wrote, and what was made of it is read through a view.
    "resolving_view": {"0.5.11": None, "0.5.19": "sglang.srt.arg_groups.model_override_base:resolving_view"},
    "model_config_of": {"0.5.11": None, "0.5.19": "sglang.srt.arg_groups.model_override_base:model_config_of"},
    "NSATokenToKVPool": {
        "0.5.11": "sglang.srt.mem_cache.memory_pool:NSATokenToKVPool",
        "0.5.13": "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool",
    },
    "PagedTokenToKVPoolAllocator": {
        "0.5.11": "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator",
        "0.5.13": "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator",
    },
    "prefix_tree": {
        "0.5.11": "sglang.srt.mem_cache.radix_cache:RadixCache",
        "0.5.19": "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache",
    },
    "chunk_cache": {"0.5.11": "sglang.srt.mem_cache.chunk_cache:ChunkCache", "0.5.22": None},
    "prefix_kv_indices": {"0.5.11": None, "0.5.22": "sglang.srt.mem_cache.allocation:_prefix_kv_indices"},
    "unwrap_write_loc": {"0.5.11": None, "0.5.22": "sglang.srt.mem_cache.memory_pool:unwrap_write_loc"},
    "get_token_to_kv_pool": {
        "0.5.11": None,
        "0.5.13": "sglang.srt.model_executor.forward_context:get_token_to_kv_pool",
    },
    "AddReqResult": {"0.5.11": "sglang.srt.managers.schedule_policy:AddReqResult"},
    "calculate_mla_kv_cache_dim": {
        "0.5.11": None,
        "0.5.16": "sglang.srt.mem_cache.kv_cache_configurator:calculate_mla_kv_cache_dim",
    },
    "get_nsa_index_head_dim": {
        "0.5.11": "sglang.srt.configs.model_config:get_nsa_index_head_dim",
        "0.5.13": "sglang.srt.configs.model_config:get_dsa_index_head_dim",
    },
    "release_metadata_buffer": {
        "0.5.11": "sglang.srt.disaggregation.prefill:release_req_to_metadata_buffer",
        "0.5.13": "sglang.srt.disaggregation.prefill:maybe_release_metadata_buffer",
    },
    "is_deepseek_nsa": {
        "0.5.11": "sglang.srt.configs.model_config:is_deepseek_nsa",
        "0.5.13": "sglang.srt.configs.model_config:is_deepseek_dsa",
    },
}


@dataclass(frozen=True)
class Release:
    """What is known of one release.

    Attributes:
        version: the release.
        arguments: its argument names.
        targets: its seams, id -> place and look.
        absent: seams that it does not have and that are not needed there, id -> why.
        symbols: name here -> ``module:object``, or None where it has no such thing; see :func:`symbol`.
        no_zigzag: why SGLang itself cannot run these models in the split that shared KV supports, None where it can.
        upstream: SGLang's own ways to keep less KV on each CP rank, a sentence each on when they are the better choice.
        stock_loses_pages: whether stock loses pages when all CP ranks send, where page ids are not ascending.
        index_k_state: value of the ``StateType`` that index-K is transferred as.
        state_by_component: whether a transfer has a list of state pages for each state type; else one list for all.
        state_after_prefix: whether index-K of the pages that decode has cached is not sent again, as KV never is.
        heeds_state_failures: whether a state transfer that fails makes the request fail.
        counts_chunks: whether a prefill manager counts the chunks that are being written, by room.
        makes_sender_apart: whether the bootstrap queue can make a request's sender without queueing it.
        answers_rejected: whether the bootstrap queue answers the client of a rejected request with its error.
        stream_output: dotted name of the scheduler's method that answers clients.
        pools_on_batch: whether a forward batch holds the pools; else the attention backend does.
        pools_in_result: whether what builds the pools returns them, frozen; else it leaves them on the model runner.
        index_key_cache: whether the index-K buffers are in the pool's ``index_key_cache``; else in the pool itself.
        request_kv: whether a request's place in ``req_to_token`` is noted in its ``kv``; else in the request itself.
        request_prefix_len: whether a request has the length of its prefix; else it has the prefix's slots.
        tree_namespace: fields of a request that, beside its tokens, tell prefixes in the tree apart.
    """

    version: str
    arguments: ArgumentNames
    targets: Mapping[str, Target]
    absent: Mapping[str, str]
    symbols: Mapping[str, str | None]
    no_zigzag: str | None = None
    upstream: tuple[str, ...] = ()
    stock_loses_pages: bool = False
    index_k_state: str = "dsa"
    state_by_component: bool = True
    state_after_prefix: bool = True
    heeds_state_failures: bool = True
    counts_chunks: bool = True
    makes_sender_apart: bool = True
    answers_rejected: bool = True
    stream_output: str = "output_streamer.stream_output"
    pools_on_batch: bool = False
    pools_in_result: bool = True
    index_key_cache: bool = True
    request_kv: bool = True
    request_prefix_len: bool = True
    tree_namespace: tuple[str, ...] = ("extra_key", "cache_salt")


def supported_versions() -> tuple[str, ...]:
    """All releases with a row, oldest first."""
    return VERSIONS


def _at(version: str, eras: Mapping[str, Any]) -> Any:
    """The value that holds for a release: that of the last era which began by then, None before the first."""
    order = VERSIONS.index(version)
    begun = [since for since in eras if VERSIONS.index(since) <= order]
    return eras[max(begun, key=VERSIONS.index)] if begun else None


@cache
def seam_eras() -> dict[str, dict[str, dict[str, Any]]]:
    """Seam -> first release -> its look, from ``seams.json``."""
    text = resources.files(__package__).joinpath("seams.json").read_text(encoding="utf-8")
    return {seam: {era["since"]: era for era in eras} for seam, eras in json.loads(text).items()}


def public_part(version: str) -> str:
    """A version without its local part, such as ``+cu130``."""
    return version.split("+", 1)[0]


@cache
def release_for(version: str) -> Release:
    """Row of a release; a local part such as ``+cu130`` does not count.

    Raises:
        SeamError: the release has no row.
    """
    public = public_part(version)
    if public not in VERSIONS:
        raise SeamError(
            [f"SGLang {version} is not a supported release: supported are {', '.join(VERSIONS)}; install one"]
        )
    eras = {seam: _at(public, looks) for seam, looks in seam_eras().items()}
    known = {seam: era for seam, era in eras.items() if era is not None}
    return Release(
        version=public,
        targets={seam: Target.from_json(era) for seam, era in known.items() if era["at"]},
        absent={seam: era["why"] for seam, era in known.items() if not era["at"]},
        symbols={name: _at(public, places) for name, places in _SYMBOLS.items()},
        **{fact: _at(public, values) for fact, values in _FACTS.items()},
    )


@cache
def installed() -> Release:
    """Row of the installed SGLang.

    Raises:
        SeamError: SGLang is not installed, or its release has no row.
    """
    return release_for(SourceTree.installed().version)


def named_arguments(seam: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call of a method that is a seam, by the names that the installed SGLang gives them.

    Args:
        seam: id of the seam.
        args: positional arguments, without ``self``.
        kwargs: keyword arguments.
    """
    return {**dict(zip(installed().targets[seam].parameters[1:], args, strict=False)), **kwargs}


@cache
def symbol(name: str) -> Any:
    """An object of the installed SGLang by the name it has here, None where it has no such thing; imports its module.

    Args:
        name: a key of :attr:`Release.symbols`.
    """
    place = installed().symbols[name]
    if place is None:
        return None
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def resolved_arguments(server_args: Any) -> Any:
    """What SGLang made of its arguments, readable by field name."""
    view = symbol("resolving_view")
    return server_args if view is None else view(server_args)
