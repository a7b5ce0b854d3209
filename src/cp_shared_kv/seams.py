"""Seams: the places in SGLang's source that the product depends on, found and checked without importing SGLang.

A seam is a function or method named by module and qualified name. Its source is located in the installed package (or
any unpacked wheel), parsed, and compared with what the release table says: it exists, takes the same parameters, and
is the same source. Reading source rather than importing keeps the check independent of plugin order, since importing
SGLang's layers early freezes flags such as ``is_cuda`` for every other plugin.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

PACKAGE = "sglang"


class SeamError(RuntimeError):
    """Seams that are missing, changed or taken; ``problems`` lists every one of them."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{len(self.problems)} of the SGLang seams that CP shared KV needs cannot be used:\n{lines}")


@dataclass(frozen=True)
class Target:
    """Where a seam lies in one release, and what it looked like when it was taken up.

    Args:
        module: dotted module name, such as ``sglang.srt.server_args``.
        qualname: function, or class and method, such as ``ServerArgs.check_server_args``.
        parameters: parameter names in order; ``*``/``**`` mark variadic ones.
        fingerprint: first 16 hex digits of the SHA-256 of the function's source (see :func:`fingerprint`).
        source_only: compare its source alone: a kernel is an object of Triton's, and a platform without Triton stands
            in for it.
    """

    module: str
    qualname: str
    parameters: tuple[str, ...]
    fingerprint: str
    source_only: bool = False

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Target:
        """A target as ``seams.json`` has it: ``at`` is ``module:qualname``, ``parameters`` are joined by commas."""
        module, _, qualname = entry["at"].partition(":")
        parameters = tuple(entry["parameters"].split(", ")) if entry["parameters"] else ()
        return cls(module, qualname, parameters, entry["fingerprint"], entry.get("source_only", False))

    @property
    def path(self) -> str:
        """Dotted path as SGLang's ``HookRegistry`` writes it."""
        return f"{self.module}.{self.qualname}"


@dataclass(frozen=True)
class Definition:
    """A seam as found in source: first line (decorators included), parameters and fingerprint."""

    first_line: int
    parameters: tuple[str, ...]
    fingerprint: str


def fingerprint(source: str) -> str:
    """First 16 hex digits of the SHA-256 of ``source``, trailing blanks aside."""
    text = "\n".join(line.rstrip() for line in source.strip("\n").splitlines())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    if args.vararg:
        names.append("*" + args.vararg.arg)
    names += [arg.arg for arg in args.kwonlyargs]
    if args.kwarg:
        names.append("**" + args.kwarg.arg)
    return tuple(names)


class SourceTree:
    """SGLang's source on disk: ``root`` is the directory of the ``sglang`` package, ``version`` its release."""

    def __init__(self, root: Path, version: str) -> None:
        self.root = Path(root)
        self.version = version
        self._modules: dict[str, tuple[str, ast.Module] | str] = {}

    @classmethod
    def installed(cls) -> SourceTree:
        """The installed SGLang.

        Raises:
            SeamError: SGLang is not installed, or not as files.
        """
        try:
            version = importlib.metadata.version(PACKAGE)
        except importlib.metadata.PackageNotFoundError:
            raise SeamError(["sglang is not installed in this environment; install it beside this plugin"]) from None
        spec = importlib.util.find_spec(PACKAGE)
        locations = list(spec.submodule_search_locations or []) if spec else []
        if not locations:
            raise SeamError([f"sglang {version} is installed without a package directory; install it as files"])
        return cls(Path(locations[0]), version)

    def file_of(self, module: str) -> Path:
        """Path that holds ``module``; it need not exist."""
        relative = Path(*module.split(".")[1:])
        package = self.root / relative / "__init__.py"
        return package if package.exists() else self.root / relative.with_suffix(".py")

    def _parse(self, module: str) -> tuple[str, ast.Module] | str:
        if module not in self._modules:
            path = self.file_of(module)
            try:
                text = path.read_text(encoding="utf-8")
                self._modules[module] = (text, ast.parse(text))
            except (OSError, SyntaxError, ValueError) as error:
                self._modules[module] = f"module {module} cannot be read ({type(error).__name__})"
        return self._modules[module]

    def find(self, module: str, qualname: str) -> Definition | str:
        """Definition of ``module.qualname``, or a sentence that says why there is none."""
        parsed = self._parse(module)
        if isinstance(parsed, str):
            return parsed
        text, tree = parsed
        body: list[ast.stmt] = tree.body
        *classes, name = qualname.split(".")
        for class_name in classes:
            found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name]
            if not found:
                return f"class {class_name} is not defined in {module}"
            body = found[-1].body
        functions = [n for n in body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name]
        if not functions:
            return f"{qualname} is not defined in {module}"
        node = functions[-1]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        source = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        return Definition(first, _parameters(node), fingerprint(source))

    def describe(self, module: str, qualname: str) -> Target:
        """Row for the release table, as this source has it.

        Raises:
            SeamError: there is no such definition.
        """
        found = self.find(module, qualname)
        if isinstance(found, str):
            raise SeamError([found])
        return Target(module, qualname, found.parameters, found.fingerprint)


@dataclass(frozen=True)
class Resolution:
    """Outcome of comparing a release's seams with a source tree.

    ``problems`` forbid patching; ``changed`` are seams whose parameters still fit but whose source differs.
    """

    version: str
    definitions: Mapping[str, Definition]
    problems: tuple[str, ...]
    changed: tuple[str, ...]

    @cached_property
    def ok(self) -> bool:
        return not self.problems and not self.changed


def resolve(source: SourceTree, targets: Mapping[str, Target]) -> Resolution:
    """Compare every seam with ``source``; reports all problems, never only the first.

    Args:
        source: the SGLang to look at.
        targets: seam id -> where it should be and how it should look.
    """
    definitions: dict[str, Definition] = {}
    problems: list[str] = []
    changed: list[str] = []
    for seam, target in targets.items():
        found = source.find(target.module, target.qualname)
        if isinstance(found, str):
            problems.append(f"{seam}: missing: {found}")
            continue
        definitions[seam] = found
        if found.parameters != target.parameters:
            problems.append(
                f"{seam}: signature changed: {target.path} takes ({', '.join(found.parameters)}), "
                f"expected ({', '.join(target.parameters)})"
            )
        elif found.fingerprint != target.fingerprint:
            changed.append(
                f"{seam}: source changed: {target.path} has fingerprint {found.fingerprint}, "
                f"expected {target.fingerprint}"
            )
    return Resolution(source.version, definitions, tuple(problems), tuple(changed))
