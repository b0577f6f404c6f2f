"""`splitserve certs`: certificates, renewals and refusals."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from splitserve_cli.main import main


def _refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that `argv` is answered with."""
    assert main(["certs", *argv]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("splitserve certs: ")
    return line.removeprefix("splitserve certs: ")


def _hosts(path: Path) -> list[str]:
    made = x509.load_pem_x509_certificate(path.read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_certs_name_a_host_of_one_server(tmp_path: Path) -> None:
    flags = ["--host=scheduler=inner", "--host=gateway=192.0.2.7", "--host=both"]

    assert main(["certs", str(tmp_path), *flags]) == 0

    local = ["127.0.0.1", "::1", "localhost"]
    scheduler = sorted([*local, "inner", "both", "scheduler.splitserve.internal"])
    assert sorted(_hosts(tmp_path / "scheduler.crt")) == scheduler
    assert sorted(_hosts(tmp_path / "gateway.crt")) == sorted([*local, "192.0.2.7", "both"])


def test_certs_name_the_hosts_when_they_are_names_and_addresses(tmp_path: Path) -> None:
    hosts = ["scheduler.example.org", "*.example.org", "h_1", "a" * 70, "192.0.2.7", "2001:db8::7"]
    flags = [f"--host={host}" for host in hosts]

    assert main(["certs", str(tmp_path), *flags, "--days=3650"]) == 0

    made = x509.load_pem_x509_certificate((tmp_path / "scheduler.crt").read_bytes())
    assert made.not_valid_after_utc - made.not_valid_before_utc > timedelta(days=3650)
    assert set(_hosts(tmp_path / "scheduler.crt")) >= set(hosts)


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "a b",
        "*",
        "a.*.b",
        "host:50051",
        "2001:db8::x",
        "http://a",
        "a\n",
        "executor=a",
        "=a",
    ],
)
def test_certs_refuse_a_malformed_host(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "made"
    problem = f"--host is {host!r}; allowed: a host name or an IP address"
    assert _refusal(capsys, str(directory), "--host", host) == problem
    assert not directory.exists()


@pytest.mark.parametrize("flag", ["--host", "--client"])
@pytest.mark.parametrize(
    "suffix", ["splitserve.internal", "SplitServe.internal", "splitserve.internal."]
)
def test_certs_refuse_a_name_when_it_would_be_a_role(
    flag: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"executor.{suffix}"
    assert _refusal(capsys, str(tmp_path), flag, name).startswith(f"{name!r} is reserved: ")


@pytest.mark.parametrize("days", ["0", "3651", "-1", "ten", "1.5", "99999999999"])
def test_certs_refuse_days_when_they_are_out_of_range(
    days: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["certs", str(tmp_path), f"--days={days}"])
    assert f"--days: {days!r} is not allowed; allowed: 1 to 3650\n" in capsys.readouterr().err


def test_certs_name_the_file_when_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert _refusal(capsys, str(tmp_path / "file")) == f"{tmp_path / 'file'}: File exists"


def _no_certificate(directory: Path) -> None:
    (directory / "ca.crt").write_text("nothing")


def _missing_certificate(directory: Path) -> None:
    (directory / "ca.crt").unlink()


def _no_key(directory: Path) -> None:
    (directory / "ca.key").write_bytes(b"")


def _key_with_password(directory: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (directory / "ca.key").write_bytes(key)


def _key_of_another(directory: Path) -> None:
    shutil.copy(directory / "scheduler.key", directory / "ca.key")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_no_certificate, "ca.crt: not a PEM certificate"),
        (_missing_certificate, "ca.crt: No such file or directory"),
        (_no_key, "ca.key: not a PEM key without a password"),
        (_key_with_password, "ca.key: not a PEM key without a password"),
        (_key_of_another, "ca.key: not the key of ca.crt"),
    ],
)
def test_certs_name_the_file_when_the_authority_is_broken(
    spoil: Callable[[Path], None],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    spoil(tmp_path)
    assert _refusal(capsys, str(tmp_path)) == f"{tmp_path}/{problem}"


def test_certs_keep_the_authority_when_run_again(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    authority, renewed = ((tmp_path / f"{name}.crt").read_text() for name in ("ca", "operator"))
    assert main(["certs", str(tmp_path)]) == 0
    assert (tmp_path / "ca.crt").read_text() == authority
    assert (tmp_path / "operator.crt").read_text() != renewed
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
        tmp_path / "operator.crt", tmp_path / "operator.key"
    )


def test_certs_are_in_folders_of_their_own_when_asked_for(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path), "--folders"]) == 0
    authority = (tmp_path / "ca.crt").read_bytes()
    made = {"scheduler", "executor", "operator", "gateway"}
    assert {path.name for path in tmp_path.iterdir()} == {*made, "ca.crt", "ca.key"}
    for name in made:
        folder = tmp_path / name
        assert {path.name for path in folder.iterdir()} == {"tls.crt", "tls.key", "ca.crt"}
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "ca.crt").read_bytes() == authority
        context = ssl.create_default_context(cafile=folder / "ca.crt")
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    first = (tmp_path / "gateway" / "tls.crt").read_bytes()
    assert main(["certs", str(tmp_path), "--folders"]) == 0
    assert (tmp_path / "gateway" / "tls.crt").read_bytes() != first
    assert (tmp_path / "ca.crt").read_bytes() == authority


@pytest.mark.parametrize("where", [(), ("--folders",)])
def test_certs_keep_the_names_when_they_are_renewed(where: tuple[str, ...], tmp_path: Path) -> None:
    first = ["--host=api.example.org", "--host=2001:DB8::7", "--client=alice"]
    renewals = (first, ["--host=localhost", "--host=2001:db8::7"], ["--host=new.example.org"])
    for flags in renewals:
        assert main(["certs", str(tmp_path), *where, *flags]) == 0

    file = "{}/tls.crt" if where else "{}.crt"
    local = ["localhost", "127.0.0.1", "::1"]
    hosts = sorted([*local, "api.example.org", "2001:db8::7", "new.example.org"])
    role = "{}.splitserve.internal"
    assert sorted(_hosts(tmp_path / file.format("gateway"))) == hosts
    scheduler = sorted([*hosts, role.format("scheduler")])
    assert sorted(_hosts(tmp_path / file.format("scheduler"))) == scheduler
    assert _hosts(tmp_path / file.format("executor")) == [role.format("executor")]
    assert _hosts(tmp_path / file.format("alice")) == ["alice"]


def test_certs_take_no_names_from_a_certificate_of_another_authority(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert main(["certs", str(ours)]) == 0
    assert main(["certs", str(theirs), "--host=theirs.example.org"]) == 0
    shutil.copy(theirs / "scheduler.crt", ours / "gateway.crt")

    assert main(["certs", str(ours)]) == 0

    assert _hosts(ours / "gateway.crt") == ["localhost", "127.0.0.1", "::1"]


def test_certs_change_nothing_when_a_certificate_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    broken = tmp_path / "gateway.crt"
    broken.write_text("nothing")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    assert _refusal(capsys, str(tmp_path)) == f"{broken}: not a PEM certificate"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
