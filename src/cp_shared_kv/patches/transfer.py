"""Mooncake PD transfer: every prefill rank sends the pages it owns, each to its place, once.

``MooncakeKVSender.send`` stays stock: the sender counts whole chunks, so it knows the last one,
and asks ``filter_kv_indices_for_cp_rank`` for this rank's part. That function now answers with physical pages and an
array of positions where stock answers with a slice. Index-K pages are filtered where they are paired with decode's.

A failure is noted by the rank that has it, and decode hears of it only when no rank writes for the request any more: it
then gives the pages to another request. The scheduler's poll, a collective, shows a failure to all ranks in one turn;
from there each rank drops what it has queued, and the request ends in the turn in which all ranks are found quiet.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.metrics import COUNTERS
from cp_shared_kv.patches import Patch, PatchGroup, argument
from cp_shared_kv.plan import ceil_div
from cp_shared_kv.releases import installed, named_arguments
from cp_shared_kv.rooms import Announcements, Statuses, TransferThread, UnansweredRooms
from cp_shared_kv.transfer import Destination, chunk_problem, split_chunk, split_state

logger = logging.getLogger("cp_shared_kv")

STATE_ATTRIBUTE = "_cp_shared_kv_sending"
#: How long a status message may wait for room in its socket, which is full only where nobody has read for long.
SEND_TIMEOUT_MS = 1_000


@dataclass
class Queued:
    """What of a request a rank has queued so far.

    Attributes:
        infos: ``TransferInfo`` of its decode ranks; stock forgets them when a last chunk is done, well or not.
        pages: KV pages of this rank.
    """

    infos: list[Any]
    pages: int = 0


@dataclass
class Sending:
    """What shared KV keeps on a prefill rank's manager.

    Attributes:
        layout: placement, with this rank's number.
        unanswered: requests that ended before decode announced itself for them.
        teller: tells decode ranks of failures.
        patience_s: how long decode waits for a request's pages; nothing is written for it afterwards.
        threads: the manager's transfer threads.
        failed_state: requests and decode sessions whose index-K could not be sent.
        queued: what was queued of each request that is not over.
        failed_at: decode session -> ``time.monotonic()`` of the last write to it that failed.
    """

    layout: CpSharedKVLayout
    unanswered: UnansweredRooms
    teller: Teller
    patience_s: float
    threads: list[TransferThread] = field(default_factory=list)
    failed_state: set[tuple[int, str]] = field(default_factory=set)
    queued: dict[int, Queued] = field(default_factory=dict)
    failed_at: dict[str, float] = field(default_factory=dict)


def sending_of(manager: Any) -> Sending | None:
    """State of a prefill manager whose pool is shared; None for decode managers and pools of one rank."""
    return getattr(manager, STATE_ATTRIBUTE, None)


def layout_of(manager: Any) -> CpSharedKVLayout | None:
    """Layout of a prefill manager whose pool is shared; None for decode managers and pools of one rank."""
    sending = sending_of(manager)
    return None if sending is None else sending.layout


def _manager_init(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wrapped(*args, **kwargs)
    mode = argument(args, kwargs, 1, "disaggregation_mode")
    if getattr(mode, "value", mode) != "prefill" or instance.attn_cp_size == 1:
        return
    if not instance.enable_all_cp_ranks_for_transfer:
        raise RuntimeError("CP shared KV needs SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1 on the prefill side")
    from sglang.srt.distributed.parallel_state import get_attn_cp_group

    group = get_attn_cp_group()
    if (group.rank_in_group, group.world_size) != (instance.attn_cp_rank, instance.attn_cp_size):
        raise RuntimeError(
            f"CP shared KV: the pool is rank {group.rank_in_group} of {group.world_size} of the attention-CP group but "
            f"the transfer is rank {instance.attn_cp_rank} of {instance.attn_cp_size}; wrong pages would be sent"
        )
    layout = CpSharedKVLayout(
        page_size=instance.kv_args.page_size, cp_size=instance.attn_cp_size, cp_rank=instance.attn_cp_rank
    )
    from sglang.srt.environ import envs

    sending = Sending(
        layout,
        UnansweredRooms(instance.bootstrap_timeout),
        Teller(instance),
        envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(),
    )
    setattr(instance, STATE_ATTRIBUTE, sending)
    instance.transfer_infos = Announcements()
    instance.request_status = Statuses()


def _filter_kv_indices(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    layout = layout_of(argument(args, kwargs, 0, "kv_mgr"))
    if layout is None:
        return wrapped(*args, **kwargs)
    return split_chunk(layout, argument(args, kwargs, 1, "kv_indices"), argument(args, kwargs, 2, "index_slice"))


def _owned_state(manager: Any, state_indices: list[Any] | None) -> list[Any] | None:
    layout = layout_of(manager)
    if layout is None or state_indices is None:
        return state_indices
    return [
        None if pages is None else pages[layout.owner_for_logical_pages_np(pages) == layout.cp_rank]
        for pages in state_indices
    ]


def _record_transfer_indices(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    state = argument(args, kwargs, 1, "state_indices")
    return wrapped(argument(args, kwargs, 0, "kv_indices"), _owned_state(instance.kv_mgr, state))


def _by_component(state: Any) -> list[Any]:
    """A request's state, or what describes it, as a list with an entry for each state type."""
    if state is None:
        return []
    return list(state) if installed().state_by_component else [state]


def _item_bytes(item_lens: list[Any]) -> int:
    """Bytes of a page of all layers: item lengths, for KV one a layer, for state a list for each component."""
    return sum(sum(each) if isinstance(each, list) else each for each in item_lens)


def _kv_page_bytes(manager: Any) -> int:
    return _item_bytes(manager.kv_args.kv_item_lens)


def _state_page_bytes(manager: Any) -> int:
    return _item_bytes(manager.kv_args.state_item_lens)


def state_types(manager: Any) -> list[str]:
    """State types of a manager's requests, in the order in which their pages are listed."""
    return list(manager.kv_args.state_types) if installed().state_by_component else [manager.kv_args.state_type]


def note_failure(manager: Any, room: int, reason: str) -> None:
    """Fail a request on this rank; the next poll shows it to all ranks.

    Args:
        manager: the prefill side's ``MooncakeKVManager``.
        room: bootstrap room of the request.
        reason: what went wrong, for the client and the log.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    if room not in manager.request_status:
        return  # it has ended already
    logger.error("CP shared KV: request with bootstrap room %s fails: %s", room, reason)
    manager.record_failure(room, reason)
    manager.update_status(room, KVPoll.Failed)


def refuse_request(manager: Any, room: int, reason: str) -> None:
    """:func:`note_failure` of a request that does not fit what decode registered for it."""
    COUNTERS.add(transfers_refused=1)
    note_failure(manager, room, reason)


class Teller:
    """Tells decode ranks of failures from a thread of its own, since a socket belongs to the thread that uses it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="cp_shared_kv_teller", daemon=True).start()

    def tell(self, info: Any) -> None:
        """Tell one decode rank.

        Args:
            info: its ``TransferInfo`` for the request.
        """
        self._queue.put(info)

    def _run(self) -> None:
        import zmq
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager, context = self._manager, zmq.Context()
        sockets: dict[str, Any] = {}

        def connect(endpoint: str, is_ipv6: bool = False) -> Any:
            if endpoint not in sockets:
                sockets[endpoint] = socket = context.socket(zmq.PUSH)
                socket.setsockopt(zmq.IPV6, int(is_ipv6))
                socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
                socket.connect(endpoint)
            return sockets[endpoint]

        def send(endpoint: str, parts: list[bytes], is_ipv6: bool = False) -> None:
            connect(endpoint, is_ipv6).send_multipart(parts)

        # Stock's own message, sent through another socket.
        voice = types.SimpleNamespace(_connect=connect, _send_multipart_locked=send)
        seam = installed().targets["transfer.sync_status"]
        by_target = "targets" in seam.parameters
        if by_target:
            voice._encode_kv_status_message = manager._encode_kv_status_message
        rank = manager.attn_tp_rank * manager.pp_size * manager.attn_cp_size
        rank += manager.pp_rank * manager.attn_cp_size + manager.attn_cp_rank
        while True:
            info = self._queue.get()
            try:
                sync = getattr(type(manager), seam.qualname.rpartition(".")[2])
                if by_target:
                    targets = [(info.endpoint, info.dst_port)]
                    sync(voice, targets=targets, bootstrap_room=info.room, status=KVPoll.Failed)
                else:
                    sync(voice, info.endpoint, info.dst_port, info.room, KVPoll.Failed, rank)
            except Exception:  # a decode rank that is gone must not keep others from being told
                logger.exception("CP shared KV: decode could not be told that room %s has failed", info.room)


def announced_by_all(manager: Any, room: int) -> bool:
    """Whether all decode ranks of a request have announced themselves."""
    infos = list(manager.transfer_infos.get(room, {}).values())
    return bool(infos) and len(infos) >= infos[0].required_dst_info_num


def tell_decode_failed(manager: Any, room: int) -> None:
    """Tell the decode ranks that have announced themselves for a request that it has failed."""
    sending = sending_of(manager)
    assert sending is not None
    queued = sending.queued.get(room)
    for info in queued.infos if queued is not None else list(manager.transfer_infos.get(room, {}).values()):
        if not info.is_dummy:
            sending.teller.tell(info)


def forget_room(manager: Any, room: int) -> None:
    """Drop whatever a manager keeps for a request that is over."""
    manager.request_status.pop(room, None)
    _forget_transfer(manager, room)
    _forget_failure(manager, room)


def _forget_transfer(manager: Any, room: int) -> None:
    sending = sending_of(manager)
    assert sending is not None
    sending.queued.pop(room, None)
    manager.req_to_decode_prefix_len.pop(room, None)
    manager.transfer_infos.pop(room, None)
    if installed().counts_chunks:
        manager._staging_outstanding.pop(room, None)


def _forget_failure(manager: Any, room: int) -> None:
    with manager.failure_lock:
        manager.failure_records.pop(room, None)


def abort_before_sending(sender: Any) -> None:
    """End a request nothing was sent of, and tell decode, now or when it announces itself.

    Args:
        sender: the request's ``MooncakeKVSender``.
    """
    sender.abort()
    end_aborted(sender)


def end_aborted(sender: Any) -> None:
    """End a request that was aborted and that no rank writes for, and tell decode."""
    sender.clear()
    _forget_failure(sender.kv_mgr, sender.bootstrap_room)


def _is_over(manager: Any, room: int) -> bool:
    """Whether nothing more is to be written for a room: it has failed, has ended, or decode waits no longer."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    sending = sending_of(manager)
    assert sending is not None
    if manager.request_status.get(room, KVPoll.Failed) == KVPoll.Failed:
        return True
    if time.monotonic() - manager.transfer_infos.since(room) > sending.patience_s:
        note_failure(
            manager,
            room,
            f"decode asked for it more than {sending.patience_s} s ago and may have given its pages away; "
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT must be the same on both sides, and long enough",
        )
        return True
    return False


def _transfer_worker(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    manager, sending = instance, sending_of(instance)
    if sending is None:
        return wrapped(*args, **kwargs)
    named = named_arguments("transfer.transfer_worker", args, kwargs)
    thread = TransferThread(named["queue"], named["executor"], lambda room: _is_over(manager, room))
    named |= {"queue": thread, "executor": thread}
    sending.threads.append(thread)
    while True:
        try:
            return wrapped(**named)
        except Exception as error:
            room = thread.room
            if room is None:
                raise
            logger.exception("CP shared KV: a transfer thread goes on after an error")
            cause = error.__context__ or error  # stock's own text says that the server is dead
            note_failure(manager, room, f"the transfer failed: {type(cause).__name__}: {cause}")
            thread.finish()


def _sync_status(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    if layout_of(instance) is not None and argument(args, kwargs, 3, "status") == KVPoll.Failed:
        return None  # decode is told when all ranks are quiet
    return wrapped(*args, **kwargs)


def _poll(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    polls = wrapped(*args, **kwargs)
    senders = argument(args, kwargs, 0, "pollers")
    failed = [i for i, sender in enumerate(senders) if polls[i] == KVPoll.Failed and is_sharing(sender)]
    if not failed:
        return polls
    quiet = quiet_everywhere([senders[i] for i in failed], argument(args, kwargs, 1, "attn_cp_cpu_group"))
    for i, everywhere in zip(failed, quiet, strict=True):
        if not everywhere:
            polls[i] = KVPoll.Transferring if has_begun(senders[i]) else KVPoll.Bootstrapping
    return polls


def is_sharing(sender: Any) -> bool:
    """Whether a sender is one of a manager whose pool is shared; that of a warm-up is not, nor is None."""
    from sglang.srt.disaggregation.common.conn import CommonKVSender

    return isinstance(sender, CommonKVSender) and sending_of(sender.kv_mgr) is not None


def quiet_everywhere(senders: list[Any], attn_cp_cpu_group: Any) -> list[int]:
    """Stop writing for requests that failed on some rank; of each, whether no rank writes for it any more."""
    quiet = torch.tensor([_stop_writing(sender) for sender in senders], dtype=torch.uint8)
    torch.distributed.all_reduce(quiet, op=torch.distributed.ReduceOp.MIN, group=attn_cp_cpu_group)
    return quiet.tolist()


def has_begun(sender: Any) -> bool:
    """Whether the request has left the bootstrap queue, for which decode has announced itself."""
    return getattr(sender, "num_kv_indices", None) is not None


def _stop_writing(sender: Any) -> bool:
    """Drop what is queued of a request that failed on some rank; True when nothing is being written for it here."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    sending = sending_of(sender.kv_mgr)
    assert sending is not None
    sender.conclude_state = KVPoll.Failed  # also where this rank was done: the group's verdict counts
    sender.kv_mgr.update_status(sender.bootstrap_room, KVPoll.Failed)
    done = [thread.drop(sender.bootstrap_room) for thread in sending.threads]
    return all(done)


def _sender_clear(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    sender, manager, room = instance, instance.kv_mgr, instance.bootstrap_room
    sending = sending_of(manager)
    if sending is None:
        return wrapped(*args, **kwargs)
    if sender.conclude_state == KVPoll.Failed:
        if not has_begun(sender) and not announced_by_all(manager, room):
            # What decode has announced, or is announcing just now, stays until it can be answered.
            manager.request_status.pop(room, None)
            manager.req_to_decode_prefix_len.pop(room, None)
            sending.unanswered.add(room)
            return None
        tell_decode_failed(manager, room)
    result = wrapped(*args, **kwargs)
    _forget_transfer(manager, room)
    return result


def _add_transfer_request(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager, layout = instance, layout_of(instance)
    if layout is None:
        return wrapped(*args, **kwargs)
    named = named_arguments("transfer.add_transfer_request", args, kwargs)
    room = named["bootstrap_room"]
    if manager.request_status.get(room) in (None, KVPoll.Failed):
        return wrapped(*args, **kwargs)  # gone or failed before: stock drops the chunk
    state = _by_component(named.get("state_indices"))
    problem = chunk_problem(named["index_slice"].stop, state, _destinations(manager, room))
    if problem is not None:
        refuse_request(manager, room, problem)
        return None
    sending = sending_of(manager)
    assert sending is not None
    queued = sending.queued.setdefault(room, Queued(list(manager.transfer_infos.get(room, {}).values())))
    queued.pages += len(named["kv_indices"])
    if named["is_last_chunk"]:
        state_pages = sum(len(each) for each in _owned_state(manager, state) or [] if each is not None)
        logger.debug(
            "CP shared KV transfer: rank=%d pages=%d bytes=%d state_pages=%d state_bytes=%d room=%s",
            manager.attn_cp_rank,
            queued.pages,
            queued.pages * _kv_page_bytes(manager),
            state_pages,
            state_pages * _state_page_bytes(manager),
            room,
        )
    return wrapped(*args, **kwargs)


def _destinations(manager: Any, room: int) -> list[Destination]:
    """What the decode ranks that have announced themselves for a request have registered for it."""
    return [
        Destination(len(info.dst_kv_indices), [len(pages) for pages in _by_component(info.dst_state_indices)])
        for info in list(manager.transfer_infos.get(room, {}).values())
        if not info.is_dummy
    ]


def request_problem(manager: Any, room: int, tokens: int, decode_prefix: int) -> str | None:
    """Why a request that decode has announced itself for must not be sent, or None.

    Args:
        manager: the prefill side's manager.
        room: bootstrap room of the request.
        tokens: length of its prompt.
        decode_prefix: tokens that decode has cached and does not ask for.
    """
    infos = list(manager.transfer_infos.get(room, {}).values())
    if any(
        getattr(manager.decode_kv_args_table.get(info.mooncake_session_id), "enable_hisparse", False) for info in infos
    ):
        return "decode runs HiSparse, whose token-granular transfer is not supported under CP shared KV"
    page_size = manager.kv_args.page_size
    pages = ceil_div(tokens - decode_prefix, page_size)
    state_pages = pages if installed().state_after_prefix else ceil_div(tokens, page_size)
    state = [np.arange(state_pages)] * len(state_types(manager))
    return chunk_problem(pages, state, _destinations(manager, room))


def _send_kvcache(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rc = wrapped(*args, **kwargs)
    sending = sending_of(instance)
    if sending is None:
        return rc
    if rc == 0:
        pages = len(argument(args, kwargs, 1, "prefill_kv_indices"))
        COUNTERS.add(kv_pages_sent=pages, kv_bytes_sent=pages * _kv_page_bytes(instance))
    else:
        sending.failed_at[argument(args, kwargs, 0, "mooncake_session_id")] = time.monotonic()
    return rc


def _maybe_send_extra(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    manager, sending = instance, sending_of(instance)
    if sending is None:
        return wrapped(*args, **kwargs)
    named = named_arguments("transfer.maybe_send_extra", args, kwargs)
    req = named["req"]
    try:
        rc, pages = _send_owned_state(wrapped, manager, sending.layout, named)
    except Exception:
        # An exception would leave the other decode ranks of the request without an answer.
        logger.exception("CP shared KV: sending index-K of bootstrap room %s failed", req.room)
        rc, pages = -1, 0
    if rc != 0:
        if installed().heeds_state_failures:
            sending.failed_at[req.mooncake_session_id] = time.monotonic()
        else:
            sending.failed_state.add((req.room, req.mooncake_session_id))
        manager.record_failure(req.room, f"Failed to send index-K pages of {req.room}")
    else:
        COUNTERS.add(state_pages_sent=pages, state_bytes_sent=pages * _state_page_bytes(manager))
    return rc


def _send_owned_state(
    wrapped: Callable[..., Any], manager: Any, layout: CpSharedKVLayout, named: dict[str, Any]
) -> tuple[int, int]:
    """Send this rank's index-K pages; ``(return code, pages)``. Neither the chunk nor decode's answer is changed."""
    release, req = installed(), named["req"]
    source, destination = _by_component(named["prefill_state_indices"]), _by_component(req.dst_state_indices)
    pages = 0
    for i, state_type in enumerate(state_types(manager)):
        if i >= len(source) or source[i] is None:
            continue
        if state_type != release.index_k_state:
            raise RuntimeError(f"state component {state_type} is not known to CP shared KV")
        source[i], destination[i] = split_state(layout, source[i], destination[i])
        pages += len(source[i])
    if not pages:
        return 0, 0
    named["req"] = dataclasses.replace(
        req, dst_state_indices=destination if release.state_by_component else destination[0]
    )
    named["prefill_state_indices"] = source if release.state_by_component else source[0]
    return wrapped(**named), pages


def _skip_flags(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if sending_of(instance) is not None:
        return False, False  # neither KV nor state is left to another rank
    return wrapped(*args, **kwargs)


def _send_aux(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    req = argument(args, kwargs, 0, "req")
    sending = sending_of(instance)
    if sending is not None and (key := (req.room, req.mooncake_session_id)) in sending.failed_state:
        sending.failed_state.discard(key)
        return -1
    return wrapped(*args, **kwargs)


_UNTIL_POSITIONS = "SGLang's Mooncake backend takes page positions and shards the NSA KV pool over CP ranks"

GROUP = PatchGroup(
    name="transfer",
    patches=(
        Patch(
            "transfer.manager_init",
            _manager_init,
            why="the prefill side's manager must know which pages its rank holds",
            until=_UNTIL_POSITIONS,
        ),
        Patch(
            "transfer.filter_kv_indices",
            _filter_kv_indices,
            why="stock splits a chunk into equal runs, by page id up to 0.5.13; here a rank sends the pages it owns",
            until=_UNTIL_POSITIONS,
        ),
        Patch(
            "transfer.record_transfer_indices",
            _record_transfer_indices,
            why="stock would count every rank as having sent all index-K pages",
            until=_UNTIL_POSITIONS,
        ),
        Patch(
            "transfer.add_transfer_request",
            _add_transfer_request,
            why="a position beyond decode's pages raises in the transfer thread and kills it; logs a request's pages",
            until="SGLang checks a chunk against the destination before queueing it",
        ),
        Patch(
            "transfer.send_kvcache",
            _send_kvcache,
            why="counts what was sent, and notes when a write failed, since a later request proves decode alive",
            until="SGLang counts pages and bytes sent per rank, and does not give up a decode server for one write",
        ),
        Patch(
            "transfer.maybe_send_extra",
            _maybe_send_extra,
            why="index-K pages are those this rank owns, and a failure to send them must fail the request",
            until=_UNTIL_POSITIONS,
        ),
        Patch(
            "transfer.skip_flags",
            _skip_flags,
            why="stock leaves state to CP rank 0, since every rank has all of it; here each has its own pages",
            until=_UNTIL_POSITIONS,
        ),
        Patch(
            "transfer.send_aux",
            _send_aux,
            why="stock ignores the return code of the state transfer; failing the aux transfer fails the request",
            until="0.5.17 is the oldest supported release: from there on SGLang heeds that return code",
        ),
        Patch(
            "transfer.transfer_worker",
            _transfer_worker,
            why="chunks of a request that has failed are still written, nobody can tell which request a thread writes "
            "for, and an exception ends the thread",
            until="SGLang drops chunks of failed requests and can tell when none is being written",
        ),
        Patch(
            "transfer.sync_status",
            _sync_status,
            why="a rank that fails tells decode at once, which gives away pages that other ranks still write to",
            until="SGLang tells decode of a failure when no prefill rank writes for the request any more",
        ),
        Patch(
            "transfer.poll",
            _poll,
            why="a failed request must not end before all ranks have stopped writing for it",
            until="SGLang tells decode of a failure when no prefill rank writes for the request any more",
        ),
        Patch(
            "transfer.sender_clear",
            _sender_clear,
            why="decode is told of a failed request when it ends, or when it announces itself for it later",
            until="SGLang tells decode of a failure when no prefill rank writes for the request any more",
        ),
    ),
    relies_on=(
        "transfer.queue_put",
        "transfer.queue_get",
        "transfer.start_prefill_thread",
        "transfer.update_status",
        "transfer.sender_abort",
        "transfer.sender_send",
        "transfer.prepare_send_indices",
        "transfer.encode_status",
        "transfer.conclude",
        "prefill.send_kv_chunk",
        "prefill.send_kv_pages",
        "prefill.process_inflight_queue",
    ),
)
