"""Checks of ports, files of options, and certificates."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from splitserve_cli.checks import ports
from splitserve_cli.checks.finding import Finding, State
from splitserve_cli.checks.ports import (
    check_port,
    check_process_files,
    check_tls_files,
    check_twice,
    owner_of,
)
from splitserve_options import Command, Value
from splitserve_rpc import TlsFiles
from tests.support.security.cluster import Certificates


def test_port_is_free_until_somebody_listens_there_who_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = check_port("listen", f"127.0.0.1:{port}")
    free = check_port("listen", f"127.0.0.1:{port}")

    # It is this process; its command line may have our name in it.
    assert taken.state is not State.WRONG
    assert f"(process {os.getpid()})" in taken.found
    assert free.state is State.OK
    assert free.found == "free"


def test_address_of_another_machine_is_wrong() -> None:
    found = check_port("http", "192.0.2.1:8000")
    assert found.state is State.WRONG
    assert "--http" in found.remedy


def _process(proc: Path, inode: int, command: str) -> None:
    process = proc / "77"
    (process / "fd").mkdir(parents=True)
    (process / "fd" / "3").symlink_to(f"socket:[{inode}]")
    (process / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (process / "comm").write_text("python3\n")


def test_owner_of_a_port_is_named_without_its_arguments(tmp_path: Path) -> None:
    line = "0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1\n"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text("header\n" + line)
    assert owner_of(8000 + 80, tmp_path) == "a process of another user"
    _process(tmp_path, 4711, "python3 other.py --password secret")

    assert owner_of(8080, tmp_path) == "python3 (process 77)"
    for program, name in (
        (b"splitserve_gateway", "splitserve gateway"),
        (b"scheduler_service", "splitserve scheduler"),
        (b"executor_service", "splitserve executor"),
        (b"splitserve_bench", "splitserve"),
    ):
        (tmp_path / "77" / "cmdline").write_bytes(b"python3\0-m\0" + program)
        assert owner_of(8080, tmp_path) == f"{name} (process 77)"


def test_port_of_ours_is_a_warning_unless_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports, "owner_of", lambda _port: "splitserve gateway (process 77)")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        found = check_port("http", address)
        running = check_port("http", address, is_running=True)
    assert (found.state, running.state) == (State.WARNING, State.OK)
    assert "a second one cannot start there" in found.meaning
    assert running.found == "taken by splitserve gateway (process 77)"


def test_address_of_two_options_is_wrong() -> None:
    assert list(check_twice([("listen", "a:1"), ("cluster-listen", "a:1"), ("http", "a:2")])) == []
    assert list(check_twice([("listen", "a:0"), ("http", "a:0")])) == []
    (found,) = check_twice([("listen", "a:1"), ("http", "a:1")])
    assert (found.name, found.found, found.state) == (
        "http a:1",
        "also given as --listen",
        State.WRONG,
    )


def unfit(command: Command, **values: Value | Path) -> list[Finding]:
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
    assert unfit("scheduler", **tls(made, "scheduler")) == []
    assert unfit("gateway", **tls(made, "gateway")) == []
    (found,) = unfit("scheduler", **tls(made, "executor"))
    assert found.meaning == "requires scheduler.splitserve.internal: other processes reject it"
    # Nobody asks for a role where no certificate is asked for.
    assert unfit("scheduler", **{**tls(made, "executor"), "tls_ca": None}) == []


def test_authority_without_a_certificate_is_wrong_but_for_a_gateway(made: Certificates) -> None:
    ca = made.directory / "ca.crt"
    (found,) = unfit("executor", tls_ca=ca)
    assert found.meaning.startswith("splitserve executor does not start")
    assert unfit("gateway", tls_ca=ca) == []


def test_http_certificate_may_have_another_authority(made: Certificates, tmp_path: Path) -> None:
    other = Certificates.make(tmp_path).directory / "ca.crt"
    files = {**tls(made, "gateway", "http_tls", "http_tls_client_ca"), "http_tls_client_ca": other}
    assert unfit("serve", **files) == []
    (found,) = unfit("serve", **{**files, "http_tls_key": made.directory / "scheduler.key"})
    assert "is the key of another certificate" in found.found
    (alone,) = unfit("serve", http_tls_cert=made.directory / "gateway.crt")
    assert alone.remedy == "give --http-tls-cert and --http-tls-key"


def test_file_is_wrong_when_missing_or_readable_by_others(tmp_path: Path) -> None:
    (missing,) = unfit("scheduler", api_keys=tmp_path / "none")
    assert missing.meaning == "splitserve scheduler does not start"
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    (readable,) = unfit("scheduler", cluster_token_file=token, tenants=token)
    assert readable.remedy == f"chmod 600 {token}"
    (authority,) = unfit("scheduler", tls_client_ca=token)
    assert authority.found == "contains no certificate"


def test_model_is_wrong_when_it_is_no_checkpoint(tmp_path: Path) -> None:
    assert unfit("serve", model="bundled") == unfit("executor", model="someone/something") == []
    assert unfit("scheduler", model=str(tmp_path)) == []
    (found,) = unfit("serve", model=str(tmp_path))
    assert found.name == "checkpoint"
    model = tmp_path / "model-00001-of-00002.gguf"
    model.touch()
    (found,) = unfit("serve", model=model)
    assert "the first is model-00002-of-00002.gguf" in found.found
    model.with_name("model-00002-of-00002.gguf").touch()
    assert unfit("serve", model=model) == unfit("serve", model=str(tmp_path)) == []


_YEARS_S = 50 * 365 * 86400.0


def wrongs(findings: list[Finding]) -> list[str]:
    return [f"{each.name}: {each.found}" for each in findings if each.state is State.WRONG]


def test_files_of_a_cluster_are_well(made: Certificates) -> None:
    for name in ("scheduler", "executor", "operator"):
        findings = check_tls_files(made.files(name))
        assert {each.state for each in findings} == {State.OK}
        assert len(findings) == 4


def test_certificate_is_wrong_outside_its_validity(made: Certificates) -> None:
    files = made.files("scheduler")
    ended, authority = wrongs(check_tls_files(files, now_s=4e9 + _YEARS_S))
    assert ended.startswith("certificate ")
    assert "expired at 20" in ended
    assert authority.startswith("authority ")
    assert "expired at 2" in authority
    (early,) = wrongs(check_tls_files(files, now_s=0.0))
    assert "not valid before 20" in early


def test_certificate_is_warned_of_when_it_ends_within_days(made: Certificates) -> None:
    from splitserve_common import read_certificate

    files = made.files("scheduler")
    assert files.cert is not None
    assert files.key is not None
    ends_s = read_certificate(files.cert, files.key).ends_s
    states = {each.state for each in check_tls_files(files, now_s=ends_s - 86400)}
    assert states == {State.OK, State.WARNING}


def test_key_is_wrong_when_readable_or_mismatched(
    tmp_path: Path,
) -> None:
    made = Certificates.make(tmp_path)
    files = made.files("scheduler")
    assert files.key is not None
    files.key.chmod(0o644)
    assert [text.partition(": ")[2] for text in wrongs(check_tls_files(files))] == ["mode 0644"]
    mixed = TlsFiles(files.cert, made.files("executor").key, files.ca)
    (problem,) = wrongs(check_tls_files(mixed))
    assert problem.endswith("executor.key is the key of another certificate")


def test_unreadable_files_and_lone_certificates_are_wrong(
    made: Certificates, tmp_path: Path
) -> None:
    missing = TlsFiles(tmp_path / "no.crt", tmp_path / "no.key")
    assert len(wrongs(check_tls_files(missing))) == 2
    (alone,) = wrongs(check_tls_files(TlsFiles(made.files("scheduler").cert)))
    assert "only" in alone


def test_certificate_is_wrong_when_it_has_none_of_the_names(made: Certificates) -> None:
    problems = wrongs(check_tls_files(made.files("operator"), ("scheduler.example",)))
    assert len(problems) == 1
    assert "DNS names" in problems[0]


def test_nothing_is_said_when_no_files_are_given() -> None:
    assert check_tls_files(TlsFiles()) == []


@pytest.mark.parametrize(
    ("cert", "key", "found"),
    [
        ("garbage", "scheduler.key", "contains no PEM certificate"),
        ("scheduler.crt", "garbage", "contains no PEM private key"),
        ("scheduler.crt", "sealed", "has a passphrase"),
        ("damaged", "scheduler.key", "with "),
    ],
)
def test_unusable_file_is_described(
    made: Certificates, tmp_path: Path, cert: str, key: str, found: str
) -> None:
    for name, text in (
        ("garbage", "no certificate"),
        ("sealed", "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAA==\n"),
        ("damaged", "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    paths = (made.directory / name for name in (cert, key))
    files = TlsFiles(*(path if path.exists() else tmp_path / path.name for path in paths))
    (finding,) = [each for each in check_tls_files(files) if each.state is State.WRONG]
    assert finding.found.startswith(found)
    assert finding.remedy


def test_authority_that_is_none_is_not_blamed_on_the_certificate(
    made: Certificates, tmp_path: Path
) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_text("no certificate")
    own = made.files("scheduler")
    for files in (TlsFiles(own.cert, own.key, garbage), TlsFiles(ca=garbage)):
        (problem,) = wrongs(check_tls_files(files))
        assert problem == f"authority {garbage}: contains no certificate"


def test_authority_of_others_need_not_have_signed_our_certificate(
    made: Certificates, tmp_path: Path
) -> None:
    own, other = made.files("gateway"), Certificates.make(tmp_path).directory / "ca.crt"
    files = TlsFiles(own.cert, own.key, other)
    assert wrongs(check_tls_files(files, is_of_authority=False)) == []
    assert len(wrongs(check_tls_files(files))) == 1
