"""Credential (API key or JWT) that the client sends with each call."""

from __future__ import annotations

import os
from pathlib import Path

from splitserve_client.errors import CredentialsUnusable
from splitserve_rpc.access import MAX_CREDENTIAL_CHARS, is_credential
from splitserve_rpc.files import FilesUnusable, WatchedFiles, read_bytes, warn_if_readable

Metadata = tuple[tuple[str, str], ...]


class ApiKey:
    """API key or JWT, given as a text or read from a file; empty if neither is given."""

    def __init__(self, text: str | None, file: str | os.PathLike[str] | None) -> None:
        """Reads the credential. Raises CredentialsUnusable."""
        self._metadata = _metadata(text, "api_key")
        self._watched: WatchedFiles[Metadata] | None = None
        if file is None:
            return
        if text is not None:
            raise CredentialsUnusable("api_key and api_key_file are given; allowed: one of them")
        path = Path(file)
        try:
            self._watched = WatchedFiles("api_key_files", [path], lambda: _read(path))
        except FilesUnusable as error:
            raise CredentialsUnusable(str(error)) from error
        warn_if_readable(path)

    def current(self) -> Metadata:
        """Returns the call metadata with the current credential.

        The same object until the file changes.
        """
        return self._metadata if self._watched is None else self._watched.current()


def _read(path: Path) -> Metadata:
    """Reads the credential in `path`. Raises FilesUnusable."""
    try:
        # A character outside ASCII becomes one that the check of the credential refuses.
        return _metadata(read_bytes(path).decode("ascii", "replace").strip(), str(path))
    except CredentialsUnusable as error:
        raise FilesUnusable(str(error)) from error


def _metadata(text: str | None, where: str) -> Metadata:
    """Returns call metadata for a credential; empty metadata for None.

    Raises CredentialsUnusable, whose message never contains the text, which may be a secret even if
    it is malformed.
    """
    if text is None:
        return ()
    if not is_credential(text):
        raise CredentialsUnusable(
            f"{where}: is no credential: it has {len(text)} characters; allowed: 1 to"
            f" {MAX_CREDENTIAL_CHARS}, of ASCII, without spaces"
        )
    return (("authorization", f"Bearer {text}"),)
