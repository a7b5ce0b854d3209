"""Applying and undoing patches, in every order with imports, on a synthetic package of its own for each test."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import logging
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import wrapt

from cp_shared_kv import patches
from cp_shared_kv.config import ALLOW_CHANGED_SOURCE_ENV
from cp_shared_kv.patches import Patch, PatchGroup, PatchSet, argument, builtin_groups
from cp_shared_kv.patches import arguments as arguments_group
from cp_shared_kv.releases import release_for, supported_versions
from cp_shared_kv.seams import SeamError, SourceTree, Target

FILES = {
    "__init__": "",
    "origin": """\
        def function(a, b=1):
            return f"stock {a} {b}"

        def untouched():
            return "stock"

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

        class Overriding(Base):
            def method(self, x):
                return "child of " + super().method(x)
        """,
    "copier": """\
        from {package}.origin import function
        from {package}.origin import function as alias
        """,
    "late_copier": "from {package}.origin import function\n",
    "second": """\
        def other(a):
            return f"stock {{a}}"
        """,
}
SEAMS = {
    "function": ("origin", "function"),
    "method": ("origin", "Base.method"),
    "static": ("origin", "Base.static"),
    "make": ("origin", "Base.make"),
    "other": ("second", "other"),
}
RELEASE = release_for("0.5.12.post1")
_numbers = itertools.count()


def mark(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Wrapper that shows in the result how often it ran."""
    return f"<{wrapped(*args, **kwargs)}>"


def patch(seam: str) -> Patch:
    return Patch(seam, mark, why="a test", until="the test is over")


@dataclass
class Package:
    """A package on disk and on sys.path, under a name of its own, and its release."""

    name: str
    root: Path

    @property
    def source(self) -> SourceTree:
        return SourceTree(self.root, "1.0")

    @property
    def targets(self) -> dict[str, Target]:
        return {seam: self.source.describe(f"{self.name}.{module}", path) for seam, (module, path) in SEAMS.items()}

    def load(self, module: str) -> types.ModuleType:
        return importlib.import_module(f"{self.name}.{module}")

    def patch_set(self, *seams: str, targets: dict[str, Target] | None = None, relies_on: Any = ()) -> PatchSet:
        release = replace(RELEASE, version="1.0", absent={}, targets=self.targets if targets is None else targets)
        group = PatchGroup("group", tuple(patch(seam) for seam in seams or SEAMS), relies_on=relies_on)
        return PatchSet(release, self.source, [group])

    def calls(self) -> list[str]:
        """Results of every way to reach a seam."""
        origin, copier, second = self.load("origin"), self.load("copier"), self.load("second")
        return [
            origin.function("a", b=2),
            copier.function("a"),
            copier.alias("a"),
            origin.Base().method("m"),
            origin.Base.method(origin.Base(), "m"),
            origin.Child().method("m"),
            origin.Overriding().method("m"),
            origin.Base.static("s"),
            origin.Base().static("s"),
            origin.Child.static("s"),
            origin.Base.make("c"),
            origin.Child.make("c"),
            origin.Child().make("c"),
            second.other("o"),
        ]

    def objects(self) -> dict[str, Any]:
        """The very objects that a patch replaces, and what classes hold of their own."""
        origin, copier, second = self.load("origin"), self.load("copier"), self.load("second")
        owners = (origin.Base, origin.Child, origin.Overriding, origin, copier, second)
        return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}


STOCK = [
    "stock a 2",
    "stock a 1",
    "stock a 1",
    "stock m",
    "stock m",
    "stock m",
    "child of stock m",
    "stock s",
    "stock s",
    "stock s",
    "stock Base c",
    "stock Child c",
    "stock Child c",
    "stock o",
]
PATCHED = [
    "<stock a 2>",
    "<stock a 1>",
    "<stock a 1>",
    "<stock m>",
    "<stock m>",
    "<stock m>",
    "child of <stock m>",
    "<stock s>",
    "<stock s>",
    "<stock s>",
    "<stock Base c>",
    "<stock Child c>",
    "<stock Child c>",
    "<stock o>",
]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[key] is right[key] for key in left)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    name = f"fake_sglang_{next(_numbers)}"
    root = tmp_path / name
    root.mkdir()
    for file, text in FILES.items():
        text = textwrap.dedent(text)
        text = text.format(package=name) if file in ("copier", "late_copier", "second") else text
        (root / f"{file}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(ALLOW_CHANGED_SOURCE_ENV, raising=False)
    monkeypatch.setattr(patches, "_foreign_replacements", dict)
    yield Package(name, root)
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]


class TestOrderOfImportAndPatch:
    def test_import_then_patch(self, package: Package):
        assert package.calls() == STOCK
        package.patch_set().apply()
        assert package.calls() == PATCHED

    def test_patch_then_import(self, package: Package):
        package.patch_set().apply()
        assert f"{package.name}.origin" not in sys.modules, "applying imported a module"
        assert package.calls() == PATCHED

    def test_import_one_module_then_patch_then_import_the_other(self, package: Package):
        package.load("origin")
        package.patch_set().apply()
        assert package.calls() == PATCHED

    def test_a_copy_made_before_and_one_made_after_both_hold_the_wrapper(self, package: Package):
        before = package.load("copier")
        package.patch_set().apply()
        after = package.load("late_copier")
        wrapper = package.load("origin").function
        assert before.function is before.alias is after.function is wrapper

    @pytest.mark.parametrize("imported_first", [False, True])
    def test_patching_twice_wraps_once(self, package: Package, imported_first: bool):
        if imported_first:
            package.load("copier")
        patch_set = package.patch_set()
        patch_set.apply()
        patch_set.apply()
        assert package.calls() == PATCHED
        patch_set.apply()
        assert package.calls() == PATCHED

    def test_what_is_not_a_seam_stays(self, package: Package):
        package.patch_set().apply()
        origin = package.load("origin")
        assert type(origin.untouched) is types.FunctionType
        assert origin.untouched() == "stock"

    def test_wrapped_functions_still_look_like_themselves(self, package: Package):
        package.patch_set().apply()
        origin = package.load("origin")
        assert origin.function.__name__ == "function"
        assert isinstance(vars(origin.Base)["make"], classmethod)
        assert isinstance(vars(origin.Base)["static"], staticmethod)
        assert "method" not in vars(origin.Child)

    def test_applying_while_a_seams_module_is_being_imported_is_refused_and_leaves_it_stock(self, package: Package):
        """The module imports, at its head, something that applies the patches: too early to wrap, no hook comes."""
        second, trigger = package.root / "second.py", types.ModuleType(f"{package.name}.trigger")
        second.write_text(f"from {trigger.__name__} import apply\napply()\n" + second.read_text())
        patch_set = package.patch_set("function", "other")
        trigger.apply = patch_set.apply  # type: ignore[attr-defined]
        sys.modules[trigger.__name__] = trigger
        package.load("origin")
        with pytest.raises((SystemExit, SeamError), match="other: "):
            package.load("second")
        assert not patch_set.active
        assert package.load("origin").function("a") == "stock a 1"


class TestUndo:
    def test_the_very_same_objects_are_back_copies_and_inherited_methods_included(self, package: Package):
        before = package.objects()
        patch_set = package.patch_set()
        patch_set.apply()
        assert not same(package.objects(), before)
        patch_set.undo()
        assert same(package.objects(), before)
        assert package.calls() == STOCK

    def test_copies_made_while_patched_are_back_to_stock_too(self, package: Package):
        patch_set = package.patch_set()
        patch_set.apply()
        copy = package.load("late_copier")
        assert package.calls() == PATCHED
        patch_set.undo()
        assert copy.function is package.load("origin").function
        assert type(copy.function) is types.FunctionType
        assert package.calls() == STOCK

    def test_undone_before_the_import_nothing_is_patched(self, package: Package):
        patch_set = package.patch_set()
        patch_set.apply()
        patch_set.undo()
        assert package.calls() == STOCK

    def test_undoing_twice_is_undoing_once(self, package: Package):
        before = package.objects()
        patch_set = package.patch_set()
        patch_set.undo()
        patch_set.apply()
        patch_set.undo()
        patch_set.undo()
        assert same(package.objects(), before)

    def test_patches_can_be_applied_again_after_undoing(self, package: Package):
        before = package.objects()
        patch_set = package.patch_set()
        for _ in range(2):
            patch_set.apply()
            assert package.calls() == PATCHED
            patch_set.undo()
            assert same(package.objects(), before)

    def test_applied_undone_and_applied_again_before_the_import_wraps_once(self, package: Package):
        patch_set = package.patch_set()
        patch_set.apply()
        patch_set.undo()
        patch_set.apply()
        assert package.calls() == PATCHED

    def test_a_second_set_can_follow_an_undone_one(self, package: Package):
        first = package.patch_set()
        first.apply()
        first.undo()
        package.patch_set().apply()
        assert package.calls() == PATCHED

    def test_an_import_after_undo_is_left_alone_while_the_loaded_modules_are_restored(self, package: Package):
        package.load("origin")
        patch_set = package.patch_set()
        patch_set.apply()
        patch_set.undo()
        assert package.calls() == STOCK


class TestAllOrNothing:
    @pytest.mark.parametrize("seam", SEAMS)
    def test_one_seam_replaced_by_somebody_else_leaves_every_seam_alone(self, package: Package, seam: str):
        package.calls()
        module, path = SEAMS[seam]
        owner: Any = package.load(module)
        *classes, name = path.split(".")
        for class_name in classes:
            owner = getattr(owner, class_name)
        kind = {"static": staticmethod, "make": classmethod}.get(seam, lambda function: function)
        setattr(owner, name, kind(lambda *args, **kwargs: "foreign"))
        before = package.objects()
        patch_set = package.patch_set()
        with pytest.raises(SeamError) as refused:
            patch_set.apply()
        assert same(package.objects(), before)
        assert not patch_set.active
        assert len(refused.value.problems) == 1
        assert refused.value.problems[0].startswith(f"{seam}: already patched: {package.name}.{module}.{path} is ")
        assert "not the function of SGLang 1.0" in refused.value.problems[0]

    def test_a_refused_set_does_not_patch_modules_imported_later(self, package: Package):
        package.load("origin").Base.method = lambda self, x: "foreign"
        with pytest.raises(SeamError):
            package.patch_set().apply()
        assert package.load("second").other("o") == "stock o"

    def test_all_replaced_seams_are_reported_together(self, package: Package):
        origin, second = package.load("origin"), package.load("second")
        origin.function = len
        second.other = lambda a: "foreign"
        with pytest.raises(SeamError) as refused:
            package.patch_set().apply()
        assert sorted(problem.split(":")[0] for problem in refused.value.problems) == ["function", "other"]

    def test_another_function_of_the_same_module_is_not_the_seam(self, package: Package):
        origin = package.load("origin")
        origin.function = origin.untouched
        with pytest.raises(SeamError, match="function: already patched"):
            package.patch_set().apply()

    def test_a_function_at_the_same_line_of_another_file_is_not_the_seam(self, package: Package):
        origin = package.load("origin")
        lines = "\n" * (origin.function.__code__.co_firstlineno - 1)
        exec(compile(lines + "def function(a, b=1): return 'foreign'", "elsewhere.py", "exec"), vars(origin))
        with pytest.raises(SeamError, match="function: already patched"):
            package.patch_set().apply()

    def test_a_wrapper_made_with_functools_is_somebody_else(self, package: Package):
        origin = package.load("origin")

        @functools.wraps(origin.function)
        def wrapper(*args: Any) -> str:
            return "foreign"

        origin.function = wrapper
        with pytest.raises(SeamError, match="function: already patched"):
            package.patch_set().apply()

    def test_a_wrapper_made_with_wrapt_is_somebody_else(self, package: Package):
        origin = package.load("origin")
        origin.function = wrapt.FunctionWrapper(origin.function, lambda *_: "foreign")
        with pytest.raises(SeamError, match="function: already patched"):
            package.patch_set().apply()

    def test_a_seam_that_the_imported_module_lacks_is_missing(self, package: Package):
        origin = package.load("origin")
        del origin.Base.make
        del origin.function
        with pytest.raises(SeamError) as refused:
            package.patch_set().apply()
        assert refused.value.problems == [
            f"function: missing: {package.name}.origin.function is not defined in the imported module",
            f"make: missing: {package.name}.origin.Base.make is not defined in the imported module",
        ]

    def test_a_failure_in_the_middle_unwraps_what_was_wrapped(self, package: Package, monkeypatch: pytest.MonkeyPatch):
        before = package.objects()
        wrapper, made = wrapt.FunctionWrapper, []

        def third_time_unlucky(*args: Any) -> Any:
            if len(made) == 2:
                raise KeyboardInterrupt
            made.append(args)
            return wrapper(*args)

        patch_set = package.patch_set()
        monkeypatch.setattr(wrapt, "FunctionWrapper", third_time_unlucky)
        with pytest.raises(KeyboardInterrupt):
            patch_set.apply()
        assert same(package.objects(), before)
        assert not patch_set.active

    def test_a_module_that_replaces_its_own_seam_ends_the_process_when_imported(self, package: Package):
        patch_set = package.patch_set()
        with (package.root / "second.py").open("a") as file:
            file.write("\n\nother = len\n")
        patch_set.apply()
        with pytest.raises(SystemExit, match="other: already patched"):
            package.load("second")


class TestChangedSource:
    def changed(self, package: Package) -> dict[str, Target]:
        return {**package.targets, "method": replace(package.targets["method"], fingerprint="0" * 16)}

    @pytest.mark.parametrize("value", [None, "0", "banana"])
    def test_is_refused_and_names_the_override(
        self, package: Package, monkeypatch: pytest.MonkeyPatch, value: str | None
    ):
        if value is not None:
            monkeypatch.setenv(ALLOW_CHANGED_SOURCE_ENV, value)
        patch_set = package.patch_set(targets=self.changed(package))
        with pytest.raises(SeamError) as refused:
            patch_set.apply()
        assert len(refused.value.problems) == 1
        assert refused.value.problems[0].startswith("method: source changed: ")
        assert refused.value.problems[0].endswith("set CP_SHARED_KV_ALLOW_CHANGED_SOURCE=1 to trust it")
        assert package.calls() == STOCK

    def test_is_trusted_with_a_warning_where_the_override_is_set(
        self, package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        monkeypatch.setenv(ALLOW_CHANGED_SOURCE_ENV, "1")
        with caplog.at_level(logging.WARNING, "cp_shared_kv"):
            package.patch_set(targets=self.changed(package)).apply()
        assert package.calls() == PATCHED
        assert "method: source changed" in caplog.text

    def test_a_changed_signature_is_refused_even_then(self, package: Package, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv(ALLOW_CHANGED_SOURCE_ENV, "1")
        targets = {**package.targets, "method": replace(package.targets["method"], parameters=("self",))}
        with pytest.raises(SeamError, match="method: signature changed"):
            package.patch_set(targets=targets).apply()
        assert package.calls() == STOCK

    def test_of_a_seam_that_is_only_relied_on_is_refused_too(self, package: Package):
        with pytest.raises(SeamError, match="method: source changed"):
            package.patch_set("function", targets=self.changed(package), relies_on=("method",)).apply()

    def test_every_problem_is_reported_at_once(self, package: Package):
        targets = {
            **self.changed(package),
            "function": replace(package.targets["function"], parameters=()),
            "other": replace(package.targets["other"], qualname="absent"),
        }
        with pytest.raises(SeamError) as refused:
            package.patch_set(targets=targets).resolve()
        assert sorted(problem.split(":")[0] for problem in refused.value.problems) == ["function", "method", "other"]


class TestAttest:
    def test_passes_where_every_seam_is_in_place(self, package: Package):
        package.load("origin")
        patch_set = package.patch_set()
        patch_set.apply()
        patch_set.attest()
        assert package.calls() == PATCHED

    def test_imports_modules_that_are_not_there_yet(self, package: Package):
        patch_set = package.patch_set()
        patch_set.apply()
        patch_set.attest()
        assert f"{package.name}.second" in sys.modules

    @pytest.mark.parametrize("seam", SEAMS)
    def test_finds_a_lost_wrapper(self, package: Package, seam: str):
        patch_set = package.patch_set()
        patch_set.apply()
        package.calls()
        applied = patch_set._applied[seam]
        setattr(applied.owner, applied.attribute, applied.original)
        with pytest.raises(SeamError) as refused:
            patch_set.attest()
        assert [problem.split(": ")[:2] for problem in refused.value.problems] == [[seam, "lost"]]

    def test_finds_a_wrapper_lost_under_a_foreign_replacement(self, package: Package):
        patch_set = package.patch_set()
        patch_set.apply()
        package.load("origin").Base.method = lambda self, x: "foreign"
        with pytest.raises(SeamError, match="method: lost"):
            patch_set.attest()

    @pytest.mark.parametrize("seam", ["method", "static", "make"])
    def test_finds_a_replaced_function_that_is_relied_on_but_not_wrapped(self, package: Package, seam: str):
        patch_set = package.patch_set("function", relies_on=(seam,))
        patch_set.apply()
        patch_set.attest()
        target = patch_set.targets[seam]
        setattr(package.load("origin").Base, target.qualname.split(".")[1], lambda self, x: "foreign")
        with pytest.raises(SeamError, match=f"{seam}: replaced"):
            patch_set.attest()

    def test_allows_a_wrapper_around_a_function_that_is_relied_on(self, package: Package):
        patch_set = package.patch_set("function", relies_on=("method",))
        patch_set.apply()
        base = package.load("origin").Base
        stock = base.method
        base.method = functools.wraps(stock)(lambda self, x: stock(self, x))
        patch_set.attest()

    def test_finds_a_module_that_was_never_reached(self, package: Package):
        """It came into the process without the import system."""
        patch_set = package.patch_set()
        patch_set.apply()
        name = f"{package.name}.second"
        spec = importlib.util.spec_from_file_location(name, package.root / "second.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with pytest.raises(SeamError) as refused:
            patch_set.attest()
        assert refused.value.problems == [f"other: not patched: {name}.other was never reached"]

    def test_finds_everything_after_undo(self, package: Package):
        patch_set = package.patch_set()
        patch_set.apply()
        package.calls()
        patch_set.undo()
        with pytest.raises(SeamError) as refused:
            patch_set.attest()
        assert len(refused.value.problems) == len(SEAMS)

    @pytest.mark.parametrize("path", ["origin.Base.method", "origin.Base"])
    def test_finds_a_replace_hook_on_the_seam_or_its_class(
        self, package: Package, monkeypatch: pytest.MonkeyPatch, path: str
    ):
        patch_set = package.patch_set("function", "method")
        patch_set.apply()
        replaced = {f"{package.name}.{path}": "other_plugin"}
        monkeypatch.setattr(patches, "_foreign_replacements", lambda: replaced)
        with pytest.raises(SeamError) as refused:
            patch_set.attest()
        assert refused.value.problems == [
            f"method: replaced: {package.name}.{path} has a REPLACE hook from other_plugin"
        ]

    def test_does_not_mind_replace_hooks_on_neighbours(self, package: Package, monkeypatch: pytest.MonkeyPatch):
        patch_set = package.patch_set()
        patch_set.apply()
        neighbours = ("origin.Bas", "origin.Base.method_2", "origin.untouched", "origin.Child")
        monkeypatch.setattr(patches, "_foreign_replacements", lambda: {f"{package.name}.{n}": "x" for n in neighbours})
        patch_set.attest()

    @pytest.mark.parametrize(
        ("seam", "wrap"),
        [(seam, wrap) for seam in SEAMS for wrap in ("functools", "wrapt")],
    )
    def test_allows_a_foreign_wrapper_around_ours(self, package: Package, seam: str, wrap: str):
        """SGLang's hook registry wraps with functools; descriptors keep their kind."""
        patch_set = package.patch_set()
        patch_set.apply()
        package.calls()
        applied = patch_set._applied[seam]
        if wrap == "wrapt":
            foreign: Any = wrapt.FunctionWrapper(applied.wrapped, mark)
        else:
            inner = getattr(applied.owner, applied.attribute)

            @functools.wraps(inner)
            def foreign(*args: Any, **kwargs: Any) -> Any:
                return inner(*args, **kwargs)

            kind = {"static": staticmethod, "make": classmethod}.get(seam)
            foreign = kind(foreign) if kind else foreign
        setattr(applied.owner, applied.attribute, foreign)
        patch_set.attest()

    def test_points_copies_made_during_the_import_at_the_wrapper(self, package: Package):
        patch_set = package.patch_set()
        patch_set.apply()
        copier = package.load("copier")
        copier.function = patch_set._applied["function"].original
        patch_set.attest()
        assert copier.function("a") == "<stock a 1>"


class TestSets:
    def test_seams_without_a_row_are_all_named(self, package: Package):
        with pytest.raises(SeamError) as refused:
            package.patch_set("function", "no.such", relies_on=("nor.this",))
        assert refused.value.problems == [
            "no.such: the table of release 1.0 has no such seam",
            "nor.this: the table of release 1.0 has no such seam",
        ]

    def test_a_group_may_bring_its_own_seams(self, package: Package):
        group = PatchGroup("mine", (patch("function"),), targets={"function": package.targets["function"]})
        PatchSet(replace(RELEASE, version="1.0", targets={}), package.source, [group]).apply()
        assert package.load("origin").function("a") == "<stock a 1>"

    def test_an_unknown_group_is_named(self):
        with pytest.raises(SeamError, match="there is no patch group 'nonsense'"):
            PatchSet.for_release(groups=["attention", "nonsense"])

    def test_an_unknown_release_is_refused_by_name(self):
        with pytest.raises(SeamError, match=r"SGLang 0\.5\.99 is not a supported release"):
            PatchSet.for_release("0.5.99")

    def test_groups_can_be_chosen(self):
        patch_set = PatchSet.for_release(groups=["indexer", "attention"])
        assert [group.name for group in patch_set.groups] == ["attention", "indexer"]
        assert patch_set.resolution is not None
        assert not patch_set.active

    def test_groups_of_extensions_are_resolved_with_the_built_in_ones(self):
        from cp_shared_kv.hookspecs import hookimpl, plugin_manager

        class Extension:
            @hookimpl
            def cp_shared_kv_patch_groups(self) -> list[PatchGroup]:
                return [PatchGroup("mine", (patch("mine.seam"),))]

        extension = Extension()
        plugin_manager().register(extension)
        try:
            with pytest.raises(SeamError, match=r"mine\.seam: the table of release \S+ has no such seam"):
                PatchSet.for_release()
        finally:
            plugin_manager().unregister(extension)
        PatchSet.for_release(groups=["attention"])

    @pytest.mark.parametrize(
        ("args", "kwargs", "value"), [((1, 2), {}, 2), ((1,), {"b": 3}, 3), ((), {"a": 1, "b": None}, None)]
    )
    def test_an_argument_is_found_however_it_was_passed(self, args: Any, kwargs: Any, value: Any):
        assert argument(args, kwargs, 1, "b") is value

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize("version", supported_versions())
    def test_every_built_in_patch_has_a_row_a_reason_and_an_end(self, version: str, role: str):
        release = release_for(version)
        known = {*release.targets, *release.absent}
        groups = (*(group for group in builtin_groups() if role in group.roles), arguments_group.GROUP)
        all_patches = [patch for group in groups for patch in group.patches]
        for each in all_patches:
            assert each.seam in known
            assert len(each.why) > 10
            assert len(each.until) > 10
        assert {seam for group in groups for seam in group.relies_on} <= known
        assert len({each.seam for each in all_patches}) == len(all_patches), "a seam is wrapped twice"
        assert len({group.name for group in groups}) == len(groups)

    def test_importing_the_groups_imports_nothing_of_sglang(self):
        code = (
            "import sys; from cp_shared_kv.patches import builtin_groups, arguments; builtin_groups(); "
            "print([m for m in sys.modules if m.split('.')[0] == 'sglang'])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
        assert done.stdout.strip() == "[]"
