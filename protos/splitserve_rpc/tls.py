"""TLS of servers and channels, from files that may change while the process runs."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from splitserve_rpc.certificate import load_authority, load_pair
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
    # No two of these are equal.
    for_channels: grpc.ChannelCredentials = field(compare=False)


class Tls:
    """What the files said last that was of use. Its methods may be called in any thread."""

    def __init__(self, files: TlsFiles, name: str | None = None) -> None:
        """`name`: that our certificate has to have. Raises FilesUnusable."""
        self.files = files
        paths = [path for path in (files.cert, files.key, files.ca) if path is not None]
        self._watched = WatchedFiles("tls_files", paths, lambda: _read(files, name))

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


def load_files(context: ssl.SSLContext, files: TlsFiles, name: str | None = None) -> None:
    """Loads those that there are. `name`: that the certificate has to have.

    Raises FilesUnusable, also for a key of another certificate, and a certificate that has ended.
    """
    if files.cert is not None and files.key is not None:
        load_pair(context, files.cert, files.key, name)
    if files.ca is not None:
        load_authority(context, files.ca)


def _read(files: TlsFiles, name: str | None) -> _Contents:
    """Raises FilesUnusable."""
    if (files.cert is None) != (files.key is None):
        raise FilesUnusable(f"{files.cert or files.key}: certificate and key are given together")
    cert, key, ca = (
        None if path is None else read_bytes(path) for path in (files.cert, files.key, files.ca)
    )
    load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files, name)
    return _Contents(cert, key, ca, grpc.ssl_channel_credentials(ca, key, cert))
