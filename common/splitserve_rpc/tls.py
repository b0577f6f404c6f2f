"""TLS of gRPC servers and channels, from files that may change at run time."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from splitserve_rpc.certificate import load_authority, load_pair
from splitserve_rpc.watched_files import FilesUnusable, WatchedFiles, read_bytes

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
        raise FilesUnusable(f"{files.cert or files.key}: certificate and key are given together")
    cert, key, ca = (
        None if path is None else read_bytes(path) for path in (files.cert, files.key, files.ca)
    )
    load_files(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files, name)
    return _Contents(cert, key, ca, grpc.ssl_channel_credentials(ca, key, cert))
