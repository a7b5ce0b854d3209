"""Extension points: what another package may add, as pluggy hook specifications.

A package registers a module or object with hook implementations under the entry-point group ``cp_shared_kv``::

    [project.entry-points.cp_shared_kv]
    my_platform = "my_platform.shared_kv_hooks"

and marks them with :data:`hookimpl`. They are called in every process, before anything is patched.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from cp_shared_kv.gate import Rule
    from cp_shared_kv.patches import PatchGroup

NAMESPACE = "cp_shared_kv"

hookspec = pluggy.HookspecMarker(NAMESPACE)
hookimpl = pluggy.HookimplMarker(NAMESPACE)


@hookspec
def cp_shared_kv_devices() -> list[str]:  # type: ignore[empty-body]
    """Values of ``--device``, besides ``cuda``, on which the caller vouches for the NSA path."""


@hookspec
def cp_shared_kv_transfer_backends() -> list[str]:  # type: ignore[empty-body]
    """Transfer backends, besides ``mooncake``, that a patch group of the caller serves."""


@hookspec
def cp_shared_kv_gate_rules() -> list[Rule]:  # type: ignore[empty-body]
    """Further requirements; each is evaluated and reported with the built-in ones."""


@hookspec
def cp_shared_kv_patch_groups() -> list[PatchGroup]:  # type: ignore[empty-body]
    """Further patch groups; resolved, applied, attested and undone with the built-in ones, all or none."""


@cache
def plugin_manager() -> pluggy.PluginManager:
    """The process's plugin manager, with all installed extensions loaded."""
    import sys

    manager = pluggy.PluginManager(NAMESPACE)
    manager.add_hookspecs(sys.modules[__name__])
    manager.load_setuptools_entrypoints(NAMESPACE)
    return manager
