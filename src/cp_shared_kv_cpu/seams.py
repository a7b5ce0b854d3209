"""Replacing names inside SGLang: a seam that has moved is an error, never a silent no-op."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class SeamError(RuntimeError):
    """SGLang no longer has the name that the CPU platform replaces."""


def owner_of(path: str) -> Any:
    """Resolve ``package.module`` or ``package.module:Class`` to the object that holds the seam."""
    module_name, _, attribute = path.partition(":")
    owner = importlib.import_module(module_name)
    if not attribute:
        return owner
    if not hasattr(owner, attribute):
        raise SeamError(f"{module_name} has no {attribute}; releases.py does not fit this SGLang")
    return getattr(owner, attribute)


def replace(path: str, name: str, new: Any) -> Any:
    """Set ``name`` of the module or class at ``path`` to ``new`` and return what it was.

    Raises SeamError when the name is not there already.
    """
    owner = owner_of(path)
    if not hasattr(owner, name):
        raise SeamError(f"{path} has no {name}; releases.py does not fit this SGLang")
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


def replace_everywhere(place: str, new: Any) -> None:
    """Replace a function at ``module:name``, and under that name in every module of SGLang that has imported it.

    Modules imported later get the new one from its place. Raises SeamError when there is no such place.
    """
    path, _, name = place.partition(":")
    old = replace(path, name, new)
    for module_name, module in list(sys.modules.items()):
        # The dictionary, since getattr would run the lazy imports of some modules.
        if module_name.startswith("sglang.") and vars(module).get(name) is old:
            setattr(module, name, new)
