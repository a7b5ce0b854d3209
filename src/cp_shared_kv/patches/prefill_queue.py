"""Prefill queue: answer a rejected request with its error, on the prefill and on the decode side.

Stock replaces the prompt of a rejected request by one token and lets it run; in a disaggregated deployment decode then
answers 200 with an unrelated text. Here the client of the prefill server gets the error at once, and decode is told as
soon as it has announced itself for the request.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from cp_shared_kv.patches import Patch, PatchGroup, argument
from cp_shared_kv.patches.transfer import layout_of, tell_decode_failed

REJECTED_ATTRIBUTE = "_cp_shared_kv_rejected"


@dataclasses.dataclass(frozen=True)
class _Rejected:
    """A request that was answered here and that decode may still announce itself for."""

    room: int
    sender: Any
    until: float


def _queue_add(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, prepare_abort
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    queue, req = instance, argument(args, kwargs, 0, "req")
    if layout_of(queue.kv_manager) is None or not isinstance(req.to_finish, FINISH_ABORT):
        return wrapped(*args, **kwargs)
    reason = req.to_finish.message
    if req.bootstrap_host != FAKE_BOOTSTRAP_HOST:
        wrapped(*args, **kwargs)  # makes the sender, which waits for decode
        if queue.queue and queue.queue[-1] is req:
            queue.queue.pop()
            rejected = _Rejected(
                req.bootstrap_room, req.disagg_kv_sender, time.monotonic() + queue.kv_manager.bootstrap_timeout
            )
            if not hasattr(queue, REJECTED_ATTRIBUTE):
                setattr(queue, REJECTED_ATTRIBUTE, [])
            getattr(queue, REJECTED_ATTRIBUTE).append(rejected)
    prepare_abort(req, reason, status_code=req.to_finish.status_code or HTTPStatus.BAD_REQUEST)
    queue.scheduler.stream_output([req], req.return_logprob)
    return None


def _queue_pop_bootstrapped(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    waiting = getattr(instance, REJECTED_ATTRIBUTE, None)
    if waiting:
        setattr(instance, REJECTED_ATTRIBUTE, [entry for entry in waiting if not _settle(instance, entry)])
    return wrapped(*args, **kwargs)


def _settle(queue: Any, entry: _Rejected) -> bool:
    """Tell decode about a rejected request once it is known; True when the entry is done with."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager = queue.kv_manager
    status = manager.request_status.get(entry.room, KVPoll.Failed)
    if status == KVPoll.Bootstrapping and time.monotonic() < entry.until:
        return False
    if status == KVPoll.WaitingForInput:
        tell_decode_failed(manager, entry.room)
    entry.sender.clear()
    return True


GROUP = PatchGroup(
    name="prefill_queue",
    patches=(
        Patch(
            "prefill.queue_add",
            _queue_add,
            why="stock serves a rejected prompt as a one-token prompt and decode answers with an unrelated text",
            until="SGLang answers rejected requests with their error in disaggregated mode, on both sides",
        ),
        Patch(
            "prefill.queue_pop_bootstrapped",
            _queue_pop_bootstrapped,
            why="decode announces itself after the request was rejected and would wait until its timeout",
            until="SGLang answers rejected requests with their error in disaggregated mode, on both sides",
        ),
    ),
)
