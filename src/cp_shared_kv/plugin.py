"""The entry point that SGLang's plugin framework calls in every process, and the decisions taken there.

In the launching process only argument handling is patched; :func:`decide` then runs once, when SGLang has resolved its
arguments. Where it decides for shared KV, every seam has been checked and the gate has passed. Scheduler processes find
the decision in their environment, or in the ``ServerArgs`` they are given, and patch themselves before anything runs.

SGLang logs a plugin's exception and goes on with stock code. Here that would corrupt answers silently, so whatever goes
wrong once shared KV was asked for leaves as ``SystemExit``, which SGLang lets through.
"""

from __future__ import annotations

import logging
import multiprocessing.context
import os
import sys
from typing import Any, NoReturn

from cp_shared_kv import config
from cp_shared_kv._version import __version__
from cp_shared_kv.compare import compare, is_supported
from cp_shared_kv.config import FLAGS, Decision, State
from cp_shared_kv.divergence import check_every
from cp_shared_kv.gate import GateError, gate_with_extensions, gather_facts, role_of
from cp_shared_kv.metrics import configure_logging
from cp_shared_kv.patches import PatchSet, SourceTree, arguments
from cp_shared_kv.patches.arguments import DECISION_ATTRIBUTE, FLAG_ATTRIBUTE
from cp_shared_kv.releases import installed, release_for, resolved_arguments
from cp_shared_kv.seams import SeamError

logger = logging.getLogger("cp_shared_kv")

_argument_patches: PatchSet | None = None
_scheduler_patches: PatchSet | None = None


def _stop(reason: object) -> NoReturn:
    text = str(reason)
    raise SystemExit(text if text.startswith("CP shared KV") else f"CP shared KV: {text}")


def _describe(error: Exception) -> str:
    """An error of ours as it is; any other with its type, which its text alone would not tell."""
    ours = isinstance(error, (GateError, SeamError, config.ConfigError))
    return str(error) if ours else f"{type(error).__name__}: {error}"


def _on_command_line() -> bool:
    return any(flag in sys.argv for flag in FLAGS)


def load() -> None:
    """Load the plugin into this process; idempotent. Called by the entry point (``entry.load``).

    Raises:
        SystemExit: shared KV was asked for (or decided on) and cannot be put in place.
    """
    try:
        configure_logging()
        decision = config.published()
        asked = config.requested(os.environ, flag=_on_command_line()).state
    except config.ConfigError as error:
        _stop(error)
    if decision is not None:
        activate(decision)
    try:
        _patch_arguments()
    except Exception as error:
        if asked is State.ON:
            _stop(_describe(error) + _seam_report())
        # Merely installed, the plugin must not be heard; its flag is unknown to SGLang then.
        level = logging.WARNING if asked is State.AUTO else logging.DEBUG
        logger.log(level, "CP shared KV stays off: %s", error)


def _seam_report() -> str:
    """Of a release without a row: how its seams fit the closest one that has one."""
    source = SourceTree.installed()
    if is_supported(source.version):
        return ""
    return "\n" + "\n".join(compare(source).lines())


def _patch_arguments() -> None:
    global _argument_patches
    if _argument_patches is None:
        source = SourceTree.installed()
        patches = PatchSet(release_for(source.version), source, [arguments.GROUP])
        patches.resolve()
        patches.apply()
        _argument_patches = patches


def attest_arguments() -> None:
    """Prove that the patches of argument handling are in place, once other plugins have had their turn.

    Raises:
        SystemExit: a seam is not in place, so the flag would be dropped or the decision not made.
    """
    try:
        if _argument_patches is not None:
            _argument_patches.attest()
    except SeamError as error:
        _stop(error)


def decide(server_args: Any) -> Decision | None:
    """Decide for or against shared KV on a server, and publish the decision.

    Args:
        server_args: resolved and checked ``ServerArgs``.

    Returns:
        the decision, or None where the server is stock.

    Raises:
        SystemExit: shared KV was asked for and a requirement is unmet or a seam is not as known.
    """
    config.publish(None)
    deactivate()  # an earlier server of this process may have left its patches
    setattr(server_args, DECISION_ATTRIBUTE, None)
    try:
        request = config.requested(os.environ, flag=bool(getattr(server_args, FLAG_ATTRIBUTE, False)))
        if request.state is not State.OFF:
            check_every()
            config.prefetch_wanted()
    except config.ConfigError as error:
        _stop(error)
    if (
        request.state is State.ON or _on_command_line()
    ):  # a flag that was dropped on the way is on the command line still
        attest_arguments()
    if request.state is State.OFF:
        _warn_of_stock_fault(server_args)
        return None
    try:
        source = SourceTree.installed()
        release = release_for(source.version)
        gate_with_extensions().require(gather_facts(server_args, release))
        role = role_of(server_args)
        PatchSet.for_release(source=source, role=role)
        resolved = resolved_arguments(server_args)
        decision = Decision(
            __version__, source.version, resolved.attn_cp_size, resolved.page_size, request.source, role
        )
    except Exception as error:  # also an extension's rule, or an unreadable model configuration
        if request.state is State.ON:
            _stop(f"{_describe(error)}\n(asked for by {request.source})")
        logger.warning("CP shared KV stays off, this server is stock: %s", _describe(error))
        _warn_of_stock_fault(server_args)
        return None
    config.publish(decision)
    setattr(server_args, DECISION_ATTRIBUTE, _TravellingDecision.of(decision))
    if role == "decode":
        logger.info(
            "CP shared KV: on for this decode server (%s), SGLang %s; pages of requests that end early are freed late",
            request.source,
            decision.release,
        )
    else:
        logger.info(
            "CP shared KV: on for this server (%s), SGLang %s, cp_size=%d; every decode server needs %s=1 too",
            request.source,
            decision.release,
            decision.cp_size,
            config.ALL_CP_RANKS_ENV,
        )
    return decision


def _warn_of_stock_fault(server_args: Any) -> None:
    """Warn where a server that stays stock would lose pages, as after a roll-back that left the variable set."""
    try:
        release = installed()
    except SeamError:
        return
    resolved = resolved_arguments(server_args)
    if (getattr(resolved, "attn_cp_size", 1) or 1) < 2 or resolved.disaggregation_mode != "prefill":
        return
    if release.stock_loses_pages and config.sglang_true(os.environ.get(config.ALL_CP_RANKS_ENV)):
        logger.warning(
            "%s=1 on a stock prefill server: SGLang %s then loses pages whose ids do not ascend, and decode reads "
            "garbage. Unset it here and on the decode servers, or turn CP shared KV on",
            config.ALL_CP_RANKS_ENV,
            release.version,
        )


class _TravellingDecision(str):
    """A decision on ``ServerArgs``, as its JSON text. Being spawned with it patches the new process.

    So a scheduler process that was told to share KV cannot run stock code because its plugins failed to load. Other
    pickles (``/server_info`` sends the arguments back to the launching process, crash dumps hold them) patch nothing,
    and as a string it is plain data for every encoder.
    """

    __slots__ = ()

    @classmethod
    def of(cls, decision: Decision) -> _TravellingDecision:
        """The travelling form of a decision."""
        return cls(decision.to_json())

    @property
    def decision(self) -> Decision:
        """The decision."""
        return Decision.from_json(self)

    def __reduce__(self) -> tuple[Any, ...]:
        spawning = multiprocessing.context.get_spawning_popen() is not None
        return _arrive if spawning else _TravellingDecision, (str(self),)


def _arrive(text: str) -> _TravellingDecision:
    activate(Decision.from_json(text))
    return _TravellingDecision(text)


def activate(decision: Decision) -> None:
    """Patch this process as decided by the launching one; idempotent.

    Raises:
        SystemExit: the decision was made by another version or for another SGLang, or a seam is not as known.
    """
    global _scheduler_patches
    if _scheduler_patches is not None and _scheduler_patches.active:
        return
    try:
        source = SourceTree.installed()
        found = (__version__, source.version)
        if found != (decision.version, decision.release):
            _stop(
                f"the launching process decided with plugin {decision.version} on SGLang {decision.release}, this one "
                f"has plugin {found[0]} on SGLang {found[1]}; install the same on every node"
            )
        patches = PatchSet.for_release(source=source, role=decision.role)
        patches.apply()
        _scheduler_patches = patches
    except Exception as error:  # anything but SystemExit would only be logged by SGLang
        _stop(_describe(error))


def deactivate() -> None:
    """Undo every scheduler-side patch of this process; argument handling stays."""
    global _scheduler_patches
    if _scheduler_patches is not None:
        _scheduler_patches.undo()
        _scheduler_patches = None


def attest_scheduler(server_args: Any) -> None:
    """Prove, in a scheduler process and before its pools are built, that it will do what was decided.

    Raises:
        SystemExit: a seam is not in place, or environment, arguments and gate do not agree.
    """
    carried = getattr(server_args, DECISION_ATTRIBUTE, None)
    decision = config.published()
    if carried is None or decision is None or carried.decision != decision:
        _stop(
            "the decision on the server arguments and the one in the environment differ: "
            f"{carried!r} and {decision!r}; a scheduler process must be started by the server that decided"
        )
    decided = (decision.role, decision.cp_size, decision.page_size)
    resolved = resolved_arguments(server_args)
    found = (role_of(server_args), resolved.attn_cp_size, resolved.page_size)
    if decided != found:
        names = "role={}, cp_size={}, page_size={}"
        _stop(f"decided for {names.format(*decided)}, but this scheduler has {names.format(*found)}")
    try:
        assert _scheduler_patches is not None
        _scheduler_patches.attest()
        gate_with_extensions().require(gather_facts(server_args, _scheduler_patches.release))
    except (SeamError, GateError) as error:
        _stop(error)
