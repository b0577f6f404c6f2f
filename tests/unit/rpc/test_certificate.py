"""What a certificate may not be: ended, or of somebody else. cryptography says what is in it."""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from splitserve_rpc.certificate import Certificate, load_pair, read_certificate
from splitserve_rpc.files import FilesUnusable
from splitserve_rpc.tls import Tls
from tests.support.security.cluster import Certificates

BEGINS = datetime(2001, 2, 3, tzinfo=UTC)
Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def _write(
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
def test_certificate_is_read_whatever_it_is_for_and_whenever_it_ends(
    tmp_path: Path, key: Key, usage: list[x509.ObjectIdentifier], year: int
) -> None:
    ends = datetime(year, 3, 4, 5, 6, 7, tzinfo=UTC)
    certificate = read_certificate(*_write(tmp_path, key, ends, usage))
    begins_s = BEGINS.timestamp()
    assert certificate == Certificate(frozenset({"a.test"}), begins_s, ends.timestamp())


def test_certificate_is_refused_with_the_date_when_it_has_ended(tmp_path: Path) -> None:
    files = _write(tmp_path, ec.generate_private_key(ec.SECP256R1()), datetime(2002, 3, 4), [])
    with pytest.raises(FilesUnusable, match=r"a\.crt: .* expired at 2002-03-04T00:00:00\+00:00$"):
        load_pair(_context(), *files)


def test_new_certificate_is_not_taken_when_it_is_of_another_role(
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
    _write(tmp_path, ec.generate_private_key(ec.SECP256R1()), soon, [])
    for kind in ("crt", "key"):
        (tmp_path / f"a.{kind}").replace(tmp_path / f"executor.{kind}")
    with caplog.at_level(logging.WARNING):
        tls.channel_credentials()
    assert f"tls_files_expire_soon cert={files.cert}" in caplog.text
