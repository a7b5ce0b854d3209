"""Finding and checking seams in source: small synthetic trees, and the installed SGLang."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import logging
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import ClassVar

import pytest

from cp_shared_kv.config import ALLOW_CHANGED_SOURCE_ENV
from cp_shared_kv.patches import HOOK_REGISTRY, Patch, PatchGroup, PatchSet
from cp_shared_kv.releases import release_for
from cp_shared_kv.seams import Definition, SeamError, SourceTree, Target, fingerprint, resolve

MODULE = """\
    import functools

    def plain(a, b=1):
        return a

    @functools.cache
    @functools.wraps(plain)
    def decorated(a):
        return a

    async def waits(a, /, b, *rest, c, d=2, **more):
        return a

    def keywords(*, only):
        return only

    if True:
        def conditional():
            return 1

    class Outer:
        def method(self, x: int = 3) -> int:
            return x

        @staticmethod
        def static(x):
            return x

        @classmethod
        def make(cls, x):
            return cls()

        class Inner:
            def method(self, y):
                return y

    def twice(old):
        return old

    def twice(new):
        return new

    class Reopened:
        def first(self):
            return 1

    class Reopened:
        def second(self):
            return 2

    value = 3
"""

Tree = Callable[..., SourceTree]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Makes a source tree of package ``fake`` from ``{relative path: source}``."""

    def make(**files: str) -> SourceTree:
        root = tmp_path / "fake"
        for name, text in {"__init__": "", "module": MODULE, **files}.items():
            path = root / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text), encoding="utf-8")
        return SourceTree(root, "1.0")

    return make


def found(source: SourceTree, qualname: str, module: str = "fake.module") -> Definition:
    definition = source.find(module, qualname)
    assert isinstance(definition, Definition), definition
    return definition


class TestFingerprint:
    def test_is_the_head_of_the_sha256_of_the_source(self):
        assert fingerprint("def f():\n    return 1") == hashlib.sha256(b"def f():\n    return 1").hexdigest()[:16]

    @pytest.mark.parametrize(
        "same", ["def f():  \n    return 1\t", "\n\ndef f():\n    return 1\n\n", "def f():\r\n    return 1\r\n"]
    )
    def test_trailing_blanks_and_line_ends_do_not_count(self, same: str):
        assert fingerprint(same) == fingerprint("def f():\n    return 1")

    @pytest.mark.parametrize(
        "other",
        [
            "def f():\n    return 2",
            "def f():\n  return 1",
            "def f():\n\n    return 1",
            "def f():\n    return 1  # note",
        ],
    )
    def test_anything_else_counts(self, other: str):
        assert fingerprint(other) != fingerprint("def f():\n    return 1")


class TestFind:
    @pytest.mark.parametrize(
        ("qualname", "parameters"),
        [
            ("plain", ("a", "b")),
            ("decorated", ("a",)),
            ("waits", ("a", "b", "*rest", "c", "d", "**more")),
            ("keywords", ("only",)),
            ("Outer.method", ("self", "x")),
            ("Outer.static", ("x",)),
            ("Outer.make", ("cls", "x")),
            ("Outer.Inner.method", ("self", "y")),
            ("twice", ("new",)),
            ("Reopened.second", ("self",)),
        ],
    )
    def test_names_the_parameters_of_the_definition_that_counts(
        self, tree: Tree, qualname: str, parameters: tuple[str, ...]
    ):
        assert found(tree(), qualname).parameters == parameters

    def test_a_definition_begins_with_its_first_decorator(self, tree: Tree):
        source = textwrap.dedent(MODULE).splitlines()
        definition = found(tree(), "decorated")
        assert source[definition.first_line - 1] == "@functools.cache"
        text = "@functools.cache\n@functools.wraps(plain)\ndef decorated(a):\n    return a"
        assert definition.fingerprint == fingerprint(text)

    def test_the_first_line_is_the_one_that_python_notes_on_the_function(self, tree: Tree):
        namespace: dict[str, object] = {}
        exec(compile(textwrap.dedent(MODULE), "module.py", "exec"), namespace)
        outer = namespace["Outer"]
        for qualname, function in (
            ("plain", namespace["plain"]),
            ("decorated", namespace["decorated"].__wrapped__),  # type: ignore[attr-defined]
            ("twice", namespace["twice"]),
            ("Outer.static", outer.static),  # type: ignore[attr-defined]
            ("Outer.make", outer.make.__func__),  # type: ignore[attr-defined]
        ):
            # functools.wraps leaves the inner function's code, which is that of `plain`, alone.
            assert found(tree(), qualname).first_line == function.__code__.co_firstlineno or qualname == "decorated"

    def test_the_last_of_several_definitions_counts(self, tree: Tree):
        assert found(tree(), "twice").fingerprint == fingerprint("def twice(new):\n    return new")
        assert tree().find("fake.module", "Reopened.first") == "Reopened.first is not defined in fake.module"

    def test_packages_and_nested_modules_are_found(self, tree: Tree):
        source = tree(
            sub__in____init__="def here(a): ...\n", sub__in__deep="def there(b): ...\n", __init__="def top(c): ...\n"
        )
        assert found(source, "here", "fake.sub").parameters == ("a",)
        assert found(source, "there", "fake.sub.deep").parameters == ("b",)
        assert found(source, "top", "fake").parameters == ("c",)
        assert source.file_of("fake.sub").name == "__init__.py"
        assert source.file_of("fake.sub.deep").name == "deep.py"
        assert source.file_of("fake.no.such") == source.root / "no" / "such.py"

    @pytest.mark.parametrize(
        ("module", "qualname", "reason"),
        [
            ("fake.module", "absent", "absent is not defined in fake.module"),
            ("fake.module", "value", "value is not defined in fake.module"),
            ("fake.module", "conditional", "conditional is not defined in fake.module"),
            ("fake.module", "Outer", "Outer is not defined in fake.module"),
            ("fake.module", "Outer.absent", "Outer.absent is not defined in fake.module"),
            ("fake.module", "Absent.method", "class Absent is not defined in fake.module"),
            ("fake.module", "Outer.Absent.method", "class Absent is not defined in fake.module"),
            ("fake.module", "plain.method", "class plain is not defined in fake.module"),
            ("fake.absent", "plain", "module fake.absent cannot be read (FileNotFoundError)"),
            ("fake.broken", "plain", "module fake.broken cannot be read (SyntaxError)"),
        ],
    )
    def test_what_is_missing_is_said_in_a_sentence(self, tree: Tree, module: str, qualname: str, reason: str):
        assert tree(broken="def plain(:\n").find(module, qualname) == reason

    def test_a_file_that_is_not_utf_8_is_said_in_a_sentence(self, tree: Tree):
        source = tree()
        (source.root / "latin.py").write_bytes(b"# caf\xe9\ndef plain(): ...\n")
        assert "module fake.latin cannot be read" in str(source.find("fake.latin", "plain"))

    def test_nothing_of_the_tree_is_executed(self, tree: Tree):
        assert found(tree(evil="raise SystemExit('imported')\ndef f(a): ...\n"), "f", "fake.evil").parameters == ("a",)
        assert "fake" not in sys.modules

    def test_describe_gives_the_row_for_the_release_table(self, tree: Tree):
        definition = found(tree(), "Outer.make")
        target = tree().describe("fake.module", "Outer.make")
        assert target == Target("fake.module", "Outer.make", ("cls", "x"), definition.fingerprint)
        assert target.path == "fake.module.Outer.make"

    def test_describe_refuses_what_is_missing(self, tree: Tree):
        with pytest.raises(SeamError, match="absent is not defined"):
            tree().describe("fake.module", "absent")


class TestResolve:
    def test_a_tree_as_described_resolves(self, tree: Tree):
        source = tree()
        targets = {name: source.describe("fake.module", name) for name in ("plain", "Outer.method")}
        resolution = resolve(source, targets)
        assert resolution.ok
        assert (resolution.version, resolution.problems, resolution.changed) == ("1.0", (), ())
        assert set(resolution.definitions) == {"plain", "Outer.method"}

    def test_every_problem_is_reported_at_once_and_told_apart(self, tree: Tree):
        source = tree(broken="def f(:\n")
        plain = source.describe("fake.module", "plain")
        method = source.describe("fake.module", "Outer.method")
        resolution = resolve(
            source,
            {
                "good": plain,
                "gone": Target("fake.module", "absent", (), ""),
                "class gone": Target("fake.module", "Absent.m", (), ""),
                "broken": Target("fake.broken", "f", (), ""),
                "signature": replace(method, parameters=("self", "x", "y")),
                "both": replace(plain, parameters=("a",), fingerprint="0" * 16),
                "source": replace(plain, fingerprint="0" * 16),
            },
        )
        assert not resolution.ok
        assert resolution.problems == (
            "gone: missing: absent is not defined in fake.module",
            "class gone: missing: class Absent is not defined in fake.module",
            "broken: missing: module fake.broken cannot be read (SyntaxError)",
            "signature: signature changed: fake.module.Outer.method takes (self, x), expected (self, x, y)",
            "both: signature changed: fake.module.plain takes (a, b), expected (a)",
        )
        assert resolution.changed == (
            f"source: source changed: fake.module.plain has fingerprint {plain.fingerprint}, expected {'0' * 16}",
        )
        assert set(resolution.definitions) == {"good", "signature", "both", "source"}

    def test_a_changed_source_alone_is_not_ok(self, tree: Tree):
        source = tree()
        changed = {"plain": replace(source.describe("fake.module", "plain"), fingerprint="0" * 16)}
        assert not resolve(source, changed).ok

    @pytest.mark.parametrize("order", [("a", "b", "c"), ("b", "a")])
    def test_parameters_in_another_order_or_number_are_a_change_of_signature(self, tree: Tree, order: tuple[str, ...]):
        source = tree()
        target = replace(source.describe("fake.module", "plain"), parameters=order)
        assert "signature changed" in resolve(source, {"plain": target}).problems[0]

    def test_an_error_lists_and_counts_its_problems(self):
        error = SeamError(iter(["one", "two"]))
        assert error.problems == ["one", "two"]
        assert str(error) == "2 of the SGLang seams that CP shared KV needs cannot be used:\n  - one\n  - two"


class TestEveryProblemOfALaunch:
    """A set of patches names all that is wrong in one error, of every kind, also what only the process can tell."""

    #: Seam -> its function in the module, and its kind of problem.
    WRONG: ClassVar = {
        "gone": ("absent", "missing"),
        "signature": ("plain", "signature changed"),
        "source": ("keywords", "source changed"),
        "taken": ("twice", "already patched"),
        "relied on": ("Outer.method", "replaced"),
        "hooked": ("Outer.static", "replaced"),
    }

    @pytest.fixture
    def package(self, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SourceTree]:
        """The package ``fake``, imported, with a hook registry that another plugin may use."""
        monkeypatch.delenv(ALLOW_CHANGED_SOURCE_ENV, raising=False)
        registry = types.ModuleType(HOOK_REGISTRY)
        kinds = Enum("HookType", ["REPLACE", "AROUND"])
        vars(registry).update(HookRegistry=types.SimpleNamespace(_hooks={}), HookType=kinds)
        monkeypatch.setitem(sys.modules, HOOK_REGISTRY, registry)
        source = tree()
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.import_module("fake.module")
        yield source
        for name in ("fake", "fake.module"):
            sys.modules.pop(name, None)

    def patch_set(self, source: SourceTree, *wrong: str, row: bool = True) -> PatchSet:
        """A set over good seams and wrong ones, of which ``relied on`` is not wrapped."""
        targets = {"good": source.describe("fake.module", "waits")}
        registry = sys.modules[HOOK_REGISTRY]
        for seam in wrong:
            qualname = self.WRONG[seam][0]
            if seam == "gone":
                targets[seam] = Target("fake.module", qualname, (), "")
                continue
            targets[seam] = source.describe("fake.module", qualname)
            if seam == "signature":
                targets[seam] = replace(targets[seam], parameters=("self",))
            elif seam == "source":
                targets[seam] = replace(targets[seam], fingerprint="0" * 16)
            elif seam == "taken":
                sys.modules["fake.module"].twice = lambda new: "foreign"
            elif seam == "relied on":
                sys.modules["fake.module"].Outer.method = lambda self, x: "foreign"
            elif seam == "hooked":
                hooks = registry.HookRegistry._hooks
                hooks[targets[seam].path] = [
                    (registry.HookType.REPLACE, len, types.SimpleNamespace(plugin_name="other"))
                ]
                hooks["fake.module.waits"] = [(registry.HookType.AROUND, len, None)]
        wrapped = [seam for seam in targets if seam != "relied on"] + ([] if row else ["no.row"])
        group = PatchGroup(
            "group",
            tuple(Patch(seam, lambda wrapped, *rest: wrapped(), why="a test", until="it is over") for seam in wrapped),
            relies_on=tuple(seam for seam in targets if seam == "relied on"),
        )
        release = replace(release_for("0.5.12.post1"), version="1.0", targets=targets, absent={})
        return PatchSet(release, source, [group])

    def kinds(self, refused: pytest.ExceptionInfo[SeamError]) -> dict[str, str]:
        return {seam: kind for seam, kind, *_ in (problem.split(": ") for problem in refused.value.problems)}

    @pytest.mark.parametrize("seam", WRONG)
    def test_each_kind_alone_refuses_and_patches_nothing(self, package: SourceTree, seam: str):
        patch_set = self.patch_set(package, seam)
        before = dict(vars(sys.modules["fake.module"]))
        with pytest.raises(SeamError) as refused:
            patch_set.apply()
        assert self.kinds(refused) == {seam: self.WRONG[seam][1]}
        assert vars(sys.modules["fake.module"]) == before

    def test_all_kinds_are_named_in_one_error(self, package: SourceTree):
        with pytest.raises(SeamError) as refused:
            self.patch_set(package, *self.WRONG).apply()
        assert self.kinds(refused) == {seam: kind for seam, (_, kind) in self.WRONG.items()}
        assert len(refused.value.problems) == len(self.WRONG)

    def test_they_are_named_where_seams_are_only_checked_too(self, package: SourceTree):
        with pytest.raises(SeamError) as refused:
            self.patch_set(package, *self.WRONG).resolve()
        assert self.kinds(refused) == {seam: kind for seam, (_, kind) in self.WRONG.items()}

    def test_a_seam_without_a_row_is_named_with_the_others(self, package: SourceTree):
        with pytest.raises(SeamError) as refused:
            self.patch_set(package, *self.WRONG, row=False)
        assert self.kinds(refused) == {
            "no.row": "the table of release 1.0 has no such seam",
            **{seam: kind for seam, (_, kind) in self.WRONG.items()},
        }

    def test_a_seam_whose_signature_changed_and_that_is_taken_is_named_for_both(self, package: SourceTree):
        patch_set = self.patch_set(package, "signature")
        sys.modules["fake.module"].plain = lambda self: "foreign"  # type: ignore[attr-defined]
        with pytest.raises(SeamError) as refused:
            patch_set.apply()
        assert [problem.split(": ")[1] for problem in refused.value.problems] == [
            "signature changed",
            "already patched",
        ]

    def test_changed_source_that_is_trusted_is_said_in_the_log_and_the_rest_stays_refused(
        self, package: SourceTree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        monkeypatch.setenv(ALLOW_CHANGED_SOURCE_ENV, "1")
        patch_set = self.patch_set(package, "source")
        with caplog.at_level(logging.WARNING, "cp_shared_kv"):
            patch_set.apply()
        patch_set.undo()
        assert "source: source changed: fake.module.keywords has fingerprint" in caplog.text
        with pytest.raises(SeamError) as refused:
            self.patch_set(package, *self.WRONG).apply()
        assert self.kinds(refused) == {seam: kind for seam, (_, kind) in self.WRONG.items() if seam != "source"}

    def test_a_seam_that_is_not_imported_yet_is_not_imported_to_look_at_it(self, package: SourceTree):
        del sys.modules["fake.module"], sys.modules["fake"]
        patch_set = self.patch_set(package, "gone", "signature")
        with pytest.raises(SeamError) as refused:
            patch_set.apply()
        assert set(self.kinds(refused)) == {"gone", "signature"}
        assert "fake.module" not in sys.modules


INSTALLED = """
import json, sys
from cp_shared_kv.patches import PatchSet, all_groups, arguments
from cp_shared_kv.releases import release_for
from cp_shared_kv.seams import SourceTree, resolve
source = SourceTree.installed()
release = release_for(source.version)
resolution = resolve(source, release.targets)
sets = {role: PatchSet.for_release(source=source, role=role) for role in ("prefill", "decode")}
print(json.dumps({
    "version": source.version,
    "problems": resolution.problems,
    "changed": resolution.changed,
    "found": len(resolution.definitions),
    "targets": len(release.targets),
    "groups": {role: [group.name for group in patches.groups] for role, patches in sets.items()},
    "used": sorted({
        *PatchSet(release, source, [arguments.GROUP]).targets,
        *(seam for patches in sets.values() for seam in patches.targets),
    }),
    "table": sorted(release.targets),
    "sglang": [name for name in sys.modules if name.split(".")[0] == "sglang"],
}))
"""


class TestInstalled:
    @pytest.fixture(scope="class")
    @staticmethod
    def facts() -> dict[str, object]:
        """What a fresh process finds in the installed SGLang."""
        done = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def test_every_seam_of_the_release_is_as_the_table_says(self, facts: dict[str, object]):
        assert facts["version"] == importlib.metadata.version("sglang")
        assert (facts["problems"], facts["changed"]) == ([], [])
        assert facts["found"] == facts["targets"] > 0

    def test_resolving_imports_nothing_of_sglang(self, facts: dict[str, object]):
        assert facts["sglang"] == []

    def test_all_groups_are_resolved(self, facts: dict[str, object]):
        assert facts["groups"] == {
            "prefill": ["scheduler", "capacity", "page_ids", "attention", "indexer", "transfer", "prefill_queue"],
            "decode": ["scheduler", "decode"],
        }

    def test_every_seam_of_the_table_is_patched_or_relied_on(self, facts: dict[str, object]):
        assert facts["used"] == facts["table"]

    def test_a_missing_sglang_is_named(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("cp_shared_kv.seams.PACKAGE", "sglang-that-is-not-here")
        with pytest.raises(SeamError, match="sglang is not installed in this environment"):
            SourceTree.installed()

    def test_an_sglang_without_files_is_named(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(SeamError, match=r"sglang \S+ is installed without a package directory"):
            SourceTree.installed()
