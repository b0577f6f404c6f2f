"""Files that options name, and that are not there or not for this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve_cli.checks.finding import Finding, State
from splitserve_cli.checks.ports import check_process_files
from splitserve_options.option import Command
from splitserve_options.options import Value
from tests.support.security.cluster import Certificates


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def wrongs(command: Command, **values: Value | Path) -> list[Finding]:
    given = {name: None if each is None else str(each) for name, each in values.items()}
    return [each for each in check_process_files(command, given) if each.state is State.WRONG]


def tls(made: Certificates, name: str, prefix: str = "tls", ca: str = "tls_ca") -> dict[str, Path]:
    folder = made.directory
    return {
        f"{prefix}_cert": folder / f"{name}.crt",
        f"{prefix}_key": folder / f"{name}.key",
        ca: folder / "ca.crt",
    }


def test_certificate_is_wrong_when_it_is_of_another_role(made: Certificates) -> None:
    assert wrongs("scheduler", **tls(made, "scheduler")) == []
    assert wrongs("gateway", **tls(made, "gateway")) == []
    (found,) = wrongs("scheduler", **tls(made, "executor"))
    assert found.meaning == "needed is scheduler.splitserve.internal: it is refused"
    # Nobody asks for a role where no certificate is asked for.
    assert wrongs("scheduler", **{**tls(made, "executor"), "tls_ca": None}) == []


def test_authority_without_a_certificate_is_wrong_but_for_a_gateway(made: Certificates) -> None:
    ca = made.directory / "ca.crt"
    (found,) = wrongs("executor", tls_ca=ca)
    assert found.meaning.startswith("splitserve executor does not start")
    assert wrongs("gateway", tls_ca=ca) == []


def test_certificate_of_http_need_not_be_of_the_authority_of_its_clients(
    made: Certificates, tmp_path: Path
) -> None:
    other = Certificates.make(tmp_path).directory / "ca.crt"
    files = {**tls(made, "gateway", "http_tls", "http_tls_client_ca"), "http_tls_client_ca": other}
    assert wrongs("serve", **files) == []
    (found,) = wrongs("serve", **{**files, "http_tls_key": made.directory / "scheduler.key"})
    assert "is the key of another certificate" in found.found
    (alone,) = wrongs("serve", http_tls_cert=made.directory / "gateway.crt")
    assert alone.remedy == "give --http-tls-cert and --http-tls-key"


def test_file_that_is_not_there_or_that_others_can_read_is_wrong(tmp_path: Path) -> None:
    (missing,) = wrongs("scheduler", api_keys=tmp_path / "none")
    assert missing.meaning == "splitserve scheduler does not start"
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    (readable,) = wrongs("scheduler", cluster_token_file=token, tenants=token)
    assert readable.remedy == f"chmod 600 {token}"
    (authority,) = wrongs("scheduler", tls_client_ca=token)
    assert authority.found == "holds no certificate"


def test_model_is_wrong_when_it_is_no_checkpoint(tmp_path: Path) -> None:
    assert wrongs("serve", model="bundled") == wrongs("executor", model="someone/something") == []
    assert wrongs("scheduler", model=str(tmp_path)) == []
    (found,) = wrongs("serve", model=str(tmp_path))
    assert found.name == "checkpoint"
