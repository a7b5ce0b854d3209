"""Run in a process of its own by ``test_plugin.py``, in the environment of the CPU platform.

Loads the plugin with nobody asking for it, imports every module that has a seam, then goes through refused and
accepted activations. Writes to the path in argv[1] what was patched after each step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import wrapt

from cp_shared_kv import config, plugin
from cp_shared_kv._version import __version__
from cp_shared_kv.config import Decision
from cp_shared_kv.gate import gather_facts
from cp_shared_kv.patches.arguments import FLAG_ATTRIBUTE
from cp_shared_kv.releases import release_for
from cp_shared_kv.seams import SeamError

TARGETS = release_for("0.5.12.post1").targets
DECISION = Decision(__version__, "0.5.12.post1", 2, 64, "CP_SHARED_KV=1")


def objects() -> dict[str, Any]:
    """Seam -> the raw object that its module or class holds."""
    return {seam: wrapt.resolve_path(target.module, target.qualname)[2] for seam, target in TARGETS.items()}


def patched() -> list[str]:
    return sorted(seam for seam, found in objects().items() if type(found) is wrapt.FunctionWrapper)


def stopped(decision: Decision) -> str:
    """Message of the SystemExit that activation raises."""
    try:
        plugin.activate(decision)
    except SystemExit as error:
        return str(error)
    return "NOT STOPPED"


def parse_flag() -> dict[str, bool]:
    """What SGLang's parser makes of the flag, and what the arguments built from it remember."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    absent = parser.parse_args(["--model-path", "m"])
    given = parser.parse_args(["--model-path", "m", config.FLAG])
    # Building real arguments would load a model's configuration; only the copying of the flag is of interest.
    original, ServerArgs.__post_init__ = ServerArgs.__post_init__, lambda self: None
    try:
        server_args = ServerArgs.from_cli_args(given)
    finally:
        ServerArgs.__post_init__ = original
    return {
        "absent": getattr(absent, config.FLAG_DEST),
        "given": getattr(given, config.FLAG_DEST),
        "attribute": getattr(server_args, FLAG_ATTRIBUTE),
    }


def facts_of(architecture: str, mla: bool, **config_fields: Any) -> dict[str, Any]:
    """Facts that the gate gathers for a model configuration."""
    from sglang.srt.configs.model_config import AttentionArch

    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture], **config_fields),
        attention_arch=AttentionArch.MLA if mla else AttentionArch.MHA,
    )
    server_args = SimpleNamespace(get_model_config=lambda: model)
    facts = gather_facts(server_args, release_for("0.5.12.post1").arguments, environ={"A": "1"})
    names = ("architecture", "is_nsa", "is_mla", "index_kpool", "is_out_of_tree_platform", "devices", "environ")
    return {name: getattr(facts, name) for name in names}


def main() -> None:
    seen: dict[str, Any] = {}
    plugin.load()
    plugin.load()
    hooks = {target.module for target in TARGETS.values()} - {"sglang.srt.server_args"}
    seen["off_hooks"] = sorted(hooks & set(wrapt.importer._post_import_hooks))
    for target in TARGETS.values():
        importlib.import_module(target.module)
    seen["off"] = patched()
    published = config.published()
    seen["off_decision"] = None if published is None else published.to_json()
    check = objects()["server_args.check_server_args"]
    seen["layers"] = 0
    while type(check) is wrapt.FunctionWrapper:
        seen["layers"] += 1
        check = check.__wrapped__
    seen["flag"] = parse_flag()
    seen["facts"] = [
        facts_of("DeepseekV32ForCausalLM", True, index_topk=2048),
        facts_of("DeepseekV32ForCausalLM", True, index_topk=2048, index_kpool=4),
        facts_of("DeepseekV3ForCausalLM", True),
        facts_of("LlamaForCausalLM", False),
    ]

    from sglang.srt.disaggregation import utils

    stock = utils.filter_kv_indices_for_cp_rank
    utils.filter_kv_indices_for_cp_rank = lambda *args: stock(*args)
    seen["foreign"] = stopped(DECISION)
    utils.filter_kv_indices_for_cp_rank = stock
    seen["after_foreign"] = patched()

    seen["other_version"] = stopped(Decision("0.0.0", "0.5.12.post1", 2, 64, "CP_SHARED_KV=1"))
    seen["after_other_version"] = patched()

    before = objects()
    plugin._arrive(pickle.loads(pickle.dumps(plugin._TravellingDecision.of(DECISION))))
    seen["arrived"] = patched()
    assert plugin._scheduler_patches is not None
    own = {patch.seam for patch in plugin._scheduler_patches.patches}
    seen["patched_seams"] = sorted(own | set(seen["off"]))
    plugin._scheduler_patches.attest()
    seen["attested"] = True

    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    path = TARGETS["transfer.send_aux"].path
    HookRegistry.register(path, len, HookType.REPLACE, source=HookSource("other_plugin", None))
    try:
        plugin._scheduler_patches.attest()
    except SeamError as error:
        seen["replace_hook"] = str(error)
    del HookRegistry._hooks[path]

    plugin.deactivate()
    seen["after_deactivate"] = patched()
    after = objects()
    seen["restored"] = all(after[seam] is before[seam] for seam in before)

    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    main()
