"""Configuration of a client: credential, timeouts, retries and security of its connection."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from splitserve_client.channels import Credentials
from splitserve_client.errors import CredentialsUnusable, DeadlineExceeded
from splitserve_common import FilesUnusable, WatchedFiles, read_bytes, warn_if_readable
from splitserve_rpc import MAX_CREDENTIAL_CHARS, Tls, TlsFiles, is_credential
from splitserve_text import SplitserveError

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
            f"{where}: is not a credential: it has {len(text)} characters; allowed: 1 to"
            f" {MAX_CREDENTIAL_CHARS} ASCII characters without spaces"
        )
    return (("authorization", f"Bearer {text}"),)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Backoff between attempts: delays grow by `factor` up to a maximum, with jitter.

    `give_up_after_s` counts from the loss of the stream; any progress resets the count.
    """

    first_delay_s: float = 0.1
    factor: float = 2.0
    max_delay_s: float = 1.0
    give_up_after_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Clock, sleep and jitter, replaced by tests. `clock` returns monotonic seconds."""

    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    jitter: Callable[[], float] = random.random


class Backoff:
    """Backoff of one request or session."""

    def __init__(self, policy: RetryPolicy, timing: Timing, deadline: float | None = None) -> None:
        self._policy = policy
        self._timing = timing
        self._deadline = deadline
        self._lost_at: float | None = None
        self._delay_s = policy.first_delay_s

    def reset(self) -> None:
        """Resets the backoff after progress."""
        self._lost_at = None
        self._delay_s = self._policy.first_delay_s

    def remaining_s(self) -> float | None:
        """Returns the seconds until the deadline, None without one.

        Raises DeadlineExceeded after it.
        """
        if self._deadline is None:
            return None
        remaining_s = self._deadline - self._timing.clock()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline of the request has passed")
        return remaining_s

    async def pause(self, error: SplitserveError) -> None:
        """Waits before the next attempt.

        Raises `error` if the retry policy permits no more attempts.
        """
        delay_s = self.next_delay_s(error)
        if not self.lasts(delay_s):
            raise error
        remaining_s = self.remaining_s()
        if remaining_s is not None:
            delay_s = min(delay_s, remaining_s)
        await self._timing.sleep(delay_s)

    def next_delay_s(self, error: SplitserveError) -> float:
        """Returns the delay after `error` in seconds, and increases the next delay."""
        delay_s = self._delay_s * (0.5 + 0.5 * self._timing.jitter())
        self._delay_s = min(self._delay_s * self._policy.factor, self._policy.max_delay_s)
        return max(delay_s, error.retry_delay_s or 0.0)

    def lasts(self, delay_s: float) -> bool:
        """Returns whether the retry policy permits a further delay of `delay_s`.

        Counts from the first failure since the last progress.
        """
        now = self._timing.clock()
        if self._lost_at is None:
            self._lost_at = now
        return now + delay_s - self._lost_at <= self._policy.give_up_after_s


DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Configuration of a client: timeouts, retries, credentials and security of its connection.

    `connect_timeout_s`: for the first connection and for short calls. `retry`: for broken streams.
    `tls`: files, read again for each new connection; `TlsFiles()` trusts the system's certificate
    authorities. `tls_name`: the name expected in the server's certificate; None: the host of the
    address. `credentials`: in place of `tls`; with neither, the connection is plain text.
    `api_key`: an API key or a JWT, sent with every call; `api_key_file`: a file that holds it, read
    again when it changes. Either is sent over plain text to other machines too, with a warning.
    `cluster_token`: for calls of operators, such as `list_executors` and `drain_executor`, if the
    server asks for one; other calls do not send it. `follows_peers`: whether streams may continue
    at schedulers that a stopping scheduler names, with the same security; docs/security.md says
    which of them are trusted.
    """

    connect_timeout_s: float = 5.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    credentials: grpc.ChannelCredentials | None = None
    cluster_token: str | None = field(default=None, repr=False)
    timing: Timing = field(default_factory=lambda: Timing(time.monotonic, asyncio.sleep))
    tls: TlsFiles | None = None
    tls_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | os.PathLike[str] | None = None
    follows_peers: bool = True

    @property
    def is_plain_text(self) -> bool:
        """Whether the connection is unencrypted."""
        return self.tls is None and self.credentials is None

    @property
    def has_api_key(self) -> bool:
        """Whether calls carry a credential."""
        return self.api_key is not None or self.api_key_file is not None

    def check(self) -> None:
        """Reads the files, as each client does first. Raises CredentialsUnusable."""
        ApiKey(self.api_key, self.api_key_file)
        self.open_credentials()

    def open_credentials(self) -> Callable[[], Credentials]:
        """Returns a function that gives the credentials for a new channel.

        Raises CredentialsUnusable.
        """
        if self.tls is None:
            return lambda: self.credentials
        if self.credentials is not None:
            raise CredentialsUnusable("tls and credentials are given; allowed: one of them")
        try:
            return Tls(self.tls).channel_credentials
        except FilesUnusable as error:
            raise CredentialsUnusable(str(error)) from error
