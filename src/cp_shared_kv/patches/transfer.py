"""Mooncake PD transfer: every prefill rank sends the pages it owns, each to its place, once.

``MooncakeKVSender.send`` and the transfer worker stay stock: the sender counts whole chunks, so it knows the last one,
and asks ``filter_kv_indices_for_cp_rank`` for this rank's part. That function now answers with physical pages and an
array of positions where stock answers with a slice. Index-K pages are filtered where they are paired with decode's.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from cp_shared_kv.layout import CpSharedKVLayout
from cp_shared_kv.metrics import COUNTERS
from cp_shared_kv.patches import Patch, PatchGroup, argument
from cp_shared_kv.plan import ceil_div
from cp_shared_kv.transfer import chunk_problem, split_chunk, split_state

logger = logging.getLogger("cp_shared_kv")

LAYOUT_ATTRIBUTE = "_cp_shared_kv_layout"
#: How long a status message may take to leave; a busy host can stall a send for seconds.
LINGER_MS = 60_000
FAILED_STATE_ATTRIBUTE = "_cp_shared_kv_failed_state"


def layout_of(manager: Any) -> CpSharedKVLayout | None:
    """Layout of a prefill manager whose pool is shared; None for decode managers and pools of one rank."""
    return getattr(manager, LAYOUT_ATTRIBUTE, None)


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
    setattr(instance, FAILED_STATE_ATTRIBUTE, set())
    setattr(instance, LAYOUT_ATTRIBUTE, layout)


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
    sender, manager = instance, instance.kv_mgr
    state = argument(args, kwargs, 1, "state_indices")
    result = wrapped(argument(args, kwargs, 0, "kv_indices"), _owned_state(manager, state))
    if layout_of(manager) is not None and state is not None:  # only the last chunk brings index-K
        pages, state_pages = sender._transfer_num_kv_indices, sender._transfer_num_state_indices
        logger.debug(
            "CP shared KV transfer: rank=%d pages=%d bytes=%d state_pages=%d state_bytes=%d room=%s",
            manager.attn_cp_rank,
            pages,
            pages * manager.kv_item_lens_sum,
            state_pages,
            state_pages * manager.state_item_lens_sum,
            sender.bootstrap_room,
        )
    return result


def fail_request(manager: Any, room: int, reason: str) -> None:
    """Fail a request on this rank and tell decode.

    Called on the scheduler thread. The manager's sockets belong to its transfer threads, so this uses its own.

    Args:
        manager: the prefill side's ``MooncakeKVManager``.
        room: bootstrap room of the request.
        reason: what went wrong, for the client and the log.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    COUNTERS.add(transfers_refused=1)
    logger.error("CP shared KV: request with bootstrap room %s fails: %s", room, reason)
    manager.record_failure(room, reason)
    manager.update_status(room, KVPoll.Failed)
    tell_decode_failed(manager, room)
    manager.transfer_infos.pop(room, None)  # chunks that are still queued find no destination and are dropped


def tell_decode_failed(manager: Any, room: int) -> None:
    """Send every decode rank of a request the status Failed, from sockets of this thread."""
    import zmq
    from sglang.srt.disaggregation.base.conn import KVPoll

    context = zmq.Context()
    opened: list[Any] = []

    def connect(endpoint: str, is_ipv6: bool = False) -> Any:
        socket = context.socket(zmq.PUSH)
        if is_ipv6:
            socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.connect(endpoint)
        opened.append(socket)
        return socket

    # Stock's own message, sent through another socket.
    sender = types.SimpleNamespace(_connect=connect)
    rank = manager.attn_tp_rank * manager.pp_size * manager.attn_cp_size
    rank += manager.pp_rank * manager.attn_cp_size + manager.attn_cp_rank
    sync = type(manager).sync_status_to_decode_endpoint
    for info in list(manager.transfer_infos.get(room, {}).values()):
        if not info.is_dummy:
            sync(sender, info.endpoint, info.dst_port, info.room, KVPoll.Failed, rank)
    for socket in opened:
        socket.close()
    if opened:
        # Closing waits for the messages to leave, up to the linger time: not on the scheduler thread.
        threading.Thread(target=context.term, daemon=True).start()
    else:
        context.term()


def _add_transfer_request(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager, layout = instance, layout_of(instance)
    if layout is None:
        return wrapped(*args, **kwargs)
    room = argument(args, kwargs, 0, "bootstrap_room")
    if manager.request_status.get(room) in (None, KVPoll.Failed):
        return wrapped(*args, **kwargs)  # gone or failed before: stock drops the chunk
    positions = argument(args, kwargs, 2, "index_slice")
    state = kwargs.get("state_indices", args[5] if len(args) > 5 else None) or ()
    infos = list(manager.transfer_infos.get(room, {}).values())
    problem = chunk_problem(positions.stop, state, infos)
    if problem is not None:
        fail_request(manager, room, problem)
        return None
    return wrapped(*args, **kwargs)


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
    state = [np.arange(ceil_div(tokens, page_size))] * len(manager.kv_args.state_types)
    return chunk_problem(ceil_div(tokens - decode_prefix, page_size), state, infos)


def _send_kvcache(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rc = wrapped(*args, **kwargs)
    if layout_of(instance) is not None and rc == 0:
        pages = len(argument(args, kwargs, 1, "prefill_kv_indices"))
        COUNTERS.add(kv_pages_sent=pages, kv_bytes_sent=pages * instance.kv_item_lens_sum)
    return rc


def _maybe_send_extra(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    manager, layout = instance, layout_of(instance)
    if layout is None:
        return wrapped(*args, **kwargs)
    req = argument(args, kwargs, 0, "req")
    failed = getattr(manager, FAILED_STATE_ATTRIBUTE)
    try:
        rc, pages = _send_owned_state(wrapped, manager, layout, req, args, kwargs)
    except Exception:
        # An exception would kill this transfer thread and hang every later request on it.
        logger.exception("CP shared KV: sending index-K of bootstrap room %s failed", req.room)
        rc, pages = -1, 0
    if rc != 0:
        failed.add((req.room, req.mooncake_session_id))
        manager.record_failure(req.room, f"Failed to send index-K pages of {req.room}")
    else:
        COUNTERS.add(state_pages_sent=pages, state_bytes_sent=pages * manager.state_item_lens_sum)
    return rc


def _send_owned_state(
    wrapped: Callable[..., Any],
    manager: Any,
    layout: CpSharedKVLayout,
    req: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[int, int]:
    """Send this rank's index-K pages; ``(return code, pages)``. Neither the chunk nor decode's answer is changed."""
    from sglang.srt.disaggregation.base.conn import StateType

    source = list(argument(args, kwargs, 1, "prefill_state_indices"))
    destination = list(req.dst_state_indices)
    pages = 0
    for i, state_type in enumerate(manager.kv_args.state_types):
        if i >= len(source) or source[i] is None:
            continue
        if state_type != StateType.NSA:
            raise RuntimeError(f"state component {state_type} is not known to CP shared KV")
        source[i], destination[i] = split_state(layout, source[i], destination[i])
        pages += len(source[i])
    executor = argument(args, kwargs, 2, "executor")
    target = kwargs.get("target_rank_registration_info", args[3] if len(args) > 3 else None)
    if not pages:
        return 0, 0
    return wrapped(dataclasses.replace(req, dst_state_indices=destination), source, executor, target), pages


def _send_aux(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    req = argument(args, kwargs, 0, "req")
    failed = getattr(instance, FAILED_STATE_ATTRIBUTE, None)
    if failed and (key := (req.room, req.mooncake_session_id)) in failed:
        failed.discard(key)
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
            why="stock would count every rank as having sent all index-K pages; logs a request's pages per rank",
            until=_UNTIL_POSITIONS,
        ),
        Patch(
            "transfer.add_transfer_request",
            _add_transfer_request,
            why="a position beyond decode's pages raises in the transfer thread and kills it",
            until="SGLang checks a chunk against the destination before queueing it",
        ),
        Patch(
            "transfer.send_kvcache",
            _send_kvcache,
            why="counts what was sent",
            until="SGLang counts pages and bytes sent per rank",
        ),
        Patch(
            "transfer.maybe_send_extra",
            _maybe_send_extra,
            why="index-K pages are those this rank owns, and a failure to send them must fail the request",
            until=_UNTIL_POSITIONS + ", and heeds the return code of the state transfer (0.5.23)",
        ),
        Patch(
            "transfer.send_aux",
            _send_aux,
            why="stock ignores the return code of the state transfer; failing the aux transfer fails the request",
            until="SGLang heeds the return code of the state transfer (0.5.23)",
        ),
    ),
    relies_on=("transfer.transfer_worker", "transfer.sender_send", "transfer.sync_status", "prefill.send_kv_chunk"),
)
