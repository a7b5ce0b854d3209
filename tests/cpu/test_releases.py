"""The table of releases: every release once, complete, and the one that is installed among them."""

from __future__ import annotations

import re

import pytest

from cp_shared_kv_cpu import releases, triton_twins


def test_every_release_has_one_row_in_order():
    versions = releases.supported_versions()
    assert len(set(versions)) == len(versions)
    assert list(versions) == sorted(versions, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])


def test_the_installed_release_has_a_row():
    assert releases.installed_version() in releases.installed_row().versions


def test_an_unknown_release_is_named_beside_the_known_ones():
    with pytest.raises(
        ValueError, match=r"SGLang 0\.5\.10 is not known .*0\.5\.11, 0\.5\.12, 0\.5\.12\.post1, .*0\.5\.23$"
    ):
        releases.row_for("0.5.10")


@pytest.mark.parametrize("row", releases.ROWS, ids=lambda row: row.versions[0])
class TestRow:
    def test_has_a_place_for_what_every_release_needs(self, row: releases.Row):
        needed = {"act_quant", "get_k_and_s", "set_k_and_s", "hadamard_transform", "can_fuse_store"}
        needed |= {"fused_store_index_k_cache", "is_arch_support_pdl", "dequantize_k_cache_paged"}
        assert needed <= set(row.places)
        # One way to write MLA rows: with a slot that is left out, or without.
        assert len({"set_mla_kv_buffer", "set_mla_kv_buffer_skipping"} & set(row.places)) == 1

    def test_names_a_place_by_module_and_name(self, row: releases.Row):
        wrong = [place for place in row.places.values() if not re.fullmatch(r"sglang(\.\w+)+:\w+", place)]
        assert wrong == []

    def test_pins_what_must_be_installed_beside_it(self, row: releases.Row):
        assert [pin for pin in row.extra_requirements if not re.fullmatch(r"[\w-]+==[\w.]+", pin)] == []


def test_every_twin_has_a_place_in_some_release():
    assert set(triton_twins.TWINS) <= {name for row in releases.ROWS for name in row.places}
