"""Certificates of a process: loading, checks, and warnings before they expire."""

from __future__ import annotations

import functools
import logging
import math
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from splitserve_common.files import FilesUnusable, read_bytes, warn_if_readable

_log = logging.getLogger(__name__)

_DAY_S = 86400.0
# Manual renewal gets a warning of two weeks. Programs renew in the last third of the lifetime.
_SOON_S = 14 * _DAY_S
_LAST_PART = 1 / 3
# X509_V_FLAG_NO_CHECK_TIME of OpenSSL, for which `ssl` has no name.
_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
_MAX_TURNS = 10


@dataclass(frozen=True, slots=True)
class Certificate:
    """Contents of a certificate. `begins_s`, `ends_s`: validity, in seconds since 1970."""

    dns_names: frozenset[str]
    begins_s: float
    ends_s: float

    @property
    def ends(self) -> str:
        """End of validity as ISO 8601 text."""
        return datetime.fromtimestamp(self.ends_s, UTC).isoformat()

    @property
    def soon_s(self) -> float:
        """Time before the end at which a warning is due, in seconds."""
        return min(_SOON_S, _LAST_PART * (self.ends_s - self.begins_s))


def load_pair(
    context: ssl.SSLContext,
    cert: Path,
    key: Path,
    name: str | None = None,
    now_s: float | None = None,
) -> Certificate:
    """Loads certificate and key into `context`; warns of a certificate that expires soon.

    `name`: DNS name that the certificate must have, None for any. `now_s`: seconds since 1970, None
    for the present. Raises FilesUnusable, also for a key of another certificate and for a
    certificate that has expired.
    """
    for path in (cert, key):
        read_bytes(path)
    try:
        # An empty password prevents a prompt for one.
        context.load_cert_chain(cert, key, password="")
        certificate = read_certificate(cert, key)
    except (ssl.SSLError, OSError, ValueError) as error:
        problem = getattr(error, "reason", None) or str(error)
        raise FilesUnusable(f"{cert} with {key}: {problem}") from error
    now_s = time.time() if now_s is None else now_s
    if certificate.ends_s <= now_s:
        raise FilesUnusable(f"{cert}: the certificate expired at {certificate.ends}")
    if name is not None and name not in certificate.dns_names:
        names = ", ".join(sorted(certificate.dns_names)) or "none"
        raise FilesUnusable(f"{cert}: the certificate has the DNS names: {names}; required: {name}")
    warn_if_readable(key)
    warn_of_end(cert, certificate, now_s)
    return certificate


def warn_of_end(cert: Path, certificate: Certificate, now_s: float) -> None:
    """Logs, once per day left, that a certificate in use expires soon or has expired."""
    left_s = certificate.ends_s - now_s
    if left_s < certificate.soon_s:
        _warn(cert, certificate.ends, math.ceil(left_s / _DAY_S) - 1)


def load_authority(context: ssl.SSLContext, ca: Path) -> None:
    """Loads the certificates of the trusted authority into `context`. Raises FilesUnusable."""
    read_bytes(ca)
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        raise FilesUnusable(f"{ca}: contains no certificate") from error


def read_certificate(cert: Path, key: Path) -> Certificate:
    """Returns the contents of a certificate. Raises ssl.SSLError, OSError.

    `ssl` only shows the contents of a certificate that a peer has presented and that is trusted. So
    the certificate is presented in a local handshake to a peer that trusts just this one, expired
    or not.
    """
    try:
        contents = _shown_by_server(cert, key)
    except ssl.SSLCertVerificationError:
        # The certificate is for clients only.
        contents = _shown_by_client(cert, key)
    names = frozenset(value for kind, value in contents.get("subjectAltName", ()) if kind == "DNS")
    begins_s, ends_s = (
        float(ssl.cert_time_to_seconds(contents[end])) for end in ("notBefore", "notAfter")
    )
    return Certificate(names, begins_s, ends_s)


def refusal_of(cert: Path, key: Path, ca: Path) -> str:
    """Returns why a peer that trusts only `ca` refuses the certificate; empty if it is accepted.

    Ignores the period of validity. Raises OSError.
    """
    server, client = _contexts()
    try:
        for context in (server, client):
            context.load_cert_chain(cert, key, password="")
            context.load_verify_locations(ca)
            context.verify_flags |= _NO_CHECK_TIME
        # A certificate for servers is accepted by a client only, and the reverse.
        for verifier in (client, server):
            verifier.verify_mode = ssl.CERT_REQUIRED
            problem = _problem_of_handshake(server, client)
            verifier.verify_mode = ssl.CERT_NONE
            if not problem:
                return ""
    except ssl.SSLError as error:
        return error.reason or str(error)
    return problem


def _problem_of_handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    try:
        _handshake(server, client)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    return ""


def _shown_by_server(cert: Path, key: Path) -> dict[str, Any]:
    server, client = _contexts()
    server.load_cert_chain(cert, key, password="")
    _trust_only(client, cert)
    return _handshake(server, client)[1].getpeercert() or {}


def _shown_by_client(cert: Path, key: Path) -> dict[str, Any]:
    server, client = _contexts()
    # The server needs a certificate, too; the client does not check it.
    for context in (server, client):
        context.load_cert_chain(cert, key, password="")
    _trust_only(server, cert)
    return _handshake(server, client)[0].getpeercert() or {}


def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server, client = (
        ssl.SSLContext(protocol) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    return server, client


def _trust_only(context: ssl.SSLContext, cert: Path) -> None:
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME


def _handshake(
    server: ssl.SSLContext, client: ssl.SSLContext
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Performs a handshake in memory; returns the server's end and the client's."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server),
    )
    unfinished = list(ends)
    for _ in range(_MAX_TURNS):
        for end in tuple(unfinished):
            try:
                end.do_handshake()
                unfinished.remove(end)
            except ssl.SSLWantReadError:
                continue
    if unfinished:
        raise ssl.SSLError("the handshake does not finish")
    return ends


@functools.lru_cache(maxsize=256)
def _warn(cert: Path, ends: str, days_left: int) -> None:
    """Logs a warning once per process and day.

    Negative `days_left`: the certificate has expired.
    """
    if days_left < 0:
        _log.error("tls_files_expired cert=%s ends=%s", cert, ends)
    else:
        _log.warning("tls_files_expire_soon cert=%s ends=%s days_left=%d", cert, ends, days_left)
