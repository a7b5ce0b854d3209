"""The table of releases: every release has its row, and what the rows say is well formed."""

from __future__ import annotations

import itertools
import json
from importlib import resources

import pytest

from cp_shared_kv import releases
from cp_shared_kv.releases import Release, installed, release_for, supported_versions
from cp_shared_kv.seams import SeamError

ERAS = json.loads(resources.files("cp_shared_kv").joinpath("seams.json").read_text(encoding="utf-8"))


def test_no_release_has_two_rows() -> None:
    assert len(set(supported_versions())) == len(supported_versions())


def test_the_installed_release_is_supported() -> None:
    assert isinstance(installed(), Release)


def test_a_local_part_of_the_version_does_not_count() -> None:
    assert release_for("0.5.12.post1+cu130").version == "0.5.12.post1"


@pytest.mark.parametrize("version", ["0.5.10", "0.5.12.post2", "0.5.1", "0.5.24", "0.6.0", "", "main"])
def test_an_unknown_release_is_refused_by_name(version: str) -> None:
    with pytest.raises(SeamError) as refused:
        release_for(version)
    assert f"SGLang {version} is not a supported release: supported are 0.5.11, 0.5.12" in str(refused.value)


@pytest.mark.parametrize("version", supported_versions())
def test_rows_are_well_formed(version: str) -> None:
    release = release_for(version)
    for seam, target in release.targets.items():
        assert target.module.split(".")[0] == "sglang", seam
        assert len(target.fingerprint) == 16, seam
    assert len({target.path for target in release.targets.values()}) == len(release.targets)
    assert not set(release.targets) & set(release.absent)
    assert all(len(why) > 10 for why in release.absent.values())


@pytest.mark.parametrize("seam", ERAS)
def test_the_eras_of_a_seam_are_in_order_and_each_differs_from_the_one_before(seam: str) -> None:
    eras = ERAS[seam]
    begins = [supported_versions().index(era["since"]) for era in eras]
    assert begins == sorted(set(begins))
    assert begins[0] == 0, f"{seam} says nothing of {supported_versions()[0]}; say why it is absent"
    looks = [{key: value for key, value in era.items() if key != "since"} for era in eras]
    assert all(now != before for before, now in itertools.pairwise(looks))
    assert all(set(look) <= {"at", "parameters", "fingerprint", "source_only"} for look in looks if look["at"])
    assert all(set(look) == {"at", "why"} for look in looks if not look["at"])


def test_a_fact_holds_from_its_first_release_until_the_next() -> None:
    eras = {"0.5.11": "a", "0.5.13": "b", "0.5.16": "c"}
    found = {version: releases._at(version, eras) for version in ("0.5.11", "0.5.12.post1", "0.5.13", "0.5.15.post1")}
    assert found == {"0.5.11": "a", "0.5.12.post1": "a", "0.5.13": "b", "0.5.15.post1": "b"}
    assert releases._at("0.5.23", eras) == "c"
    assert releases._at("0.5.12", {"0.5.13": "b"}) is None
