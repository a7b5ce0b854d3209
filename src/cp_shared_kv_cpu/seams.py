"""Replacing a name inside SGLang: a seam that has moved is an error, never a silent no-op."""

from __future__ import annotations

import importlib
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
        raise SeamError(f"{module_name} has no {attribute}; this SGLang release is not the supported one")
    return getattr(owner, attribute)


def replace(path: str, name: str, new: Any) -> Any:
    """Set ``name`` of the module or class at ``path`` to ``new`` and return what it was.

    Raises SeamError when the name is not there already.
    """
    owner = owner_of(path)
    if not hasattr(owner, name):
        raise SeamError(f"{path} has no {name}; this SGLang release is not the supported one")
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old
