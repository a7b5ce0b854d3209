"""The entry point in whole processes: what each state patches, and what ends the process.

One child process imports SGLang and takes all the steps that need it, recording what it saw after each; the rest needs
SGLang's source only.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cp_shared_kv import config, plugin
from cp_shared_kv._version import __version__
from cp_shared_kv.config import Decision
from cp_shared_kv.divergence import CHECK_EVERY_ENV
from cp_shared_kv.patches.arguments import DECISION_ATTRIBUTE, FLAG_ATTRIBUTE
from cp_shared_kv.releases import installed
from cp_shared_kv.seams import SeamError, SourceTree
from cp_shared_kv_cpu import launch

RELEASE = installed().version
DECISION = Decision(__version__, RELEASE, 2, 64, "CP_SHARED_KV=1")
VARIABLES = (
    config.SWITCH_ENV,
    config.PLUGINS_ENV,
    config.DECISION_ENV,
    config.LOG_LEVEL_ENV,
    config.ALLOW_CHANGED_SOURCE_ENV,
    CHECK_EVERY_ENV,
)


def environment(**variables: str) -> dict[str, str]:
    """Environment of a process that can import SGLang and in which nobody asks for anything but ``variables``."""
    merged = {**os.environ, **launch.cpu_environment(1)}
    return {**{name: value for name, value in merged.items() if name not in VARIABLES}, **variables}


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=240)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the plugin is set, and no process-wide patches are left from elsewhere."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(plugin, "_argument_patches", None)
    monkeypatch.setattr(plugin, "_scheduler_patches", None)


def worker(mode: str, directory: Path) -> dict[str, Any]:
    """What ``plugin_worker.py`` recorded; most of its time is the import of sglang."""
    path = directory / "seen.json"
    command = [sys.executable, str(Path(__file__).with_name("plugin_worker.py")), mode, str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


class TestWithSglang:
    @pytest.fixture(scope="class")
    @staticmethod
    def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        return worker("activations", tmp_path_factory.mktemp("plugin"))

    def test_off_patches_nothing_but_the_three_methods_of_the_arguments(self, seen: dict[str, Any]):
        assert seen["off"] == [
            "server_args.add_cli_args",
            "server_args.check_server_args",
            "server_args.from_cli_args",
        ]
        assert seen["off_hooks"] == [], "an import hook waits for a module that is not imported yet"
        assert seen["off_decision"] is None

    def test_the_parser_takes_the_flag_and_the_arguments_remember_it(self, seen: dict[str, Any]):
        assert seen["flag"] == {"absent": False, "given": True, "attribute": True}

    def test_the_gate_knows_an_nsa_model_by_its_configuration(self, seen: dict[str, Any]):
        models = [[f["architecture"], f["is_nsa"], f["is_mla"], f["index_kpool"]] for f in seen["facts"]]
        assert models == [
            ["DeepseekV32ForCausalLM", True, True, 1],
            ["DeepseekV32ForCausalLM", True, True, 4],
            ["DeepseekV3ForCausalLM", False, True, 1],
            ["LlamaForCausalLM", False, False, 1],
        ]
        assert seen["facts"][0]["environ"] == {"A": "1"}
        assert seen["facts"][0]["devices"] == ["cuda"], "no platform vouches for another device here"
        assert seen["facts"][0]["is_out_of_tree_platform"] is False

    def test_loading_twice_patches_once(self, seen: dict[str, Any]):
        assert seen["layers"] == 1

    def test_a_launch_with_the_flag_stops_when_its_handling_was_replaced(self, seen: dict[str, Any]):
        lost = seen["flag_lost"]
        assert "server_args.check_server_args: replaced" in lost["check_server_args"]
        assert "server_args.from_cli_args: replaced" in lost[f"from_cli_args {[config.FLAG]}"]

    def test_without_the_flag_replaced_argument_handling_is_nobody_s_business(self, seen: dict[str, Any]):
        assert seen["flag_lost"]["from_cli_args []"] == "NOT STOPPED"

    def test_a_seam_that_somebody_else_replaced_stops_activation_and_nothing_is_patched(self, seen: dict[str, Any]):
        assert seen["foreign"].startswith("CP shared KV: 1 of the SGLang seams")
        assert "transfer.filter_kv_indices: already patched" in seen["foreign"]
        assert "remove one of the two" in seen["foreign"]
        assert seen["after_foreign"] == seen["off"]

    def test_a_decision_of_another_plugin_version_stops_activation_and_nothing_is_patched(self, seen: dict[str, Any]):
        assert f"the launching process decided with plugin 0.0.0 on SGLang {RELEASE}" in seen["other_version"]
        assert f"this one has plugin {__version__} on SGLang {RELEASE}" in seen["other_version"]
        assert "install the same on every node" in seen["other_version"]
        assert seen["after_other_version"] == seen["off"]

    def test_unpickling_a_travelling_decision_patches_every_seam(self, seen: dict[str, Any]):
        assert seen["arrived"] == seen["patched_seams"]
        assert len(seen["arrived"]) > len(seen["off"])
        assert seen["attested"] is True

    def test_deactivating_restores_the_very_same_objects_and_keeps_the_argument_handling(self, seen: dict[str, Any]):
        assert seen["restored"] is True
        assert seen["after_deactivate"] == seen["off"]

    def test_a_replace_hook_registered_with_sglang_fails_attestation(self, seen: dict[str, Any]):
        assert "transfer.send_aux: replaced: " in seen["replace_hook"]
        assert "has a REPLACE hook from other_plugin" in seen["replace_hook"]


class TestPermutationsWithSglang:
    """All patches of a kind of server, argument handling included, on the installed SGLang."""

    @pytest.fixture(scope="class")
    @staticmethod
    def roles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        return worker("permutations", tmp_path_factory.mktemp("permutations"))

    @pytest.fixture(params=["prefill", "decode"])
    @staticmethod
    def seen(request: pytest.FixtureRequest, roles: dict[str, Any]) -> dict[str, Any]:
        return roles[request.param]

    @pytest.mark.parametrize("order", ["patch, import", "import, patch", "patch again"])
    def test_every_patch_is_in_place_whatever_the_order(self, seen: dict[str, Any], order: str):
        assert len(seen["seams"]) == seen["patches"] > 3
        assert seen[order] == [seen["seams"], []]

    def test_patching_before_the_import_and_undoing_leaves_no_wrapper_anywhere(self, seen: dict[str, Any]):
        assert seen["copies"] > 0, "no module holds a wrapper while patched"
        assert seen["undo"] == [[], []]

    @pytest.mark.parametrize("step", ["patch twice", "after undo", "undo twice", "undo again", "in the end"])
    def test_nothing_moves(self, seen: dict[str, Any], step: str):
        """Of all that modules hold, and the classes that have a seam: the very same objects under the same names."""
        assert seen[step] == []

    def test_a_copy_of_a_wrapper_made_while_patched_becomes_the_original(self, seen: dict[str, Any]):
        assert seen["late copy"] == ["transfer.filter_kv_indices" in seen["seams"], True]

    def test_a_failure_of_any_patch_leaves_everything_as_it_was(self, seen: dict[str, Any]):
        assert seen["failures"] == [[]] * seen["patches"]

    @pytest.mark.parametrize("kind", ["BEFORE", "AFTER", "AROUND"])
    def test_hooks_that_wrap_are_allowed_around_ours_and_inside_and_stay_where_they_are(
        self, seen: dict[str, Any], kind: str
    ):
        assert seen[f"{kind} after"] == {"attested": [], "moved by undo": [], "again": []}
        assert seen[f"{kind} before"] == {"applied": [], "attested": [], "moved by undo": []}

    def test_hooks_that_replace_are_refused_by_the_plugins_name(self, seen: dict[str, Any]):
        after, before = seen["REPLACE after"], seen["REPLACE before"]
        for problems in (after["attested"], after["again"], before["applied"]):
            assert sorted(problem.split(": ")[0] for problem in problems) == seen["seams"]
            assert all(problem.endswith(" has a REPLACE hook from other") for problem in problems)
        assert (after["moved by undo"], before["moved by undo"]) == ([], [])


class TestLoadStops:
    """Processes that stop before SGLang is imported; SystemExit is what SGLang's plugin loader lets through."""

    LOAD = "from cp_shared_kv import plugin; plugin.load(); print('LOADED')"

    def test_a_switch_that_is_not_understood_ends_the_process(self):
        done = run(self.LOAD, CP_SHARED_KV="banana")
        assert done.returncode == 1
        assert "LOADED" not in done.stdout
        assert "CP shared KV: CP_SHARED_KV='banana' is not understood: accepted are 1/true/yes/on" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"CP_SHARED_KV": "banana"}, "CP_SHARED_KV='banana' is not understood"),
            ({"CP_SHARED_KV_DECISION": "yes"}, "CP_SHARED_KV_DECISION='yes' was not written by this plugin"),
            (
                {"CP_SHARED_KV_DECISION": Decision("0.0.0", RELEASE, 2, 64, "x").to_json()},
                f"decided with plugin 0.0.0 on SGLang {RELEASE}",
            ),
            (
                {"CP_SHARED_KV_DECISION": Decision(__version__, "0.5.13", 2, 64, "x").to_json()},
                f"decided with plugin {__version__} on SGLang 0.5.13",
            ),
            ({"CP_SHARED_KV": "1", "CP_SHARED_KV_LOG_LEVEL": "chatty"}, "CP_SHARED_KV_LOG_LEVEL"),
        ],
        ids=["switch", "decision", "version", "release", "log level"],
    )
    def test_what_cannot_be_understood_or_does_not_fit_is_a_system_exit(
        self, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as stopped:
            plugin.load()
        assert message in str(stopped.value)
        assert str(stopped.value).startswith("CP shared KV: ")

    @pytest.mark.parametrize(
        ("variables", "stops"),
        [({"CP_SHARED_KV": "1"}, True), ({"SGLANG_PLUGINS": "cp_shared_kv"}, False), ({}, False)],
        ids=["on", "auto", "off"],
    )
    def test_argument_handling_that_cannot_be_patched_stops_only_where_it_was_asked_for(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        variables: dict[str, str],
        stops: bool,
    ):
        def broken() -> None:
            raise SeamError(["server_args is gone"])

        monkeypatch.setattr(plugin, "_patch_arguments", broken)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if stops:
            with pytest.raises(SystemExit, match="server_args is gone"):
                plugin.load()
        else:
            plugin.load()
            assert ("CP shared KV stays off" in caplog.text) == ("SGLANG_PLUGINS" in variables)

    def test_an_unknown_release_is_refused_by_name_with_the_report_of_its_seams(self, monkeypatch: pytest.MonkeyPatch):
        newer = SourceTree(SourceTree.installed().root, "9.9.9")
        monkeypatch.setattr(SourceTree, "installed", classmethod(lambda cls: newer))
        monkeypatch.setattr(plugin, "_argument_patches", None)
        monkeypatch.setenv("CP_SHARED_KV", "1")
        with pytest.raises(SystemExit) as stopped:
            plugin.load()
        message = str(stopped.value)
        assert "SGLang 9.9.9 is not a supported release: supported are 0.5.11" in message
        assert "\nSGLang 9.9.9, compared with the row of " in message
        assert "\nverdict: refused, SGLang 9.9.9 is not a supported release" in message

    @pytest.mark.parametrize("flag", config.FLAGS)
    def test_the_flag_alone_stops_too_with_the_reason(self, monkeypatch: pytest.MonkeyPatch, flag: str):
        """SGLang's parser does not know the flag then, and would say no more than that."""

        def broken() -> None:
            raise SeamError(["SGLang 9.9 is not a supported release"])

        monkeypatch.setattr(plugin, "_patch_arguments", broken)
        monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "m", flag])
        with pytest.raises(SystemExit, match=r"SGLang 9\.9 is not a supported release"):
            plugin.load()

    def test_an_unexpected_error_stops_too_where_shared_kv_was_asked_for(self, monkeypatch: pytest.MonkeyPatch):
        def broken() -> None:
            raise KeyError("unexpected")

        monkeypatch.setattr(plugin, "_patch_arguments", broken)
        monkeypatch.setenv("CP_SHARED_KV", "1")
        with pytest.raises(SystemExit, match="unexpected"):
            plugin.load()


class TestDecide:
    @staticmethod
    def arguments(flag: bool = False) -> Any:
        return SimpleNamespace(**{FLAG_ATTRIBUTE: flag}, attn_cp_size=2, page_size=64, disaggregation_mode="prefill")

    @pytest.fixture
    def gate(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """Stands in for the gate, which needs SGLang: refuses where ``refusal`` is set, and counts its calls."""
        state = SimpleNamespace(refusal=None, calls=0)

        class Stand:
            def require(self, facts: Any) -> None:
                state.calls += 1
                if state.refusal:
                    raise state.refusal

        monkeypatch.setattr(plugin, "gate_with_extensions", Stand)
        monkeypatch.setattr(plugin, "gather_facts", lambda server_args, release: None)
        monkeypatch.setattr(plugin, "resolved_arguments", lambda server_args: server_args)
        return state

    def test_the_flag_against_a_switch_that_forbids_stops_with_both_named(
        self, monkeypatch: pytest.MonkeyPatch, gate: SimpleNamespace
    ):
        monkeypatch.setenv("CP_SHARED_KV", "0")
        with pytest.raises(SystemExit) as stopped:
            plugin.decide(self.arguments(flag=True))
        assert str(stopped.value) == (
            "CP shared KV: --enable-nsa-prefill-cp-shared-kv asks for CP shared KV but CP_SHARED_KV=0 forbids it: "
            "remove one of the two"
        )
        assert gate.calls == 0
        assert config.published() is None

    def test_off_decides_against_it_without_asking_the_gate(self, gate: SimpleNamespace):
        server_args = self.arguments()
        assert plugin.decide(server_args) is None
        assert gate.calls == 0
        assert getattr(server_args, DECISION_ATTRIBUTE) is None
        assert config.published() is None

    def test_off_takes_an_inherited_decision_away(self, monkeypatch: pytest.MonkeyPatch, gate: SimpleNamespace):
        monkeypatch.setenv(config.DECISION_ENV, DECISION.to_json())
        assert plugin.decide(self.arguments()) is None
        assert config.published() is None

    @pytest.mark.parametrize(
        ("flag", "variables", "source"),
        [
            (True, {}, config.FLAG),
            (False, {"CP_SHARED_KV": "1"}, "CP_SHARED_KV=1"),
            (False, {"SGLANG_PLUGINS": "cp_shared_kv"}, "SGLANG_PLUGINS names cp_shared_kv"),
        ],
        ids=["flag", "switch", "auto"],
    )
    def test_a_server_that_passes_gets_a_decision_on_its_arguments_and_in_the_environment(
        self,
        monkeypatch: pytest.MonkeyPatch,
        gate: SimpleNamespace,
        flag: bool,
        variables: dict[str, str],
        source: str,
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        server_args = self.arguments(flag)
        decision = plugin.decide(server_args)
        assert decision == Decision(__version__, RELEASE, 2, 64, source)
        assert config.published() == decision
        assert getattr(server_args, DECISION_ATTRIBUTE).decision == decision
        assert gate.calls == 1

    @pytest.mark.parametrize("refusal", [plugin.GateError([]), SeamError(["a seam is gone"])], ids=["gate", "seam"])
    def test_a_refusal_stops_where_it_was_asked_for(
        self, monkeypatch: pytest.MonkeyPatch, gate: SimpleNamespace, refusal: Exception
    ):
        gate.refusal = refusal
        with pytest.raises(SystemExit) as stopped:
            plugin.decide(self.arguments(flag=True))
        assert str(stopped.value).startswith(("CP shared KV: ", "CP shared KV cannot be used"))
        assert f"{refusal}\n(asked for by {config.FLAG})" in str(stopped.value)
        assert config.published() is None

    @pytest.mark.parametrize("refusal", [plugin.GateError([]), SeamError(["a seam is gone"])], ids=["gate", "seam"])
    def test_a_refusal_in_auto_leaves_stock_with_one_warning(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        gate: SimpleNamespace,
        refusal: Exception,
    ):
        monkeypatch.setenv("SGLANG_PLUGINS", "cp_shared_kv")
        gate.refusal = refusal
        server_args = self.arguments()
        assert plugin.decide(server_args) is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert str(refusal) in caplog.text
        assert getattr(server_args, DECISION_ATTRIBUTE) is None
        assert config.published() is None

    @pytest.mark.parametrize("auto", [False, True], ids=["on", "auto"])
    def test_a_check_interval_that_is_not_understood_stops(
        self, monkeypatch: pytest.MonkeyPatch, gate: SimpleNamespace, auto: bool
    ):
        """Auto forgives unmet requirements, not settings of our own that cannot be read."""
        monkeypatch.setenv("CP_SHARED_KV_CHECK_EVERY", "often")
        if auto:
            monkeypatch.setenv("SGLANG_PLUGINS", "cp_shared_kv")
        with pytest.raises(SystemExit, match="CP_SHARED_KV_CHECK_EVERY='often' must be a whole number"):
            plugin.decide(self.arguments(flag=not auto))
        assert config.published() is None

    @pytest.mark.parametrize(
        ("variables", "changes", "warned"),
        [
            ({"CP_SHARED_KV": "0", config.ALL_CP_RANKS_ENV: "1"}, {}, True),
            ({"CP_SHARED_KV": "0", config.ALL_CP_RANKS_ENV: "0"}, {}, False),
            ({"CP_SHARED_KV": "0", config.ALL_CP_RANKS_ENV: "1"}, {"attn_cp_size": 1}, False),
            ({"CP_SHARED_KV": "0", config.ALL_CP_RANKS_ENV: "1"}, {"disaggregation_mode": "decode"}, False),
        ],
        ids=["rolled back by half", "rolled back", "no CP", "decode"],
    )
    def test_a_stock_server_that_would_lose_pages_is_warned_of(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        gate: SimpleNamespace,
        variables: dict[str, str],
        changes: dict[str, Any],
        warned: bool,
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        server_args = self.arguments()
        vars(server_args).update(changes)
        assert plugin.decide(server_args) is None
        assert ("then loses pages whose ids do not ascend" in caplog.text) == warned

    @pytest.mark.parametrize("flag", [False, True])
    def test_patches_of_an_earlier_server_in_this_process_are_undone_first(
        self, monkeypatch: pytest.MonkeyPatch, gate: SimpleNamespace, flag: bool
    ):
        undone: list[str] = []
        monkeypatch.setattr(plugin, "_scheduler_patches", SimpleNamespace(undo=lambda: undone.append("undone")))
        plugin.decide(self.arguments(flag))
        assert undone == ["undone"]
        assert plugin._scheduler_patches is None


class TestTravellingDecision:
    def test_being_spawned_with_it_activates_with_the_same_decision(self, monkeypatch: pytest.MonkeyPatch):
        activated: list[Decision] = []
        monkeypatch.setattr(plugin, "activate", activated.append)
        set_spawning_popen(object())
        try:
            pickled = pickle.dumps(plugin._TravellingDecision.of(DECISION))
        finally:
            set_spawning_popen(None)
        arrived = pickle.loads(pickled)
        assert activated == [DECISION]
        assert arrived.decision == DECISION

    def test_any_other_pickle_activates_nothing(self, monkeypatch: pytest.MonkeyPatch):
        # /server_info sends the scheduler's arguments to the launching process, which must stay as it is.
        activated: list[Decision] = []
        monkeypatch.setattr(plugin, "activate", activated.append)
        arrived = pickle.loads(pickle.dumps(plugin._TravellingDecision.of(DECISION)))
        assert activated == []
        assert arrived.decision == DECISION

    def test_it_is_plain_text_for_encoders(self):
        travelling = plugin._TravellingDecision.of(DECISION)
        assert json.loads(json.dumps({"x": travelling}))["x"] == DECISION.to_json()

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
    def test_copying_activates_nothing(self, monkeypatch: pytest.MonkeyPatch, copied: Any):
        activated: list[Decision] = []
        monkeypatch.setattr(plugin, "activate", activated.append)
        assert copied(plugin._TravellingDecision.of(DECISION)).decision == DECISION
        assert activated == []


class TestAttestScheduler:
    @staticmethod
    def arguments(carried: Decision | None = DECISION, **changes: Any) -> Any:
        travelling = None if carried is None else plugin._TravellingDecision.of(carried)
        return SimpleNamespace(**{"attn_cp_size": 2, "page_size": 64, DECISION_ATTRIBUTE: travelling, **changes})

    @pytest.fixture
    def patched(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """Stands in for the applied patches and the gate."""
        state = SimpleNamespace(problem=None, release=SimpleNamespace(arguments=None), asked=[])

        def attest() -> None:
            state.asked.append("seams")
            if state.problem:
                raise state.problem

        state.attest = attest
        monkeypatch.setattr(plugin, "_scheduler_patches", state)
        monkeypatch.setattr(
            plugin, "gate_with_extensions", lambda: SimpleNamespace(require=lambda facts: state.asked.append("gate"))
        )
        monkeypatch.setattr(plugin, "gather_facts", lambda server_args, release: None)
        monkeypatch.setattr(plugin, "resolved_arguments", lambda server_args: server_args)
        return state

    def test_passes_where_environment_arguments_seams_and_gate_agree(self, patched: SimpleNamespace):
        config.publish(DECISION)
        plugin.attest_scheduler(self.arguments())
        assert patched.asked == ["seams", "gate"]

    @pytest.mark.parametrize(
        ("carried", "published"),
        [(DECISION, None), (None, DECISION), (None, None), (DECISION, Decision(__version__, RELEASE, 4, 64, "x"))],
        ids=["arguments only", "environment only", "neither", "different"],
    )
    def test_arguments_and_environment_must_carry_the_same_decision(
        self, patched: SimpleNamespace, carried: Decision | None, published: Decision | None
    ):
        config.publish(published)
        with pytest.raises(SystemExit, match="the decision on the server arguments and the one in the environment"):
            plugin.attest_scheduler(self.arguments(carried))

    @pytest.mark.parametrize(
        ("changes", "found"),
        [({"attn_cp_size": 4}, "cp_size=4, page_size=64"), ({"page_size": 1}, "cp_size=2, page_size=1")],
    )
    def test_sizes_must_be_those_decided_for(self, patched: SimpleNamespace, changes: dict[str, int], found: str):
        config.publish(DECISION)
        with pytest.raises(SystemExit) as stopped:
            plugin.attest_scheduler(self.arguments(**changes))
        assert "cp_size=2, page_size=64, but this scheduler has" in str(stopped.value)
        assert str(stopped.value).endswith(found)

    def test_a_lost_seam_stops_the_scheduler(self, patched: SimpleNamespace):
        config.publish(DECISION)
        patched.problem = SeamError(["x: lost"])
        with pytest.raises(SystemExit, match="CP shared KV: 1 of the SGLang seams"):
            plugin.attest_scheduler(self.arguments())
        assert patched.asked == ["seams"]
