"""`docker-compose.tls.yml`: what `setup` makes is what the services then run with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from executor_service.config import ExecutorConfig
from scheduler_service.config import SchedulerServiceConfig
from splitserve_cli.main import main
from splitserve_client import ApiKey
from splitserve_gateway.config import GatewayConfig
from splitserve_options import CLIENT_ENV, Command, options_of, resolve
from tests.support.security.cluster import (
    COMPOSE_FOLDER,
    ROOT,
    SERVICES_WITH_TLS,
    compose_environment,
    run_compose_setup,
)
from tests.unit.test_compose import FIXED, SERVICES

READ: dict[Command, Any] = {
    "scheduler": SchedulerServiceConfig.from_options,
    "executor": ExecutorConfig.from_options,
    "gateway": GatewayConfig.from_options,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `setup` makes, and again."""
    folder = tmp_path_factory.mktemp("splitserve")
    for _ in range(2):
        run_compose_setup(folder)
    return folder


@pytest.mark.parametrize("service", SERVICES)
def test_service_needs_no_permission_to_be_insecure(service: Command, made: Path) -> None:
    ours = compose_environment(service)
    assert ours["SPLITSERVE_INSECURE"] == "false"
    assert ours.keys() <= {option.env for option in options_of(service)}
    READ[service](resolve(service, [], FIXED[service] | compose_environment(service, made)))


@pytest.mark.parametrize("service", [*SERVICES, "operator"])
def test_service_sees_its_own_folder_alone_and_cannot_write_it(service: str) -> None:
    assert SERVICES_WITH_TLS[service]["volumes"] == [f"of-{service}:{COMPOSE_FOLDER}/{service}:ro"]
    named = re.findall(rf"{COMPOSE_FOLDER}/(\w+)", str(SERVICES_WITH_TLS[service]))
    assert set(named) == {service}
    assert f"of-{service}:{COMPOSE_FOLDER}/{service}" in SERVICES_WITH_TLS["setup"]["volumes"]


def test_folders_hold_no_secret_of_others(made: Path) -> None:
    held = {
        folder.name: {path.name for path in folder.iterdir()}
        for folder in made.iterdir()
        if folder.is_dir()
    }
    files = {"tls.crt", "tls.key", "ca.crt"}
    assert {path for path in held["scheduler"] if not path.startswith(".")} >= files
    assert held["executor"] == files
    assert held["gateway"] == held["operator"] == {*files, "api.key"}
    assert (made / "ca.key").stat().st_mode & 0o077 == 0
    for folder in ("gateway", "operator"):
        assert (made / folder / "api.key").stat().st_mode & 0o077 == 0


def test_certificate_of_a_service_is_not_valid_for_the_name_of_another(made: Path) -> None:
    hosts = {
        service: {
            str(name.value)
            for name in x509.load_pem_x509_certificate((made / service / "tls.crt").read_bytes())
            .extensions.get_extension_for_class(x509.SubjectAlternativeName)
            .value
        }
        for service in SERVICES
    }
    for service in ("scheduler", "gateway"):
        assert [each for each in SERVICES if service in hosts[each]] == [service]


def test_keys_are_made_once(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list", str(made / "scheduler" / "keys.json")]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert sorted(row.split()[1] for row in rows) == ["gateways", "operator"]


def test_operator_has_what_the_commands_read(made: Path) -> None:
    ours = compose_environment("operator")
    cluster_flags = {"SPLITSERVE_TLS_CERT", "SPLITSERVE_TLS_KEY", "SPLITSERVE_TLS_CA"}
    assert ours.keys() <= {*CLIENT_ENV, *cluster_flags, "SPLITSERVE_API_KEY_FILE"}
    key = compose_environment("operator", made)["SPLITSERVE_API_KEY_FILE"]
    assert ApiKey(None, key).current()[0][1].startswith("Bearer sk-ss-")


def test_image_has_the_folders_as_their_owner() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for service in (*SERVICES, "operator"):
        assert re.search(rf"install -d -o splitserve [^&]*{COMPOSE_FOLDER}/{service}\b", dockerfile)
