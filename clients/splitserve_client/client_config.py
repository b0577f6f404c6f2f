"""How patient a client is, who it is, and how it connects."""

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
from splitserve_rpc.tls import Tls, TlsFiles
from splitserve_rpc.watched_files import FilesUnusable

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How patient a client is, who it is, and how it connects.

    `connect_timeout_s`: for the first connection and for short calls. `retry`: for streams that
    broke. `tls`: files, read again for each new connection; `TlsFiles()` believes the usual
    authorities. `tls_name`: what the server's certificate is for, None: the host of the address.
    `credentials`: in place of `tls`; with neither, plain text. `api_key`: an API key or a
    JWT, sent with every call; `api_key_file` has it in a file, which is read again when it changes.
    In plain text to another machine either is sent, too, which is warned of.
    `cluster_token`: for `list_executors` and `drain_executor`, if the server asks for one; nothing
    else is sent it. `follows_peers`: whether a scheduler that stops may name others where streams
    go on, with the same security; docs/security.md says which are believed.
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
        """Whether everybody on the way reads what is said."""
        return self.tls is None and self.credentials is None

    @property
    def has_api_key(self) -> bool:
        """Whether calls bring a credential."""
        return self.api_key is not None or self.api_key_file is not None

    def check(self) -> None:
        """Looks at the files, as each client does at first. Raises CredentialsUnusable."""
        ApiKey(self.api_key, self.api_key_file)
        self.open_credentials()

    def open_credentials(self) -> Callable[[], Credentials]:
        """What a new channel is opened with. Raises CredentialsUnusable."""
        if self.tls is None:
            return lambda: self.credentials
        if self.credentials is not None:
            raise CredentialsUnusable("tls and credentials are given; allowed: one of them")
        try:
            return Tls(self.tls).channel_credentials
        except FilesUnusable as error:
            raise CredentialsUnusable(str(error)) from error
