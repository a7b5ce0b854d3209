"""``cp-shared-kv seams``: any SGLang against the table of releases."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cp_shared_kv import compare as comparing
from cp_shared_kv import releases
from cp_shared_kv.__main__ import main
from cp_shared_kv.compare import as_text, closest_release, compare, open_source, record
from cp_shared_kv.releases import installed, release_for, seam_eras, supported_versions
from cp_shared_kv.seams import PACKAGE, SeamError, SourceTree, Target

SEAM = "transfer.queue_get"


@pytest.fixture
def target() -> Target:
    return installed().targets[SEAM]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The Python files of the installed SGLang that hold seams or arguments, as a directory of their own."""
    source = SourceTree.installed()
    files = {source.file_of(target.module) for target in installed().targets.values()}
    files |= {source.file_of("sglang.srt.server_args")} | set((source.root / "srt" / "arg_groups").rglob("*.py"))
    for file in files:
        place = tmp_path / PACKAGE / file.relative_to(source.root)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    (tmp_path / f"{PACKAGE}-{source.version}.dist-info").mkdir()
    return tmp_path


def rename(copy: Path, version: str) -> None:
    (info,) = copy.glob("*.dist-info")
    info.rename(copy / f"{PACKAGE}-{version}.dist-info")


def change(copy: Path, target: Target, before: str, after: str) -> None:
    file = SourceTree(copy / PACKAGE, "x").file_of(target.module)
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


class TestReport:
    def test_the_installed_release_is_supported(self, capsys: pytest.CaptureFixture[str]):
        assert main(["seams"]) == 0
        out = capsys.readouterr().out
        total = len(installed().targets)
        assert f"seams: {total} of {total} fit\n" in out
        assert f"needs {installed().arguments.prefill_cp_flag} " in out
        on_decode = ", on decode servers" if installed().no_zigzag else ""
        assert out.endswith(f"verdict: supported{on_decode}\n")

    def test_it_runs_as_a_program_and_imports_nothing_of_sglang(self):
        code = (
            "import sys; from cp_shared_kv.__main__ import main; main(['seams', '--json']); "
            "print([m for m in sys.modules if m.split('.')[0] in ('sglang', 'torch')], file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert json.loads(done.stdout)["ok"] is True
        assert done.stderr.strip() == "[]"

    def test_a_changed_seam_is_named_with_its_fingerprint(
        self, copy: Path, target: Target, capsys: pytest.CaptureFixture[str]
    ):
        change(copy, target, "def get(self):", "def get(self):\n        pass")
        assert main(["seams", str(copy)]) == 1
        out = capsys.readouterr().out
        total = len(installed().targets)
        assert f"seams: {total - 1} of {total} fit\n" in out
        assert f"  - {SEAM}: source changed: {target.path} has fingerprint " in out
        assert out.endswith("verdict: refused, this is not the SGLang that the table knows\n")

    def test_a_seam_with_other_parameters_and_one_that_is_gone_are_named(self, copy: Path, target: Target):
        change(copy, target, "def get(self):", "def get(self, more):")
        change(copy, target, "def put(", "def push(")
        with open_source(copy) as source:
            problems = compare(source).resolution.problems
        assert sorted(problem.split(":")[0] for problem in problems) == [SEAM, "transfer.queue_put"]

    def test_a_wheel_is_read_where_it_lies(self, copy: Path, tmp_path_factory: pytest.TempPathFactory):
        wheel = tmp_path_factory.mktemp("wheel") / "sglang-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for file in copy.rglob("*.py"):
                archive.write(file, file.relative_to(copy))
            archive.writestr(f"{PACKAGE}-{installed().version}.dist-info/METADATA", "")
        with open_source(wheel) as source:
            assert compare(source).ok

    def test_an_argument_that_the_gate_cannot_do_without_is_missed(self, copy: Path):
        names = installed().arguments
        for file in copy.rglob("*.py"):
            text = file.read_text()
            if f"    {names.cp_mode}:" in text:
                file.write_text(text.replace(f"    {names.cp_mode}:", "    another_name:"))
        with open_source(copy) as source:
            comparison = compare(source)
        assert comparison.missing_names == (names.cp_mode,)
        assert not comparison.ok
        assert f"  - ServerArgs has no field {names.cp_mode}, so every server would be refused" in comparison.lines()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["seams", "no-such.whl"], "no-such.whl cannot be read as a wheel"),
            (["seams", "."], ". holds no SGLang: give a wheel"),
            (["seams", "--release", "0.4"], "SGLang 0.4 is not a supported release: supported are 0.5.11"),
        ],
    )
    def test_a_wrong_place_or_release_is_one_clear_error(
        self,
        arguments: list[str],
        message: str,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ):
        monkeypatch.chdir(tmp_path)
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith(message)


class TestUnknownReleases:
    def test_an_unknown_release_is_compared_with_the_closest_and_refused_by_name(
        self, copy: Path, capsys: pytest.CaptureFixture[str]
    ):
        rename(copy, "9.9.9")
        assert main(["seams", str(copy)]) == 1
        out = capsys.readouterr().out
        assert out.startswith("SGLang 9.9.9, compared with the row of ")
        assert "verdict: refused, SGLang 9.9.9 is not a supported release (0.5.11, " in out

    def test_the_closest_release_is_the_one_whose_seams_fit(self):
        source = SourceTree.installed()
        closest = closest_release(SourceTree(source.root, "9.9.9"))
        assert closest.targets == installed().targets

    def test_json_says_the_same(self, copy: Path, capsys: pytest.CaptureFixture[str]):
        rename(copy, "9.9.9")
        assert main(["seams", str(copy), "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert (report["source"], report["ok"], report["changed"]) == ("9.9.9", False, [])


class TestTakingUp:
    """A new release gets its row by the tool."""

    @pytest.fixture
    def table(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A table of its own, in which the installed release is the only and newest one."""
        table = tmp_path_factory.mktemp("table") / "seams.json"
        (first, *_), version = supported_versions(), installed().version
        eras = {
            seam: {first: {**look, "since": first}}
            for seam, looks in seam_eras().items()
            if (look := releases._at(version, looks)) is not None
        }
        monkeypatch.setattr(releases, "VERSIONS", (*supported_versions(), "9.9.9"))
        table.write_text(as_text(eras))
        monkeypatch.setattr(releases.resources, "files", lambda package: table.parent)
        seam_eras.cache_clear()
        release_for.cache_clear()
        yield table
        monkeypatch.undo()
        seam_eras.cache_clear()
        release_for.cache_clear()

    def test_what_changed_is_recorded_and_fits_from_then_on(self, copy: Path, target: Target, table: Path):
        rename(copy, "9.9.9")
        change(copy, target, "def get(self):", "def get(self, more=None):")
        before = release_for("0.5.23").targets[SEAM]
        with open_source(copy) as source:
            assert not compare(source, "9.9.9").resolution.ok
            assert record(source) == ([SEAM], [])
            assert compare(source, "9.9.9").resolution.ok
        assert release_for("9.9.9").targets[SEAM].parameters == ("self", "more")
        assert release_for("0.5.23").targets[SEAM] == before
        assert table.read_text().count('"since": "9.9.9"') == 1

    def test_recording_twice_changes_nothing_more(self, copy: Path, target: Target, table: Path):
        rename(copy, "9.9.9")
        change(copy, target, "def get(self):", "def get(self, more=None):")
        with open_source(copy) as source:
            record(source)
            text = table.read_text()
            assert record(source) == ([], [])
        assert table.read_text() == text

    def test_a_seam_that_moved_is_left_to_be_placed_by_hand(
        self, copy: Path, target: Target, table: Path, capsys: pytest.CaptureFixture[str]
    ):
        rename(copy, "9.9.9")
        change(copy, target, "def get(self):", "def take(self):")
        text = table.read_text()
        assert main(["seams", str(copy), "--record"]) == 1
        assert f"to be placed by hand: {SEAM}: " in capsys.readouterr().out
        assert table.read_text() == text

    def test_a_release_that_is_not_listed_is_not_recorded(self, copy: Path):
        rename(copy, "9.9.8")
        with open_source(copy) as source, pytest.raises(SeamError, match=r"SGLang 9\.9\.8 is not a supported release"):
            record(source)

    def test_the_table_in_the_repository_is_as_the_tool_writes_it(self):
        path = Path(releases.__file__).with_name("seams.json")
        assert path.read_text() == as_text(seam_eras())


def test_the_gate_reads_what_the_tool_says_it_reads() -> None:
    names = installed().arguments
    assert {names.prefill_cp, names.cp_mode, "page_size", "dcp_size"} <= comparing.arguments_read(installed())
