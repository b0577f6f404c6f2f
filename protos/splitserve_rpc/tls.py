"""TLS of servers and channels, from files that may change while the process runs."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

_log = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]


class TlsFilesUnusable(Exception):
    """The message names the file and says what is wrong with it."""


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


class Tls:
    """What the files said last that was of use. Its methods may be called in any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises TlsFilesUnusable."""
        self.files = files
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._contents = _read(files)

    @property
    def checks_clients(self) -> bool:
        """Whether servers ask for a certificate that `ca` vouches for."""
        return self.files.ca is not None

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server; each new connection is met with what the files say then."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), self._server_configuration, self.checks_clients
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a new channel, which keeps them."""
        contents = self._current()
        return grpc.ssl_channel_credentials(contents.ca, contents.key, contents.cert)

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        contents = self._current()
        return grpc.ssl_server_certificate_configuration(
            [(contents.key, contents.cert)], contents.ca
        )

    def _current(self) -> _Contents:
        with self._lock:
            try:
                stamp = self._look()
                if stamp != self._stamp:
                    # Files that are changed one after the other do not fit for a moment.
                    self._contents = _read(self.files)
                    self._stamp = stamp
                    _log.info("tls_files_reloaded cert=%s", self.files.cert)
            except TlsFilesUnusable as error:
                _log.warning("tls_files_unusable problem=%r", str(error))
            return self._contents

    def _look(self) -> _Stamp:
        return tuple(_stamp(path) for path in _paths(self.files))


def _paths(files: TlsFiles) -> list[Path]:
    return [path for path in (files.cert, files.key, files.ca) if path is not None]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise TlsFilesUnusable(f"{path}: {error.strerror}") from error
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(files: TlsFiles) -> _Contents:
    """Raises TlsFilesUnusable, also for a key that is not that of the certificate."""
    contents = _Contents(_bytes_of(files.cert), _bytes_of(files.key), _bytes_of(files.ca))
    if files.cert is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(files.cert, files.key, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            problem = getattr(error, "reason", None) or str(error)
            raise TlsFilesUnusable(f"{files.cert} with {files.key}: {problem}") from error
    if files.ca is not None:
        try:
            ssl.create_default_context(cafile=files.ca)
        except (ssl.SSLError, OSError) as error:
            raise TlsFilesUnusable(f"{files.ca}: holds no certificate") from error
    return contents


def _bytes_of(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsFilesUnusable(f"{path}: {error.strerror}") from error
