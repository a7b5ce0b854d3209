"""What the user asked for, and the decision that was made of it.

Three states. *On*: the flag or ``CP_SHARED_KV=1``; every requirement holds or the launch stops. *Auto*: no flag, but
``SGLANG_PLUGINS`` names the plugin; the gate decides. *Off*: ``CP_SHARED_KV=0``, or the plugin merely installed.
The launching process decides once; the decision travels to the scheduler processes in their environment and on the
``ServerArgs`` they are given, and both must agree there.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

PLUGIN_NAME = "cp_shared_kv"
FLAG = "--enable-nsa-prefill-cp-shared-kv"
FLAG_ALIAS = "--enable-dsa-prefill-cp-shared-kv"
FLAGS = (FLAG, FLAG_ALIAS)
FLAG_DEST = "enable_nsa_prefill_cp_shared_kv"
SWITCH_ENV = "CP_SHARED_KV"
PLUGINS_ENV = "SGLANG_PLUGINS"
DECISION_ENV = "CP_SHARED_KV_DECISION"
ALLOW_CHANGED_SOURCE_ENV = "CP_SHARED_KV_ALLOW_CHANGED_SOURCE"
LOG_LEVEL_ENV = "CP_SHARED_KV_LOG_LEVEL"
PREFETCH_ENV = "CP_SHARED_KV_PREFETCH"
ALL_CP_RANKS_ENV = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class ConfigError(ValueError):
    """A setting of this plugin that cannot be understood, or two that contradict each other."""


class State(enum.Enum):
    """What was asked for."""

    OFF = "off"
    AUTO = "auto"
    ON = "on"


@dataclass(frozen=True)
class Request:
    """A state and where it came from, for messages."""

    state: State
    source: str


def is_true(value: str | None) -> bool:
    """Whether an environment value means yes, as SGLang reads booleans."""
    return value is not None and value.strip().lower() in _TRUE


def sglang_true(value: str | None) -> bool:
    """Whether SGLang reads an environment value as yes; what it does not know it takes for its default, no."""
    return value is not None and value.lower() in ("true", "1", "yes", "y")


def parse_switch(value: str | None) -> bool | None:
    """Value of ``CP_SHARED_KV``: True, False, or None where it is unset or empty.

    Raises:
        ConfigError: any other value.
    """
    return _parse_bool(SWITCH_ENV, value, f"then {FLAG} or {PLUGINS_ENV} decide")


def prefetch_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the next layer's prefix is fetched while a layer computes: yes, unless ``CP_SHARED_KV_PREFETCH`` says no.

    Raises:
        ConfigError: the variable has an unknown value.
    """
    value = (os.environ if environ is None else environ).get(PREFETCH_ENV)
    return _parse_bool(PREFETCH_ENV, value, "then it is on") is not False


def _parse_bool(name: str, value: str | None, unset: str) -> bool | None:
    if value is None or not value.strip():
        return None
    text = value.strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(
        f"{name}={value!r} is not understood: accepted are 1/true/yes/on, 0/false/no/off, or unset ({unset})"
    )


def requested(environ: Mapping[str, str], flag: bool) -> Request:
    """State that flag and environment ask for together.

    Args:
        environ: environment of the launching process.
        flag: whether the command line held the plugin's flag.

    Raises:
        ConfigError: the switch has an unknown value, or contradicts the flag.
    """
    switch = parse_switch(environ.get(SWITCH_ENV))
    if flag and switch is False:
        raise ConfigError(
            f"{FLAG} asks for CP shared KV but {SWITCH_ENV}={environ[SWITCH_ENV]} forbids it: remove one of the two"
        )
    if flag:
        return Request(State.ON, FLAG)
    if switch is not None:
        return Request(State.ON if switch else State.OFF, f"{SWITCH_ENV}={environ[SWITCH_ENV]}")
    allowed = {name.strip() for name in environ.get(PLUGINS_ENV, "").split(",")}
    if PLUGIN_NAME in allowed:
        return Request(State.AUTO, f"{PLUGINS_ENV} names {PLUGIN_NAME}")
    return Request(State.OFF, f"neither {FLAG} nor {SWITCH_ENV} nor {PLUGINS_ENV} asks for it")


@dataclass(frozen=True)
class Decision:
    """Outcome that the scheduler processes must agree with.

    Attributes:
        version: version of this plugin.
        release: SGLang release whose seams were resolved.
        cp_size: ranks of the attention-CP group.
        page_size: tokens per page.
        source: what asked for it.
        role: side of the disaggregated deployment, ``prefill`` or ``decode``.
    """

    version: str
    release: str
    cp_size: int
    page_size: int
    source: str
    role: str = "prefill"

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """Inverse of :meth:`to_json`.

        Raises:
            ConfigError: the text was not written by this version of the plugin.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{DECISION_ENV}={text!r} was not written by this plugin ({error}); it is set by the launching "
                "process for its schedulers and must not be set by hand: unset it"
            ) from None


def publish(decision: Decision | None, environ: MutableMapping[str, str] | None = None) -> None:
    """Put the decision where child processes find it, or take an earlier one away."""
    target = os.environ if environ is None else environ
    if decision is None:
        target.pop(DECISION_ENV, None)
    else:
        target[DECISION_ENV] = decision.to_json()


def published(environ: Mapping[str, str] | None = None) -> Decision | None:
    """Decision of the launching process, or None where it decided against shared KV."""
    text = (os.environ if environ is None else environ).get(DECISION_ENV)
    return Decision.from_json(text) if text else None
