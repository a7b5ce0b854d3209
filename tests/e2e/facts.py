"""What the end-to-end tests have to know of a release of SGLang besides the product's own table."""

from __future__ import annotations

from cp_shared_kv.releases import installed

#: From here on stock sends a cached prefix early, and until it mended that, asserted that it ends with a page.
WHOLE_PAGES_ONLY = ("0.5.15", "0.5.15.post1", "0.5.16")
#: Releases that refuse other CP sizes than 8.
EIGHT_RANKS_ONLY = ("0.5.11",)


def chunks_may_end_in_a_page() -> bool:
    """Whether stock survives chunk sizes that its command line refuses, of no whole number of pages."""
    return installed().version not in WHOLE_PAGES_ONLY


def cp_sizes() -> tuple[int, ...]:
    """CP sizes that are tried, the smallest first."""
    return (8,) if installed().version in EIGHT_RANKS_ONLY else (2, 4)
