"""Certificates and keys with what goes wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve_cli.checks.finding import Finding, State
from splitserve_cli.checks.tls_files import check_tls_files
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
        assert len(findings) == 3


def test_certificate_is_wrong_when_it_has_ended_and_before_it_begins(made: Certificates) -> None:
    files = made.files("scheduler")
    (ended,) = wrongs(check_tls_files(files, now_s=4e9 + _YEARS_S))
    assert "ended at 20" in ended
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
    assert "KEY_VALUES_MISMATCH" in problem


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
