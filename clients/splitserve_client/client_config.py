"""Configuration of a client: timeouts, retries, credentials and security of its connection."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from splitserve_client.api_key import ApiKey
from splitserve_client.channels import Credentials
from splitserve_client.errors import CredentialsUnusable
from splitserve_client.resumption import RetryPolicy, Timing
from splitserve_rpc.files import FilesUnusable
from splitserve_rpc.tls import Tls, TlsFiles

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
