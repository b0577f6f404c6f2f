"""Of a certificate in use that comes to its end it is told ahead, and not too often.

When that is, cryptography says; the clock is the test's.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from cryptography import x509

from splitserve_rpc.security import Security
from splitserve_rpc.tls import CertificateEnds, TlsFiles
from tests.support.security.cluster import Certificates

HOUR_S = 3600
DAY_S = 24 * HOUR_S


class Process:
    """One that shows a certificate, at a time of the test's."""

    def __init__(self, files: TlsFiles) -> None:
        assert files.cert is not None
        self.cert = files.cert
        self.ends = x509.load_pem_x509_certificate(self.cert.read_bytes()).not_valid_after_utc
        self.now_s = 0.0
        # It shows the same in two places, and elsewhere none.
        self.looking = CertificateEnds((files, None, files), lambda: self.now_s)

    def look(self, left_s: float) -> None:
        self.now_s = self.ends.timestamp() - left_s
        self.looking.look()

    def warning(self, days_left: int) -> str:
        ends = self.ends.isoformat()
        return f"tls_files_expire_soon cert={self.cert} ends={ends} days_left={days_left}"

    def error(self) -> str:
        return f"tls_files_expired cert={self.cert} ends={self.ends.isoformat()}"


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of certificates."""
    return [line for line in caplog.messages if line.startswith("tls_files")]


def test_end_is_told_of_once_a_day_from_two_weeks_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(Certificates.make(tmp_path, "--days=90").files("gateway"))
    for left_h in range(16 * 24, -48, -1):
        process.look(left_h * HOUR_S + 1)

    warnings = [process.warning(days_left) for days_left in reversed(range(15))][1:]
    assert told(caplog) == [*warnings, process.error(), process.error()]


def test_end_is_told_of_in_the_last_third_when_a_certificate_is_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(Certificates.make(tmp_path, "--days=6").files("gateway"))
    process.look(2.5 * DAY_S)
    assert told(caplog) == []
    process.look(1.5 * DAY_S)
    assert told(caplog) == [process.warning(1)]


def test_end_is_not_told_of_when_there_is_a_new_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Certificates.make(tmp_path, "--days=30")
    process = Process(made.files("gateway"))
    process.look(20 * DAY_S)
    Certificates.make(tmp_path, "--days=300")
    process.look(2 * DAY_S)
    assert told(caplog) == []


def test_end_of_the_last_one_is_told_of_when_the_new_one_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(Certificates.make(tmp_path, "--days=30").files("gateway"))
    process.look(20 * DAY_S)
    shutil.copy(tmp_path / "operator.key", tmp_path / "gateway.key")
    process.look(1.5 * DAY_S)
    process.look(-1)
    process.cert.unlink()
    process.look(-1.5 * DAY_S)
    assert told(caplog) == [process.warning(1), process.error(), process.error()]


async def test_certificates_are_looked_at_when_a_process_starts_and_after_each_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(Certificates.make(tmp_path, "--days=90").files("gateway"))
    process.now_s = process.ends.timestamp() - 3.5 * DAY_S
    expected = [process.warning(days_left) for days_left in (3, 2, 1)]
    num_told: list[int] = []

    async def pause() -> None:
        num_told.append(len(told(caplog)))
        process.now_s += DAY_S
        if len(num_told) == len(expected):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await process.looking.keep_looking(pause)
    assert num_told == [1, 2, 3]
    assert told(caplog) == expected


def test_process_shows_what_it_has_for_its_cluster_and_for_clients(tmp_path: Path) -> None:
    files = Certificates.make(tmp_path).files("scheduler")
    options = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}
    shown = Security.from_options(options).shown
    assert {each.cert for each in shown} == {files.cert}
    assert Security.from_options({}).shown == ()
