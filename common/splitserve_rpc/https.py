"""TLS of HTTP servers, from files that may change at run time."""

from __future__ import annotations

import ssl

from splitserve_rpc.tls import TlsFiles, load_files
from splitserve_rpc.watched_files import WatchedFiles

# The default of asyncio is a minute, during which an unfinished handshake holds a connection.
HANDSHAKE_TIMEOUT_S = 15.0
# TLS 1.2 ciphers with forward secrecy and authenticated encryption; CBC has had too many attacks.
# All ciphers of TLS 1.3 are of this kind.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
# Time for a client to confirm the end of a response.
SHUTDOWN_TIMEOUT_S = 5.0


def https_context(files: TlsFiles) -> ssl.SSLContext:
    """Returns a server context that uses the current `files` for each new connection.

    `files.ca`: authority of the client certificates that are required; None: none required. Raises
    FilesUnusable.
    """
    paths = [path for path in (files.cert, files.key, files.ca) if path is not None]
    watched = WatchedFiles("https_files", paths, lambda: _read(files))

    def choose(connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        connection.context = watched.current()

    # A context of its own, never one of `watched`: it only selects one for each connection.
    context = _read(files)
    context.sni_callback = choose
    return context


def _read(files: TlsFiles) -> ssl.SSLContext:
    """Returns a new context with the contents of `files`. Raises FilesUnusable."""
    assert files.cert is not None, "a server has one"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    load_files(context, files)
    if files.ca is None:
        return context
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session is not asked for a certificate again, although its authority may have been
    # removed. Resumption cannot be disabled before TLS 1.3.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    return context
