"""The gate: what a server must be for CP shared KV to be right on it, as a list of named rules.

Each rule looks at :class:`Facts` and answers with what it found wrong, or None. All rules are evaluated and all unmet
ones are reported in one message, each with the value found and the remedy. A feature that has not been shown to work
with shared KV is refused by name.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cp_shared_kv.config import ALL_CP_RANKS_ENV, sglang_true
from cp_shared_kv.releases import ArgumentNames, Release, resolved_arguments, symbol

PAGE_SIZE = 64
STAGING_ENV = "SGLANG_DISAGG_STAGING_BUFFER"
BOTH = ("prefill", "decode")
PREFILL_BACKENDS = ("flashmla_sparse", "tilelang")
KV_CACHE_DTYPES = ("auto", "bfloat16", "bf16", "fp8_e4m3")


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        arguments: resolved server arguments, read by name with :meth:`arg`.
        names: names of those arguments in this release.
        environ: environment of the server.
        architecture: first entry of the model config's ``architectures``.
        is_nsa: whether SGLang runs the model with NSA/DSA sparse attention.
        is_mla: whether SGLang runs the model with multi-head latent attention.
        index_kpool: compression of the index keys, 1 for none.
        is_out_of_tree_platform: whether an SGLang platform plugin supplies the pools.
        has_mooncake: whether the ``mooncake`` package can be imported.
        devices: accepted values of ``--device``.
        transfer_backends: accepted values of ``--disaggregation-transfer-backend``.
        no_zigzag: why this release cannot run these models in-seq-split at all, None where it can.
        upstream: SGLang's own alternatives in this release, a sentence each.
    """

    arguments: Any
    names: ArgumentNames
    environ: Mapping[str, str]
    architecture: str
    is_nsa: bool
    is_mla: bool
    index_kpool: int = 1
    is_out_of_tree_platform: bool = False
    has_mooncake: bool = True
    devices: Sequence[str] = ("cuda",)
    transfer_backends: Sequence[str] = ("mooncake",)
    no_zigzag: str | None = None
    upstream: Sequence[str] = ()

    def arg(self, name: str, default: Any = None) -> Any:
        """A server argument, or ``default`` where this release has none of that name."""
        return getattr(self.arguments, name, default)


@dataclass(frozen=True)
class Rule:
    """One requirement.

    Args:
        name: short stable name, for messages and tests.
        check: returns the value found where the requirement is unmet, else None.
        needs: what is accepted.
        remedy: what to change.
        roles: servers that it is asked of, of ``prefill`` and ``decode``.
    """

    name: str
    check: Callable[[Facts], str | None]
    needs: str | Callable[[Facts], str]
    remedy: str | Callable[[Facts], str]
    roles: tuple[str, ...] = ("prefill",)


@dataclass(frozen=True)
class Refusal:
    """An unmet requirement, ready for printing."""

    rule: str
    found: str
    needs: str
    remedy: str

    def __str__(self) -> str:
        return f"[{self.rule}] found {self.found}; needs {self.needs}; {self.remedy}"


class GateError(RuntimeError):
    """The server is not one that CP shared KV supports; ``refusals`` lists every unmet requirement.

    ``advice`` are features of SGLang itself that would serve such a server.
    """

    def __init__(self, refusals: Sequence[Refusal], advice: Sequence[str] = ()) -> None:
        self.refusals = list(refusals)
        self.advice = list(advice)
        lines = "".join(f"\n  - {refusal}" for refusal in self.refusals)
        hints = "".join(f"\n  note: {hint}" for hint in self.advice)
        super().__init__(
            f"CP shared KV cannot be used on this server, {len(self.refusals)} requirement(s) unmet:{lines}{hints}"
        )


def _text(value: str | Callable[[Facts], str], facts: Facts) -> str:
    return value if isinstance(value, str) else value(facts)


def _unless(condition: bool, found: Any) -> str | None:
    return None if condition else str(found)


def _off(name: str, argument: str, flag: str, why: str, roles: tuple[str, ...] = ("prefill",)) -> Rule:
    """Rule that refuses a feature switched on by a truthy argument."""

    def check(facts: Facts) -> str | None:
        value = facts.arg(argument)
        return None if not value else f"{argument}={value!r}"

    return Rule(name, check, f"no {name} ({why})", f"remove {flag}", roles)


def _chunk_problem(facts: Facts) -> str | None:
    size = facts.arg("chunked_prefill_size")
    return None if size is None or size <= 0 or size % PAGE_SIZE == 0 else f"chunked_prefill_size={size}"


def _prefill_backend_problem(facts: Facts) -> str | None:
    backend = facts.arg(facts.names.prefill_backend)
    if backend == "tilelang" and facts.arg("kv_cache_dtype") == "fp8_e4m3":
        return "tilelang with fp8_e4m3 KV"
    return _unless(backend in PREFILL_BACKENDS, f"{facts.names.prefill_backend}={backend!r}")


def _attention_backend_problem(facts: Facts) -> str | None:
    names = ("attention_backend", "prefill_attention_backend")
    other = {name: facts.arg(name) for name in names if facts.arg(name) not in (None, facts.names.attention_backend)}
    return ", ".join(f"{name}={value!r}" for name, value in other.items()) or None


def _cuda_graph_problem(facts: Facts) -> str | None:
    if facts.names.cuda_graph_phases:
        config = facts.arg("cuda_graph_config")
        backends = {
            phase: getattr(getattr(config, phase, None), "backend", None) for phase in facts.names.cuda_graph_phases
        }
        found = [f"{phase} {backend!r}" for phase, backend in backends.items() if backend != "disabled"]
        return f"cuda_graph_config: {', '.join(found)}" if found else None
    return _unless(bool(facts.arg("disable_cuda_graph")), f"disable_cuda_graph={facts.arg('disable_cuda_graph')}")


def _piecewise_problem(facts: Facts) -> str | None:
    if facts.names.cuda_graph_phases:
        return None  # a backend of the prefill phase there
    return _unless(
        bool(facts.arg("disable_piecewise_cuda_graph", True)) and not facts.arg("enforce_piecewise_cuda_graph"),
        f"disable_piecewise_cuda_graph={facts.arg('disable_piecewise_cuda_graph')}, "
        f"enforce_piecewise_cuda_graph={facts.arg('enforce_piecewise_cuda_graph')}",
    )


def role_of(server_args: Any) -> str:
    """Side of the deployment that a server is meant for: ``decode`` where it says so, else ``prefill``."""
    return "decode" if getattr(server_args, "disaggregation_mode", None) == "decode" else "prefill"


def _fp8_layout_problem(facts: Facts) -> str | None:
    fp8 = facts.arg("kv_cache_dtype") == "fp8_e4m3"
    trtllm = facts.arg(facts.names.decode_backend) == "trtllm"
    return "fp8_e4m3 KV with the trtllm decode backend" if fp8 and trtllm else None


_OPTIMISTIC = "a request is computed before decode has announced itself, so its pages cannot be checked"

RULES: tuple[Rule, ...] = (
    Rule(
        "model",
        lambda f: _unless(f.is_nsa and f.is_mla, f"{f.architecture} (NSA: {f.is_nsa}, MLA: {f.is_mla})"),
        "a model with NSA/DSA sparse attention and MLA, such as DeepSeek-V3.2 or GLM-5",
        "serve such a model, or turn CP shared KV off",
        BOTH,
    ),
    Rule(
        "index_kpool",
        lambda f: _unless(f.index_kpool == 1, f"index_kpool={f.index_kpool}"),
        "uncompressed index keys (index_kpool 1)",
        "serve another model, or turn CP shared KV off",
    ),
    Rule(
        "device",
        lambda f: _unless(f.arg("device") in f.devices, f"device={f.arg('device')!r}"),
        lambda f: f"--device {' or '.join(f.devices)}",
        "run on NVIDIA GPUs",
    ),
    Rule(
        "platform",
        lambda f: "an out-of-tree SGLang platform plugin" if f.is_out_of_tree_platform else None,
        "SGLang's own platform, whose pools are known",
        "unset SGLANG_PLATFORM",
    ),
    Rule(
        "prefill_cp",
        lambda f: _unless(bool(f.arg(f.names.prefill_cp)), f"{f.names.prefill_cp}={f.arg(f.names.prefill_cp)!r}"),
        "prefill context parallelism",
        lambda f: f"add {f.names.prefill_cp_flag}",
    ),
    Rule(
        "zigzag",
        lambda f: f.no_zigzag,
        "an SGLang release that runs these models in-seq-split (zigzag)",
        "install SGLang 0.5.19 or older on the prefill side, or turn CP shared KV off",
    ),
    Rule(
        "cp_mode",
        lambda f: _unless(
            f.arg(f.names.cp_mode) == f.names.in_seq_split, f"{f.names.cp_mode}={f.arg(f.names.cp_mode)!r}"
        ),
        lambda f: f"split mode {f.names.in_seq_split}",
        lambda f: f"add {f.names.cp_mode_flag} {f.names.in_seq_split}",
    ),
    Rule(
        "cp_size",
        lambda f: _unless((f.arg("attn_cp_size") or 1) > 1, f"attn_cp_size={f.arg('attn_cp_size')}"),
        "at least 2 attention-CP ranks",
        "raise --tp-size (in-seq-split gives attn_cp_size = tp_size / dp_size)",
    ),
    Rule(
        "attn_tp",
        lambda f: _unless(
            f.arg("tp_size") == (f.arg("dp_size") or 1) * (f.arg("attn_cp_size") or 1),
            f"tp_size={f.arg('tp_size')}, dp_size={f.arg('dp_size')}, attn_cp_size={f.arg('attn_cp_size')}",
        ),
        "tp_size = dp_size * attn_cp_size (attention itself not tensor-parallel)",
        "leave --attention-context-parallel-size to SGLang",
    ),
    Rule(
        "dp_size",
        lambda f: _unless((f.arg("dp_size") or 1) == 1, f"dp_size={f.arg('dp_size')}"),
        "--dp-size 1 (DP attention beside CP has not been shown to work with shared KV)",
        "run one server per DP rank behind the router",
    ),
    Rule(
        "page_size",
        lambda f: _unless(f.arg("page_size") == PAGE_SIZE, f"page_size={f.arg('page_size')}"),
        f"page size {PAGE_SIZE}",
        f"set --page-size {PAGE_SIZE} or leave it to SGLang",
    ),
    Rule(
        "disaggregation_mode",
        lambda f: _unless(
            f.arg("disaggregation_mode") in BOTH, f"disaggregation_mode={f.arg('disaggregation_mode')!r}"
        ),
        "a server of a disaggregated deployment",
        "add --disaggregation-mode prefill (or decode, on the decode side)",
        BOTH,
    ),
    Rule(
        "transfer_backend",
        lambda f: _unless(
            f.arg("disaggregation_transfer_backend") in f.transfer_backends,
            f"disaggregation_transfer_backend={f.arg('disaggregation_transfer_backend')!r}",
        ),
        lambda f: f"transfer backend {' or '.join(f.transfer_backends)}",
        "set --disaggregation-transfer-backend mooncake on both sides",
        BOTH,
    ),
    Rule(
        "mooncake",
        lambda f: _unless(f.has_mooncake, "no importable mooncake package"),
        "the Mooncake transfer engine",
        "pip install mooncake-transfer-engine (or the build for your CUDA version)",
        BOTH,
    ),
    Rule(
        "all_cp_ranks_transfer",
        lambda f: _unless(
            sglang_true(f.environ.get(ALL_CP_RANKS_ENV)),
            f"{ALL_CP_RANKS_ENV}={f.environ[ALL_CP_RANKS_ENV]!r}"
            if ALL_CP_RANKS_ENV in f.environ
            else f"{ALL_CP_RANKS_ENV} unset",
        ),
        "every CP rank sending to decode",
        f"export {ALL_CP_RANKS_ENV}=1 on the prefill and on the decode side",
        BOTH,
    ),
    Rule(
        "chunked_prefill_size",
        _chunk_problem,
        f"chunks of whole pages ({PAGE_SIZE} tokens), or no chunking",
        f"set --chunked-prefill-size to a multiple of {PAGE_SIZE}, or -1",
    ),
    Rule(
        "prefill_backend",
        _prefill_backend_problem,
        "a prefill backend that is right under in-seq-split: flashmla_sparse, or tilelang with bfloat16 KV "
        "(others get full sequence lengths for half the query rows)",
        lambda f: f"add {f.names.prefill_backend_flag} flashmla_sparse",
    ),
    Rule(
        "kv_layout",
        _fp8_layout_problem,
        "one KV layout for prefill and decode (trtllm lays fp8 KV out in another way)",
        "choose another decode backend, or bfloat16 KV",
        BOTH,
    ),
    Rule(
        "kv_cache_dtype",
        lambda f: _unless(f.arg("kv_cache_dtype") in KV_CACHE_DTYPES, f"kv_cache_dtype={f.arg('kv_cache_dtype')!r}"),
        "KV cache dtype bfloat16 or fp8_e4m3",
        "set --kv-cache-dtype bfloat16 or fp8_e4m3",
    ),
    Rule(
        "pp_size",
        lambda f: _unless((f.arg("pp_size") or 1) == 1, f"pp_size={f.arg('pp_size')}"),
        "--pp-size 1",
        "remove --pp-size",
    ),
    Rule(
        "nnodes",
        lambda f: _unless((f.arg("nnodes") or 1) == 1, f"nnodes={f.arg('nnodes')}"),
        "one node (each node would decide for itself, and SGLang verified prefill CP on one node only)",
        "remove --nnodes",
    ),
    Rule(
        "attention_backend",
        _attention_backend_problem,
        lambda f: f"the {f.names.attention_backend} attention backend",
        "remove --attention-backend and --prefill-attention-backend",
    ),
    Rule(
        "cuda_graph",
        _cuda_graph_problem,
        "no CUDA graphs on the prefill server (a captured forward cannot be planned)",
        "add --disable-cuda-graph, and remove flags that ask for graphs",
    ),
    Rule(
        "piecewise_cuda_graph",
        _piecewise_problem,
        "no piecewise CUDA graphs on the prefill server (a captured forward cannot be planned)",
        "remove --enforce-piecewise-cuda-graph",
    ),
    _off("speculative decoding", "speculative_algorithm", "--speculative-algorithm", "the draft pool is not sharded"),
    _off("HiCache", "enable_hierarchical_cache", "--enable-hierarchical-cache", "it copies pages by logical slot"),
    _off("HiCache storage", "hicache_storage_backend", "--hicache-storage-backend", "it copies pages by logical slot"),
    _off("HiSparse", "enable_hisparse", "--enable-hisparse", "it has a pool of its own", BOTH),
    _off("LMCache", "enable_lmcache", "--enable-lmcache", "it copies pages by logical slot"),
    _off("mixed chunk", "enable_mixed_chunk", "--enable-mixed-chunk", "decode rows would share the plan"),
    _off("two-batch overlap", "enable_two_batch_overlap", "--enable-two-batch-overlap", "two plans at a time"),
    _off("PD multiplexing", "enable_pdmux", "--enable-pdmux", "two streams share the workspace"),
    _off("streaming sessions", "enable_streaming_session", "--enable-streaming-session", "they edit page tables"),
    _off("memory saver", "enable_memory_saver", "--enable-memory-saver", "the workspace is outside its region"),
    _off(
        "indexer top-k capture",
        "enable_return_indexer_topk",
        "--enable-return-indexer-topk",
        "captured slots would be those of the workspace",
    ),
    _off(
        "routed experts capture",
        "enable_return_routed_experts",
        "--enable-return-routed-experts",
        "its host buffer would grow with the logical capacity",
    ),
    _off("elastic EP", "elastic_ep_backend", "--elastic-ep-backend", "ranks that leave take their pages with them"),
    _off("Ray", "use_ray", "--use-ray", "its scheduler actors do not load plugins"),
    _off("KV cache sharding of SGLang", "enable_kv_cache_sharding", "--enable-kv-cache-sharding", "it does the same"),
    _off("KV layer split", "enable_dsa_cache_layer_split", "--enable-dsa-cache-layer-split", "it shards the same pool"),
    _off("optimistic prefill", "optimistic_prefill_retries", "--optimistic-prefill-retries", _OPTIMISTIC),
    _off("optimistic prefill attempts", "optimistic_prefill_attempts", "--optimistic-prefill-attempts", _OPTIMISTIC),
    _off(
        "KV checksum",
        "disaggregation_enable_kv_checksum",
        "--disaggregation-enable-kv-checksum",
        "it reads pages by logical slot, and a rank has only its own",
        BOTH,
    ),
    _off(
        "PD role switch", "enable_pd_role_switch", "--enable-pd-role-switch", "the patches are those of one role", BOTH
    ),
    Rule(
        "decode allocation policy",
        lambda f: _unless(
            f.arg("disaggregation_decode_allocation_policy") in (None, "early"),
            f"disaggregation_decode_allocation_policy={f.arg('disaggregation_decode_allocation_policy')!r}",
        ),
        "decode pages that are reserved early (prefill keeps its pages for longer otherwise, and answers later)",
        "remove --disaggregation-decode-allocation-policy on both sides",
        BOTH,
    ),
    _off("unified memory pool", "enable_unified_memory", "--enable-unified-memory", "it lays the pool out otherwise"),
    _off("page-major KV", "enable_page_major_kv_layout", "--enable-page-major-kv-layout", "rows are not pages there"),
    Rule(
        "dcp_size",
        lambda f: _unless((f.arg("dcp_size") or 1) == 1, f"dcp_size={f.arg('dcp_size')}"),
        "--dcp-size 1 (decode context parallelism shards the same pool)",
        "remove --dcp-size",
    ),
    Rule(
        "staging buffer",
        lambda f: f"{STAGING_ENV} is set" if sglang_true(f.environ.get(STAGING_ENV)) else None,
        "no staging buffer (it sends from contiguous positions)",
        f"unset {STAGING_ENV}",
        BOTH,
    ),
)


#: Rules that an interleaved split, the trtllm backends or SGLang's own sharding run into.
UPSTREAM_TERRITORY = frozenset(
    {"zigzag", "cp_mode", "prefill_backend", "KV cache sharding of SGLang", "KV layer split"}
)


@dataclass
class Gate:
    """Rules, built-in and added by extensions."""

    rules: Sequence[Rule] = field(default_factory=lambda: RULES)

    def refusals(self, facts: Facts) -> list[Refusal]:
        """Every unmet requirement on a server of this role; empty where shared KV may be used."""
        found = []
        for rule in self.rules:
            if role_of(facts.arguments) not in rule.roles:
                continue
            problem = rule.check(facts)
            if problem is not None:
                found.append(Refusal(rule.name, problem, _text(rule.needs, facts), _text(rule.remedy, facts)))
        return found

    def require(self, facts: Facts) -> None:
        """Raise unless every requirement is met.

        Raises:
            GateError: with all unmet requirements, and what SGLang itself offers where they are those it has.
        """
        if refusals := self.refusals(facts):
            theirs = {refusal.rule for refusal in refusals} & UPSTREAM_TERRITORY
            raise GateError(refusals, facts.upstream if theirs else ())


def gather_facts(server_args: Any, release: Release, environ: Mapping[str, str] | None = None) -> Facts:
    """Facts of a server, from its resolved ``ServerArgs``; loads the model's configuration, not its weights."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.platforms import current_platform

    from cp_shared_kv.hookspecs import plugin_manager

    model_config_of = symbol("model_config_of")
    model = server_args.get_model_config() if model_config_of is None else model_config_of(server_args)
    hooks = plugin_manager().hook
    return Facts(
        arguments=resolved_arguments(server_args),
        names=release.arguments,
        environ=os.environ if environ is None else environ,
        architecture=(getattr(model.hf_config, "architectures", None) or ["unknown"])[0],
        is_nsa=bool(symbol("is_deepseek_nsa")(model.hf_config)),
        is_mla=model.attention_arch == AttentionArch.MLA,
        index_kpool=getattr(model.hf_config, "index_kpool", None) or 1,
        is_out_of_tree_platform=bool(current_platform.is_out_of_tree()),
        has_mooncake=importlib.util.find_spec("mooncake") is not None,
        devices=("cuda", *(device for devices in hooks.cp_shared_kv_devices() for device in devices)),
        transfer_backends=("mooncake", *(b for names_ in hooks.cp_shared_kv_transfer_backends() for b in names_)),
        no_zigzag=release.no_zigzag,
        upstream=release.upstream,
    )


def gate_with_extensions() -> Gate:
    """The built-in rules followed by those of installed extensions."""
    from cp_shared_kv.hookspecs import plugin_manager

    extra = plugin_manager().hook.cp_shared_kv_gate_rules()
    return Gate((*RULES, *(rule for rules in extra for rule in rules)))
