"""Comparing any SGLang, installed or in a wheel, with the table of releases: how a new release is taken up."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cp_shared_kv.gate import RULES, Facts
from cp_shared_kv.releases import Release, public_part, release_for, seam_eras, supported_versions
from cp_shared_kv.seams import PACKAGE, Resolution, SeamError, SourceTree, resolve


@contextmanager
def open_source(path: Path | None) -> Iterator[SourceTree]:
    """SGLang's source at a place, for the time of a ``with`` block.

    Args:
        path: a wheel, a directory that holds the ``sglang`` package, such as ``site-packages``; None for the installed.

    Raises:
        SeamError: there is no SGLang.
    """
    if path is None:
        yield SourceTree.installed()
    elif path.suffix == ".whl":
        with TemporaryDirectory() as directory:
            _unpack(path, Path(directory))
            yield _source_in(Path(directory), path)
    else:
        yield _source_in(path, path)


def _may_hold_a_seam(name: str) -> bool:
    return name.startswith((f"{PACKAGE}/srt/", f"{PACKAGE}/kernels/")) and name.endswith(".py")


def _unpack(wheel: Path, directory: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if ".dist-info/" in name or _may_hold_a_seam(name)]
            archive.extractall(directory, wanted)
    except (OSError, zipfile.BadZipFile) as error:
        raise SeamError([f"{wheel} cannot be read as a wheel ({type(error).__name__}: {error})"]) from None


def _source_in(directory: Path, named: Path) -> SourceTree:
    found = sorted(directory.glob(f"{PACKAGE}-*.dist-info"))
    if not (directory / PACKAGE).is_dir() or len(found) != 1:
        raise SeamError([f"{named} holds no SGLang: give a wheel, or the directory of {PACKAGE}/ and its .dist-info"])
    return SourceTree(directory / PACKAGE, found[0].name.removeprefix(f"{PACKAGE}-").removesuffix(".dist-info"))


def closest_release(source: SourceTree) -> Release:
    """The supported release whose seams a source fits best; the newer of two that fit alike."""

    newest_first = (release_for(version) for version in reversed(supported_versions()))
    return max(newest_first, key=lambda release: _fitting(release, resolve(source, release.targets)))


def _fitting(release: Release, found: Resolution) -> int:
    """How many seams of a release are as its row says."""
    return len(release.targets) - len(found.problems) - len(found.changed)


def is_supported(version: str) -> bool:
    """Whether a release has a row."""
    return public_part(version) in supported_versions()


def arguments_read(release: Release) -> set[str]:
    """Names of the ``ServerArgs`` fields that the gate's rules read on a release."""
    read: set[str] = set()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return None

    facts = Facts(Recorder(), release.arguments, {}, "", False, False)
    for rule in RULES:
        rule.check(facts)
    return read


def declared_arguments(source: SourceTree) -> set[str]:
    """Annotated names in the files that declare ``ServerArgs``; a superset of its fields."""
    files = [source.file_of("sglang.srt.server_args"), *(source.root / "srt" / "arg_groups" / "fields").glob("*.py")]
    return {
        name
        for file in files
        if file.exists()
        for name in re.findall(r"^    (\w+)\s*:", file.read_text(encoding="utf-8"), re.MULTILINE)
    }


@dataclass(frozen=True)
class Comparison:
    """A source against a release of the table.

    Attributes:
        source: release of the source.
        release: release whose row it is compared with.
        resolution: the seams.
        absent_arguments: fields that the gate reads and this source does not declare.
        missing_names: of those, the ones that the gate cannot do without.
    """

    source: str
    release: Release
    resolution: Resolution
    absent_arguments: tuple[str, ...]
    missing_names: tuple[str, ...]

    @property
    def is_supported(self) -> bool:
        """Whether the source is that very release."""
        return public_part(self.source) == self.release.version

    @property
    def ok(self) -> bool:
        """Whether the plugin would run on the source."""
        return self.is_supported and self.resolution.ok and not self.missing_names

    def lines(self) -> Iterator[str]:
        """The report, for people."""
        release, resolution = self.release, self.resolution
        yield f"SGLang {self.source}, compared with the row of {release.version}"
        yield f"seams: {_fitting(release, resolution)} of {len(release.targets)} fit"
        for line in (*resolution.problems, *resolution.changed):
            yield f"  - {line}"
        for seam, why in release.absent.items():
            yield f"  not in this release: {seam}: {why}"
        names = release.arguments
        yield (
            f"gate: a prefill server needs {names.prefill_cp_flag} {names.cp_mode_flag} {names.in_seq_split} "
            f"{names.prefill_backend_flag} flashmla_sparse"
        )
        if release.no_zigzag:
            yield f"  - every prefill server is refused: {release.no_zigzag}"
        for name in self.missing_names:
            yield f"  - ServerArgs has no field {name}, so every server would be refused"
        if self.absent_arguments:
            yield f"  read as absent: {', '.join(self.absent_arguments)}"
        for hint in release.upstream:
            yield f"  note: {hint}"
        if self.ok:
            yield "verdict: supported" + (", on decode servers" if release.no_zigzag else "")
        elif not self.is_supported:
            yield (
                f"verdict: refused, SGLang {self.source} is not a supported release "
                f"({', '.join(supported_versions())}); docs/new-release.md says how one is taken up"
            )
        else:
            yield "verdict: refused, this is not the SGLang that the table knows"

    def to_json(self) -> dict[str, Any]:
        """The report, for programs."""
        return {
            "source": self.source,
            "release": self.release.version,
            "ok": self.ok,
            "targets": len(self.release.targets),
            "problems": list(self.resolution.problems),
            "changed": list(self.resolution.changed),
            "absent": dict(self.release.absent),
            "absent_arguments": list(self.absent_arguments),
            "missing_names": list(self.missing_names),
            "no_zigzag": self.release.no_zigzag,
        }


def compare(source: SourceTree, version: str | None = None) -> Comparison:
    """Compare a source with a row.

    Args:
        source: any SGLang.
        version: release of the row; by default the source's own, or the closest one where it has none.

    Raises:
        SeamError: the named release has no row.
    """
    if version is None and not is_supported(source.version):
        release = closest_release(source)
    else:
        release = release_for(version or source.version)
    declared = declared_arguments(source)
    absent = arguments_read(release) - declared
    names = release.arguments
    needed = {names.prefill_cp, names.cp_mode, names.prefill_backend, names.decode_backend, "page_size", "attn_cp_size"}
    return Comparison(
        source.version,
        release,
        resolve(source, release.targets),
        tuple(sorted(absent)),
        tuple(sorted(needed - declared)),
    )


def record(source: SourceTree) -> tuple[list[str], list[str]]:
    """Write how a release's seams look into ``seams.json`` of this checkout, where they lie where they lay before.

    Args:
        source: a release that is in ``releases.VERSIONS``.

    Returns:
        seams whose look was recorded, and what is left to do by hand: seams that are not where they were.

    Raises:
        SeamError: the release is not in the list.
    """
    release = release_for(source.version)
    eras = {seam: dict(looks) for seam, looks in seam_eras().items()}
    recorded, left = [], []
    for seam, target in release.targets.items():
        found = source.find(target.module, target.qualname)
        if isinstance(found, str):
            left.append(f"{seam}: {found}")
        elif (found.parameters, found.fingerprint) != (target.parameters, target.fingerprint):
            look: dict[str, Any] = {
                "since": release.version,
                "at": f"{target.module}:{target.qualname}",
                "parameters": ", ".join(found.parameters),
                "fingerprint": found.fingerprint,
            }
            if target.source_only:
                look["source_only"] = True
            eras[seam][release.version] = look
            recorded.append(seam)
    if recorded:
        with resources.as_file(resources.files(__package__).joinpath("seams.json")) as path:
            path.write_text(as_text(eras), encoding="utf-8")
        seam_eras.cache_clear()
        release_for.cache_clear()
    return recorded, left


def as_text(eras: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """``seams.json`` as it is written: one line an era, oldest first."""
    order = supported_versions().index
    seams = []
    for seam, looks in eras.items():
        lines = ",\n".join(f"  {json.dumps(looks[since])}" for since in sorted(looks, key=order))
        seams.append(f" {json.dumps(seam)}: [\n{lines}\n ]")
    return "{\n" + ",\n".join(seams) + "\n}\n"
