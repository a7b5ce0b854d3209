"""Patching is all or nothing and can be taken back: every order with imports, and beside hooks of other plugins.

Here on a small package; orders with imports each in a process of its own, and the hook registry is SGLang's own file.
``test_plugin.py`` repeats them on the installed SGLang.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import logging
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv import patches
from cp_shared_kv.patches import HOOK_REGISTRY, Patch, PatchGroup, PatchSet
from cp_shared_kv.releases import installed
from cp_shared_kv.seams import SeamError, SourceTree

FILES = {
    "__init__": "",
    "origin": """\
        def function(x):
            return f"stock {x}"

        class Base:
            def method(self, x):
                return f"stock {x}"

            @staticmethod
            def static(x):
                return f"stock {x}"

            @classmethod
            def make(cls, x):
                return f"stock {cls.__name__} {x}"

        class Child(Base):
            pass
        """,
    "copier": "from .origin import function\n",
    "late": "from .origin import function\n",
}
SEAMS = {"function": "function", "method": "Base.method", "static": "Base.static", "make": "Base.make"}
CALLS: dict[str, Callable[[Any], list[str]]] = {
    "function": lambda origin: [origin.function("x")],
    "method": lambda origin: [
        origin.Base().method("x"),
        origin.Child().method(x="x"),
        origin.Base.method(origin.Base(), "x"),
    ],
    "static": lambda origin: [origin.Base.static("x"), origin.Child().static("x")],
    "make": lambda origin: [origin.Base.make("x"), origin.Child.make("x"), origin.Child().make(x="x")],
}
STOCK = {
    "function": ["stock x"],
    "method": ["stock x"] * 3,
    "static": ["stock x"] * 2,
    "make": ["stock Base x", "stock Child x", "stock Child x"],
}
KINDS = ("BEFORE", "AFTER", "AROUND")
_numbers = itertools.count()


def write_package(directory: Path) -> str:
    name = f"fake_permuted_{next(_numbers)}"
    (directory / name).mkdir()
    for file, text in FILES.items():
        (directory / name / f"{file}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return name


def mark(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return f"<{wrapped(*args, **kwargs)}>"


def patch_set_of(root: Path) -> PatchSet:
    """A set that wraps every seam of a package of this module."""
    source = SourceTree(root, "1.0")
    targets = {seam: source.describe(f"{root.name}.origin", qualname) for seam, qualname in SEAMS.items()}
    release = replace(installed(), version="1.0", targets=targets, absent={})
    group = PatchGroup("group", tuple(Patch(seam, mark, why="a test", until="the test is over") for seam in SEAMS))
    return PatchSet(release, source, [group])


def is_plain(raw: Any) -> bool:
    """Whether what a module or class holds is a function, static or class method as Python makes it."""
    function = raw.__func__ if type(raw) in (staticmethod, classmethod) else raw
    return type(function) is types.FunctionType


def steps(root: Path, *names: str) -> dict[str, Any]:
    """Take steps in this process, and say what is there afterwards; run in a process of its own by the tests."""
    patch_set = patch_set_of(root)
    for name in names:
        if name in ("patch", "undo"):
            patch_set.apply() if name == "patch" else patch_set.undo()
        else:
            importlib.import_module(f"{root.name}.{name}")
    origin = importlib.import_module(f"{root.name}.origin")
    copies = [importlib.import_module(f"{root.name}.{name}").function for name in ("copier", "late")]
    raw = {**vars(origin), **vars(origin.Base)}
    return {
        "calls": {seam: call(origin) for seam, call in CALLS.items()},
        "copies are the function": all(copy is origin.function for copy in copies),
        "plain": {name: is_plain(raw[name]) for name in SEAMS},
        "own": [sorted(name for name in vars(cls) if name in SEAMS) for cls in (origin.Base, origin.Child)],
    }


class TestOrders:
    @pytest.mark.parametrize(
        ("names", "patched"),
        [
            (("origin", "copier", "patch"), True),
            (("patch", "copier", "late"), True),
            (("origin", "patch", "late"), True),
            (("copier", "patch", "patch"), True),
            (("patch", "patch", "copier"), True),
            (("patch", "undo", "copier"), False),
            (("copier", "patch", "late", "undo"), False),
            (("patch", "copier", "undo", "undo"), False),
            (("undo", "copier", "undo"), False),
            (("copier", "patch", "undo", "patch"), True),
            (("patch", "undo", "patch", "copier"), True),
            (("patch", "undo", "copier", "patch", "undo"), False),
            (("patch", "copier", "undo", "patch", "late", "undo", "patch", "undo"), False),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
    )
    def test_every_order_ends_wholly_patched_once_or_wholly_stock(
        self, tmp_path: Path, names: tuple[str, ...], patched: bool
    ) -> None:
        root = tmp_path / write_package(tmp_path)
        code = (
            "import json; from pathlib import Path; from test_permutations import steps; "
            f"print(json.dumps(steps(Path({str(root)!r}), *{names!r})))"
        )
        path = [str(Path(__file__).parent), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        calls = {seam: [f"<{call}>" for call in of_seam] if patched else of_seam for seam, of_seam in STOCK.items()}
        assert seen["calls"] == calls
        assert seen["copies are the function"]
        assert seen["plain"] == dict.fromkeys(SEAMS, not patched)
        assert seen["own"] == [["make", "method", "static"], []]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's hook registry, from its file: importing its package would import SGLang."""
    file = SourceTree.installed().file_of(HOOK_REGISTRY)
    spec = importlib.util.spec_from_file_location(HOOK_REGISTRY, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, HOOK_REGISTRY, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    name = write_package(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / name
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def load(root: Path, module: str = "origin") -> Any:
    return importlib.import_module(f"{root.name}.{module}")


def held(root: Path) -> dict[str, Any]:
    """Every object that the modules and classes hold, by the name they hold it under."""
    origin = load(root)
    owners = (origin, origin.Base, origin.Child, load(root, "copier"))
    return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[name] is right[name] for name in left)


def calls(root: Path) -> dict[str, list[str]]:
    origin = load(root)
    return {seam: call(origin) for seam, call in CALLS.items()}


def expected(layers: str) -> dict[str, list[str]]:
    """What calls say under wrappers, outermost first: ``<`` is ours, ``[`` another plugin's."""
    head, tail = layers, "".join({"<": ">", "[": "]"}[layer] for layer in reversed(layers))
    return {seam: [f"{head}{call}{tail}" for call in of_seam] for seam, of_seam in STOCK.items()}


def hook(registry: Any, root: Path, kind: str, apply: bool = True) -> None:
    """Have another plugin hook every seam; its hooks show as brackets."""
    source = registry.HookSource("other_plugin", None)

    def around(original: Any, *args: Any, **kwargs: Any) -> str:
        return f"[{original(*args, **kwargs)}]"

    hooks: dict[str, Callable[..., Any]] = {
        "BEFORE": lambda *args, **kwargs: (args, kwargs),
        "AFTER": lambda result, *args, **kwargs: f"[{result}]",
        "AROUND": around,
        "REPLACE": lambda *args, **kwargs: "[replaced]",
    }
    for qualname in SEAMS.values():
        target = f"{root.name}.origin.{qualname}"
        registry.HookRegistry.register(target, hooks[kind], registry.HookType[kind], source=source)
    if apply:
        registry.HookRegistry.apply_hooks()


def shown(kind: str, layers: str) -> str:
    """Layers as calls show them: a BEFORE hook does not show."""
    return layers.replace("[", "") if kind == "BEFORE" else layers


@pytest.mark.parametrize("kind", KINDS)
class TestHooksThatWrap:
    def test_put_on_before_ours_they_are_wrapped_attested_and_there_again_after_undo(
        self, root: Path, registry: Any, kind: str
    ) -> None:
        load(root, "copier")
        hook(registry, root, kind)
        before = held(root)
        patch_set = patch_set_of(root)
        patch_set.apply()
        patch_set.attest()
        assert calls(root) == expected(shown(kind, "<["))
        assert load(root, "late").function is load(root).function
        patch_set.undo()
        assert same(held(root), before)
        assert calls(root) == expected(shown(kind, "["))
        assert load(root, "late").function is load(root).function

    @pytest.mark.parametrize("imported", [False, True])
    def test_put_on_after_ours_they_wrap_ours_are_attested_and_stay_after_undo_with_ours_inert(
        self, root: Path, registry: Any, kind: str, imported: bool
    ) -> None:
        if imported:
            load(root, "copier")
        patch_set = patch_set_of(root)
        patch_set.apply()
        hook(registry, root, kind)
        load(root, "copier")
        hooked = held(root)
        patch_set.attest()
        assert calls(root) == expected(shown(kind, "[<"))
        patch_set.undo()
        assert same(held(root), hooked), "undo has moved the other plugin's hooks"
        assert calls(root) == expected(shown(kind, "["))
        assert load(root, "copier").function is load(root, "late").function is load(root).function

    def test_put_on_after_ours_they_do_not_hinder_patching_again(self, root: Path, registry: Any, kind: str) -> None:
        for again in range(2):
            patch_set = patch_set_of(root)
            patch_set.apply()
            if not again:
                hook(registry, root, kind)
            patch_set.attest()
            assert calls(root) == expected(shown(kind, "<[" if again else "[<"))
            patch_set.undo()
            assert calls(root) == expected(shown(kind, "["))

    def test_registered_before_ours_and_put_on_after_they_wrap_ours(self, root: Path, registry: Any, kind: str) -> None:
        """The order that SGLang's plugin loading makes: plugins register, hooks are put on when all are loaded."""
        hook(registry, root, kind, apply=False)
        patch_set = patch_set_of(root)
        patch_set.apply()
        registry.HookRegistry.apply_hooks()
        patch_set.attest()
        assert calls(root) == expected(shown(kind, "[<"))


class TestHooksThatReplace:
    NAMED = "has a REPLACE hook from other_plugin"

    @pytest.mark.parametrize("put_on", [False, True])
    def test_before_ours_every_seam_is_refused_by_the_plugins_name_and_nothing_is_patched(
        self, root: Path, registry: Any, put_on: bool
    ) -> None:
        load(root, "copier")
        hook(registry, root, "REPLACE", apply=put_on)
        before = held(root)
        patch_set = patch_set_of(root)
        with pytest.raises(SeamError) as refused:
            patch_set.apply()
        assert sorted(refused.value.problems) == sorted(
            f"{seam}: replaced: {root.name}.origin.{qualname} {self.NAMED}" for seam, qualname in SEAMS.items()
        )
        assert same(held(root), before)
        assert not patch_set.active

    def test_before_ours_and_before_the_import_they_are_refused_too(self, root: Path, registry: Any) -> None:
        hook(registry, root, "REPLACE", apply=False)
        with pytest.raises(SeamError, match=self.NAMED):
            patch_set_of(root).apply()
        assert f"{root.name}.origin" not in sys.modules

    def test_after_ours_attestation_refuses_them_by_name_and_undo_leaves_them(self, root: Path, registry: Any) -> None:
        patch_set = patch_set_of(root)
        patch_set.apply()
        hook(registry, root, "REPLACE")
        hooked = held(root)
        with pytest.raises(SeamError) as refused:
            patch_set.attest()
        assert len(refused.value.problems) == len(SEAMS)
        assert all(problem.endswith(self.NAMED) for problem in refused.value.problems)
        patch_set.undo()
        assert same(held(root), hooked)

    def test_a_replaced_class_is_refused_for_each_of_its_methods(self, root: Path, registry: Any) -> None:
        origin = load(root)
        replacement = type("Base", (origin.Base,), {})
        source = registry.HookSource("other_plugin", None)
        kind = registry.HookType.REPLACE
        registry.HookRegistry.register(f"{root.name}.origin.Base", replacement, kind, source=source)
        with pytest.raises(SeamError) as refused:
            patch_set_of(root).apply()
        assert refused.value.problems == [
            f"{seam}: replaced: {root.name}.origin.Base {self.NAMED}" for seam in ("method", "static", "make")
        ]


class TestUndo:
    def test_a_wrapper_under_somebody_elses_replacement_is_not_put_back_and_the_log_says_so(
        self, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        patch_set = patch_set_of(root)
        patch_set.apply()
        base = load(root).Base
        base.method = foreign = lambda self, x: "foreign"
        with caplog.at_level(logging.INFO, "cp_shared_kv"):
            patch_set.undo()
        assert vars(base)["method"] is foreign
        assert [record.getMessage().split(" was patched")[0] for record in caplog.records] == [
            f"CP shared KV: {root.name}.origin.Base.method"
        ]

    def test_wrappers_that_are_kept_where_undo_does_not_look_do_nothing_any_more(self, root: Path) -> None:
        patch_set = patch_set_of(root)
        patch_set.apply()
        origin = load(root)
        base = origin.Base()
        kept = [origin.function, base.method, origin.Base.static, origin.Base.make]
        assert [call("x") for call in kept] == ["<stock x>", "<stock x>", "<stock x>", "<stock Base x>"]
        patch_set.undo()
        assert [call("x") for call in kept] == ["stock x", "stock x", "stock x", "stock Base x"]

    def test_a_set_that_is_undone_does_not_switch_off_the_one_that_follows(self, root: Path) -> None:
        first, second = patch_set_of(root), patch_set_of(root)
        first.apply()
        first.undo()
        second.apply()
        first.undo()
        second.attest()
        assert calls(root) == expected("<")


class TestFailure:
    @pytest.mark.parametrize("number", range(len(SEAMS)))
    @pytest.mark.parametrize("where", ["wrapping", "copies"])
    def test_of_any_patch_leaves_everything_as_it_was(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
    ) -> None:
        load(root, "copier")
        before = held(root)
        patch_set = patch_set_of(root)
        name = "_wrap" if where == "wrapping" else "setattr"
        stock, counted = getattr(patches, name, setattr), itertools.count()

        def fail(*args: Any) -> Any:
            if next(counted) == number:
                raise KeyboardInterrupt
            return stock(*args)

        with monkeypatch.context() as context:
            context.setattr(patches, name, fail, raising=False)
            with pytest.raises(KeyboardInterrupt):
                patch_set.apply()
        assert same(held(root), before)
        assert calls(root) == STOCK
        patch_set.apply()
        patch_set.attest()
        assert calls(root) == expected("<")

    @pytest.mark.parametrize("number", range(len(SEAMS)))
    def test_of_any_patch_when_its_module_is_imported_leaves_the_module_as_it_was(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        patch_set = patch_set_of(root)
        patch_set.apply()
        stock, counted, modules = patches._wrap, itertools.count(), []

        def fail(*args: Any) -> Any:
            modules[:] = [sys.modules[f"{root.name}.origin"]]
            if next(counted) == number:
                raise KeyboardInterrupt
            return stock(*args)

        monkeypatch.setattr(patches, "_wrap", fail)
        with pytest.raises(KeyboardInterrupt):
            load(root)
        raw = {**vars(modules[0]), **vars(modules[0].Base)}
        assert all(is_plain(raw[seam]) for seam in SEAMS)
        with pytest.raises(SeamError, match=f"{len(SEAMS)} of the SGLang seams"):
            patch_set.attest()


@pytest.mark.parametrize("hooked", [False, True])
def test_the_wrapper_of_a_class_method_sees_the_class_as_its_instance_however_it_is_called(
    root: Path, registry: Any, hooked: bool
) -> None:
    """As the argument handling reads its arguments: the registry's wrappers pass the class as the first of them."""
    seen: list[Any] = []

    def note(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append((instance, args))
        return wrapped(*args, **kwargs)

    plain = patch_set_of(root)
    group = PatchGroup("group", (Patch("make", note, why="a test", until="the test is over"),))
    PatchSet(plain.release, plain.source, [group]).apply()
    if hooked:
        hook(registry, root, "AROUND")
    origin = load(root)
    assert "stock Child x" in origin.Child.make("x")
    assert seen == [(origin.Child, ("x",))]
