"""The gate: a server that passes, and what is said when one thing about it is changed."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from cp_shared_kv import gate
from cp_shared_kv.gate import RULES, Facts, Gate, GateError, Refusal, Rule
from cp_shared_kv.hookspecs import hookimpl, plugin_manager
from cp_shared_kv.releases import ArgumentNames, installed, release_for, supported_versions
from cp_shared_kv.seams import SourceTree

NAMES = release_for("0.5.12.post1").arguments
ALL_RANKS = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"

#: Argument that a rule reads -> first release that has it, and first that has it no more; else it reads as absent.
ARRIVED: dict[str, tuple[str, str | None]] = {
    "enable_return_indexer_topk": ("0.5.12", None),
    "optimistic_prefill_retries": ("0.5.13", "0.5.16"),
    "dcp_size": ("0.5.15", None),
    "enable_unified_memory": ("0.5.15", None),
    "enable_page_major_kv_layout": ("0.5.15", None),
    "enable_dsa_cache_layer_split": ("0.5.16", None),
    "optimistic_prefill_attempts": ("0.5.16", None),
    "disaggregation_enable_kv_checksum": ("0.5.21", None),
    "enable_pd_role_switch": ("0.5.21", None),
    "enable_kv_cache_sharding": ("0.5.22", None),
    "disaggregation_decode_allocation_policy": ("0.5.22", None),
}


def is_before(version: str, other: str) -> bool:
    """Whether a supported release is older than another."""
    return supported_versions().index(version) < supported_versions().index(other)


def absent_arguments(version: str) -> set[str]:
    """Arguments that rules read and a release does not have."""
    return {
        name
        for name, (first, gone) in ARRIVED.items()
        if is_before(version, first) or (gone is not None and not is_before(version, gone))
    }


def declared_arguments() -> set[str]:
    """Fields of the installed SGLang's ``ServerArgs``, read in source."""
    source = SourceTree.installed()
    files = [source.file_of("sglang.srt.server_args"), *(source.root / "srt" / "arg_groups" / "fields").glob("*.py")]
    classes = [
        node
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    targets = [node.target for each in classes for node in each.body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def good_arguments(names: ArgumentNames = NAMES) -> dict[str, Any]:
    """Resolved server arguments of a supported prefill server."""
    disabled = {phase: SimpleNamespace(backend="disabled") for phase in names.cuda_graph_phases}
    if disabled:
        graphs: dict[str, Any] = {"cuda_graph_config": SimpleNamespace(**disabled)}
    else:
        graphs = {
            "disable_cuda_graph": True,
            "disable_piecewise_cuda_graph": True,
            "enforce_piecewise_cuda_graph": False,
        }
    return {
        **graphs,
        "device": "cuda",
        "tp_size": 8,
        "dp_size": 1,
        "attn_cp_size": 8,
        "pp_size": 1,
        "page_size": 64,
        names.prefill_cp: True,
        names.cp_mode: names.in_seq_split,
        names.prefill_backend: "flashmla_sparse",
        names.decode_backend: "flashmla_kv",
        "kv_cache_dtype": "fp8_e4m3",
        "disaggregation_mode": "prefill",
        "disaggregation_transfer_backend": "mooncake",
        "chunked_prefill_size": 8192,
        "nnodes": 1,
        "attention_backend": names.attention_backend,
        "prefill_attention_backend": None,
        "enable_return_routed_experts": False,
        "elastic_ep_backend": None,
        "speculative_algorithm": None,
        "enable_hierarchical_cache": False,
        "hicache_storage_backend": None,
        "enable_hisparse": False,
        "enable_lmcache": False,
        "enable_mixed_chunk": False,
        "enable_two_batch_overlap": False,
        "enable_pdmux": False,
        "enable_streaming_session": False,
        "enable_memory_saver": False,
        "use_ray": False,
    }


def facts(environ: dict[str, str] | None = None, fact: dict[str, Any] | None = None, **arguments: Any) -> Facts:
    return Facts(
        **{
            "arguments": SimpleNamespace(**{**good_arguments(), **arguments}),
            "names": NAMES,
            "environ": {ALL_RANKS: "1"} if environ is None else environ,
            "architecture": "DeepseekV32ForCausalLM",
            "is_nsa": True,
            "is_mla": True,
            **(fact or {}),
        }
    )


#: Rule, what is changed, what the message must say was found, what it must say to do.
BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("model", {"fact": {"is_nsa": False, "architecture": "LlamaForCausalLM"}}, "LlamaForCausalLM (NSA: False", "serve"),
    ("model", {"fact": {"is_mla": False}}, "DeepseekV32ForCausalLM (NSA: True, MLA: False)", "serve such a model"),
    ("index_kpool", {"fact": {"index_kpool": 4}}, "index_kpool=4", "serve another model"),
    ("device", {"device": "npu"}, "device='npu'", "run on NVIDIA GPUs"),
    ("device", {"device": "cpu"}, "device='cpu'", "run on NVIDIA GPUs"),
    ("platform", {"fact": {"is_out_of_tree_platform": True}}, "an out-of-tree", "unset SGLANG_PLATFORM"),
    (
        "prefill_cp",
        {"enable_nsa_prefill_context_parallel": False},
        "enable_nsa_prefill_context_parallel=False",
        "add --enable-nsa-prefill-context-parallel",
    ),
    ("zigzag", {"fact": {"no_zigzag": "no such split"}}, "no such split", "install SGLang 0.5.19 or older"),
    (
        "cp_mode",
        {"nsa_prefill_cp_mode": "round-robin-split"},
        "nsa_prefill_cp_mode='round-robin-split'",
        "add --nsa-prefill-cp-mode in-seq-split",
    ),
    ("cp_size", {"attn_cp_size": 1, "tp_size": 1}, "attn_cp_size=1", "raise --tp-size"),
    ("cp_size", {"attn_cp_size": None, "tp_size": 1}, "attn_cp_size=None", "raise --tp-size"),
    ("attn_tp", {"attn_cp_size": 4}, "tp_size=8, dp_size=1, attn_cp_size=4", "--attention-context-parallel-size"),
    ("dp_size", {"dp_size": 2, "attn_cp_size": 4}, "dp_size=2", "one server per DP rank"),
    ("page_size", {"page_size": 1}, "page_size=1", "set --page-size 64"),
    ("disaggregation_mode", {"disaggregation_mode": "null"}, "'null'", "add --disaggregation-mode prefill"),
    (
        "transfer_backend",
        {"disaggregation_transfer_backend": "nixl"},
        "disaggregation_transfer_backend='nixl'",
        "set --disaggregation-transfer-backend mooncake",
    ),
    ("mooncake", {"fact": {"has_mooncake": False}}, "no importable mooncake", "pip install mooncake-transfer-engine"),
    ("all_cp_ranks_transfer", {"environ": {}}, f"{ALL_RANKS} unset", f"export {ALL_RANKS}=1"),
    ("all_cp_ranks_transfer", {"environ": {ALL_RANKS: "0"}}, f"{ALL_RANKS}='0'", f"export {ALL_RANKS}=1"),
    ("chunked_prefill_size", {"chunked_prefill_size": 100}, "chunked_prefill_size=100", "a multiple of 64, or -1"),
    ("prefill_backend", {"nsa_prefill_backend": "fa3"}, "nsa_prefill_backend='fa3'", "add --nsa-prefill-backend"),
    ("prefill_backend", {"nsa_prefill_backend": "flashmla_kv"}, "'flashmla_kv'", "add --nsa-prefill-backend"),
    ("prefill_backend", {"nsa_prefill_backend": "trtllm"}, "'trtllm'", "add --nsa-prefill-backend flashmla_sparse"),
    ("prefill_backend", {"nsa_prefill_backend": "tilelang"}, "tilelang with fp8_e4m3 KV", "flashmla_sparse"),
    ("kv_layout", {"nsa_decode_backend": "trtllm"}, "fp8_e4m3 KV with the trtllm", "choose another decode backend"),
    ("kv_cache_dtype", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2'", "set --kv-cache-dtype bfloat16"),
    ("pp_size", {"pp_size": 2}, "pp_size=2", "remove --pp-size"),
    ("cuda_graph", {"disable_cuda_graph": False}, "disable_cuda_graph=False", "add --disable-cuda-graph"),
    ("piecewise_cuda_graph", {"disable_piecewise_cuda_graph": False}, "=False", "--enforce-piecewise-cuda-graph"),
    ("piecewise_cuda_graph", {"enforce_piecewise_cuda_graph": True}, "=True", "remove --enforce-piecewise-cuda-graph"),
    ("nnodes", {"nnodes": 2}, "nnodes=2", "remove --nnodes"),
    ("attention_backend", {"attention_backend": "fa3"}, "attention_backend='fa3'", "remove --attention-backend"),
    ("attention_backend", {"prefill_attention_backend": "fa3"}, "prefill_attention_backend='fa3'", "remove"),
    ("routed experts capture", {"enable_return_routed_experts": True}, "=True", "--enable-return-routed-experts"),
    ("elastic EP", {"elastic_ep_backend": "mooncake"}, "='mooncake'", "remove --elastic-ep-backend"),
    ("speculative decoding", {"speculative_algorithm": "EAGLE"}, "='EAGLE'", "remove --speculative-algorithm"),
    ("HiCache", {"enable_hierarchical_cache": True}, "enable_hierarchical_cache=True", "--enable-hierarchical-cache"),
    ("HiCache storage", {"hicache_storage_backend": "file"}, "='file'", "remove --hicache-storage-backend"),
    ("HiSparse", {"enable_hisparse": True}, "enable_hisparse=True", "remove --enable-hisparse"),
    ("LMCache", {"enable_lmcache": True}, "enable_lmcache=True", "remove --enable-lmcache"),
    ("mixed chunk", {"enable_mixed_chunk": True}, "enable_mixed_chunk=True", "remove --enable-mixed-chunk"),
    ("two-batch overlap", {"enable_two_batch_overlap": True}, "=True", "remove --enable-two-batch-overlap"),
    ("PD multiplexing", {"enable_pdmux": True}, "enable_pdmux=True", "remove --enable-pdmux"),
    ("streaming sessions", {"enable_streaming_session": True}, "=True", "remove --enable-streaming-session"),
    ("memory saver", {"enable_memory_saver": True}, "enable_memory_saver=True", "remove --enable-memory-saver"),
    ("indexer top-k capture", {"enable_return_indexer_topk": True}, "=True", "remove --enable-return-indexer-topk"),
    ("Ray", {"use_ray": True}, "use_ray=True", "remove --use-ray"),
    ("KV cache sharding of SGLang", {"enable_kv_cache_sharding": True}, "=True", "remove --enable-kv-cache-sharding"),
    ("KV layer split", {"enable_dsa_cache_layer_split": True}, "=True", "remove --enable-dsa-cache-layer-split"),
    ("unified memory pool", {"enable_unified_memory": True}, "=True", "remove --enable-unified-memory"),
    ("page-major KV", {"enable_page_major_kv_layout": True}, "=True", "remove --enable-page-major-kv-layout"),
    ("dcp_size", {"dcp_size": 2}, "dcp_size=2", "remove --dcp-size"),
    ("optimistic prefill", {"optimistic_prefill_retries": 2}, "=2", "remove --optimistic-prefill-retries"),
    ("optimistic prefill attempts", {"optimistic_prefill_attempts": 1}, "=1", "--optimistic-prefill-attempts"),
    ("KV checksum", {"disaggregation_enable_kv_checksum": True}, "=True", "--disaggregation-enable-kv-checksum"),
    ("PD role switch", {"enable_pd_role_switch": True}, "=True", "remove --enable-pd-role-switch"),
    (
        "decode allocation policy",
        {"disaggregation_decode_allocation_policy": "prefill_complete"},
        "='prefill_complete'",
        "remove --disaggregation-decode-allocation-policy",
    ),
    (
        "staging buffer",
        {"environ": {ALL_RANKS: "1", "SGLANG_DISAGG_STAGING_BUFFER": "1"}},
        "SGLANG_DISAGG_STAGING_BUFFER is set",
        "unset SGLANG_DISAGG_STAGING_BUFFER",
    ),
]


class TestRules:
    def test_a_supported_server_passes(self):
        assert Gate().refusals(facts()) == []
        Gate().require(facts())

    @pytest.mark.parametrize(
        "change",
        [
            {"kv_cache_dtype": "bfloat16"},
            {"kv_cache_dtype": "auto"},
            {"kv_cache_dtype": "bfloat16", "nsa_prefill_backend": "tilelang"},
            {"kv_cache_dtype": "bfloat16", "nsa_decode_backend": "trtllm"},
            {"chunked_prefill_size": -1},
            {"chunked_prefill_size": None},
            {"chunked_prefill_size": 64},
            {"tp_size": 2, "attn_cp_size": 2},
            {"dp_size": None, "pp_size": None},
            {"environ": {ALL_RANKS: "true", "SGLANG_DISAGG_STAGING_BUFFER": "0"}},
            {"device": "cpu", "fact": {"devices": ("cuda", "cpu")}},
            {"disaggregation_transfer_backend": "x", "fact": {"transfer_backends": ("mooncake", "x")}},
        ],
        ids=str,
    )
    def test_a_supported_variant_passes(self, change: dict[str, Any]):
        assert Gate().refusals(facts(**change)) == []

    @pytest.mark.parametrize(("rule", "change", "found", "remedy"), BROKEN, ids=[f"{b[0]} {b[2]}" for b in BROKEN])
    def test_one_broken_requirement_is_refused_alone_with_what_was_found_and_the_remedy(
        self, rule: str, change: dict[str, Any], found: str, remedy: str
    ):
        refusals = Gate().refusals(facts(**change))
        assert [refusal.rule for refusal in refusals] == [rule]
        assert found in refusals[0].found
        assert remedy in refusals[0].remedy
        assert refusals[0].needs

    @pytest.mark.parametrize("rule", [rule for rule in RULES if rule.roles == ("prefill",)], ids=lambda rule: rule.name)
    def test_a_decode_server_is_not_asked_for_what_only_prefill_needs(self, rule: Rule):
        """Such as prefill CP, chunks of whole pages, or no CUDA graphs."""
        change = next(case[1] for case in BROKEN if case[0] == rule.name)
        assert Gate().refusals(facts(**{"disaggregation_mode": "decode", **change})) == []

    @pytest.mark.parametrize(
        "name",
        [
            "model",
            "transfer_backend",
            "mooncake",
            "all_cp_ranks_transfer",
            "kv_layout",
            "HiSparse",
            "staging buffer",
            "KV checksum",
        ],
    )
    def test_a_decode_server_is_asked_for_what_both_sides_need(self, name: str):
        change = next(case[1] for case in BROKEN if case[0] == name)
        refusals = Gate().refusals(facts(**{"disaggregation_mode": "decode", **change}))
        assert [refusal.rule for refusal in refusals] == [name]

    def test_every_rule_is_broken_by_some_case_above(self):
        assert {rule.name for rule in RULES} == {case[0] for case in BROKEN}

    def test_rule_names_are_unique(self):
        assert len({rule.name for rule in RULES}) == len(RULES)

    @pytest.mark.parametrize(
        ("feature", "change"),
        [
            ("HiCache", {"enable_hierarchical_cache": True}),
            ("HiSparse", {"enable_hisparse": True}),
            ("LMCache", {"enable_lmcache": True}),
            ("mixed chunk", {"enable_mixed_chunk": True}),
            ("two-batch overlap", {"enable_two_batch_overlap": True}),
            ("PD multiplexing", {"enable_pdmux": True}),
            ("staging buffer", {"environ": {ALL_RANKS: "1", "SGLANG_DISAGG_STAGING_BUFFER": "true"}}),
            ("streaming sessions", {"enable_streaming_session": True}),
            ("--pp-size", {"pp_size": 2}),
            ("layer split", {"enable_dsa_cache_layer_split": True}),
            ("KV cache sharding", {"enable_kv_cache_sharding": True}),
            ("npu", {"device": "npu"}),
            ("speculative decoding", {"speculative_algorithm": "NEXTN"}),
            ("round-robin-split", {"nsa_prefill_cp_mode": "round-robin-split"}),
            ("Ray", {"use_ray": True}),
            ("DP attention", {"dp_size": 2, "attn_cp_size": 4}),
            ("index_kpool", {"fact": {"index_kpool": 2}}),
        ],
    )
    def test_an_unproven_feature_is_refused_by_its_name(self, feature: str, change: dict[str, Any]):
        with pytest.raises(GateError) as refused:
            Gate().require(facts(**change))
        assert feature in str(refused.value)

    @pytest.mark.parametrize("size", [0, 1])
    def test_a_feature_given_as_a_number_counts_by_its_truth(self, size: int):
        assert len(Gate().refusals(facts(enable_hisparse=size))) == size

    # SGLang's EnvBool: 1/true/yes/y, any case, is true; anything that it does not know is its default, false.

    @pytest.mark.parametrize(
        ("value", "refused"),
        [
            ("1", True),
            ("true", True),
            ("YES", True),
            ("y", True),
            ("0", False),
            ("false", False),
            ("no", False),
            ("n", False),
            ("", False),
        ],
    )
    def test_the_staging_buffer_is_seen_wherever_sglang_sees_it(self, value: str, refused: bool):
        environ = {ALL_RANKS: "1", "SGLANG_DISAGG_STAGING_BUFFER": value}
        assert [r.rule for r in Gate().refusals(facts(environ=environ))] == (["staging buffer"] if refused else [])

    @pytest.mark.parametrize(
        ("value", "passes"),
        [
            ("1", True),
            ("true", True),
            ("YES", True),
            ("y", True),
            ("on", False),
            ("0", False),
            ("", False),
        ],
    )
    def test_sending_from_all_ranks_is_believed_only_where_sglang_does_it(self, value: str, passes: bool):
        refusals = Gate().refusals(facts(environ={ALL_RANKS: value}))
        assert [r.rule for r in refusals] == ([] if passes else ["all_cp_ranks_transfer"])

    def test_every_argument_that_a_rule_reads_exists_in_the_installed_release(self):
        """A misspelt argument would read as absent, and the rule would never refuse anything."""
        read: set[str] = set()
        good = good_arguments(installed().arguments)

        class Recorder:
            def __getattr__(self, name: str) -> Any:
                read.add(name)
                return good.get(name)

        Gate().refusals(facts(fact={"arguments": Recorder(), "names": installed().arguments}))
        assert read - declared_arguments() == absent_arguments(installed().version)
        assert read >= set(good) - {"speculative_algorithm"}

    @pytest.mark.parametrize("version", ["0.5.11", "0.5.13", "0.5.14"])
    def test_arguments_go_by_the_names_of_the_release(self, version: str):
        names = release_for(version).arguments
        arguments = good_arguments(names)
        good = {"arguments": SimpleNamespace(**arguments), "names": names}
        assert Gate().refusals(facts(fact=good)) == []
        for field, flag in (
            (names.prefill_cp, f"add {names.prefill_cp_flag}"),
            (names.cp_mode, f"add {names.cp_mode_flag} {names.in_seq_split}"),
            (names.prefill_backend, f"add {names.prefill_backend_flag} flashmla_sparse"),
        ):
            arguments_without = SimpleNamespace(**{**arguments, field: None})
            refusals = Gate().refusals(facts(fact={"arguments": arguments_without, "names": names}))
            assert [refusal.remedy for refusal in refusals] == [flag]
            assert f"{field}=None" in refusals[0].found

    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_a_cuda_graph_of_either_phase_is_refused_where_phases_are_set_apart(self, phase: str):
        names = release_for("0.5.14").arguments
        arguments = SimpleNamespace(**good_arguments(names))
        getattr(arguments.cuda_graph_config, phase).backend = "full"
        refusals = Gate().refusals(facts(fact={"arguments": arguments, "names": names}))
        assert [(refusal.rule, refusal.found) for refusal in refusals] == [
            ("cuda_graph", f"cuda_graph_config: {phase} 'full'")
        ]


class TestMessages:
    def test_all_unmet_requirements_are_in_one_message(self):
        with pytest.raises(GateError) as refused:
            Gate().require(facts(environ={}, pp_size=2, use_ray=True, page_size=32))
        message = str(refused.value)
        assert [refusal.rule for refusal in refused.value.refusals] == [
            "page_size",
            "all_cp_ranks_transfer",
            "pp_size",
            "Ray",
        ]
        assert "cannot be used on this server, 4 requirement(s) unmet:" in message
        for refusal in refused.value.refusals:
            assert f"\n  - [{refusal.rule}] found {refusal.found}; needs {refusal.needs}; {refusal.remedy}" in message

    def test_a_server_with_nothing_set_is_told_everything_that_is_missing(self):
        bare = facts(environ={}, fact={"arguments": SimpleNamespace()})
        found = {refusal.rule for refusal in Gate().refusals(bare)}
        assert found >= {"device", "prefill_cp", "cp_mode", "cp_size", "page_size", "disaggregation_mode", "cuda_graph"}

    def test_needs_and_remedy_may_depend_on_the_facts(self):
        rule = Rule("r", lambda f: "x", lambda f: f.architecture, lambda f: f.environ[ALL_RANKS])
        assert Gate((rule,)).refusals(facts()) == [Refusal("r", "x", "DeepseekV32ForCausalLM", "1")]

    def test_accepted_devices_and_backends_are_listed(self):
        refusals = Gate().refusals(
            facts(
                device="npu",
                disaggregation_transfer_backend="nixl",
                fact={"devices": ("cuda", "cpu"), "transfer_backends": ("mooncake", "mine")},
            )
        )
        assert [refusal.needs for refusal in refusals] == ["--device cuda or cpu", "transfer backend mooncake or mine"]

    def test_an_absent_argument_reads_as_its_default(self):
        assert facts().arg("no_such_argument") is None
        assert facts().arg("no_such_argument", 3) == 3
        assert facts().arg("tp_size", 3) == 8


class TestExtensions:
    def test_rules_of_extensions_are_evaluated_after_the_built_in_ones(self):
        class Extension:
            @hookimpl
            def cp_shared_kv_gate_rules(self) -> list[Rule]:
                return [Rule("mine", lambda f: f"tp_size={f.arg('tp_size')}", "nothing", "do this")]

        manager = plugin_manager()
        extension = Extension()
        manager.register(extension)
        try:
            extended = gate.gate_with_extensions()
            assert tuple(extended.rules[: len(RULES)]) == RULES
            assert extended.refusals(facts()) == [Refusal("mine", "tp_size=8", "nothing", "do this")]
            refused = extended.refusals(facts(pp_size=2))
            assert [refusal.rule for refusal in refused] == ["pp_size", "mine"]
        finally:
            manager.unregister(extension)
        assert gate.gate_with_extensions().refusals(facts()) == []

    @pytest.mark.parametrize(
        ("version", "change", "advice"),
        [
            ("0.5.15.post1", {"cp_strategy": "interleave"}, []),
            ("0.5.16", {"cp_strategy": "interleave"}, ["--enable-dsa-cache-layer-split"]),
            ("0.5.22", {"dsa_prefill_backend": "trtllm"}, ["--enable-dsa-cache-layer-split"]),
            ("0.5.23", {"cp_strategy": "interleave"}, ["--enable-kv-cache-sharding", "--enable-dsa-cache-layer-split"]),
            ("0.5.23", {"enable_kv_cache_sharding": True}, ["--enable-kv-cache-sharding", "--enable-dsa-cache-layer"]),
            ("0.5.23", {"page_size": 32}, []),
        ],
    )
    def test_sglangs_own_feature_is_named_where_it_would_serve_such_a_server(
        self, version: str, change: dict[str, Any], advice: list[str]
    ):
        release = release_for(version)
        arguments = SimpleNamespace(**{**good_arguments(release.arguments), **change})
        with pytest.raises(GateError) as refused:
            Gate().require(
                facts(fact={"arguments": arguments, "names": release.arguments, "upstream": release.upstream})
            )
        assert len(refused.value.advice) == len(advice)
        for flag, hint in zip(advice, refused.value.advice, strict=True):
            assert flag in hint
            assert f"\n  note: {hint}" in str(refused.value)
