"""TLS of servers and channels, from files that may change while the process runs."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from splitserve_rpc.watched_files import FilesUnusable, WatchedFiles, read_bytes

# What takes a thread some microseconds, with room for a machine that has much else to do.
_BEGIN_S = 0.1


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: `cert` with its chain and its `key` say who we are, `ca` whom we believe.

    `cert` and `key` are given together; a server has them.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None


@dataclass(frozen=True, slots=True)
class _Contents:
    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    for_channels: grpc.ChannelCredentials


class Tls:
    """What the files said last that was of use. Its methods may be called in any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises FilesUnusable."""
        self.files = files
        paths = [path for path in (files.cert, files.key, files.ca) if path is not None]
        self._watched = WatchedFiles("tls", paths, lambda: _read(files))

    @property
    def checks_clients(self) -> bool:
        """Whether servers ask for a certificate that `ca` vouches for."""
        return self.files.ca is not None

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server; each new connection is met with what the files say then."""
        return _ServerConfiguration(self._watched.current).credentials(self.checks_clients)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a new channel, which keeps them; the same object until the files change."""
        return self._watched.current().for_channels


class _ServerConfiguration:
    """What one server shows; gRPC asks before each handshake, in threads of its own.

    It has what it is told freed when it is told of something else, even if a handshake in another
    thread is about to use that (grpc/grpc#36693), which ends the process. So it is told of each
    change once, and not before handshakes that were asked about have begun: while it asks for one,
    all others wait.
    """

    def __init__(self, current: Callable[[], _Contents]) -> None:
        self._current = current
        self._shown = current()

    def credentials(self, checks_clients: bool) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown), self._news, checks_clients
        )

    def _news(self) -> grpc.ServerCertificateConfiguration | None:
        """None: nothing has changed."""
        contents = self._current()
        if contents is self._shown:
            return None
        self._shown = contents
        time.sleep(_BEGIN_S)
        return _configuration(contents)


def _configuration(contents: _Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.cert)], contents.ca)


def _read(files: TlsFiles) -> _Contents:
    """Raises FilesUnusable, also for a key that is not that of the certificate."""
    if (files.cert is None) != (files.key is None):
        raise FilesUnusable(f"{files.cert or files.key}: certificate and key are given together")
    cert, key, ca = (
        None if path is None else read_bytes(path) for path in (files.cert, files.key, files.ca)
    )
    if files.cert is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(files.cert, files.key, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            problem = getattr(error, "reason", None) or str(error)
            raise FilesUnusable(f"{files.cert} with {files.key}: {problem}") from error
    if files.ca is not None:
        try:
            ssl.create_default_context(cafile=files.ca)
        except (ssl.SSLError, OSError) as error:
            raise FilesUnusable(f"{files.ca}: holds no certificate") from error
    return _Contents(cert, key, ca, grpc.ssl_channel_credentials(ca, key, cert))
