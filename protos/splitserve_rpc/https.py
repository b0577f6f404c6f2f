"""TLS of servers of HTTP, from files that may change while they run."""

from __future__ import annotations

import ssl

from splitserve_rpc.tls import TlsFiles, load_files
from splitserve_rpc.watched_files import WatchedFiles

# Of asyncio it is a minute; whoever does not come to an end with it costs a connection.
HANDSHAKE_TIMEOUT_S = 15.0
# Of TLS 1.2: with forward secrecy and authenticated encryption; CBC has had too many attacks. Those
# of TLS 1.3 are all of this kind.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
# For a client to say that it has the end of an answer.
SHUTDOWN_TIMEOUT_S = 5.0


def https_context(files: TlsFiles) -> ssl.SSLContext:
    """For a server; each new connection is met with what `files` say then.

    `files.ca`: of whom clients need a certificate; None: they need none. Raises FilesUnusable.
    """
    paths = [path for path in (files.cert, files.key, files.ca) if path is not None]
    watched = WatchedFiles("https_files", paths, lambda: _read(files))

    def choose(connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        connection.context = watched.current()

    # One of its own, which is never what `watched` gives away: it only asks.
    context = _read(files)
    context.sni_callback = choose
    return context


def _read(files: TlsFiles) -> ssl.SSLContext:
    """Raises FilesUnusable."""
    assert files.cert is not None, "a server has one"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    load_files(context, files)
    if files.ca is None:
        return context
    context.verify_mode = ssl.CERT_REQUIRED
    # A session that is taken up again is not asked for its certificate, whose authority may have
    # been dropped since; before TLS 1.3 that cannot be turned off.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    return context
