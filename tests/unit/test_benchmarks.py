"""The benchmarks: sections that start no servers, with small parameters; budgets; the page that is written of a run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import capacity, cli, gather, page, slopes  # noqa: E402
from benchmarks.forward import draw_pages  # noqa: E402
from benchmarks.processes import sglang_process  # noqa: E402
from benchmarks.rows import Curve, Measured, Row, table  # noqa: E402

GOOD = Row("held", 2, "count", "made up", 2, "at most")
BAD = Row("broken", 1.5, "ratio", "made up", 1.0, "exactly")


def by_name(measured: Measured) -> dict[str, Row]:
    """Rows by name; each has a unit, a line on how it was measured and a name of its own."""
    rows = {row.name: row for row in measured.rows}
    assert len(rows) == len(measured.rows) > 0
    assert all(row.unit and row.how and "\n" not in row.how for row in rows.values())
    return rows


class TestSections:
    def test_capacity_is_the_number_of_ranks_less_a_workspace_that_grows_with_the_context(self):
        rows = by_name(capacity.measure(models=("GLM-5",), cp_sizes=(2, 8), dtypes=("fp8",)))
        for cp_size in (2, 8):
            values = [rows[f"GLM-5 fp8, CP {cp_size}, context {context}"].value for context in capacity.CONTEXTS]
            assert cp_size > values[0] > values[1] > values[2] > 0.8 * cp_size
        assert all(row.budget is not None for row in rows.values())

    @pytest.mark.gloo
    def test_gather_counts_what_the_wire_carries_and_stays_at_the_bound(self):
        measured = gather.measure((4,), (1, 2, 64), 512, ((2, 5),), 8, (1,), times=1)
        rows = by_name(measured)
        assert rows["counted / planned bytes, CP 2, 5 pages"].holds
        assert 1 <= rows["bytes on the wire / counted, CP 2, 5 pages"].value < 1.02
        assert rows["bytes / bound, CP 4, fewer pages"].value == 4, "one page, padded by each of the other ranks"
        assert rows["bytes / bound, CP 4, 64 pages or more"].value == 1
        assert rows["largest share less smallest, CP 4, shared allocator"].holds
        assert 1.9 < rows["bytes, all-reduce of a zero-filled view / ours"].value < 2.1
        series = measured.curves["gather"].series
        [first, *_] = series["bound, (N-1)/N of the prefix"]
        assert first == (1, pytest.approx(0.75 * (64 * 576 * 2 + 64 * 132) / 1e6))

    @pytest.mark.gloo
    def test_slopes_find_no_cost_that_grows_with_the_pool_and_bytes_that_grow_with_the_prefix(self):
        rows = by_name(slopes.measure(slopes.Case(2, 16, 8, 1, 40), factor=2, times=1))
        for cost in ("bytes received", "operations", "bytes allocated", "workspace bytes"):
            row = rows[f"{cost}, pool x 2"]
            assert (row.value, row.budget, row.bound) == (1, 1, "exactly")
        assert rows["bytes received, prefix x 2"].value == 2
        assert rows["bytes received, ranks x 2"].value == pytest.approx(1.5)
        assert rows["bytes allocated, prefix x 2"].value > 1

    @pytest.mark.parametrize("pages", [40, 90], ids=["half of the pool is free", "more must go"])
    def test_pages_of_a_request_are_distinct_and_in_a_used_pool_not_in_one_piece(self, pages: int):
        with sglang_process() as call:
            fresh, used = (call(draw_pages, "stock", 1, 96, pages, old) for old in (False, True))
        assert fresh == list(range(1, pages + 1))
        assert len(set(used)) == pages
        assert set(used) <= set(range(1, 97))
        assert used != list(range(used[0], used[0] + pages))

    def test_every_section_of_the_command_has_its_text_on_the_page(self):
        assert {"capacity", "gather", "slopes", "transfer", "engine"} <= cli.SECTIONS.keys() <= page.TEXTS.keys()


class TestBudgets:
    @pytest.mark.parametrize(
        ("value", "bound", "holds"),
        [
            (1.0, "at most", True),
            (1.1, "at most", False),
            (1.0, "at least", True),
            (0.9, "at least", False),
            (1.0, "exactly", True),
            (1.0 + 1e-12, "exactly", False),
        ],
    )
    def test_a_value_is_held_against_its_budget(self, value: float, bound: str, holds: bool):
        assert Row("name", value, "ratio", "how", 1.0, bound).holds is holds

    def test_a_row_without_a_budget_holds(self):
        assert Row("name", 17.0, "ratio", "how").holds

    @pytest.mark.parametrize(("higher", "holds"), [(True, False), (False, True)])
    def test_a_module_may_say_which_way_is_better_in_place_of_the_bound(self, higher: bool, holds: bool):
        given = {"name": "n", "value": 0.8, "unit": "ratio", "budget": 0.9, "higher_is_better": higher}
        assert Row.of(given).holds is holds

    def test_a_row_comes_back_from_its_json(self):
        assert Row.of(json.loads(json.dumps(BAD.as_json()))) == BAD

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Row.of({"name": "n", "unit": "ratio"}),
            lambda: Row("n", float("nan"), "ratio", "how"),
            lambda: Row("n", 1.0, "ratio", "how", 1.0, "about"),
        ],
    )
    def test_a_row_without_value_with_no_number_or_an_unknown_bound_is_an_error(self, make: Any):
        with pytest.raises(ValueError):
            make()

    def test_the_table_names_every_row_and_marks_the_budget_that_fails(self):
        text = table({"first": [GOOD], "second": [BAD]})
        assert [line for line in text.splitlines() if line in ("first", "second")] == ["first", "second"]
        [line] = [line for line in text.splitlines() if line.startswith("broken")]
        assert re.split(r"\s{2,}", line) == ["broken", "1.500", "ratio", "= 1.000", "NO", "made up"]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory in place of ``docs`` and of the place of the published results."""
    monkeypatch.setattr(cli, "DOCS", tmp_path)
    monkeypatch.setattr(cli, "PUBLISHED", tmp_path / "published.json")
    return tmp_path


def only(monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
    """Replace the sections of the command."""
    monkeypatch.setattr(cli, "SECTIONS", sections)


class TestCommand:
    @pytest.mark.parametrize(("rows", "status"), [([GOOD], 0), ([GOOD, BAD], 1)])
    def test_the_exit_status_is_1_if_a_budget_fails(
        self, monkeypatch: Any, tmp_path: Path, capsys: Any, rows: list[Row], status: int
    ):
        only(monkeypatch, slopes=lambda: Measured(rows))
        file = tmp_path / "made" / "bench.json"
        assert cli.main(["--json", str(file)]) == status
        written = json.loads(file.read_text())["sections"]["slopes"]
        assert [Row.of(row) for row in written] == rows
        assert [row["holds"] for row in written] == [row.holds for row in rows]
        assert ("FAILED  broken: 1.500 ratio, budget = 1.000" in capsys.readouterr().out) is bool(status)

    def test_only_the_sections_asked_for_run(self, monkeypatch: Any, tmp_path: Path):
        only(monkeypatch, slopes=lambda: Measured([GOOD]), engine=lambda: pytest.fail("not asked for"))
        assert cli.main(["--only", "slopes", "--json", str(tmp_path / "bench.json")]) == 0

    def test_a_section_that_raises_ends_the_run_and_keeps_earlier_results(self, monkeypatch: Any, tmp_path: Path):
        def broken() -> Measured:
            raise RuntimeError("no servers")

        only(monkeypatch, slopes=lambda: Measured([GOOD]), engine=broken)
        file = tmp_path / "bench.json"
        with pytest.raises(RuntimeError, match="no servers"):
            cli.main(["--json", str(file)])
        assert [*json.loads(file.read_text())["sections"]] == ["slopes"]

    def test_a_page_of_some_sections_is_refused(self):
        with pytest.raises(SystemExit) as error:
            cli.main(["--docs", "--only", "slopes"])
        assert error.value.code == 2


CURVE = Curve("prefix, pages", "received, MB", {"ours": [(1, 0.5), (64, 30.0)], "bound": [(1, 0.4), (64, 29.0)]})
BARS = Curve("page lists", "descriptors", {"stock": [(0, 4), (1, 96)], "shared": [(0, 96), (1, 96)]}, ("a & b", "c"))


class TestPage:
    def test_docs_writes_the_page_its_pictures_and_the_results_they_come_from(self, monkeypatch: Any, places: Path):
        only(
            monkeypatch,
            gather=lambda: Measured([GOOD, BAD], {"gather": CURVE}),
            transfer=lambda: Measured([GOOD], {"descriptors": BARS}),
        )
        assert cli.main(["--docs", "--json", str(places / "bench.json")]) == 1
        results = json.loads((places / "published.json").read_text())
        assert results == json.loads((places / "bench.json").read_text())
        files = page.render(results)
        assert files == {path.name: path.read_text() for path in places.iterdir() if path.suffix in (".md", ".svg")}
        text = files["benchmarks.md"]
        assert "| broken | 1.500 | ratio | = 1.000 | NO | made up |" in text
        pictures = re.findall(r"\]\((.*\.svg)\)", text)
        assert pictures == [name for name in files if name.endswith(".svg")] != []

    @pytest.mark.parametrize("curve", [CURVE, BARS], ids=["lines", "bars"])
    def test_a_picture_is_well_formed_and_names_axes_series_and_groups(self, curve: Curve):
        root = ElementTree.fromstring(page.draw(curve))
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert {curve.x, curve.y, *curve.series, *curve.groups} <= set(texts)

    def test_a_line_goes_through_its_points_in_proportion_on_logarithmic_axes(self):
        curve = Curve("x", "y", {"line": [(1, 1), (2, 2), (4, 4), (16, 16)]})
        path = next(
            line for line in page.draw(curve).splitlines() if "stroke-width" in line and line.startswith("<path")
        )
        points = [tuple(map(float, pair.split())) for pair in re.search(r'd="M([^"]*)"', path)[1].split("L")]
        (x0, y0), (x1, y1), (x2, y2), (x4, y4) = points
        assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.2)
        assert (x4 - x0, y4 - y0) == pytest.approx((4 * (x1 - x0), 4 * (y1 - y0)), abs=0.2)
        assert y0 > y4, "up is more"

    def test_the_page_in_docs_is_what_the_generator_writes_for_the_published_results(self):
        files = page.render(json.loads(cli.PUBLISHED.read_text()))
        docs = cli.DOCS
        assert {name: (docs / name).read_text() for name in files} == files
        assert {path.name for path in docs.glob("benchmark-*.svg")} == {name for name in files if name.endswith(".svg")}
