"""TLS files and certificates. The package cryptography says what certificates contain."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from splitserve_common import Certificate, FilesUnusable, load_pair, read_certificate
from splitserve_rpc import (
    Access,
    CertificateEnds,
    Security,
    ServerSecurity,
    Tls,
    TlsFiles,
    bind_server,
)
from tests.support.security.cluster import Certificates


def _serial_number(port: int, ca: Path) -> str:
    """Of the certificate that a new connection is met with."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secured,
    ):
        certificate = secured.getpeercert()
    assert certificate is not None
    return str(certificate["serialNumber"])


async def test_new_connections_meet_the_certificate_that_is_there_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Certificates.make(tmp_path, "--client", "localhost")
    tls = Tls(made.files("scheduler", ca=False))
    running = bind_server("127.0.0.1:0", (), security=ServerSecurity(Access(), tls))
    await running.server.start()

    async def met() -> str:
        return await asyncio.to_thread(_serial_number, running.port, tmp_path / "ca.crt")

    first = await met()
    assert await met() == first
    Certificates.make(tmp_path)
    second = await met()
    assert second != first
    # The key has come, the certificate has not: what fits together is kept.
    shutil.copy(tmp_path / "localhost.key", tmp_path / "scheduler.key")
    with caplog.at_level(logging.WARNING):
        assert await met() == second
    assert "tls_files_unusable" in caplog.text
    shutil.copy(tmp_path / "localhost.crt", tmp_path / "scheduler.crt")
    assert await met() not in (first, second)
    (tmp_path / "scheduler.crt").unlink()
    assert await met() not in (first, second)
    await running.stop(0)


def _missing(directory: Path) -> None:
    (directory / "scheduler.crt").unlink()


def _empty(directory: Path) -> None:
    (directory / "scheduler.key").write_bytes(b"")


def _of_another(directory: Path) -> None:
    shutil.copy(directory / "operator.key", directory / "scheduler.key")


def _no_authority(directory: Path) -> None:
    (directory / "ca.crt").write_text("nothing")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_missing, "scheduler.crt: No such file"),
        (_empty, "scheduler.key"),
        (_of_another, "KEY_VALUES_MISMATCH"),
        (_no_authority, "ca.crt: contains no certificate"),
    ],
)
def test_files_are_refused_by_name_when_they_cannot_be_used(
    tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    files = Certificates.make(tmp_path).files("scheduler")
    spoil(tmp_path)
    with pytest.raises(FilesUnusable, match=named):
        Tls(files)


def test_keys_are_their_owners_alone(tmp_path: Path) -> None:
    Certificates.make(tmp_path)
    modes = {path.name: os.stat(path).st_mode & 0o777 for path in tmp_path.iterdir()}
    assert {modes[name] for name in modes if name.endswith(".key")} == {0o600}


BEGINS = datetime(2001, 2, 3, tzinfo=UTC)
Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def _write_certificate(
    folder: Path, key: Key, ends: datetime, usage: list[x509.ObjectIdentifier]
) -> tuple[Path, Path]:
    """Self-signed, of `a.test`; without `usage`: for everything."""
    name = x509.Name([])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(BEGINS)
        .not_valid_after(ends)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("a.test")]), critical=True)
    )
    if usage:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    form = serialization.PrivateFormat.PKCS8
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "a.crt").write_bytes(builder.sign(key, digest).public_bytes(pem))
    (folder / "a.key").write_bytes(key.private_bytes(pem, form, plain))
    return folder / "a.crt", folder / "a.key"


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP384R1()),
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
    ],
    ids=["ec", "ed25519", "rsa"],
)
@pytest.mark.parametrize(
    "usage",
    [[], [ExtendedKeyUsageOID.SERVER_AUTH], [ExtendedKeyUsageOID.CLIENT_AUTH]],
    ids=["any", "server", "client"],
)
@pytest.mark.parametrize("year", [2002, 2049, 2091])
def test_certificate_is_read_with_any_key_usage_and_end(
    tmp_path: Path, key: Key, usage: list[x509.ObjectIdentifier], year: int
) -> None:
    ends = datetime(year, 3, 4, 5, 6, 7, tzinfo=UTC)
    certificate = read_certificate(*_write_certificate(tmp_path, key, ends, usage))
    begins_s = BEGINS.timestamp()
    assert certificate == Certificate(frozenset({"a.test"}), begins_s, ends.timestamp())


def test_certificate_is_refused_with_the_date_when_it_has_ended(tmp_path: Path) -> None:
    files = _write_certificate(
        tmp_path, ec.generate_private_key(ec.SECP256R1()), datetime(2002, 3, 4), []
    )
    with pytest.raises(FilesUnusable, match=r"a\.crt: .* expired at 2002-03-04T00:00:00\+00:00$"):
        load_pair(_context(), *files)


def test_new_certificate_is_refused_when_of_another_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Certificates.make(tmp_path).files("executor")
    tls = Tls(files, "executor.splitserve.internal")
    first = tls.channel_credentials()
    for kind in ("crt", "key"):
        (tmp_path / f"operator.{kind}").replace(tmp_path / f"executor.{kind}")
    with caplog.at_level(logging.WARNING):
        assert tls.channel_credentials() is first
    needed = "the DNS names: operator.splitserve.internal; required: executor.splitserve.internal"
    assert needed in caplog.text


def test_new_certificate_is_warned_of_when_it_ends_soon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Certificates.make(tmp_path).files("executor")
    tls = Tls(files)
    soon = datetime.now(UTC) + timedelta(days=2)
    _write_certificate(tmp_path, ec.generate_private_key(ec.SECP256R1()), soon, [])
    for kind in ("crt", "key"):
        (tmp_path / f"a.{kind}").replace(tmp_path / f"executor.{kind}")
    with caplog.at_level(logging.WARNING):
        tls.channel_credentials()
    assert f"tls_files_expire_soon cert={files.cert}" in caplog.text


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


def _logged_ends(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of certificates."""
    return [line for line in caplog.messages if line.startswith("tls_files")]


def test_end_is_logged_daily_during_the_last_two_weeks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(Certificates.make(tmp_path, "--days=90").files("gateway"))
    for left_h in range(16 * 24, -48, -1):
        process.look(left_h * HOUR_S + 1)

    warnings = [process.warning(days_left) for days_left in reversed(range(15))][1:]
    assert _logged_ends(caplog) == [*warnings, process.error(), process.error()]


def test_end_is_logged_in_the_last_third_when_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(Certificates.make(tmp_path, "--days=6").files("gateway"))
    process.look(2.5 * DAY_S)
    assert _logged_ends(caplog) == []
    process.look(1.5 * DAY_S)
    assert _logged_ends(caplog) == [process.warning(1)]


def test_end_is_not_logged_when_the_certificate_was_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Certificates.make(tmp_path, "--days=30")
    process = Process(made.files("gateway"))
    process.look(20 * DAY_S)
    Certificates.make(tmp_path, "--days=300")
    process.look(2 * DAY_S)
    assert _logged_ends(caplog) == []


def test_end_is_logged_when_the_new_certificate_is_unusable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(Certificates.make(tmp_path, "--days=30").files("gateway"))
    process.look(20 * DAY_S)
    shutil.copy(tmp_path / "operator.key", tmp_path / "gateway.key")
    process.look(1.5 * DAY_S)
    process.look(-1)
    process.cert.unlink()
    process.look(-1.5 * DAY_S)
    assert _logged_ends(caplog) == [process.warning(1), process.error(), process.error()]


async def test_certificate_ends_are_checked_at_start_and_periodically(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(Certificates.make(tmp_path, "--days=90").files("gateway"))
    process.now_s = process.ends.timestamp() - 3.5 * DAY_S
    expected = [process.warning(days_left) for days_left in (3, 2, 1)]
    num_told: list[int] = []

    async def pause() -> None:
        num_told.append(len(_logged_ends(caplog)))
        process.now_s += DAY_S
        if len(num_told) == len(expected):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await process.looking.keep_looking(pause)
    assert num_told == [1, 2, 3]
    assert _logged_ends(caplog) == expected


def test_security_shows_certificates_for_cluster_and_clients(tmp_path: Path) -> None:
    files = Certificates.make(tmp_path).files("scheduler")
    options = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}
    shown = Security.from_options(options).shown
    assert {each.cert for each in shown} == {files.cert}
    assert Security.from_options({}).shown == ()
