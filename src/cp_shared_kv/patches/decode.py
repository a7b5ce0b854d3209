"""Decode server: pages of a request that ends early are given away only when no prefill rank can still write to them.

Stock frees them at once when the client aborts or the request has waited too long, while prefill ranks, which nobody
told, still write: into the pages of the next request. Here such a request stays failed but in its queue until the
prefill side has said its last word about it. That needs no message of its own: a prefill rank under shared KV answers
every request that it knows, and a failure only when all of its group are quiet.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from cp_shared_kv.patches import Patch, PatchGroup, argument
from cp_shared_kv.rooms import PrefillAnswers, Statuses

logger = logging.getLogger("cp_shared_kv")

ANSWERS_ATTRIBUTE = "_cp_shared_kv_answers"


def answers_of(manager: Any) -> PrefillAnswers | None:
    """What a decode manager has heard from prefill; None for prefill managers."""
    return getattr(manager, ANSWERS_ATTRIBUTE, None)


class NotingSocket:
    """Decode's status socket, which notes failures that prefill reports before stock code acts on them.

    Args:
        manager: decode's ``MooncakeKVManager``; its socket is taken over.
        answers: where failures are noted.
    """

    def __init__(self, manager: Any, answers: PrefillAnswers) -> None:
        self._manager = manager
        self._socket = manager.server_socket
        self._answers = answers

    def recv_multipart(self, *args: Any, **kwargs: Any) -> list[bytes]:
        """Next message; news of failed requests that are over already, one from each prefill rank, are left out."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        while True:
            message = self._socket.recv_multipart(*args, **kwargs)
            # Frames as `transfer.sync_status` sends them: room, status, prefill rank.
            if len(message) != 3 or not (message[0].isdigit() and message[1].isdigit()):
                return message
            if int(message[1]) != KVPoll.Failed:
                return message
            room = int(message[0])
            if room in self._manager.request_status:
                self._answers.note_final(room)
                if room not in self._manager.request_status:  # it has ended in between
                    self._answers.forget(room)
                return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _manager_init(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wrapped(*args, **kwargs)
    mode = argument(args, kwargs, 1, "disaggregation_mode")
    if getattr(mode, "value", mode) != "decode":
        return
    answers = PrefillAnswers()
    instance.request_status = Statuses()
    setattr(instance, ANSWERS_ATTRIBUTE, answers)
    instance.server_socket = NotingSocket(instance, answers)
    # Stock's thread looks a room up after it has seen that it is there; one that ends in between would end the thread.
    instance.required_prefill_response_num_table = defaultdict(int)


def _all_ranks_are_done(manager: Any, room: int) -> bool:
    """Whether every prefill rank has reported success; a rank does when it has written to all decode ranks."""
    expected = manager.required_prefill_response_num_table.get(room, 0)
    return 0 < expected <= len(manager.prefill_response_tracker.get(room, ()))


def _receiver_poll(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    status = wrapped(*args, **kwargs)
    receiver, manager, room = instance, instance.kv_mgr, instance.bootstrap_room
    answers = answers_of(manager)
    if status != KVPoll.Failed or answers is None or receiver.init_time is None:
        return status  # without `init_time` prefill does not know the pages yet
    if answers.is_final(room) or _all_ranks_are_done(manager, room):
        return status
    # Prefill begins no write once it has known of the request for one waiting timeout; another is left for those begun.
    since_announced = time.time() - receiver.init_time
    until, first = answers.held_until(room, 2 * manager.waiting_timeout - since_announced)
    if first:
        logger.info("CP shared KV: room %s has ended here, its pages are kept until prefill has stopped writing", room)
    if time.monotonic() < until:
        return KVPoll.WaitingForInput
    logger.error(
        "CP shared KV: prefill has not answered for room %s in %s s; its pages are given away all the same",
        room,
        2 * manager.waiting_timeout,
    )
    answers.note_final(room)
    return status


def _receiver_clear(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    answers = answers_of(instance.kv_mgr)
    result = wrapped(*args, **kwargs)
    if answers is not None:
        answers.forget(instance.bootstrap_room)
    return result


def _handle_node_failure(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    answers = answers_of(instance)
    if answers is not None:
        address = argument(args, kwargs, 0, "failed_bootstrap_addr")
        for room in list(instance.addr_to_rooms_tracker.get(address, ())):
            if room in instance.request_status:
                answers.note_final(room)
                if room not in instance.request_status:  # it has ended in between
                    answers.forget(room)
    return wrapped(*args, **kwargs)


_UNTIL = "SGLang's decode keeps a request's pages until no prefill rank can still write to them"

GROUP = PatchGroup(
    name="decode",
    roles=("decode",),
    patches=(
        Patch(
            "transfer.manager_init",
            _manager_init,
            why="failures that prefill reports must be told from those of decode's own making",
            until=_UNTIL,
        ),
        Patch(
            "decode.receiver_poll",
            _receiver_poll,
            why="stock frees the pages of an aborted or overdue request while prefill may still write to them",
            until=_UNTIL,
        ),
        Patch(
            "decode.receiver_clear",
            _receiver_clear,
            why="what was noted about a request goes with it",
            until=_UNTIL,
        ),
        Patch(
            "decode.node_failure",
            _handle_node_failure,
            why="a prefill server that is lost answers no more, so its requests' pages are not kept",
            until=_UNTIL,
        ),
    ),
    relies_on=(
        "decode.start_decode_thread",
        "decode.pop_transferred",
        "decode.receiver_send_metadata",
        "decode.receiver_abort",
        "decode.apply_status",
        "transfer.sync_status",
        "transfer.encode_status",
        "transfer.update_status",
    ),
)
