"""The release matrix: what it reads of a run, the page it writes, environments it refuses, and its arguments."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))

from cp_shared_kv.releases import supported_versions
from cp_shared_kv.seams import SourceTree
from matrix import __main__ as cli
from matrix import environments, page, scenarios
from matrix.environments import EnvironmentFault
from matrix.page import PageFault, Result, describe, read, render
from matrix.scenarios import FAILED, PASSED, REFUSED, SCENARIOS, Outcome, plain

SUPPORTED = ("1.0", "1.1", "1.2")
PLUGIN = "cp_shared_kv"

Junit = Callable[[str], Outcome]


@pytest.fixture
def junit(tmp_path: Path) -> Junit:
    """Outcome of a test file, run by a pytest of its own through the runner."""

    def run(source: str) -> Outcome:
        tests = tmp_path / "test_it.py"
        tests.write_text("import pytest\n" + textwrap.dedent(source))
        return scenarios.run_pytest((str(tests),), Path(sys.executable), tmp_path / "it.log", limit_s=60)

    return run


def wheel(directory: Path, name: str, version: str, files: dict[str, str], metadata: str = "") -> Path:
    """A wheel that pip installs."""
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def sglang(directory: Path, version: str = "9.9") -> Path:
    return wheel(directory, "sglang", version, {"sglang/__init__.py": "", "sglang/srt/__init__.py": ""})


class TestOutcomes:
    def test_passed_skipped_and_failed_tests_are_counted_with_reasons_and_messages(self, junit: Junit):
        outcome = junit(
            """
            def test_one(): pass
            def test_two(): pass
            @pytest.mark.skip(reason="no GPU")
            def test_skipped(): pass
            @pytest.mark.skip(reason="no GPU")
            def test_skipped_too(): pass
            @pytest.mark.xfail(reason="known")
            def test_known(): assert False
            def test_wrong(): assert 1 == 2, "one is two"
            @pytest.fixture
            def broken(): raise RuntimeError("no pages left")
            def test_setup(broken): pass
            """
        )
        assert outcome.verdict == FAILED
        assert outcome.counts == {"failed": 2, "passed": 2, "skipped": 3}
        assert outcome.skips == {"no GPU": 2, "known": 1}
        assert [text.split("::")[-1] for text in outcome.failures] == [
            "test_wrong: AssertionError: one is two",
            "test_setup: RuntimeError: no pages left",
        ]

    def test_a_file_that_cannot_be_imported_fails_with_its_exception_and_the_other_file_still_runs(
        self, tmp_path: Path
    ):
        (tmp_path / "test_a.py").write_text("import there_is_no_such_module\n")
        (tmp_path / "test_b.py").write_text("def test_b(): pass\n")
        outcome = scenarios.run_pytest((str(tmp_path),), Path(sys.executable), tmp_path / "it.log", limit_s=60)
        assert outcome.counts == {"failed": 1, "passed": 1}
        assert "test_a: ModuleNotFoundError: No module named 'there_is_no_such_module'" in outcome.failures[0]

    def test_figures_are_added_or_the_greatest_is_taken_and_texts_are_listed(self, junit: Junit):
        outcome = junit(
            """
            @pytest.mark.parametrize(("pages", "difference", "backend"), [(3, 0.0, "a"), (5, 0.25, "b"), (1, 0.1, "a")])
            def test_it(record_property, pages, difference, backend):
                record_property("pages compared", pages)
                record_property("greatest logprob difference", difference)
                record_property("backends", backend)
            """
        )
        assert outcome.figures == {"pages compared": "9", "greatest logprob difference": "0.25", "backends": "a, b"}
        assert describe(outcome) == ("passed 3; pages compared 9; greatest logprob difference 0.25; backends a, b")

    def test_hypothesis_adds_no_figure(self, junit: Junit):
        outcome = junit(
            """
            from hypothesis import given, strategies
            @given(strategies.integers())
            def test_it(number): pass
            """
        )
        assert (outcome.counts, outcome.figures) == ({"passed": 1}, {})

    def test_a_refusal_is_no_failure_and_its_reason_is_kept_once(self, junit: Junit):
        outcome = junit(
            """
            @pytest.mark.skip(reason="refused: SGLang refuses zigzag")
            def test_skipped(): pass
            @pytest.mark.parametrize("cp", [2, 4])
            def test_refusal_is_as_written(record_property, cp): record_property("refused", "SGLang refuses zigzag")
            """
        )
        assert (outcome.verdict, outcome.counts) == (REFUSED, {"refused": 3})
        assert list(outcome.refusals) == ["SGLang refuses zigzag"]
        assert describe(outcome) == "refused: SGLang refuses zigzag"

    def test_a_refused_test_that_fails_is_a_failure(self, junit: Junit):
        outcome = junit(
            """
            def test_it(record_property):
                record_property("refused", "SGLang refuses zigzag")
                assert False
            """
        )
        assert (outcome.verdict, outcome.counts) == (FAILED, {"failed": 1})

    def test_tests_that_pass_beside_refused_ones_pass(self, junit: Junit):
        outcome = junit(
            """
            def test_one(): pass
            @pytest.mark.skip(reason="refused: by the gate")
            def test_two(): pass
            """
        )
        assert (outcome.verdict, describe(outcome)) == (PASSED, "passed 1, refused 1")

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            pytest.param("", "no test ran to its end", id="no test is selected"),
            pytest.param("def test_it(): pytest.skip('no GPU')", "no test ran to its end", id="all are skipped"),
            pytest.param("def test_it():\n    import os; os._exit(3)", "status 3", id="pytest dies"),
            pytest.param(
                "import os, atexit; atexit.register(os._exit, 9)\ndef test_it(): pass", "status 9", id="at exit"
            ),
        ],
    )
    def test_a_run_without_a_full_result_is_a_failure(self, junit: Junit, source: str, said: str):
        outcome = junit(source)
        assert outcome.verdict == FAILED
        assert said in describe(outcome)

    def test_a_run_over_its_time_is_a_failure_and_leaves_no_process(self, tmp_path: Path):
        survives = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
        log = tmp_path / "log"
        command = [sys.executable, "-uc", f"{survives}; time.sleep(600)"]
        assert scenarios.run_process(command, tmp_path, log, limit_s=3) is None
        [left] = log.read_text().split()
        state = Path(f"/proc/{left}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"

    def test_settings_of_the_shell_do_not_reach_a_scenario(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("CP_SHARED_KV_ALLOW_CHANGED_SOURCE", "1")
        monkeypatch.setenv("SGLANG_PLUGINS", "other")
        log = tmp_path / "log"
        show = "import os; print([k for k in os.environ if k.startswith(('CP_SHARED_KV', 'SGLANG_'))])"
        assert scenarios.run_process([sys.executable, "-c", show], tmp_path, log, limit_s=60) == 0
        assert log.read_text().strip() == "[]"

    def test_messages_keep_their_first_line_and_no_directory_of_this_machine(self):
        assert plain(f"\n open {scenarios.ROOT}/tests/a.py: no /var/tmp/x-1/b.py\nmore") == "open tests/a.py: no b.py"
        assert plain("see https://host/a/b, 1/2 and a/b") == "see https://host/a/b, 1/2 and a/b"
        assert len(plain("x" * 1000)) == scenarios.TEXT_LIMIT


class TestSeams:
    def test_seams_of_the_installed_release_are_all_found_in_a_wheel_of_its_source(self, tmp_path: Path):
        source = SourceTree.installed()
        files = {
            f"sglang/{path.relative_to(source.root)}": path.read_text(encoding="utf-8")
            for path in (source.root / "srt").rglob("*.py")
        }
        made = wheel(tmp_path, "sglang", source.version, files)
        outcome = scenarios.compare_seams(made, tmp_path / "log")
        assert (outcome.verdict, list(outcome.failures)) == (PASSED, [])
        assert outcome.counts["passed"] > 50

    def test_every_seam_that_a_wheel_lacks_is_counted_and_the_first_are_named(self, tmp_path: Path):
        outcome = scenarios.compare_seams(sglang(tmp_path, supported_versions()[0]), tmp_path / "log")
        assert outcome.verdict == FAILED
        assert outcome.counts["failed"] > 50
        assert len(outcome.failures) == scenarios.NAMED_FAILURES
        assert "scheduler.init: missing: module sglang.srt.managers.scheduler cannot be read" in str(outcome.failures)

    def test_seams_that_cannot_be_compared_are_a_failure(self, tmp_path: Path):
        (tmp_path / "no.whl").write_text("not a wheel")
        outcome = scenarios.compare_seams(tmp_path / "no.whl", tmp_path / "log")
        assert "failed: ended with status 2: no.whl cannot be read as a wheel" in describe(outcome)


class TestEnvironments:
    @pytest.fixture
    def cache(self, tmp_path: Path) -> Path:
        cache = tmp_path / "wheels"
        cache.mkdir()
        sglang(cache)
        wheel(cache, "matrix_extra", "2.0", {"matrix_extra.py": ""})
        return cache

    def build(self, cache: Path, *extra: str) -> Path:
        return environments.build("9.9", extra, layers=cache.parent / "layers", cache=cache)

    def test_a_layer_runs_its_own_sglang_and_what_it_needs_more_beside_the_packages_below(self, cache: Path):
        directory = self.build(cache, "matrix-extra==2.0")
        environment = environments.check("9.9", directory)
        assert environment.versions.keys() == {"Python", "torch", "transformers", "mooncake"}
        assert "absent" not in environment.versions.values()
        imports = "import sglang, matrix_extra, cp_shared_kv; print(sglang.__file__)"
        assert str(directory) in environments._run("imports", str(environment.python), "-c", imports)

    def test_a_second_build_does_nothing_and_another_wheel_builds_anew(self, cache: Path):
        mark = self.build(cache) / "mark"
        mark.touch()
        self.build(cache)
        assert mark.exists()
        self.build(cache, "matrix-extra")
        assert not mark.exists()

    def test_a_build_that_was_broken_off_is_not_taken_for_an_environment(self, cache: Path, monkeypatch):
        monkeypatch.setattr(environments, "QUIET", ("--no-such-flag",))
        with pytest.raises(EnvironmentFault, match=r"installation of SGLang 9\.9: .*no such option"):
            self.build(cache)
        monkeypatch.undo()
        environments.check("9.9", self.build(cache))

    def test_a_layer_without_its_sglang_is_refused_since_that_below_would_be_run(self, cache: Path):
        directory = self.build(cache)
        [package] = directory.glob("lib/*/site-packages/sglang")
        shutil.rmtree(package)
        with pytest.raises(EnvironmentFault, match=r"SGLang 9\.9 is not as it must be: import loads .*sglang/__init__"):
            environments.check("9.9", directory)

    def test_a_layer_with_metadata_of_another_release_is_refused(self, cache: Path):
        directory = self.build(cache)
        [metadata] = directory.glob("lib/*/site-packages/sglang-9.9.dist-info")
        text = (metadata / "METADATA").read_text()
        (metadata / "METADATA").write_text(text.replace("Version: 9.9", "Version: 9.8"))
        with pytest.raises(EnvironmentFault, match=r"metadata is that of SGLang 9\.8"):
            environments.check("9.9", directory)

    def test_a_layer_whose_metadata_is_lost_is_refused(self, cache: Path):
        directory = self.build(cache)
        [metadata] = directory.glob("lib/*/site-packages/sglang-9.9.dist-info")
        metadata.rename(metadata.with_name("elsewhere"))
        with pytest.raises(EnvironmentFault, match=r"metadata is that of SGLang .*; entry points come from"):
            environments.check("9.9", directory)

    def test_a_layer_that_does_not_see_the_plugin_is_refused(self, cache: Path):
        directory = self.build(cache)
        [below] = directory.glob("lib/*/site-packages/zz_below.pth")
        places = [path for path in sys.path if path.endswith("site-packages")]
        alone = cache.parent / "alone"
        alone.mkdir()
        for place in places:
            for package in Path(place).iterdir():
                link = alone / package.name
                if PLUGIN not in package.name.replace("-", "_") and package.name != below.name and not link.exists():
                    link.symlink_to(package)
        below.write_text(f"import site; site.addsitedir({str(alone)!r})\n")
        with pytest.raises(EnvironmentFault, match=f"SGLang would not find the plugin {PLUGIN}"):
            environments.check("9.9", directory)

    def test_a_wheel_is_downloaded_only_where_the_cache_has_none_for_this_python(self, cache: Path, monkeypatch):
        commands = []

        def download(what: str, *command: str) -> str:
            commands.append(what)
            sglang(cache, "9.8")
            return ""

        monkeypatch.setattr(environments, "_run", download)
        assert environments.sglang_wheel("9.9", cache).name == "sglang-9.9-py3-none-any.whl"
        assert commands == []
        (cache / "sglang-9.8-cp27-cp27m-win32.whl").touch()
        assert environments.sglang_wheel("9.8", cache).name == "sglang-9.8-py3-none-any.whl"
        assert commands == ["download of sglang==9.8"]
        with pytest.raises(EnvironmentFault, match=r"no wheel that fits sglang==9\.7"):
            environments.sglang_wheel("9.7", cache)

    def test_pins_are_those_of_the_metadata_that_hold_here(self, tmp_path: Path):
        metadata = (
            "Requires-Dist: torch==2.1; sys_platform == 'linux'\nRequires-Dist: torch==2.0; sys_platform == 'win32'\n"
            "Requires-Dist: transformers>=5\nRequires-Dist: numpy==1\nRequires-Dist: torch==1.0; extra == 'old'\n"
        )
        made = wheel(tmp_path, "sglang", "9.9", {}, metadata)
        assert environments.pins_of(made) == {"torch": "2.1", "transformers": ">=5"}


def result(verdict: str = PASSED, source: str = "s", **fields) -> Result:
    outcome = Outcome(verdict, **{"counts": {"passed": 5}, "source": source, **fields})
    return Result({"Python": "3.11.7", "torch": "2.2+cpu", "mooncake": "0.3"}, {"torch": "2.1"}, {"pd": outcome})


def cells(text: str, release: str) -> list[list[str]]:
    """The rows of a release, table by table."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith(f"| {release} |")]
    return [[cell.strip() for cell in row] for row in rows]


class TestPage:
    def test_what_was_not_run_is_called_so(self):
        text = render({"1.1": result()}, SUPPORTED)
        assert cells(text, "1.0") == [["1.0", *["not run"] * len(SCENARIOS)], ["1.0", *["not run"] * 4]]
        assert cells(text, "1.1")[0] == ["1.1", *("passed 5" if name == "pd" else "not run" for name in SCENARIOS)]

    def test_versions_that_were_run_are_beside_those_that_the_release_pins(self):
        results = {"1.1": result(), "1.2": Result({"torch": "2.1+cpu"}, {"torch": "2.1", "transformers": "5"})}
        text = render(results, SUPPORTED)
        assert cells(text, "1.1")[1] == ["1.1", "3.11.7", "2.2+cpu (2.1)", "not run", "0.3"]
        assert cells(text, "1.2")[1] == ["1.2", "not run", "2.1+cpu", "not run (5)", "not run"]

    def test_a_refusal_is_in_the_table_with_its_reason_and_a_failure_stands_out(self):
        reasons = ["SGLang refuses zigzag", "the gate refuses a|b"]
        results = {
            "1.0": result(REFUSED, counts={"refused": 2}, refusals=reasons),
            "1.1": result(FAILED, counts={"failed": 12, "passed": 3}, failures=["a: wrong `x`"] * 10),
            "1.2": result(counts={"passed": 3, "refused": 1, "skipped": 2}, refusals=["why"], skips={"no GPU": 2}),
        }
        text = render(results, SUPPORTED)
        assert "| refused: SGLang refuses zigzag; the gate refuses a\\|b |" in text
        assert "| **failed 12, passed 3** |" in text
        assert "| passed 3, refused 1, skipped 2 |" in text
        notes = text.split("## Notes")[1]
        assert "### 1.0" not in notes, "all is said in the table"
        assert notes.count("- pd, failed: `a: wrong 'x'`\n") == 10
        assert "- pd, failed: 2 more\n" in notes
        assert "- pd, refused: `why`\n" in notes
        assert "- pd, skipped 2: `no GPU`\n" in notes

    def test_results_of_another_source_of_the_plugin_are_told_apart(self):
        assert "run with the same source of the plugin: `s`" in render({"1.0": result(), "1.1": result()}, SUPPORTED)
        text = render({"1.0": result(source="t"), "1.1": result()}, SUPPORTED)
        assert ("passed 5 (B)" in cells(text, "1.0")[0], "passed 5 (A)" in cells(text, "1.1")[0]) == (True, True)
        assert "(digests of `src/`): A: `s`, B: `t`" in text

    def test_a_page_holds_its_results_and_writing_them_again_gives_the_same_page(self, tmp_path: Path):
        path = tmp_path / "releases.md"
        results = {"1.0": result(FAILED, failures=["a --> b", "| é <!--"], figures={"pages": "3"}), "1.2": result()}
        page.write(path, results, SUPPORTED)
        text = path.read_text()
        assert text.split(page.BEGIN)[1].count("-->") == 1, "no text ends the results early"
        page.write(path, read(path), SUPPORTED)
        assert path.read_text() == text

    def test_a_page_that_does_not_exist_holds_nothing_and_a_damaged_one_is_refused(self, tmp_path: Path):
        path = tmp_path / "releases.md"
        assert read(path) == {}
        page.write(path, {"1.0": result()}, SUPPORTED)
        for damaged in (path.read_text().replace('"pins"', '"pin"'), path.read_text().replace("<!-- results", "")):
            path.write_text(damaged)
            with pytest.raises(PageFault, match="restore it, or delete it"):
                read(path)

    def test_the_page_of_this_repository_is_the_one_its_results_make(self):
        command = "cd tests && ../.venv/bin/python -m matrix --render"
        assert page.PAGE.read_text(encoding="utf-8") == render(read(page.PAGE), supported_versions()), f"run: {command}"


class TestCommand:
    def test_a_release_that_is_not_supported_is_refused_by_name_with_those_that_are(self, capsys):
        with pytest.raises(SystemExit) as left:
            cli.parse(["1.1", "9.9", "9.8"], SUPPORTED, "1.1")
        assert left.value.code == 2
        assert "not a supported release: 9.9, 9.8; supported are 1.0, 1.1, 1.2\n" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments", [["--only", "other"], ["--ci", "1.1"], ["--ci", "--render"], ["--render", "1.0"]]
    )
    def test_arguments_that_do_not_fit_are_refused(self, arguments: list[str]):
        with pytest.raises(SystemExit, match="2"):
            cli.parse(arguments, SUPPORTED, "1.1")

    def test_all_scenarios_run_on_all_releases_or_on_those_that_are_named_in_their_order(self):
        everything = [*SCENARIOS]
        assert cli.parse([], SUPPORTED, "1.1")[0] == [(release, everything) for release in SUPPORTED]
        assert cli.parse(["1.2", "1.0"], SUPPORTED, "1.1")[0] == [("1.0", everything), ("1.2", everything)]
        assert cli.parse(["1.2", "--only", "pd", "seams"], SUPPORTED, "1.1")[0] == [("1.2", ["seams", "pd"])]

    def test_ci_compares_all_seams_and_runs_engines_on_the_oldest_the_primary_and_the_newest(self):
        supported = ("1.0", "1.1", "1.2", "1.3")
        seams = [(release, ["seams"]) for release in supported]
        assert cli.parse(["--ci"], supported, "1.2")[0] == [
            *seams,
            ("1.0", ["e2e"]),
            ("1.2", ["e2e"]),
            ("1.3", ["e2e"]),
        ]
        assert cli.parse(["--ci"], supported, "1.3")[0] == [*seams, ("1.0", ["e2e"]), ("1.3", ["e2e"])]

    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
        """The command on made-up releases, with outcomes by release; an environment of 1.1 cannot be built."""

        def build(release: str, extra: tuple[str, ...]) -> str:
            if release == "1.1":
                raise EnvironmentFault("download of sglang==1.1: no network")
            return release

        def run_tests(name: str, python: str, log: Path) -> Outcome:
            return Outcome(PASSED, {"passed": 7}, source="s")

        monkeypatch.setattr(cli, "supported_versions", lambda: SUPPORTED)
        monkeypatch.setattr(cli, "primary_version", lambda: "1.1")
        monkeypatch.setattr(cli, "row_for", lambda release: type("Row", (), {"extra_requirements": ()}))
        monkeypatch.setattr(environments, "sglang_wheel", lambda release: Path(release))
        monkeypatch.setattr(environments, "pins_of", lambda wheel: {"torch": "2.1"})
        monkeypatch.setattr(environments, "build", build)
        monkeypatch.setattr(
            environments, "check", lambda release, directory: environments.Environment(directory, {"torch": "2.2"})
        )
        monkeypatch.setattr(scenarios, "run_tests", run_tests)
        monkeypatch.setattr(scenarios, "compare_seams", lambda *_: Outcome(PASSED, {"passed": 70}, source="s"))
        monkeypatch.setattr(scenarios, "LOGS", tmp_path / "logs")
        return lambda *arguments: cli.main([*arguments, "--page", str(tmp_path / "releases.md")])

    def test_a_release_that_fails_does_not_end_the_run_but_its_status_is_1(self, run, capsys, tmp_path: Path):
        assert run() == 1
        out = capsys.readouterr().out
        assert re.search(r"^1\.1 +seams passed 70 in \d+ s$", out, re.MULTILINE)
        assert re.search(
            r"^1\.1 +unit  failed: no environment: download of sglang==1\.1: no network in", out, re.MULTILINE
        )
        assert re.search(r"^1\.2 +e2e   passed 7 in \d+ s$", out, re.MULTILINE)
        assert "Failed: 1.1 unit, 1.1 pd, 1.1 e2e" in out
        assert read(tmp_path / "releases.md")["1.2"].versions == {"torch": "2.2"}
        assert run("1.2") == 0

    def test_a_partial_run_replaces_its_own_results_only(self, run, tmp_path: Path):
        path = tmp_path / "releases.md"
        old = {"1.0": result(), "1.1": result(), "1.2": result()}
        page.write(path, old, SUPPORTED)
        assert run("1.2", "--only", "seams", "unit") == 0
        found = read(path)
        assert (found["1.0"], found["1.1"]) == (old["1.0"], old["1.1"])
        assert found["1.2"].outcomes["pd"] == old["1.2"].outcomes["pd"]
        assert found["1.2"].outcomes["unit"].counts == {"passed": 7}
        assert found["1.2"].versions == {"Python": "3.11.7", "torch": "2.2", "mooncake": "0.3"}

    def test_ci_writes_no_page_and_a_damaged_page_ends_the_command_before_it_runs_anything(self, run, tmp_path: Path):
        path = tmp_path / "releases.md"
        assert run("--ci") == 1
        assert not path.exists()
        assert run("--only", "seams", "--no-page") == 0
        assert not path.exists()
        path.write_text("# by hand\n")
        assert run("1.2") == 2
        assert path.read_text() == "# by hand\n"
