"""Run in a process of its own by ``test_plugin.py``, in the environment of the CPU platform.

``activations`` loads the plugin with nobody asking for it, imports every module that has a seam, then goes through
refused and accepted activations. ``permutations`` takes all patches of a kind of server through every order of import,
patch and undo, failures, and hooks of another plugin. Writes to the path in argv[2] what was seen after each step.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import pickle
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import wrapt

from cp_shared_kv import config, patches, plugin
from cp_shared_kv._version import __version__
from cp_shared_kv.config import Decision
from cp_shared_kv.gate import gather_facts
from cp_shared_kv.patches import PatchSet, arguments, builtin_groups
from cp_shared_kv.patches.arguments import FLAG_ATTRIBUTE
from cp_shared_kv.releases import installed, release_for
from cp_shared_kv.seams import SeamError, SourceTree

TARGETS = installed().targets
DECISION = Decision(__version__, "0.5.12.post1", 2, 64, "CP_SHARED_KV=1")


def is_patched(found: Any) -> bool:
    """Whether a module or class holds a wrapper; in a static or class method it is inside."""
    return type(found.__func__ if type(found) in (staticmethod, classmethod) else found) is wrapt.FunctionWrapper


def objects() -> dict[str, Any]:
    """Seam -> the raw object that its module or class holds."""
    return {seam: wrapt.resolve_path(target.module, target.qualname)[2] for seam, target in TARGETS.items()}


def patched() -> list[str]:
    return sorted(seam for seam, found in objects().items() if is_patched(found))


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
    given, alias = (parser.parse_args(["--model-path", "m", flag]) for flag in config.FLAGS)
    assert alias == given
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


def flag_stops() -> dict[str, str]:
    """What happens to a launch with the flag when somebody else has replaced a method that handles arguments."""
    from sglang.srt.server_args import ServerArgs

    seen = {}
    held, argv = dict(vars(ServerArgs)), sys.argv
    try:
        ServerArgs.check_server_args = lambda self: None
        parse_flag()
        seen["check_server_args"] = "NOT STOPPED"
    except SystemExit as error:
        seen["check_server_args"] = str(error)
    ServerArgs.check_server_args = held["check_server_args"]
    for given in ([], [config.FLAG]):
        try:
            sys.argv = ["launch_server", *given]
            ServerArgs.from_cli_args = classmethod(lambda cls, args: None)
            plugin.decide(SimpleNamespace(attn_cp_size=1))
            seen[f"from_cli_args {given}"] = "NOT STOPPED"
        except SystemExit as error:
            seen[f"from_cli_args {given}"] = str(error)
    ServerArgs.from_cli_args, sys.argv = held["from_cli_args"], argv
    return seen


def facts_of(architecture: str, mla: bool, **config_fields: Any) -> dict[str, Any]:
    """Facts that the gate gathers for a model configuration."""
    from sglang.srt.configs.model_config import AttentionArch

    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture], **config_fields),
        attention_arch=AttentionArch.MLA if mla else AttentionArch.MHA,
    )
    # Later releases have a function in place of the method; it finds a configuration that was built before.
    server_args = SimpleNamespace(get_model_config=lambda: model, _model_config=model, _model_config_built_from=None)
    facts = gather_facts(server_args, installed(), environ={"A": "1"})
    names = ("architecture", "is_nsa", "is_mla", "index_kpool", "is_out_of_tree_platform", "devices", "environ")
    return {name: getattr(facts, name) for name in names}


def held() -> dict[tuple[str, str], Any]:
    """Whatever modules hold, and the classes that have a seam, by owner and name."""
    owners = {name: vars(module) for name, module in sys.modules.items() if isinstance(module, types.ModuleType)}
    for target in TARGETS.values():
        owner = wrapt.resolve_path(target.module, target.qualname)[0]
        if isinstance(owner, type):
            owners[f"{target.module}:{owner.__name__}"] = vars(owner)
    return {(owner, name): value for owner, names in owners.items() for name, value in list(names.items())}


def moved(before: dict[tuple[str, str], Any]) -> list[str]:
    """Names that hold another object than before, or are new, or gone."""
    after, nothing = held(), object()
    names = before.keys() | after.keys()
    return sorted(":".join(name) for name in names if before.get(name, nothing) is not after.get(name, nothing))


def wrappers() -> list[str]:
    """Names that hold a wrapper of ours."""
    return sorted(":".join(name) for name, value in held().items() if type(value) is wrapt.FunctionWrapper)


def problems_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except SeamError as error:
        return error.problems
    return []


def hooked_after(patch_set: PatchSet, kind: str, paths: list[str]) -> dict[str, Any]:
    """Another plugin hooks every seam that is patched; ours is undone under it, and patched again."""
    before = held()
    patch_set.apply()
    hook(kind, paths)
    hooked = held()
    seen: dict[str, Any] = {"attested": problems_of(patch_set.attest)}
    patch_set.undo()
    seen["moved by undo"] = moved(hooked)
    seen["again"] = problems_of(patch_set.apply)
    patch_set.undo()
    put_back(before)
    return seen


def hooked_before(patch_set: PatchSet, kind: str, paths: list[str]) -> dict[str, Any]:
    """Another plugin has hooked every seam already."""
    before = held()
    hook(kind, paths)
    hooked = held()
    seen: dict[str, Any] = {"applied": problems_of(patch_set.apply)}
    seen["attested"] = problems_of(patch_set.attest) if patch_set.active else None
    patch_set.undo()
    seen["moved by undo"] = moved(hooked)
    put_back(before)
    return seen


def hook(kind: str, paths: list[str]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    for path in paths:
        HookRegistry.register(path, lambda *args, **kwargs: None, HookType[kind], source=HookSource("other", None))
    HookRegistry.apply_hooks()
    assert HookRegistry._patched == set(paths)


def put_back(before: dict[tuple[str, str], Any]) -> None:
    """Take the other plugin's hooks away."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.reset()
    for (owner, name), value in held().items():
        if before[owner, name] is not value:
            module, _, class_name = owner.partition(":")
            holder = sys.modules[module]
            setattr(getattr(holder, class_name) if class_name else holder, name, before[owner, name])
    assert not moved(before)


def failures(patch_set: PatchSet) -> list[list[str]]:
    """What has moved after each patch in turn could not be applied."""
    stock, before, seen = patches._wrap, held(), []
    for number in range(len(patch_set.patches)):
        counted = itertools.count()

        def fail(*args: Any, counted: Any = counted, number: int = number) -> Any:
            if next(counted) == number:
                raise KeyboardInterrupt
            return stock(*args)

        patches._wrap = fail
        try:
            patch_set.apply()
        except KeyboardInterrupt:
            patches._wrap = stock
            seen.append(moved(before))
    return seen


def permutations(role: str) -> dict[str, Any]:
    source = SourceTree.installed()
    groups = [*(group for group in builtin_groups() if role in group.roles), arguments.GROUP]
    patch_set = PatchSet(release_for(source.version), source, groups)
    seen: dict[str, Any] = {"patches": len(patch_set.patches)}

    patch_set.apply()
    for target in TARGETS.values():
        importlib.import_module(target.module)
    seen["patch, import"] = [patched(), problems_of(patch_set.attest)]
    seen["seams"] = sorted(patch.seam for patch in patch_set.patches)
    seen["copies"] = len(wrappers())
    patch_set.undo()
    seen["undo"] = [patched(), wrappers()]

    before = held()
    patch_set.apply()
    once = held()
    patch_set.apply()
    seen["patch twice"] = moved(once)
    late = sys.modules["late_copy"] = types.ModuleType("late_copy")
    exec("from sglang.srt.disaggregation.utils import filter_kv_indices_for_cp_rank as copy", vars(late))
    was_wrapper = type(late.copy) is wrapt.FunctionWrapper
    seen["import, patch"] = [patched(), problems_of(patch_set.attest)]
    patch_set.undo()
    seen["late copy"] = [was_wrapper, late.copy is before["sglang.srt.disaggregation.utils", late.copy.__name__]]
    del sys.modules["late_copy"]
    seen["after undo"] = moved(before)
    patch_set.undo()
    seen["undo twice"] = moved(before)
    patch_set.apply()
    seen["patch again"] = [patched(), problems_of(patch_set.attest)]
    patch_set.undo()
    seen["undo again"] = moved(before)
    seen["failures"] = failures(patch_set)
    paths = [patch_set.targets[patch.seam].path for patch in patch_set.patches]
    for kind in ("BEFORE", "AFTER", "AROUND", "REPLACE"):
        seen[f"{kind} after"] = hooked_after(patch_set, kind, paths)
        seen[f"{kind} before"] = hooked_before(patch_set, kind, paths)
    seen["in the end"] = moved(before)
    return seen


def activations() -> dict[str, Any]:
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
    while is_patched(check):
        seen["layers"] += 1
        check = check.__wrapped__
    seen["flag"] = parse_flag()
    seen["facts"] = [
        facts_of("DeepseekV32ForCausalLM", True, index_topk=2048),
        facts_of("DeepseekV32ForCausalLM", True, index_topk=2048, index_kpool=4),
        facts_of("DeepseekV3ForCausalLM", True),
        facts_of("LlamaForCausalLM", False),
    ]

    seen["flag_lost"] = flag_stops()

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

    return seen


def main() -> None:
    if sys.argv[1] == "activations":
        seen = activations()
    else:
        seen = {role: permutations(role) for role in ("prefill", "decode")}
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    main()
