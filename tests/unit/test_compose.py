"""`docker-compose.yml` passes every option on, and `.env.example` lists what may be set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from splitserve_options import Command, options_of, resolve

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
WITH_TLS = (ROOT / "docker-compose.tls.yml").read_text()
# What the containers are to each other is nobody's choice.
FIXED = {
    "scheduler": {
        "RES_OPTIONS": "timeout:1",
        "SPLITSERVE_LISTEN": "0.0.0.0:50051",
        "SPLITSERVE_CLUSTER_LISTEN": "0.0.0.0:50050",
        "SPLITSERVE_INSECURE": "${SPLITSERVE_INSECURE:-true}",
    },
    "executor": {
        "RES_OPTIONS": "timeout:1",
        "SPLITSERVE_LISTEN": "0.0.0.0:50052",
        "SPLITSERVE_SCHEDULER": "dns:scheduler:50050",
        "SPLITSERVE_INSECURE": "${SPLITSERVE_INSECURE:-true}",
    },
    "gateway": {
        "RES_OPTIONS": "timeout:1",
        "SPLITSERVE_HTTP": "0.0.0.0:8000",
        "SPLITSERVE_SCHEDULERS": "dns:scheduler:50051",
        "SPLITSERVE_LIVE_LISTEN": "0.0.0.0:8001",
        "SPLITSERVE_LIVE_SCHEDULERS": "dns:scheduler:50050",
        "SPLITSERVE_INSECURE": "${SPLITSERVE_INSECURE:-true}",
    },
}
SERVICES: tuple[Command, ...] = ("scheduler", "executor", "gateway")


def variables_of(command: Command) -> set[str]:
    return {option.env for option in options_of(command) if not option.hidden}


def example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    assignments = [line.removeprefix("#").partition("=") for line in lines if "=" in line]
    return {name: value for name, _, value in assignments}


@pytest.mark.parametrize("service", SERVICES)
def test_compose_passes_every_option_of_a_service(service: Command) -> None:
    service_file = yaml.safe_load(COMPOSE)["services"][service]
    entries = [entry.partition("=") for entry in service_file["environment"]]
    assigned = {name: value for name, sign, value in entries if sign}
    passed_on = {name for name, sign, _ in entries if not sign} - {"HF_TOKEN"}

    assert assigned == FIXED[service]
    assert passed_on == variables_of(service) - assigned.keys()
    # Compose would take every name above that is not set in the environment out of the file again.
    assert "env_file" not in service_file


def test_example_lists_what_compose_takes() -> None:
    passed_on = {name for service in SERVICES for name in variables_of(service)} | {"HF_TOKEN"}
    fixed = {name for assigned in FIXED.values() for name in assigned}
    interpolated = set(re.findall(r"\$\{(\w+)", COMPOSE + WITH_TLS))

    assert example().keys() == passed_on - fixed | interpolated


@pytest.mark.parametrize("service", SERVICES)
def test_example_has_the_defaults(service: Command) -> None:
    assert resolve(service, [], example() | {"SPLITSERVE_INSECURE": ""}) == resolve(service, [], {})


def test_example_has_the_defaults_of_compose_itself() -> None:
    defaults = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE + WITH_TLS))

    assert {name: example()[name] for name in defaults} == defaults


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_drained_before_compose_kills_it(service: Command) -> None:
    period = yaml.safe_load(COMPOSE)["services"][service]["stop_grace_period"]
    drains_s = resolve(service, [], {})["drain_timeout_s"]
    default_s = float(example()["SPLITSERVE_STOP_GRACE_PERIOD"].removesuffix("s"))

    assert period == "${SPLITSERVE_STOP_GRACE_PERIOD:-30s}"
    # What is left when that time is over is ended or moved, which takes a moment, too.
    assert isinstance(drains_s, float)
    assert drains_s + 15 <= default_s
