"""TLS of gRPC servers and channels, from files that may change at run time."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from splitserve_common import (
    Certificate,
    FilesUnusable,
    WatchedFiles,
    load_authority,
    load_pair,
    read_bytes,
    warn_of_end,
)

# Time for a started handshake to use its configuration: some microseconds, on a busy machine more.
_BEGIN_S = 0.1


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side: `cert` with its chain, its `key`, and the trusted authority `ca`.

    `cert` and `key` must be given together. A server needs both.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None


@dataclass(frozen=True, slots=True)
class _Contents:
    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    # Credentials never compare equal.
    for_channels: grpc.ChannelCredentials = field(compare=False)


class Tls:
    """TLS credentials from the last valid contents of the files. Thread-safe."""

    def __init__(self, files: TlsFiles, name: str | None = None) -> None:
        """`name`: DNS name that the certificate must have. Raises FilesUnusable."""
        self.files = files
        paths = [path for path in (files.cert, files.key, files.ca) if path is not None]
        self._watched = WatchedFiles("tls_files", paths, lambda: _read(files, name))

    @property
    def checks_clients(self) -> bool:
        """Whether servers ask clients for a certificate issued by `ca`."""
        return self.files.ca is not None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for a server. Each new connection uses the current files."""
        return _ServerConfiguration(self._watched.current).credentials(self.checks_clients)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials for a new channel, which keeps them. New object when files change."""
        return self._watched.current().for_channels


class _ServerConfiguration:
    """Current TLS configuration of one server. gRPC asks for it before each handshake.

    gRPC asks in threads of its own. When it gets a new configuration it frees the old one, even if
    a handshake in another thread is about to use the old one (grpc/grpc#36693), which crashes the
    process. So each change is returned only once, and only after the handshakes that asked before
    have begun: all other threads wait while gRPC asks.
    """

    def __init__(self, current: Callable[[], _Contents]) -> None:
        self._current = current
        self._shown = current()

    def credentials(self, checks_clients: bool) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown), self._news, checks_clients
        )

    def _news(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the changed configuration for gRPC; None without a change."""
        contents = self._current()
        if contents is self._shown:
            return None
        self._shown = contents
        time.sleep(_BEGIN_S)
        return _configuration(contents)


def _configuration(contents: _Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.cert)], contents.ca)


def load_files(context: ssl.SSLContext, files: TlsFiles, name: str | None = None) -> None:
    """Loads the given files into `context`. `name`: DNS name that the certificate must have.

    Raises FilesUnusable, also for a key of another certificate and for an expired certificate.
    """
    if files.cert is not None and files.key is not None:
        load_pair(context, files.cert, files.key, name)
    if files.ca is not None:
        load_authority(context, files.ca)


def _read(files: TlsFiles, name: str | None) -> _Contents:
    """Reads and checks the files. Raises FilesUnusable."""
    if (files.cert is None) != (files.key is None):
        raise FilesUnusable(f"{files.cert or files.key}: certificate and key require each other")
    cert, key, ca = (
        None if path is None else read_bytes(path) for path in (files.cert, files.key, files.ca)
    )
    load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files, name)
    return _Contents(cert, key, ca, grpc.ssl_channel_credentials(ca, key, cert))


# -- TLS of HTTP servers, from files that may change at run time -----------------------------------

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
    watched = WatchedFiles("https_files", paths, lambda: _read_context(files))

    def choose(connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        connection.context = watched.current()

    # A context of its own, never one of `watched`: it only selects one for each connection.
    context = _read_context(files)
    context.sni_callback = choose
    return context


def _read_context(files: TlsFiles) -> ssl.SSLContext:
    """Returns a new context with the contents of `files`. Raises FilesUnusable."""
    assert files.cert is not None, "a server has a certificate"
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


# -- Periodic check whether the certificates that a process shows expire soon ----------------------

_PERIOD_S = 3600.0


async def _pause() -> None:
    await asyncio.sleep(_PERIOD_S)


class CertificateEnds:
    """Checks the certificates of `shown`, each once.

    None and files without a certificate are skipped.
    """

    def __init__(
        self, shown: Iterable[TlsFiles | None], now_s: Callable[[], float] = time.time
    ) -> None:
        """`now_s`: wall clock, in seconds since 1970."""
        # Key by certificate, so that each certificate is checked once.
        self._pairs = {
            files.cert: files.key for files in shown if files is not None and files.cert is not None
        }
        self._now_s = now_s
        self._last: dict[Path, Certificate] = {}

    def look(self) -> None:
        """Reads all certificates and warns of those that expire soon or have expired. Blocks."""
        now_s = self._now_s()
        for cert, key in self._pairs.items():
            assert key is not None, "a certificate has a key"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # The user of the files reports the error and keeps using the last certificate.
            with suppress(FilesUnusable):
                self._last[cert] = load_pair(context, cert, key, now_s=now_s)
            if cert in self._last:
                warn_of_end(cert, self._last[cert], now_s)

    async def keep_looking(self, pause: Callable[[], Awaitable[None]] = _pause) -> None:
        """Checks the certificates at once and after each `pause`, until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await pause()
