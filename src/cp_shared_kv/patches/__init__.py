"""Patching: all groups are resolved before the first symbol is touched, and all are applied or none.

A :class:`Patch` says which seam it wraps, why, and what upstream change would let it be deleted. A :class:`PatchGroup`
holds the patches of one SGLang system; there is one module per group. A :class:`PatchSet` binds groups to a release:
it checks the source (``cp_shared_kv.seams``), then wraps each symbol, at once where its module is imported and right
after import where it is not, so that ``from module import name`` copies made later hold the wrapped object; copies made
earlier are found and rebound. :meth:`PatchSet.attest` proves in the process that uses it that every symbol was reached.

Undoing puts the very objects back, in modules and classes. A wrapper that cannot be taken out, because somebody else
has wrapped it since or keeps it elsewhere (in a class attribute, dict, list, partial or default argument), is switched
off and passes calls on to what it wraps.
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
        roles: servers of a disaggregated deployment that the group is for, of ``prefill`` and ``decode``.
    """

    name: str
    patches: tuple[Patch, ...]
    relies_on: tuple[str, ...] = ()
    targets: dict[str, Target] = field(default_factory=dict)
    roles: tuple[str, ...] = ("prefill",)


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    """An argument of a wrapped call, however it was passed; ``position`` does not count ``self``."""
    return kwargs[name] if name in kwargs else args[position]


def builtin_groups() -> tuple[PatchGroup, ...]:
    """The product's own groups, those that run in scheduler processes."""
    from cp_shared_kv.patches import (
        attention,
        capacity,
        decode,
        indexer,
        page_ids,
        prefill_queue,
        scheduler,
        transfer,
    )

    return (
        scheduler.GROUP,
        capacity.GROUP,
        page_ids.GROUP,
        attention.GROUP,
        indexer.GROUP,
        transfer.GROUP,
        prefill_queue.GROUP,
        decode.GROUP,
    )


def all_groups() -> tuple[PatchGroup, ...]:
    """Built-in groups and those of extensions."""
    extra = plugin_manager().hook.cp_shared_kv_patch_groups()
    return (*builtin_groups(), *(group for groups in extra for group in groups))


@dataclass
class _Switch:
    """Whether a wrapper runs; wrapt asks before each call."""

    on: bool = True

    def __call__(self) -> bool:
        return self.on


@dataclass
class _Applied:
    """What is needed to undo one patch; ``wrapped`` is what the owner holds, ``wrapper`` itself or a method of it."""

    owner: Any
    attribute: str
    original: Any
    wrapped: Any
    wrapper: wrapt.FunctionWrapper
    own: bool
    switch: _Switch


#: SGLang's own way to wrap functions; asked only where it is imported, since without it there are no hooks.
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry"

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
        self.patches = tuple(patch for group in groups for patch in group.patches if patch.seam not in release.absent)
        self.targets: dict[str, Target] = {}
        problems = []
        for group in groups:
            for seam in (*(patch.seam for patch in group.patches), *group.relies_on):
                if seam in release.absent:
                    continue
                target = group.targets.get(seam) or release.targets.get(seam)
                if target is None:
                    problems.append(f"{seam}: the table of release {source.version} has no such seam")
                else:
                    self.targets[seam] = target
        self.resolution: Resolution | None = None
        self.active = False
        self._applied: dict[str, _Applied] = {}
        if problems:
            resolution, others = self._compare()
            raise SeamError([*problems, *others, *self._taken(resolution)])

    @classmethod
    def for_release(
        cls,
        version: str | None = None,
        groups: Iterable[str] | None = None,
        source: SourceTree | None = None,
        role: str = "prefill",
    ) -> PatchSet:
        """Groups of a release, resolved against the source; nothing is patched yet.

        Args:
            version: SGLang release; the installed one by default.
            groups: names of groups; all of the role by default.
            source: SGLang's source; the installed one by default.
            role: ``prefill`` or ``decode``.

        Raises:
            SeamError: the release is unknown, or any seam is missing or changed; every problem is listed.
        """
        source = source or SourceTree.installed()
        release = release_for(version or source.version)
        wanted = None if groups is None else set(groups)
        of_role = [group for group in all_groups() if role in group.roles]
        chosen = [group for group in of_role if wanted is None or group.name in wanted]
        if wanted is not None and (unknown := wanted - {group.name for group in chosen}):
            raise SeamError([f"there is no patch group {name!r}" for name in sorted(unknown)])
        patch_set = cls(release, source, chosen)
        patch_set.resolve()
        return patch_set

    def resolve(self) -> Resolution:
        """Check every seam in source.

        Raises:
            SeamError: a seam is missing, is changed and ``CP_SHARED_KV_ALLOW_CHANGED_SOURCE`` is not set, or is known
                to be taken by somebody else.
        """
        resolution, problems = self._compare()
        if resolution.changed and self._trusts_changed_source():
            logger.warning(
                "CP shared KV: SGLang's source differs from release %s and %s is set; trusting it:\n%s",
                resolution.version,
                ALLOW_CHANGED_SOURCE_ENV,
                "\n".join(f"  - {line}" for line in resolution.changed),
            )
        problems += self._taken(resolution)
        if problems:
            raise SeamError(problems)
        self.resolution = resolution
        return resolution

    @staticmethod
    def _trusts_changed_source() -> bool:
        return is_true(os.environ.get(ALLOW_CHANGED_SOURCE_ENV))

    def _compare(self) -> tuple[Resolution, list[str]]:
        """The seams as found in source, and why they cannot be used."""
        resolution = resolve(self.source, self.targets)
        problems = list(resolution.problems)
        if not self._trusts_changed_source():
            problems += [f"{line}; set {ALLOW_CHANGED_SOURCE_ENV}=1 to trust it" for line in resolution.changed]
        return resolution, problems

    def apply(self) -> None:
        """Wrap every seam; on any failure none stays wrapped. Applying twice is applying once.

        Raises:
            SeamError: a seam cannot be used as :meth:`resolve` says, a symbol was replaced by somebody else, or its
                module does not hold it; every problem is listed.
        """
        if self.active:
            return
        if self.resolution is None:
            self.resolve()
        assert self.resolution is not None
        if problems := self._taken(self.resolution):
            raise SeamError(problems)
        by_module: dict[str, list[Patch]] = {}
        for patch in self.patches:
            by_module.setdefault(self.targets[patch.seam].module, []).append(patch)
        loaded = {name for name in by_module if _fully_imported(name)}
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

    def _taken(self, resolution: Resolution) -> list[str]:
        """Seams of imported modules that somebody else has taken, and those that a REPLACE hook is registered for."""
        if self.active:
            return []
        wrapped = {patch.seam for patch in self.patches}
        problems = []
        for seam, target in self.targets.items():
            if seam in resolution.definitions and not target.source_only and _fully_imported(target.module):
                check = self._live_problem if seam in wrapped else self._replaced
                problems.append(check(seam, resolution))
        return [problem for problem in problems if problem is not None] + self._replace_hooks()

    def _after_import(self, patches: tuple[Patch, ...], module: types.ModuleType) -> None:
        if not self.active or patches[0].seam in self._applied:
            return  # undone before the module was imported; wrapt cannot unregister a hook
        assert self.resolution is not None
        problems = [p for patch in patches if (p := self._live_problem(patch.seam, self.resolution))]
        if problems:
            # An import hook cannot report to anybody else, and stock code must not run half patched.
            raise SystemExit(str(SeamError(problems)))
        self._patch_module(patches, module)

    def _live_problem(self, seam: str, resolution: Resolution) -> str | None:
        """Why the imported symbol cannot be wrapped: it is absent, or not the function that was read in source."""
        target = self.targets[seam]
        try:
            original = wrapt.resolve_path(target.module, target.qualname)[2]
        except AttributeError:
            return f"{seam}: missing: {target.path} is not defined in the imported module"
        for link in _chain(original):
            function = _underlying(link)
            if function is not None and self._is_stock(seam, function, resolution):
                return None
            if type(link) not in _HOLDERS and not _is_pass_through(link):
                break
        return (
            f"{seam}: already patched: {target.path} is {original!r}, not the function of SGLang "
            f"{self.source.version}; another plugin or patch replaced it: remove one of the two"
        )

    def _replaced(self, seam: str, resolution: Resolution) -> str | None:
        """Whether somebody else has replaced an imported symbol; wrappers around the stock function are allowed."""
        target = self.targets[seam]
        try:
            function = _stock_function(wrapt.resolve_path(target.module, target.qualname)[2])
        except AttributeError:
            return f"{seam}: missing: {target.path} is not defined in the imported module"
        if function is None or not self._is_stock(seam, function, resolution):
            return f"{seam}: replaced: {target.path} no longer leads to the function of SGLang"
        return None

    def _replace_hooks(self) -> list[str]:
        """Seams that another plugin's REPLACE hook is registered for."""
        replaced = _foreign_replacements()
        return [
            f"{seam}: replaced: {path} has a REPLACE hook from {source}"
            for seam, target in self.targets.items()
            for path, source in replaced.items()
            if target.path == path or target.path.startswith(path + ".")
        ]

    def _is_stock(self, seam: str, function: types.FunctionType, resolution: Resolution) -> bool:
        """Whether a function is the one that was read in source."""
        file = self.source.file_of(self.targets[seam].module).name
        return (
            function.__code__.co_firstlineno == resolution.definitions[seam].first_line
            and os.path.basename(function.__code__.co_filename) == file
        )

    def _patch_module(self, patches: Iterable[Patch], module: types.ModuleType) -> None:
        done: list[str] = []
        try:
            for patch in patches:
                owner, attribute, original = wrapt.resolve_path(module, self.targets[patch.seam].qualname)
                own = not isinstance(owner, type) or attribute in vars(owner)
                wrapped, wrapper, switch = _wrap(original, patch.wrapper)
                # Noted first: undo finds out whether the symbol holds it.
                self._applied[patch.seam] = _Applied(owner, attribute, original, wrapped, wrapper, own, switch)
                done.append(patch.seam)
                setattr(owner, attribute, wrapped)
                if isinstance(owner, types.ModuleType):
                    _rebind_copies(original, wrapped)
        except BaseException:
            self._remove(done)
            raise

    def undo(self) -> None:
        """Put back the very objects that were there, copies in modules included. Undoing twice is undoing once.

        What somebody else has put over a wrapper since stays in place, and the wrapper under it does nothing any more.
        """
        self.active = False
        self._remove(list(self._applied))

    def _remove(self, seams: Sequence[str]) -> None:
        for seam in reversed(seams):
            applied = self._applied.pop(seam)
            applied.switch.on = False
            current = vars(applied.owner).get(applied.attribute)
            if current is applied.wrapped:
                if applied.own:
                    setattr(applied.owner, applied.attribute, applied.original)
                else:
                    delattr(applied.owner, applied.attribute)
            elif current is not applied.original:
                path = self.targets[seam].path
                logger.info("CP shared KV: %s was patched by somebody else since and stays so: %r", path, current)
            if isinstance(applied.owner, types.ModuleType):
                _rebind_copies(applied.wrapped, applied.original)

    def attest(self) -> None:
        """Prove that every seam is in place in this process, importing the modules that are not there yet.

        Raises:
            SeamError: a symbol does not lead to the wrapper, a stale copy is left, or a foreign hook replaces it.
        """
        for target in self.targets.values():
            importlib.import_module(target.module)
        assert self.resolution is not None
        live = [seam for seam, target in self.targets.items() if not target.source_only]
        problems = [problem for seam in live if (problem := self._replaced(seam, self.resolution))]
        problems += self._replace_hooks()
        for patch in self.patches:
            target = self.targets[patch.seam]
            applied = self._applied.get(patch.seam)
            if applied is None:
                problems.append(f"{patch.seam}: not patched: {target.path} was never reached")
                continue
            try:
                current = wrapt.resolve_path(target.module, target.qualname)[2]
            except AttributeError:
                continue  # reported as missing above
            if not any(_is_wrapper(link, applied.wrapper) for link in _chain(current)):
                problems.append(f"{patch.seam}: lost: {target.path} no longer leads to this plugin's wrapper")
            elif isinstance(applied.owner, types.ModuleType):
                _rebind_copies(applied.original, current)  # copies made while its module was importing
        if problems:
            raise SeamError(problems)


def _wrap(original: Any, wrapper: Wrapper) -> tuple[Any, wrapt.FunctionWrapper, _Switch]:
    """What takes the place of ``original``, the wrapper in it, and its switch.

    A class or static method stays one, with the wrapper inside: SGLang's ``HookRegistry`` takes the function out of
    such a method to wrap it, and would lose a wrapper around the method.
    """
    switch = _Switch()
    if type(original) is classmethod:
        inner = wrapt.FunctionWrapper(original.__func__, _with_class(wrapper), switch)
        return classmethod(inner), inner, switch
    if type(original) is staticmethod:
        inner = wrapt.FunctionWrapper(original.__func__, wrapper, switch)
        return staticmethod(inner), inner, switch
    whole = wrapt.FunctionWrapper(original, wrapper, switch)
    return whole, whole, switch


def _with_class(wrapper: Wrapper) -> Wrapper:
    """The wrapper of a class method, called alike by all Python releases: with the class as the instance."""

    def call(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if instance is None:  # the class comes as the first argument: Python 3.13, and HookRegistry's wrappers
            instance, args = args[0], args[1:]
            wrapped = functools.partial(wrapped, instance)
        return wrapper(wrapped, instance, args, kwargs)

    return call


def _stock_function(value: Any) -> types.FunctionType | None:
    """The innermost function of a chain of wrappers."""
    function = None
    for link in _chain(value):
        function = _underlying(link) or function
    return function


def _is_pass_through(link: Any) -> bool:
    """Whether ``link`` calls what it wraps: a wrapper of SGLang's own, or one of ours that is off.

    SGLang's own are decorators in its source, and the wrappers of its ``HookRegistry``. The registry's REPLACE hooks do
    not call what they wrap; :func:`_foreign_replacements` knows them.
    """
    switch = getattr(link, "_self_enabled", None)
    if isinstance(switch, _Switch):
        return not switch.on
    function = _underlying(link)
    return function is not None and function.__globals__.get("__name__", "").startswith("sglang.")


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
    registry = sys.modules.get(HOOK_REGISTRY)
    found: dict[str, str] = {}
    if registry is None:
        return found
    for path, hooks in registry.HookRegistry._hooks.items():
        for hook_type, hook, source in hooks:
            if hook_type is registry.HookType.REPLACE:
                found[path] = getattr(source, "plugin_name", None) or str(getattr(hook, "__module__", "unknown"))
    return found
