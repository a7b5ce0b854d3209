"""What the CPU platform tells the product, through the product's own extension points: ``--device cpu`` is vouched for.

Loaded by pluggy from the entry-point group ``cp_shared_kv``; silent unless the CPU platform is active.
"""

from __future__ import annotations

import pluggy

hookimpl = pluggy.HookimplMarker("cp_shared_kv")


@hookimpl
def cp_shared_kv_devices() -> list[str]:
    """``["cpu"]`` where the CPU platform runs in this process, else nothing."""
    from cp_shared_kv_cpu import requested

    return ["cpu"] if requested() else []
