"""What an installation gets: types with each package, and the versions that are tested."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
# TORCH of Makefile and Dockerfile names torch; triton follows from it. Others are not installed.
UNPINNED = {"torch", "triton", "kernels", "flash-attn"}


def pinned_versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = (text for extra in project["optional-dependencies"].values() for text in extra)
    return [Requirement(text) for text in (*project["dependencies"], *extras)]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_brings_its_types(package: str) -> None:
    assert (ROOT / package / "py.typed").read_bytes() == b""


def test_constraints_have_an_allowed_version_of_each_dependency() -> None:
    pinned = pinned_versions()

    wrong = [
        str(each)
        for each in requirements()
        if each.name not in UNPINNED
        and not each.specifier.contains(pinned.get(canonicalize_name(each.name), "0"))
    ]

    assert wrong == [], "make clean setup CONSTRAINTS= && make constraints"


def test_constraints_leave_the_build_of_torch_to_the_machine() -> None:
    assert not pinned_versions().keys() & UNPINNED


def test_coverage_measures_every_package_with_code_of_ours() -> None:
    names = {Path(package).name for package in PACKAGES} - {"splitserve"}  # generated code

    assert set(PYPROJECT["tool"]["coverage"]["run"]["source_pkgs"]) == names
