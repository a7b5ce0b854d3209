"""What one unsharded pool would hold, by logical slot, and which rank must hold it where."""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PAGE = 64
LAYERS = 2
#: bf16 elements of the two parts of a token's MLA KV; real ones have 512 and 64.
NOPE, ROPE = 4, 4
KV_BYTES = 2 * (NOPE + ROPE)
KEY_BYTES, SCALE_BYTES = 128, 4
INDEX_PAGE_BYTES = PAGE * (KEY_BYTES + SCALE_BYTES)
#: High bits of the integers that a freed page is filled with; tokens and stamps are positive.
POISON = -0x2929 << 48

Bytes = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """What a forward writes of one layer: ``(n, KV_BYTES)``, ``(n, KEY_BYTES)`` and ``(n, SCALE_BYTES)``, uint8."""

    kv: Bytes
    key: Bytes
    scale: Bytes


def rows_of(tokens: npt.NDArray[np.int64], forward: int, layer: int) -> Rows:
    """Traceable bytes of tokens: each row names the token, the forward that wrote it, the layer and the cache."""
    kv = np.empty((len(tokens), 2), dtype=np.int64)
    key = np.empty((len(tokens), KEY_BYTES // 16, 2), dtype=np.int64)
    stamp = (forward * LAYERS + layer) * 2
    kv[:, 0], kv[:, 1] = tokens, stamp
    key[..., 0], key[..., 1] = tokens[:, None], stamp + 1
    scale = (tokens * LAYERS + layer).astype(np.int32)
    return Rows(kv.view(np.uint8), key.reshape(len(tokens), -1).view(np.uint8), scale[:, None].view(np.uint8))


def pages_held(ranks: int, pages: int) -> list[Slots]:
    """Logical pages of each rank, by physical page; pages are dealt out in turn, page 0 is everybody's dummy."""
    held: list[list[int]] = [[0] for _ in range(ranks)]
    for page, rank in zip(range(1, ranks * pages + 1), cycle(range(ranks)), strict=False):
        held[rank].append(page)
    return [np.array(pages) for pages in held]


def poison_of(page: int, time: int) -> int:
    """The integer that a page freed at ``time`` is filled with."""
    return POISON + (page << 32) + time


class Oracle:
    """Dense bytes of ``pages`` logical pages and the dummy page.

    Attributes:
        kv: ``(LAYERS, pages + 1, PAGE * KV_BYTES)`` uint8.
        index: ``(LAYERS, pages + 1, INDEX_PAGE_BYTES)`` uint8, keys of a page in front of its scales.
    """

    def __init__(self, pages: int) -> None:
        self.kv = np.empty((LAYERS, pages + 1, PAGE * KV_BYTES), dtype=np.uint8)
        self.index = np.empty((LAYERS, pages + 1, INDEX_PAGE_BYTES), dtype=np.uint8)
        for page in range(pages + 1):
            self.poison(page, 0)

    def poison(self, page: int, time: int) -> None:
        """Fill a page that nobody may read any more."""
        for store in (self.kv, self.index):
            store[:, page].view(np.int64)[:] = poison_of(page, time)

    def write(self, layer: int, slots: Slots, rows: Rows) -> None:
        """Store one layer's rows at logical slots ``(n,)``."""
        self.kv[layer].reshape(-1, KV_BYTES)[slots] = rows.kv
        pages, offsets = slots[:, None] // PAGE, slots[:, None] % PAGE
        self.index[layer][pages, offsets * KEY_BYTES + np.arange(KEY_BYTES)] = rows.key
        scales = PAGE * KEY_BYTES + offsets * SCALE_BYTES + np.arange(SCALE_BYTES)
        self.index[layer][pages, scales] = rows.scale

    def kv_rows(self, layer: int, slots: Slots) -> Bytes:
        """MLA KV at logical slots, ``(n, KV_BYTES)``."""
        return self.kv[layer].reshape(-1, KV_BYTES)[slots]

    def tokens(self, slots: Slots) -> Slots:
        """Tokens at logical slots; negative where a slot is poisoned."""
        return self.kv[0].reshape(-1, KV_BYTES).view(np.int64)[slots, 0]


def index_rows(pages: Bytes, tokens: int) -> tuple[Bytes, Bytes]:
    """Keys ``(tokens, KEY_BYTES)`` and scales ``(tokens, SCALE_BYTES)`` of index pages in request order."""
    keys, scales = pages[:, : PAGE * KEY_BYTES], pages[:, PAGE * KEY_BYTES :]
    return keys.reshape(-1, KEY_BYTES)[:tokens], scales.reshape(-1, SCALE_BYTES)[:tokens]
