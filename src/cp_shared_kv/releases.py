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
)

#: Fact -> first release that it holds for -> value; what a fact means is said in :class:`Release`.
_FACTS: dict[str, dict[str, Any]] = {
    "arguments": {"0.5.11": _NSA, "0.5.13": _DSA, "0.5.14": _CP_STRATEGY},
    "stock_loses_pages": {"0.5.11": True, "0.5.14": False},
}

#: Name here -> first release that it holds for -> ``module:object``.
_SYMBOLS: dict[str, dict[str, str]] = {
    "NSATokenToKVPool": {
        "0.5.11": "sglang.srt.mem_cache.memory_pool:NSATokenToKVPool",
        "0.5.13": "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool",
    },
    "PagedTokenToKVPoolAllocator": {
        "0.5.11": "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator",
        "0.5.13": "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator",
    },
    "get_nsa_index_head_dim": {
        "0.5.11": "sglang.srt.configs.model_config:get_nsa_index_head_dim",
        "0.5.13": "sglang.srt.configs.model_config:get_dsa_index_head_dim",
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
        symbols: name here -> ``module:object``; see :func:`symbol`.
        stock_loses_pages: whether stock loses pages when all CP ranks send, where page ids are not ascending.
    """

    version: str
    arguments: ArgumentNames
    targets: Mapping[str, Target]
    absent: Mapping[str, str]
    symbols: Mapping[str, str]
    stock_loses_pages: bool = False


def supported_versions() -> tuple[str, ...]:
    """All releases with a row, oldest first."""
    return VERSIONS


def _at(version: str, eras: Mapping[str, Any]) -> Any:
    """The value that holds for a release: that of the last era which began by then, None before the first."""
    order = VERSIONS.index(version)
    begun = [since for since in eras if VERSIONS.index(since) <= order]
    return eras[max(begun, key=VERSIONS.index)] if begun else None


@cache
def _seam_eras() -> dict[str, dict[str, dict[str, Any]]]:
    """Seam -> first release -> its look, from ``seams.json``."""
    text = resources.files(__package__).joinpath("seams.json").read_text(encoding="utf-8")
    return {seam: {era["since"]: era for era in eras} for seam, eras in json.loads(text).items()}


@cache
def release_for(version: str) -> Release:
    """Row of a release; a local part such as ``+cu130`` does not count.

    Raises:
        SeamError: the release has no row.
    """
    public = version.split("+", 1)[0]
    if public not in VERSIONS:
        raise SeamError(
            [f"SGLang {version} is not a supported release: supported are {', '.join(VERSIONS)}; install one"]
        )
    eras = {seam: _at(public, looks) for seam, looks in _seam_eras().items()}
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


@cache
def symbol(name: str) -> Any:
    """An object of the installed SGLang by the name it has here; imports its module.

    Args:
        name: a key of :attr:`Release.symbols`.
    """
    module, _, attribute = installed().symbols[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
