"""What was asked for, from flag and environment, and the decision that travels to the schedulers."""

from __future__ import annotations

import json
import os

import pytest

from cp_shared_kv import config
from cp_shared_kv.config import ConfigError, Decision, State, is_true, parse_switch, publish, published, requested

FLAG = "--enable-nsa-prefill-cp-shared-kv"
DECISION = Decision(version="1.2", release="0.5.12.post1", cp_size=4, page_size=64, source="CP_SHARED_KV=1")


class TestSwitch:
    @pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", "On", " 1 "])
    def test_yes_is_understood(self, value: str):
        assert parse_switch(value) is True

    @pytest.mark.parametrize("value", ["0", "false", "FALSE", "no", "Off", " 0\n"])
    def test_no_is_understood(self, value: str):
        assert parse_switch(value) is False

    @pytest.mark.parametrize("value", [None, "", "  "])
    def test_unset_and_empty_say_nothing(self, value: str | None):
        assert parse_switch(value) is None

    @pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes"])
    def test_other_variables_are_true_for_a_plain_yes(self, value: str):
        assert is_true(value) is True

    @pytest.mark.parametrize("value", [None, "", "  ", "0", "false", "no", "off", "2", "banana"])
    def test_other_variables_are_false_for_anything_else(self, value: str | None):
        assert is_true(value) is False

    @pytest.mark.parametrize("value", ["banana", "2", "-1", "enabled", "y"])
    def test_anything_else_is_refused_with_what_is_accepted(self, value: str):
        with pytest.raises(ConfigError) as refused:
            parse_switch(value)
        message = str(refused.value)
        assert message.startswith(f"CP_SHARED_KV={value!r} is not understood")
        assert "1/true/yes/on, 0/false/no/off, or unset" in message


class TestRequested:
    @pytest.mark.parametrize(
        ("environ", "flag", "state", "source"),
        [
            ({}, True, State.ON, FLAG),
            ({"CP_SHARED_KV": "1"}, False, State.ON, "CP_SHARED_KV=1"),
            ({"CP_SHARED_KV": "on"}, True, State.ON, FLAG),
            ({"CP_SHARED_KV": ""}, True, State.ON, FLAG),
            ({"CP_SHARED_KV": "1", "SGLANG_PLUGINS": "cp_shared_kv"}, False, State.ON, "CP_SHARED_KV=1"),
            ({"CP_SHARED_KV": "0"}, False, State.OFF, "CP_SHARED_KV=0"),
            ({"CP_SHARED_KV": "0", "SGLANG_PLUGINS": "cp_shared_kv"}, False, State.OFF, "CP_SHARED_KV=0"),
            ({"SGLANG_PLUGINS": "cp_shared_kv"}, False, State.AUTO, "SGLANG_PLUGINS names cp_shared_kv"),
            ({"SGLANG_PLUGINS": "a, cp_shared_kv ,b"}, False, State.AUTO, "SGLANG_PLUGINS names cp_shared_kv"),
            ({"SGLANG_PLUGINS": "cp_shared_kv"}, True, State.ON, FLAG),
            ({"SGLANG_PLUGINS": "cp_shared_kv", "CP_SHARED_KV": " "}, False, State.AUTO, "SGLANG_PLUGINS names"),
            ({"SGLANG_PLUGINS": "cp_shared_kv_cpu"}, False, State.OFF, "neither"),
            ({"SGLANG_PLUGINS": ""}, False, State.OFF, "neither"),
            ({}, False, State.OFF, f"neither {FLAG} nor CP_SHARED_KV nor SGLANG_PLUGINS asks for it"),
        ],
    )
    def test_flag_goes_before_switch_and_switch_before_plugin_list(
        self, environ: dict[str, str], flag: bool, state: State, source: str
    ):
        request = requested(environ, flag)
        assert request.state is state
        assert request.source.startswith(source)

    @pytest.mark.parametrize("value", ["0", "false", "Off"])
    def test_the_flag_and_a_switch_that_forbids_contradict_each_other(self, value: str):
        with pytest.raises(ConfigError) as refused:
            requested({"CP_SHARED_KV": value}, True)
        assert str(refused.value) == (
            f"{FLAG} asks for CP shared KV but CP_SHARED_KV={value} forbids it: remove one of the two"
        )

    @pytest.mark.parametrize("flag", [False, True])
    def test_a_bad_switch_is_refused_with_and_without_the_flag(self, flag: bool):
        with pytest.raises(ConfigError, match="CP_SHARED_KV='banana' is not understood"):
            requested({"CP_SHARED_KV": "banana", "SGLANG_PLUGINS": "cp_shared_kv"}, flag)


class TestDecision:
    def test_goes_through_json_and_back(self):
        assert Decision.from_json(DECISION.to_json()) == DECISION

    def test_json_holds_every_field_by_name(self):
        assert json.loads(DECISION.to_json()) == {
            "version": "1.2",
            "release": "0.5.12.post1",
            "cp_size": 4,
            "page_size": 64,
            "source": "CP_SHARED_KV=1",
            "role": "prefill",
        }

    @pytest.mark.parametrize("text", ["{", "{}", "[]", "1", "null", '"x"', '{"version": "1.2"}', "1/2"])
    def test_text_that_the_plugin_did_not_write_is_refused(self, text: str):
        with pytest.raises(ConfigError) as refused:
            Decision.from_json(text)
        assert str(refused.value).startswith(f"CP_SHARED_KV_DECISION={text!r} was not written by this plugin")
        assert "unset it" in str(refused.value)

    def test_a_field_of_another_plugin_version_is_refused(self):
        fields = {**json.loads(DECISION.to_json()), "draft": True}
        with pytest.raises(ConfigError, match="was not written by this plugin"):
            Decision.from_json(json.dumps(fields))


class TestPublishing:
    def test_a_published_decision_is_found(self):
        environ: dict[str, str] = {}
        publish(DECISION, environ)
        assert list(environ) == ["CP_SHARED_KV_DECISION"]
        assert published(environ) == DECISION

    def test_none_takes_an_earlier_decision_away(self):
        environ = {"CP_SHARED_KV_DECISION": DECISION.to_json(), "OTHER": "1"}
        publish(None, environ)
        assert environ == {"OTHER": "1"}
        assert published(environ) is None

    def test_none_where_nothing_was_published_is_no_error(self):
        publish(None, {})

    def test_an_empty_variable_is_no_decision(self):
        assert published({"CP_SHARED_KV_DECISION": ""}) is None

    def test_a_damaged_decision_is_an_error_and_not_none(self):
        with pytest.raises(ConfigError, match="CP_SHARED_KV_DECISION='yes'"):
            published({"CP_SHARED_KV_DECISION": "yes"})

    def test_the_environment_of_the_process_is_the_default(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delenv(config.DECISION_ENV, raising=False)
        monkeypatch.setattr(os, "environ", {"A": "1"})
        publish(DECISION)
        assert published() == DECISION
        assert os.environ[config.DECISION_ENV] == DECISION.to_json()
