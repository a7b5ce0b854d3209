"""Prefill queue: a request that ends before it is computed ends with its error, on the prefill and the decode side.

Stock replaces the prompt of a rejected request by one token and lets it run; in a disaggregated deployment decode then
answers 200 with an unrelated text. A request that is aborted while it waits is dropped, and decode waits for it until
its timeout. Here the client of the prefill server gets the error at once, and decode is told as soon as it has
announced itself for the request.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from cp_shared_kv.patches import Patch, PatchGroup, argument
from cp_shared_kv.patches.transfer import (
    Sending,
    abort_before_sending,
    announced_by_all,
    end_aborted,
    forget_room,
    has_begun,
    is_sharing,
    layout_of,
    logger,
    quiet_everywhere,
    refuse_request,
    request_problem,
    sending_of,
    tell_decode_failed,
)
from cp_shared_kv.releases import installed, symbol


def _queue_add(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, prepare_abort
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    queue, req = instance, argument(args, kwargs, 0, "req")
    if layout_of(queue.kv_manager) is None:
        return wrapped(*args, **kwargs)
    room = req.bootstrap_room
    if not isinstance(req.to_finish, FINISH_ABORT):
        _take_over(queue.kv_manager, room)
        return wrapped(*args, **kwargs)
    reason = req.to_finish
    if req.bootstrap_host != FAKE_BOOTSTRAP_HOST and not _is_live(queue, room):
        _take_over(queue.kv_manager, room)
        if _make_sender(wrapped, queue, args, kwargs):
            abort_before_sending(req.disagg_kv_sender)
    if installed().answers_rejected:
        return wrapped(*args, **kwargs)
    prepare_abort(req, reason.message, status_code=reason.status_code or HTTPStatus.BAD_REQUEST)
    _answer_client(queue, req)
    return None


def _make_sender(wrapped: Callable[..., Any], queue: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Make the sender of a request that is not to be queued; whether it has one now. It waits for decode."""
    if installed().makes_sender_apart:
        return queue.create_sender(*args, **kwargs)
    req = argument(args, kwargs, 0, "req")
    wrapped(*args, **kwargs)
    if not queue.queue or queue.queue[-1] is not req:
        return False
    queue.queue.pop()
    return True


def _answer_client(queue: Any, req: Any) -> None:
    """Stream a request that ends with an error to its client."""
    stream_output = operator.attrgetter(installed().stream_output)(queue.scheduler)
    stream_output([req], req.return_logprob)


def _take_over(manager: Any, room: int) -> None:
    """Settle an earlier request whose room a new one takes over: the room's status is the new one's from now on."""
    sending = sending_of(manager)
    assert sending is not None
    if room in sending.unanswered:
        if announced_by_all(manager, room):
            tell_decode_failed(manager, room)
            forget_room(manager, room)
        sending.unanswered.discard(room)


def _is_live(queue: Any, room: int) -> bool:
    """Whether a request with this room is between its arrival and the end of its transfer."""
    scheduler = queue.scheduler
    requests = [*queue.queue, *scheduler.waiting_queue, *scheduler.disagg_prefill_inflight_queue]
    if scheduler.last_batch is not None:
        requests += scheduler.last_batch.reqs
    if scheduler.chunked_req is not None:
        requests.append(scheduler.chunked_req)
    return any(req.bootstrap_room == room and not req.finished() for req in requests)


def _queue_pop_bootstrapped(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    queue, manager = instance, instance.kv_manager
    sending = sending_of(manager)
    if sending is None:
        return wrapped(*args, **kwargs)
    for room in sending.unanswered.settle(lambda room: announced_by_all(manager, room)):
        tell_decode_failed(manager, room)
        forget_room(manager, room)
    result = wrapped(*args, **kwargs)
    bootstrapped = result[0] if isinstance(result, tuple) else result
    bootstrapped[:] = [req for req in bootstrapped if not _failed_for_its_pages(queue, req)]
    for req in bootstrapped:
        _reopen_sessions(manager, sending, req.bootstrap_room)
    return result


def _reopen_sessions(manager: Any, sending: Sending, room: int) -> None:
    """Take the decode ranks of a request for alive again that have announced themselves since a write failed."""
    for session in list(manager.transfer_infos.get(room, {})):
        failed_at = sending.failed_at.get(session)
        if failed_at is None or manager.transfer_infos.since(room) < failed_at:
            continue
        with manager.session_lock:
            manager.failed_sessions.discard(session)
            manager.session_failures.pop(session, None)
        del sending.failed_at[session]
        logger.info("CP shared KV: decode session %s is taken for alive again, it has asked for room %s", session, room)


def _failed_for_its_pages(queue: Any, req: Any) -> bool:
    """Fail a request whose pages do not fit those that decode registered, before anything is computed or sent.

    Every rank has decode's answer when stock hands the request out, so all ranks fail it in the same turn.
    """
    from sglang.srt.disaggregation.utils import prepare_abort

    manager, room = queue.kv_manager, req.bootstrap_room
    problem = request_problem(manager, room, len(req.origin_input_ids), req.start_send_idx)
    if problem is None:
        return False
    refuse_request(manager, room, problem)
    abort_before_sending(req.disagg_kv_sender)
    symbol("release_metadata_buffer")(req, queue.req_to_metadata_buffer_idx_allocator)
    prepare_abort(req, problem, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    _answer_client(queue, req)
    return True


def _abort_request(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scheduler = instance
    waiting = list(scheduler.waiting_queue)
    result = wrapped(*args, **kwargs)
    left = {id(req) for req in scheduler.waiting_queue}
    for req in waiting:
        if id(req) not in left and is_sharing(req.disagg_kv_sender):
            # Every rank drops the request in the same turn, and nothing was sent of it.
            abort_before_sending(req.disagg_kv_sender)
    return result


def _abort_chunked(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scheduler, req = instance, instance._pending_chunked_abort_req
    if req is None or scheduler.chunked_req is not req or not is_sharing(req.disagg_kv_sender):
        return wrapped(*args, **kwargs)
    req.disagg_kv_sender.abort()
    if not all(quiet_everywhere([req.disagg_kv_sender], scheduler.attn_cp_cpu_group)):
        return None  # it stays pending; chunks that are computed until then are not sent
    result = wrapped(*args, **kwargs)
    end_aborted(req.disagg_kv_sender)
    return result


def _retire_aborted(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scheduler, req = instance, argument(args, kwargs, 0, "req")
    sender = req.disagg_kv_sender
    if not is_sharing(sender) or not has_begun(sender) or not req.kv.holds_kv:
        return wrapped(*args, **kwargs)
    # As a transfer that failed: it ends, with its pages, when no rank writes for it any more.
    sender.abort()
    scheduler.clear_pending_chunk_send(req)
    if req.to_finish is not None and not req.finished():
        req.update_finish_state()
    scheduler.disagg_prefill_inflight_queue.append(req)
    return False


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
            why="decode announces itself after a request was rejected or aborted and would wait until its timeout; a "
            "request that does not fit decode's pages is failed before it is computed; one failed write would refuse a "
            "decode server for good",
            until="SGLang answers rejected requests with their error in disaggregated mode, on both sides",
        ),
        Patch(
            "scheduler.abort_request",
            _abort_request,
            why="stock drops a waiting request without a word to decode, which waits for it until its timeout",
            until="SGLang tells decode when a waiting request is aborted",
        ),
        Patch(
            "scheduler.abort_chunked",
            _abort_chunked,
            why="stock releases the pages of a request that is aborted between its chunks though they are still sent, "
            "and never tells decode",
            until="SGLang tells decode of a failure when no prefill rank writes for the request any more",
        ),
        Patch(
            "prefill.retire_aborted",
            _retire_aborted,
            why="stock releases the pages of a request that is aborted while it runs though they are still sent, and "
            "never tells decode",
            until="SGLang tells decode of a failure when no prefill rank writes for the request any more",
        ),
    ),
    relies_on=("prefill.create_sender",),
)
