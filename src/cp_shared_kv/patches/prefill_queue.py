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
from cp_shared_kv.patches.transfer import fail_request, layout_of, request_problem, tell_decode_failed

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
    if layout_of(queue.kv_manager) is None:
        return wrapped(*args, **kwargs)
    if not isinstance(req.to_finish, FINISH_ABORT):
        _forget(queue, req.bootstrap_room)
        return wrapped(*args, **kwargs)
    reason = req.to_finish.message
    if req.bootstrap_host != FAKE_BOOTSTRAP_HOST and not _is_live(queue, req.bootstrap_room):
        _forget(queue, req.bootstrap_room)
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


def _is_live(queue: Any, room: int) -> bool:
    """Whether a request with this room is between its arrival and the end of its transfer."""
    scheduler = queue.scheduler
    batches = (getattr(scheduler, name, None) for name in ("cur_batch", "last_batch"))
    requests = [*queue.queue, *scheduler.waiting_queue, *scheduler.disagg_prefill_inflight_queue]
    requests += [req for batch in batches if batch is not None for req in batch.reqs]
    requests += [req for req in (getattr(scheduler, "chunked_req", None),) if req is not None]
    return any(req.bootstrap_room == room and not req.finished() for req in requests)


def _forget(queue: Any, room: int) -> None:
    """Settle rejected requests whose room a new request takes over: the room's status is the new one's from now on."""
    waiting = getattr(queue, REJECTED_ATTRIBUTE, [])
    for entry in [entry for entry in waiting if entry.room == room]:
        waiting.remove(entry)
        _end(queue, entry)


def _queue_pop_bootstrapped(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    queue = instance
    waiting = getattr(queue, REJECTED_ATTRIBUTE, None)
    if waiting:
        setattr(queue, REJECTED_ATTRIBUTE, [entry for entry in waiting if not _settle(queue, entry)])
    result = wrapped(*args, **kwargs)
    if layout_of(queue.kv_manager) is not None:
        bootstrapped = result[0] if isinstance(result, tuple) else result
        bootstrapped[:] = [req for req in bootstrapped if not _failed_for_its_pages(queue, req)]
    return result


def _failed_for_its_pages(queue: Any, req: Any) -> bool:
    """Fail a request whose pages do not fit those that decode registered, before anything is computed or sent.

    Every rank has decode's answer when stock hands the request out, so all ranks fail it in the same turn.
    """
    from sglang.srt.disaggregation.prefill import release_req_to_metadata_buffer
    from sglang.srt.disaggregation.utils import prepare_abort

    manager, room = queue.kv_manager, req.bootstrap_room
    problem = request_problem(manager, room, len(req.origin_input_ids), req.start_send_idx)
    if problem is None:
        return False
    fail_request(manager, room, problem)
    req.disagg_kv_sender.clear()
    release_req_to_metadata_buffer(req, queue.req_to_metadata_buffer_idx_allocator)
    prepare_abort(req, problem, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    queue.scheduler.stream_output([req], req.return_logprob)
    return True


def _settle(queue: Any, entry: _Rejected) -> bool:
    """End a rejected request once decode is known or its time is over; True when it is done with."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    status = queue.kv_manager.request_status.get(entry.room, KVPoll.Failed)
    if status == KVPoll.Bootstrapping and time.monotonic() < entry.until:
        return False
    _end(queue, entry)
    return True


def _end(queue: Any, entry: _Rejected) -> None:
    """Tell decode, where it has announced itself, and drop what is kept for the room."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    if queue.kv_manager.request_status.get(entry.room) == KVPoll.WaitingForInput:
        tell_decode_failed(queue.kv_manager, entry.room)
    entry.sender.clear()


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
            why="decode announces itself after the request was rejected and would wait until its timeout; a request "
            "that does not fit decode's pages is failed before it is computed",
            until="SGLang answers rejected requests with their error in disaggregated mode, on both sides",
        ),
    ),
)
