"""Small certificate authority for a cluster, and the certificates of its processes."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from splitserve_common import replace_file

_CA_DAYS = 3650
# Tolerance for clock differences between machines.
_BEFORE = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Issued:
    """Certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, directory: Path, name: str) -> None:
        """Writes `name`.crt, and `name`.key with permissions for its owner only. Raises OSError."""
        key = self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        replace_file(directory / f"{name}.key", key)
        self.write_certificate(directory, name)

    def write_certificate(self, directory: Path, name: str) -> None:
        """Writes `name`.crt alone. Raises OSError."""
        certificate = self.certificate.public_bytes(serialization.Encoding.PEM)
        replace_file(directory / f"{name}.crt", certificate, is_secret=False)


class Authority:
    """Issues certificates with a lifetime in days; `issued`: its own certificate and key."""

    def __init__(self, issued: Issued) -> None:
        self.issued = issued

    @classmethod
    def create(cls) -> Authority:
        """Creates a certificate authority with a fresh key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name("splitserve CA")
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(subject, subject, key, _CA_DAYS).add_extension(constraints, True)
        usage = _usage(signs_certificates=True)
        certificate = builder.add_extension(usage, True).sign(key, hashes.SHA256())
        return cls(Issued(certificate, key))

    @classmethod
    def read(cls, directory: Path) -> Authority:
        """Reads the authority that was written to `directory`. Raises OSError, ValueError."""
        certificate = _read_certificate(directory / "ca.crt")
        key = _read_key(directory / "ca.key")
        if certificate.public_key() != key.public_key():
            raise ValueError(f"{directory / 'ca.key'}: not the key of ca.crt")
        return cls(Issued(certificate, key))

    def issue(self, name: str, hosts: Sequence[str], days: int) -> Issued:
        """Issues a certificate for `name`, valid for servers and clients.

        `hosts`: host names and addresses. `days`: lifetime.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.issued.certificate.subject
        usage = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        builder = (
            _builder(_name(name), issuer, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(_usage(signs_certificates=False), True)
            .add_extension(usage, False)
            .add_extension(x509.SubjectAlternativeName(dict.fromkeys(map(_host, hosts))), False)
        )
        return Issued(builder.sign(self.issued.key, hashes.SHA256()), key)

    def hosts_of(self, path: Path) -> list[str]:
        """Returns the host names and addresses in the certificate at `path`.

        Returns none if the certificate does not exist or another authority issued it. Raises
        OSError, ValueError.
        """
        if not path.exists():
            return []
        certificate = _read_certificate(path)
        try:
            certificate.verify_directly_issued_by(self.issued.certificate)
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            # Names in a certificate of another authority are not trusted.
            return []
        return [str(name.value) for name in names.value]


def issue_all(
    directory: Path, names: Mapping[str, Sequence[str]], days: int, *, in_folders: bool
) -> None:
    """Writes or renews a certificate for each of `names`; creates the authority if there is none.

    `names`: host names and addresses by certificate; a renewed certificate also keeps its earlier
    ones. `in_folders`: writes NAME/tls.crt rather than NAME.crt. Raises OSError, ValueError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (directory / "ca.key").exists():
        authority = Authority.read(directory)
    else:
        authority = Authority.create()
        authority.issued.write(directory, "ca")
    paths = {name: (directory / name, "tls") if in_folders else (directory, name) for name in names}
    # Reads all certificates before it writes one, so that an unreadable one changes nothing.
    kept = {name: authority.hosts_of(at / f"{file}.crt") for name, (at, file) in paths.items()}
    for name, (folder, file) in paths.items():
        folder.mkdir(mode=0o700, exist_ok=True)
        authority.issue(name, [*names[name], *kept[name]], days).write(folder, file)
        if in_folders:
            authority.issued.write_certificate(folder, "ca")


def _read_certificate(path: Path) -> x509.Certificate:
    """Reads a certificate. Raises OSError, ValueError."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not a PEM certificate") from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Reads a private key of an elliptic curve. Raises OSError, ValueError."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path}: not a PEM key without a password") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path}: not an elliptic curve key")
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
