"""Checks of installed packages."""

from __future__ import annotations

import pytest

from splitserve_cli.checks import packages
from splitserve_cli.checks.finding import State
from splitserve_cli.checks.packages import (
    check_packages,
    check_python,
    check_torch,
    command_installed,
    why_not_imported,
)
from splitserve_options import Command

REQUIREMENTS = [
    "grpcio>=1.73.1",
    "protobuf>=6.31.0,<8",
    "fastapi>=0.136; extra == 'gateway'",
    "torch>=2.11; extra == 'executor'",
    "pytest>=8; extra == 'dev'",
]
INSTALLED = {"grpcio": "1.80.0", "protobuf": "7.1", "fastapi": "0.140", "torch": "2.13.0+cpu"}


def no_requirements(_name: str) -> list[str]:
    """No package says that it needs another."""
    return []


def states(command: Command, installed: dict[str, str]) -> list[tuple[str, State]]:
    found = check_packages(command, REQUIREMENTS, installed.get, requirements_of=no_requirements)
    return [(each.name, each.state) for each in found]


def test_packages_are_those_of_the_process_that_is_to_run() -> None:
    assert states("serve", INSTALLED) == [
        ("packages of all", State.OK),
        ("packages of gateway", State.OK),
        ("packages of executor", State.OK),
    ]
    without = {name: version for name, version in INSTALLED.items() if name != "torch"}
    assert states("gateway", without)[-1] == ("packages of gateway", State.OK)
    assert states("executor", without)[-1] == ("packages of executor", State.WRONG)


@pytest.mark.parametrize("version", ["8.0", "5.29"])
def test_package_of_another_version_is_named(version: str) -> None:
    installed = INSTALLED | {"protobuf": version}
    found = check_packages(
        "scheduler", REQUIREMENTS, installed.get, requirements_of=no_requirements
    )[0]
    assert found.state is State.WRONG
    assert found.found == f"protobuf is {version}, required: <8,>=6.31.0"


@pytest.mark.parametrize(
    ("missing", "gateway", "executor", "installed"),
    [
        ([], State.OK, State.OK, "serve"),
        # Nobody wants an extra of which nothing is there.
        (["fastapi", "torch"], State.OK, State.OK, "scheduler"),
        (["torch"], State.OK, State.OK, "gateway"),
        (["fastapi"], State.OK, State.OK, "executor"),
        # Somebody may want one of which a part is there.
        (["safetensors"], State.OK, State.WARNING, "serve"),
    ],
)
def test_missing_extra_is_fine_when_nobody_asks(
    missing: list[str], gateway: State, executor: State, installed: Command
) -> None:
    requirements = [*REQUIREMENTS, "safetensors; extra == 'executor'"]
    here = {**INSTALLED, "safetensors": "0.8"}
    for name in missing:
        del here[name]

    found = check_packages(None, requirements, here.get, requirements_of=no_requirements)

    assert [each.state for each in found] == [State.OK, gateway, executor]
    assert command_installed(here.get) == installed


def test_extra_is_wrong_when_its_package_is_too_old() -> None:
    here = {**INSTALLED, "torch": "2.0"}
    *_, found = check_packages(None, REQUIREMENTS, here.get, requirements_of=no_requirements)
    assert (found.state, found.found) == (State.WRONG, "torch is 2.0, required: >=2.11")


@pytest.mark.parametrize(
    ("why_not", "state"),
    [(None, State.WARNING), ("ImportError: libdeep.so: no such file", State.WRONG)],
)
def test_indirect_package_is_wrong_only_when_imports_fail(
    why_not: str | None, state: State
) -> None:
    def no_deep(name: str) -> list[str]:
        return ["deep>=2"] if name == "torch" else []

    (_, found) = check_packages(
        "executor", REQUIREMENTS, INSTALLED.get, no_deep, why_not_imported=lambda _extra: why_not
    )

    assert found.state is state
    assert found.found.startswith("deep is missing, torch requires >=2")
    assert why_not is None or why_not in found.found


def test_modules_are_imported_by_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "MODULES", {"executor": ("json",), "gateway": ("no_such",)})
    assert why_not_imported("executor") is None
    assert why_not_imported("gateway") == "ModuleNotFoundError: No module named 'no_such'"


def test_packages_of_this_software_are_here() -> None:
    assert {each.state for each in check_packages("serve")} == {State.OK}


def test_python_is_wrong_when_it_is_older_than_needed() -> None:
    assert check_python((3, 9, 1), ">=3.11").state is State.WRONG
    assert check_python().state is State.OK


def test_package_is_wrong_when_another_needs_other_version() -> None:
    others = {
        "protobuf": ["grpcio>=1.85.1", "sphinx; extra == 'docs'", "old; python_version < '3'"],
        "grpcio": ["deep"],
        "deep": ["deeper>=2", "grpcio"],
    }
    installed = INSTALLED | {"deep": "1", "deeper": "1.9"}
    (found,) = check_packages(
        "scheduler", REQUIREMENTS, installed.get, lambda name: others.get(name, [])
    )
    assert found.state is State.WRONG
    assert (
        found.found
        == "grpcio is 1.80.0, protobuf requires >=1.85.1, deeper is 1.9, deep requires >=2"
    )


def test_packages_for_traces_are_needed_where_there_are_traces() -> None:
    found = check_packages(
        "scheduler",
        [*REQUIREMENTS, "opentelemetry-sdk>=1.40; extra == 'otel'"],
        INSTALLED.get,
        no_requirements,
        has_traces=True,
    )
    assert [(each.name, each.state) for each in found] == [
        ("packages of all", State.OK),
        ("packages of otel", State.WRONG),
    ]


@pytest.mark.parametrize(
    ("device", "has_gpu", "version", "state"),
    [
        ("cuda", False, "2.13.0+cpu", State.WRONG),
        ("auto", True, "2.13.0+cpu", State.WARNING),
        ("cpu", True, "2.13.0+cpu", None),
        ("auto", False, "2.13.0+cpu", None),
        ("cuda", True, "2.13.0", None),
        ("cuda", True, None, None),
    ],
)
def test_torch_without_cuda_is_reported_when_gpu_wanted(
    device: str, has_gpu: bool, version: str | None, state: State | None
) -> None:
    found = check_torch(device, has_gpu, version)
    assert (found and found.state) is state
