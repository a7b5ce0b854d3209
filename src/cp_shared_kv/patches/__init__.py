"""Patching: all groups are resolved before the first symbol is touched, and all are applied or none.

A :class:`Patch` says which seam it wraps, why, and what upstream change would let it be deleted. A :class:`PatchGroup`
holds the patches of one SGLang system; there is one module per group. A :class:`PatchSet` binds groups to a release:
it checks the source (``cp_shared_kv.seams``), then wraps each symbol, at once where its module is imported and right
after import where it is not, so that ``from module import name`` copies made later hold the wrapped object; copies made
earlier are found and rebound. :meth:`PatchSet.attest` proves in the process that uses it that every symbol was reached.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import wrapt

from cp_shared_kv.config import ALLOW_CHANGED_SOURCE_ENV, is_true
from cp_shared_kv.hookspecs import plugin_manager
from cp_shared_kv.releases import Release, release_for
from cp_shared_kv.seams import Resolution, SeamError, SourceTree, Target, resolve

logger = logging.getLogger("cp_shared_kv")

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Patch:
    """One wrapped seam.

    Args:
        seam: id of the seam in the release table.
        wrapper: ``wrapper(wrapped, instance, args, kwargs)`` as wrapt calls it.
        why: why the stock behaviour does not do.
        until: which upstream change would let the patch be deleted.
    """

    seam: str
    wrapper: Wrapper
    why: str
    until: str


@dataclass(frozen=True)
class PatchGroup:
    """The patches of one SGLang system.

    Args:
        name: group name, as given to :meth:`PatchSet.for_release`.
        patches: wrapped seams.
        relies_on: seams that are called or overridden but not wrapped; checked, not patched.
        targets: seams of a group from another package, which the release table cannot hold.
    """

    name: str
    patches: tuple[Patch, ...]
    relies_on: tuple[str, ...] = ()
    targets: dict[str, Target] = field(default_factory=dict)


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    """An argument of a wrapped call, however it was passed; ``position`` does not count ``self``."""
    return kwargs[name] if name in kwargs else args[position]


def builtin_groups() -> tuple[PatchGroup, ...]:
    """The product's own groups, those that run in scheduler processes."""
    from cp_shared_kv.patches import attention, capacity, indexer, prefill_queue, scheduler, transfer

    return (
        scheduler.GROUP,
        capacity.GROUP,
        attention.GROUP,
        indexer.GROUP,
        transfer.GROUP,
        prefill_queue.GROUP,
    )


def all_groups() -> tuple[PatchGroup, ...]:
    """Built-in groups and those of extensions."""
    extra = plugin_manager().hook.cp_shared_kv_patch_groups()
    return (*builtin_groups(), *(group for groups in extra for group in groups))


@dataclass
class _Applied:
    """What is needed to undo one patch."""

    owner: Any
    attribute: str
    original: Any
    wrapped: Any
    own: bool


#: What holds a plain function as ``__func__``.
_HOLDERS = (staticmethod, classmethod, types.MethodType)


def _underlying(value: Any) -> types.FunctionType | None:
    """The plain function inside a method, descriptor or nothing."""
    # By exact type: isinstance() and attributes look through the proxies that wrapt makes.
    function = value.__func__ if type(value) in _HOLDERS else value
    return function if type(function) is types.FunctionType else None


def _chain(value: Any) -> Iterator[Any]:
    """``value`` and whatever it wraps, outermost first."""
    seen = 0
    while value is not None and seen < 64:
        yield value
        inner = value.__func__ if type(value) in _HOLDERS else None
        value = inner if inner is not None else getattr(value, "__wrapped__", None)
        seen += 1


class PatchSet:
    """Patches of one release, applied and undone together. Make one with :meth:`for_release`."""

    def __init__(self, release: Release, source: SourceTree, groups: Sequence[PatchGroup]) -> None:
        self.release = release
        self.source = source
        self.groups = tuple(groups)
        self.patches = tuple(patch for group in groups for patch in group.patches)
        self.targets: dict[str, Target] = {}
        problems = []
        for group in groups:
            for seam in (*(patch.seam for patch in group.patches), *group.relies_on):
                target = group.targets.get(seam) or release.targets.get(seam)
                if target is None:
                    problems.append(f"{seam}: the table of release {source.version} has no such seam")
                else:
                    self.targets[seam] = target
        if problems:
            raise SeamError(problems)
        self.resolution: Resolution | None = None
        self.active = False
        self._applied: dict[str, _Applied] = {}

    @classmethod
    def for_release(
        cls, version: str | None = None, groups: Iterable[str] | None = None, source: SourceTree | None = None
    ) -> PatchSet:
        """Groups of a release, resolved against the source; nothing is patched yet.

        Args:
            version: SGLang release; the installed one by default.
            groups: names of groups; all by default.
            source: SGLang's source; the installed one by default.

        Raises:
            SeamError: the release is unknown, or any seam is missing or changed; every problem is listed.
        """
        source = source or SourceTree.installed()
        release = release_for(version or source.version)
        wanted = None if groups is None else set(groups)
        chosen = [group for group in all_groups() if wanted is None or group.name in wanted]
        if wanted is not None and (unknown := wanted - {group.name for group in chosen}):
            raise SeamError([f"there is no patch group {name!r}" for name in sorted(unknown)])
        patch_set = cls(release, source, chosen)
        patch_set.resolve()
        return patch_set

    def resolve(self) -> Resolution:
        """Check every seam in source.

        Raises:
            SeamError: a seam is missing, or changed and ``CP_SHARED_KV_ALLOW_CHANGED_SOURCE`` is not set.
        """
        resolution = resolve(self.source, self.targets)
        problems = list(resolution.problems)
        if resolution.changed:
            if is_true(os.environ.get(ALLOW_CHANGED_SOURCE_ENV)):
                logger.warning(
                    "CP shared KV: SGLang's source differs from release %s and %s is set; trusting it:\n%s",
                    resolution.version,
                    ALLOW_CHANGED_SOURCE_ENV,
                    "\n".join(f"  - {line}" for line in resolution.changed),
                )
            else:
                problems += [f"{line}; set {ALLOW_CHANGED_SOURCE_ENV}=1 to trust it" for line in resolution.changed]
        if problems:
            raise SeamError(problems)
        self.resolution = resolution
        return resolution

    def apply(self) -> None:
        """Wrap every seam; on any failure none stays wrapped. Applying twice is applying once.

        Raises:
            SeamError: a symbol was replaced by somebody else, or its module does not hold it.
        """
        if self.active:
            return
        if self.resolution is None:
            self.resolve()
        by_module: dict[str, list[Patch]] = {}
        for patch in self.patches:
            by_module.setdefault(self.targets[patch.seam].module, []).append(patch)
        loaded = {name for name in by_module if _fully_imported(name)}
        problems = [p for name in loaded for patch in by_module[name] if (p := self._live_problem(patch, name))]
        if problems:
            raise SeamError(problems)
        self.active = True
        try:
            for name, patches in by_module.items():
                if name in loaded:
                    self._patch_module(patches, sys.modules[name])
                else:
                    wrapt.register_post_import_hook(functools.partial(self._after_import, tuple(patches)), name)
        except BaseException:
            self.undo()
            raise

    def _after_import(self, patches: tuple[Patch, ...], module: types.ModuleType) -> None:
        if not self.active or patches[0].seam in self._applied:
            return  # undone before the module was imported; wrapt cannot unregister a hook
        problems = [p for patch in patches if (p := self._live_problem(patch, module.__name__))]
        if problems:
            # An import hook cannot report to anybody else, and stock code must not run half patched.
            raise SystemExit(str(SeamError(problems)))
        self._patch_module(patches, module)

    def _live_problem(self, patch: Patch, module: str) -> str | None:
        """Why the imported symbol cannot be wrapped: it is absent, or not the function that was read in source."""
        target = self.targets[patch.seam]
        try:
            original = wrapt.resolve_path(module, target.qualname)[2]
        except AttributeError:
            return f"{patch.seam}: missing: {target.path} is not defined in the imported module"
        function = _underlying(original)
        if function is None or not self._is_stock(patch.seam, function):
            return (
                f"{patch.seam}: already patched: {target.path} is {original!r}, not the function of SGLang "
                f"{self.source.version}; another plugin or patch replaced it: remove one of the two"
            )
        return None

    def _foreign_problems(self) -> list[str]:
        """Seams, wrapped or relied on, that somebody else has replaced; wrappers around stock code are allowed."""
        problems = []
        replaced = _foreign_replacements()
        for seam, target in self.targets.items():
            importlib.import_module(target.module)
            function = _stock_function(wrapt.resolve_path(target.module, target.qualname)[2])
            if function is None or not self._is_stock(seam, function):
                problems.append(f"{seam}: replaced: {target.path} no longer leads to the function of SGLang")
            for path, source in replaced.items():
                if target.path == path or target.path.startswith(path + "."):
                    problems.append(f"{seam}: replaced: {path} has a REPLACE hook from {source}")
        return problems

    def _is_stock(self, seam: str, function: types.FunctionType) -> bool:
        """Whether a function is the one that was read in source."""
        assert self.resolution is not None
        file = self.source.file_of(self.targets[seam].module).name
        return (
            function.__code__.co_firstlineno == self.resolution.definitions[seam].first_line
            and os.path.basename(function.__code__.co_filename) == file
        )

    def _patch_module(self, patches: Iterable[Patch], module: types.ModuleType) -> None:
        for patch in patches:
            owner, attribute, original = wrapt.resolve_path(module, self.targets[patch.seam].qualname)
            own = not isinstance(owner, type) or attribute in vars(owner)
            wrapped = wrapt.FunctionWrapper(original, patch.wrapper)
            setattr(owner, attribute, wrapped)
            self._applied[patch.seam] = _Applied(owner, attribute, original, wrapped, own)
            if isinstance(owner, types.ModuleType):
                _rebind_copies(original, wrapped)

    def undo(self) -> None:
        """Put back the very objects that were there, copies included. Undoing twice is undoing once."""
        self.active = False
        for applied in reversed(list(self._applied.values())):
            if applied.own:
                setattr(applied.owner, applied.attribute, applied.original)
            else:
                delattr(applied.owner, applied.attribute)
            if isinstance(applied.owner, types.ModuleType):
                _rebind_copies(applied.wrapped, applied.original)
        self._applied.clear()

    def attest(self) -> None:
        """Prove that every seam is in place in this process, importing the modules that are not there yet.

        Raises:
            SeamError: a symbol does not lead to the wrapper, a stale copy is left, or a foreign hook replaces it.
        """
        problems = self._foreign_problems()
        for patch in self.patches:
            target = self.targets[patch.seam]
            importlib.import_module(target.module)
            applied = self._applied.get(patch.seam)
            if applied is None:
                problems.append(f"{patch.seam}: not patched: {target.path} was never reached")
                continue
            current = wrapt.resolve_path(target.module, target.qualname)[2]
            if not any(_is_wrapper(link, applied.wrapped) for link in _chain(current)):
                problems.append(f"{patch.seam}: lost: {target.path} no longer leads to this plugin's wrapper")
            if isinstance(applied.owner, types.ModuleType):
                _rebind_copies(applied.original, applied.wrapped)  # copies made while its module was importing
        if problems:
            raise SeamError(problems)


def _stock_function(value: Any) -> types.FunctionType | None:
    """The innermost function of a chain of wrappers."""
    function = None
    for link in _chain(value):
        function = _underlying(link) or function
    return function


def _is_wrapper(link: Any, wrapper: Any) -> bool:
    """Whether ``link`` is our wrapper or what the descriptor protocol made of it."""
    return link is wrapper or getattr(link, "_self_parent", None) is wrapper


def _fully_imported(name: str) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def _rebind_copies(old: Any, new: Any) -> None:
    """Point every module-level name that is ``old`` at ``new``: copies made by ``from module import name``."""
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def _foreign_replacements() -> dict[str, str]:
    """Paths that another plugin replaces through SGLang's ``HookRegistry``, with that plugin's name."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    found: dict[str, str] = {}
    for path, hooks in HookRegistry._hooks.items():
        for hook_type, hook, source in hooks:
            if hook_type is HookType.REPLACE:
                found[path] = getattr(source, "plugin_name", None) or str(getattr(hook, "__module__", "unknown"))
    return found
