"""Certificates and keys with what goes wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve_cli.checks.finding import Finding, State
from splitserve_cli.checks.ports import check_tls_files
from splitserve_rpc.tls import TlsFiles
from tests.support.security.cluster import Certificates

_YEARS_S = 50 * 365 * 86400.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def wrongs(findings: list[Finding]) -> list[str]:
    return [f"{each.name}: {each.found}" for each in findings if each.state is State.WRONG]


def test_files_of_a_cluster_are_well_when_they_are_as_they_were_made(made: Certificates) -> None:
    for name in ("scheduler", "executor", "operator"):
        findings = check_tls_files(made.files(name))
        assert {each.state for each in findings} == {State.OK}
        assert len(findings) == 4


def test_certificate_is_wrong_when_it_has_ended_and_before_it_begins(made: Certificates) -> None:
    files = made.files("scheduler")
    ended, authority = wrongs(check_tls_files(files, now_s=4e9 + _YEARS_S))
    assert ended.startswith("certificate ")
    assert "ended at 20" in ended
    assert authority.startswith("authority ")
    assert "ended at 2" in authority
    (early,) = wrongs(check_tls_files(files, now_s=0.0))
    assert "begins at 20" in early


def test_certificate_is_warned_of_when_it_ends_within_days(made: Certificates) -> None:
    from splitserve_rpc.certificate import read_certificate

    files = made.files("scheduler")
    assert files.cert is not None
    assert files.key is not None
    ends_s = read_certificate(files.cert, files.key).ends_s
    states = {each.state for each in check_tls_files(files, now_s=ends_s - 86400)}
    assert states == {State.OK, State.WARNING}


def test_certificate_of_another_authority_is_wrong(made: Certificates, tmp_path: Path) -> None:
    other = Certificates.make(tmp_path)
    files = TlsFiles(made.files("scheduler").cert, made.files("scheduler").key, tmp_path / "ca.crt")
    (problem,) = wrongs(check_tls_files(files))
    assert "certificate" in problem
    assert wrongs(check_tls_files(other.files("scheduler"))) == []


def test_key_is_wrong_when_others_can_read_it_or_it_is_of_another_certificate(
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


def test_files_that_cannot_be_read_are_named_and_a_lone_certificate_is_wrong(
    made: Certificates, tmp_path: Path
) -> None:
    missing = TlsFiles(tmp_path / "no.crt", tmp_path / "no.key")
    assert len(wrongs(check_tls_files(missing))) == 2
    (alone,) = wrongs(check_tls_files(TlsFiles(made.files("scheduler").cert)))
    assert "only" in alone
    garbage = tmp_path / "garbage"
    garbage.write_text("no certificate")
    garbage.chmod(0o600)
    assert len(wrongs(check_tls_files(TlsFiles(garbage, garbage)))) == 1


def test_certificate_is_wrong_when_it_has_none_of_the_names(made: Certificates) -> None:
    problems = wrongs(check_tls_files(made.files("operator"), ("scheduler.example",)))
    assert len(problems) == 1
    assert "DNS names" in problems[0]


def test_nothing_is_said_when_no_files_are_given() -> None:
    assert check_tls_files(TlsFiles()) == []


@pytest.mark.parametrize(
    ("cert", "key", "found"),
    [
        ("garbage", "scheduler.key", "holds no certificate in PEM"),
        ("scheduler.crt", "garbage", "holds no private key in PEM"),
        ("scheduler.crt", "sealed", "has a passphrase"),
        ("damaged", "scheduler.key", "with "),
    ],
)
def test_file_that_is_of_no_use_is_named_with_what_it_is_instead(
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
        assert problem == f"authority {garbage}: holds no certificate"


def test_authority_of_others_need_not_have_signed_our_certificate(
    made: Certificates, tmp_path: Path
) -> None:
    own, other = made.files("gateway"), Certificates.make(tmp_path).directory / "ca.crt"
    files = TlsFiles(own.cert, own.key, other)
    assert wrongs(check_tls_files(files, is_of_authority=False)) == []
    assert len(wrongs(check_tls_files(files))) == 1
