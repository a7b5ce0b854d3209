"""What a transfer scenario is and what a run of it reports. Plain picklable data; imports neither SGLang nor torch.

Positions and pages: a request's pages are listed by *position* (position i holds tokens ``i * 64 .. i * 64 + 63`` of
the prompt). ``Request.pages[i]`` is the logical page of the prefill side that holds position i.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cp_shared_kv.releases import installed

PAGE_SIZE = 64
LAYERS = 3
# Bytes one token takes in one layer. Different for the two kinds, so that a mix-up of regions cannot go unseen:
# fp8 latent 512 + four fp32 scales + bf16 rope 64; index-K 128 + one fp32 scale.
TOKEN_BYTES = {"kv": 656, "state": 132}
KINDS = ("kv", "state")
ITEM_LEN = {kind: PAGE_SIZE * TOKEN_BYTES[kind] for kind in KINDS}

PREFILL_POISON = 0xDD
DECODE_POISON = 0xEE

Kind = Literal["kv", "state"]


def page_content(kind: str, layer: int, position: int, room: int) -> np.ndarray:
    """The bytes, uint8 ``[ITEM_LEN[kind]]``, of one page of a request: the oracle of the unsharded cache.

    It depends on everything that must not be mixed up, and on nothing else: not on the rank, not on the page number.
    """
    seed = [KINDS.index(kind), layer, position, room]
    return np.random.default_rng(seed).integers(0, 256, ITEM_LEN[kind], dtype=np.uint8)


@dataclass(frozen=True)
class Request:
    """One request of a scenario."""

    room: int
    pages: tuple[int, ...]
    """Logical page of the prefill side by position; ``ceil(tokens / 64)`` of them, unless ``fake``."""
    tokens: int
    chunk_ends: tuple[int, ...] = ()
    """Token count after each prefill chunk; the last one is ``tokens``. Empty: one chunk."""
    decode_prefix_pages: int = 0
    """Pages that decode already has: it asks for KV from this position on, and for state as the release does."""
    missing_kv_destinations: int = 0
    """How many KV destination pages decode leaves out at the end of its list (0 for a correct decode)."""
    missing_state_destinations: int = 0
    """The same for its list of state destination pages."""
    fake: bool = False
    """A warm-up request (FAKE_BOOTSTRAP_HOST): FakeKVSender on the prefill side, nothing on the decode side."""
    renew_registration: bool = False
    """Decode loses the prefill server and registers again before it starts this request."""
    enters_after: int = 0
    """Prefill gets the request, and decode announces itself for it, when those before it have sent so many chunks and
    their writes are over."""
    late_on: tuple[int, ...] = ()
    """Decode TP ranks that announce themselves only when prefill has ended the request."""

    def __post_init__(self) -> None:
        if len(self.pages) != -(-self.tokens // PAGE_SIZE):
            raise ValueError(f"room {self.room}: {self.tokens} tokens do not take {len(self.pages)} pages")
        if self.chunk_ends and self.chunk_ends[-1] != self.tokens:
            raise ValueError(f"room {self.room}: the last chunk ends at {self.chunk_ends[-1]}, not {self.tokens}")
        if 0 in self.pages or len(set(self.pages)) != len(self.pages):
            raise ValueError(f"room {self.room}: pages must be distinct and not the dummy page 0")

    @property
    def ends(self) -> tuple[int, ...]:
        return self.chunk_ends or (self.tokens,)

    def first_position(self, kind: str) -> int:
        """Where the pages that decode asks for begin: KV from its prefix on, state too or from 0 (trap 7)."""
        return self.decode_prefix_pages if kind == "kv" or installed().state_after_prefix else 0

    def positions_to_send(self, kind: str) -> set[int]:
        """The positions that must cross the wire."""
        return set() if self.fake else set(range(self.first_position(kind), len(self.pages)))


@dataclass(frozen=True)
class WriteFault:
    """One Mooncake write of one prefill rank that fails: the ``nth`` of its kind in a wave.

    ``how="error"``: the write call returns -1 and writes nothing.
    ``how="refused"``: its destinations are moved outside registered memory, and the real engine refuses them.
    ``how="raises"``: the write call raises, and writes nothing.
    """

    wave: int
    cp_rank: int
    kind: Literal["kv", "state", "aux"]
    nth: int = 0
    how: Literal["error", "refused", "raises"] = "error"


@dataclass(frozen=True)
class SlowWrite:
    """One Mooncake write of one prefill rank that begins in time, and reaches the engine ``seconds`` later."""

    wave: int
    cp_rank: int
    kind: Literal["kv", "state", "aux"]
    nth: int = 0
    seconds: float = 0.3


@dataclass(frozen=True)
class Abort:
    """A request that is aborted on one side.

    ``rejected``: when prefill gets it, as a prompt that is too long.
    ``bootstrapping``: when prefill has it, and those decode ranks that are not ``late_on`` have announced themselves.
    ``waiting``: in prefill's waiting queue. ``between chunks``: after the first chunk. ``in flight``: after the last.
    ``on decode``: on all decode ranks, in flight. In flight, a slow write of the wave is under way, if there is one.
    """

    room: int
    when: Literal["rejected", "bootstrapping", "waiting", "between chunks", "in flight", "on decode"]
    cp_rank: int | None = None
    """The prefill rank that alone takes the request for aborted; None: all of them, in the same turn."""


@dataclass(frozen=True)
class Scenario:
    """A cluster and what it serves: waves one after the other, the requests of a wave at the same time."""

    cp_size: int
    waves: tuple[tuple[Request, ...], ...]
    transfer: Literal["shared", "stock", "undone"] = "shared"
    """``shared``: the product's transfer patches on prefill, pools hold owned pages only. ``stock``: no patches, full
    pools. ``undone``: the patches are applied and taken back first, then as stock."""
    with_queue: bool = False
    """Apply the product's patches of the prefill queue too, which refuse a request before it is computed."""
    on_decode: bool = False
    """Apply the product's patches of the decode side; otherwise decode is stock."""
    all_cp_ranks_send: bool = True
    """SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER on both sides; False is stock's way: CP rank 0 alone sends."""
    decode_tp: int = 1
    logical_pages: int = 96
    """Logical pages of the prefill side; a multiple of cp_size."""
    decode_pages: int = 64
    contiguous_destination: bool = False
    """Destination pages ascend by one; otherwise they are a random permutation."""
    faults: tuple[WriteFault, ...] = ()
    slow: tuple[SlowWrite, ...] = ()
    aborts: tuple[Abort, ...] = ()
    sabotage: str | None = None
    """Name of a function in ``sabotage`` that breaks this run on purpose."""
    timeout_s: float = 25.0
    """How long a wave may take before what is left of it counts as hung; two seconds for the waves after a hang.

    SGLang's own limit on decode is set to it too, rounded to whole seconds; that on prefill is longer.

    A wave takes tenths of a second. The limit leaves room for a machine whose processors are busy with other work.
    """

    def requests(self) -> list[Request]:
        return [request for wave in self.waves for request in wave]


# Outcomes of a request on one rank.
SUCCESS = "SUCCESS"
ABORTED = "ABORTED"
HUNG = "HUNG"


@dataclass
class Outcome:
    """How one request ended on one rank."""

    room: int
    status: str
    """SUCCESS, ABORTED, or HUNG (neither within the scenario's time)."""
    error: str = ""
    streamed: int = 0
    """How often the scheduler told the client that the request is done: exactly once for a sound run."""
    released: int = 0
    """How often its KV was released."""


@dataclass(frozen=True)
class Region:
    """One registered buffer: items of ``item_len`` bytes of one kind and layer from ``base`` on."""

    kind: str
    layer: int
    base: int
    length: int
    item_len: int

    def holds(self, address: int, length: int) -> bool:
        return self.base <= address and address + length <= self.base + self.length

    def items(self, address: int, length: int) -> range:
        """The items that a block touches."""
        return range((address - self.base) // self.item_len, -(-(address + length - self.base) // self.item_len))


@dataclass(frozen=True)
class Write:
    """A write that reached the engine; times are ``time.monotonic()`` seconds, the same in all processes."""

    wave: int
    session: str
    begin: float
    end: float
    destinations: tuple[tuple[int, int], ...]
    """Address and length of each block."""


@dataclass
class Traffic:
    """What one prefill rank wrote through Mooncake, by room and kind. Only writes that returned 0 count."""

    pages: dict[int, dict[str, Counter[tuple[int, int]]]] = field(default_factory=dict)
    """room -> kind -> how often each (layer, position) was sent, over all destinations."""
    bytes: dict[str, int] = field(default_factory=lambda: {"kv": 0, "state": 0, "aux": 0})
    """Block lengths as handed to the engine; independent of ``pages``."""
    unknown_pages: list[tuple[str, int]] = field(default_factory=list)
    """(kind, physical page) of pages sent that no request of the wave owns here."""
    outside_registered: int = 0
    """Source blocks outside registered memory. Mooncake does not check that on TCP; RDMA would fail or read garbage."""
    faults_fired: list[WriteFault] = field(default_factory=list)
    slowed: list[SlowWrite] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    """Every write that reached the engine, whatever it returned."""

    def positions(self, room: int, kind: str) -> set[int]:
        return {position for _, position in self.pages.get(room, {}).get(kind, ())}


@dataclass
class PrefillReport:
    cp_rank: int
    outcomes: dict[int, Outcome]
    traffic: Traffic
    workers_started: int
    workers_alive: int
    counters: dict[str, int]
    """The product's own counters (``cp_shared_kv.metrics.COUNTERS``); empty for a stock run."""
    leftovers: dict[int, list[str]]
    """wave -> what the manager or the scheduler still kept after it; always empty for a stock run."""
    released: dict[int, float]
    """room -> when its pages were released, ``time.monotonic()`` seconds."""


@dataclass
class DecodeOutcome(Outcome):
    wrong_pages: dict[str, list[int]] = field(default_factory=dict)
    """kind -> positions whose page differs from the oracle; for a failed request, is neither right nor untouched
    when it is released."""
    untouched_pages: dict[str, list[int]] = field(default_factory=dict)
    """kind -> positions that were to be filled and still hold the poison in every layer."""
    late_pages: dict[str, list[int]] = field(default_factory=dict)
    """For a failed request: kind -> positions whose page was written after its release."""


@dataclass
class DecodeReport:
    tp_rank: int
    outcomes: dict[int, DecodeOutcome]
    clobbered: dict[int, dict[str, list[int]]]
    """wave -> kind -> decode pages that were written though no request of the wave has them as a destination."""
    session: str
    regions: list[Region]
    holders: dict[int, dict[str, dict[int, int]]]
    """wave -> kind -> page, or metadata slot for ``aux``, -> room that it was given to."""
    announced: dict[int, float]
    """room -> when this rank began to announce itself for it, ``time.monotonic()`` seconds."""
    released: dict[int, float]
    """room -> when its pages were released, or were complete."""
    leftovers: dict[int, list[str]]
    """wave -> what the manager or the scheduler still kept after it."""
    errors: list[str]
    """What the product logged as errors."""


@dataclass
class Report:
    scenario: Scenario
    prefill: list[PrefillReport]
    decode: list[DecodeReport]
    seconds: float

    def statuses(self, room: int) -> dict[str, list[str]]:
        """``{"prefill": one status per CP rank, "decode": one per TP rank}`` of a request."""
        return {
            "prefill": [rank.outcomes[room].status for rank in self.prefill],
            "decode": [rank.outcomes[room].status for rank in self.decode if room in rank.outcomes],
        }
