"""``docs/patches.md`` is what the patches, the release table and the reasons say today."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import cp_shared_kv
from cp_shared_kv.patches import arguments, builtin_groups, catalogue
from cp_shared_kv.releases import installed, release_for, supported_versions
from cp_shared_kv.seams import SourceTree

PAGE = Path(__file__).resolve().parents[2] / "docs" / "patches.md"
OURS = Path(cp_shared_kv.__file__).parent


@pytest.fixture(scope="module")
def page() -> str:
    return catalogue.render()


def test_the_page_in_docs_is_current(page: str) -> None:
    assert PAGE.read_text(encoding="utf-8") == page, f"docs/patches.md is stale, run: {catalogue.COMMAND}"


def test_the_command_prints_the_page_without_sglang_and_without_an_accelerator(page: str) -> None:
    code = (
        "import runpy, sys; sys.modules['sglang'] = None; "
        "runpy.run_module('cp_shared_kv.patches.catalogue', run_name='__main__')"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, page), done.stderr
    assert catalogue.COMMAND == "python -m cp_shared_kv.patches.catalogue > docs/patches.md"


def test_every_patch_is_listed_with_its_reason_and_its_end(page: str) -> None:
    for group in (*builtin_groups(), arguments.GROUP):
        section = page.split(f"\n## {group.name}\n")[1].split("\n## ")[0]
        for patch in group.patches:
            assert f"### `{patch.seam}`: wrap\n\n- Why: {patch.why}.\n- Can go when: {patch.until}.\n" in section
        for seam in group.relies_on:
            dependency = catalogue.DEPENDENCIES[group.name][seam]
            assert f"### `{seam}`: {dependency.kind}\n\n- Why: {dependency.why}.\n" in section


@pytest.mark.parametrize("version", supported_versions())
def test_every_seam_and_argument_name_of_a_release_is_listed_as_the_table_has_it(page: str, version: str) -> None:
    release = release_for(version)
    for target in release.targets.values():
        assert f"| `{target.path}` | `{', '.join(target.parameters)}` | `{target.fingerprint}` |" in page
    for why in release.absent.values():
        assert f"| none: {why} |" in page
    for name, value in vars(release.arguments).items():
        assert f"| `{name}` |" in page
        assert f"| `{value}` |" in page


def test_releases_that_are_alike_share_a_line_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    first = release_for("0.5.12.post1")
    seam, target = next(iter(first.targets.items()))
    table = {
        "9.0": replace(first, version="9.0"),
        "9.1": replace(first, version="9.1"),
        "9.2": replace(first, version="9.2", targets={seam: replace(target, fingerprint="f" * 16)}),
    }
    monkeypatch.setattr(catalogue, "supported_versions", lambda: tuple(table))
    monkeypatch.setattr(catalogue, "release_for", table.__getitem__)
    text = catalogue.render()
    assert text.count(f"| 9.0 to 9.1 | `{target.path}` |") == 1
    assert text.count("| 9.2 | ") == 1
    assert f"| 9.2 | `{target.path}` |" in text
    assert "| name here | 9.0 to 9.2 |" in text


def test_every_seam_that_is_not_wrapped_has_a_reason_and_every_reason_a_seam() -> None:
    assert catalogue.undocumented() == []


def test_a_seam_without_a_reason_and_a_reason_without_a_seam_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {**catalogue.DEPENDENCIES, "attention": {"attention.gone": catalogue.Dependency("relies on", "a test")}}
    monkeypatch.setattr(catalogue, "DEPENDENCIES", reasons)
    named = ["attention: attention.forward_extend", "attention: attention.gone"]
    assert catalogue.undocumented() == named
    with pytest.raises(LookupError, match=", ".join(named)):
        catalogue.render()


def test_the_order_in_which_groups_and_seams_are_declared_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    turned = tuple(
        replace(group, patches=group.patches[::-1], relies_on=group.relies_on[::-1]) for group in builtin_groups()[::-1]
    )
    monkeypatch.setattr(catalogue, "builtin_groups", lambda: turned)
    assert catalogue.render() == page


@cache
def classes(path: Path) -> dict[str, tuple[list[str], set[str]]]:
    """Class name -> names of its bases and of the methods that it defines."""
    return {
        node.name: (
            [base.id for base in node.bases if isinstance(base, ast.Name)],
            {item.name for item in node.body if isinstance(item, ast.FunctionDef)},
        )
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


#: Class of ours -> name in ``releases`` of the stock class that it is made from.
STOCK = {
    "CPSharedNSATokenToKVPool": "NSATokenToKVPool",
    "CPSharedPagedTokenToKVPoolAllocator": "PagedTokenToKVPoolAllocator",
}


def line_of_descent(source: SourceTree, name: str, module: str) -> set[str]:
    """A class of a module and those that it descends from, as far as they are defined or imported by name in files."""
    known = {**classes(source.file_of(module))}
    for other in (module.rpartition(".")[0], f"{module.rpartition('.')[0]}.base"):
        known = {**classes(source.file_of(other)), **known} if source.file_of(other).exists() else known
    found, left = set(), [name]
    while left:
        if (each := left.pop()) not in found:
            found.add(each)
            left += known.get(each, ([], set()))[0]
    return found


@pytest.mark.parametrize(
    ("group", "seam"),
    [
        (group, seam)
        for group, seams in catalogue.DEPENDENCIES.items()
        for seam in seams
        if seam in installed().targets and not installed().targets[seam].source_only
    ],
)
def test_a_seam_is_an_override_exactly_where_a_class_of_ours_overrides_it(group: str, seam: str) -> None:
    source, release = SourceTree.installed(), installed()
    target = release.targets[seam]
    stock_class, _, method = target.qualname.rpartition(".")
    ours = {**classes(OURS / "allocator.py"), **classes(OURS / "pool.py")}
    overridden = False
    for name, stock in STOCK.items():
        module, _, base = (release.symbols[stock] or "").partition(":")
        overridden |= method in ours[name][1] and stock_class in line_of_descent(source, base, module)
    assert catalogue.DEPENDENCIES[group][seam].kind == ("override" if overridden else "relies on")
