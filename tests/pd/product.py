"""The product's transfer patches as the prefill ranks use them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cp_shared_kv.patches import PatchSet


@cache
def transfer_patches(with_queue: bool = False) -> PatchSet:
    """The transfer group, and that of the prefill queue if asked for, checked against SGLang's source, not yet applied.

    The check reads and parses source for 0.2 s. The fork server calls this before it forks, so that the ranks have it.
    """
    from cp_shared_kv.patches import PatchSet

    if with_queue:
        import sglang.srt.managers.scheduler  # noqa: F401  the ranks have this too, then, which takes seconds

    return PatchSet.for_release(groups=("transfer", "prefill_queue") if with_queue else ("transfer",))


def decode_patches() -> PatchSet:
    """The group of the decode side, checked against SGLang's source, not yet applied."""
    from cp_shared_kv.patches import PatchSet

    return PatchSet.for_release(groups=("decode",), role="decode")
