"""The product broken on purpose, one mechanism at a time, to show that the tests see each kind of fault.

Each function breaks the prefill process that it is called in, after the product's patches were applied. They replace
names of the product's own modules, so a rename there makes a control fail rather than pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from cp_shared_kv.releases import installed

BREAKS: dict[str, Callable[[], None]] = {}


def _break(function: Callable[[], None]) -> Callable[[], None]:
    BREAKS[function.__name__] = function
    return function


def apply(name: str | None) -> None:
    """Break this prefill process; ``None`` leaves it sound."""
    if name is not None:
        BREAKS[name]()


def _replace(owner: Any, name: str, value: Any) -> None:
    # Asks that the name exists, unlike setattr. Never stopped: the process ends with its scenario.
    mock.patch.object(owner, name, value).start()


@_break
def shift_kv_positions() -> None:
    """Each KV page goes to the destination before its own; the first one of a request to the last."""
    from cp_shared_kv.patches import transfer

    sound = transfer.split_chunk

    def shifted(*args: Any) -> Any:
        pages, positions = sound(*args)
        return pages, type(positions)(positions - 1, positions.stop)

    _replace(transfer, "split_chunk", shifted)


@_break
def shift_state_positions() -> None:
    """Each index-K page goes to the destination after its own, as if a prefix of one page counted for them too."""
    from cp_shared_kv.patches import transfer

    sound = transfer.split_state
    _replace(transfer, "split_state", lambda layout, pages, to: sound(layout, pages, np.roll(to, -1).tolist()))


@_break
def skip_the_state_filter() -> None:
    """Every rank sends all index-K pages of the request, logical page numbers for physical ones, as stock does."""
    from cp_shared_kv.patches import transfer

    _replace(transfer, "split_state", lambda layout, pages, destination: (pages, destination))


@_break
def count_owners_from_page_0() -> None:
    """The owner of page p is rank p mod N, not (p - 1) mod N: one of two copies of the formula that drifted apart."""
    from cp_shared_kv.layout import CpSharedKVLayout

    def owner(layout: CpSharedKVLayout, pages: Any) -> Any:
        array = np.asarray(pages, dtype=np.int64)
        return np.where(array <= 0, -1, array % layout.cp_size)

    _replace(CpSharedKVLayout, "owner_for_logical_pages_np", owner)


@_break
def one_rank_sends_nothing() -> None:
    """CP rank 1 takes none of the KV pages for its own."""
    from cp_shared_kv.patches import transfer

    sound = transfer.split_chunk

    def emptied(layout: Any, *args: Any) -> Any:
        pages, positions = sound(layout, *args)
        keep = slice(0, 0 if layout.cp_rank == 1 else None)
        return pages[keep], type(positions)(positions[keep], positions.stop)

    _replace(transfer, "split_chunk", emptied)


@_break
def filter_before_the_sender_counts() -> None:
    """Each rank hands its own pages only to ``send``, whose count then never reaches the request's (trap 8)."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    from cp_shared_kv.patches.transfer import layout_of

    sound = MooncakeKVSender.send

    def send(sender: Any, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
        layout = layout_of(sender.kv_mgr)
        sound(sender, kv_indices[layout.owner_for_logical_pages_np(kv_indices) == layout.cp_rank], *args, **kwargs)

    _replace(MooncakeKVSender, "send", send)


@_break
def skip_the_position_check() -> None:
    """Chunks are queued whether or not their positions exist on the decode side."""
    from cp_shared_kv.patches import transfer

    _replace(transfer, "chunk_problem", lambda *args: None)


@_break
def ignore_failed_state_writes() -> None:
    """A failed index-K write is forgotten, as in stock."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    _replace(MooncakeKVManager, "send_aux", MooncakeKVManager.send_aux.__wrapped__)


@_break
def never_answer() -> None:
    """Prefill tells decode nothing, neither of success nor of failure."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    from cp_shared_kv.patches import transfer

    tells = installed().targets["transfer.sync_status"].qualname.rpartition(".")[2]
    _replace(MooncakeKVManager, tells, lambda *args, **kwargs: None)
    _replace(transfer, "tell_decode_failed", lambda manager, room: None)


@_break
def count_pages_twice() -> None:
    """The product's counters say twice what was sent."""
    from cp_shared_kv.metrics import COUNTERS

    sound = COUNTERS.add
    _replace(COUNTERS, "add", lambda **amounts: sound(**{name: 2 * amount for name, amount in amounts.items()}))
