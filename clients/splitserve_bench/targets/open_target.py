"""Makes a target of its address."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from splitserve_bench.targets.options import AskOptions, TargetAddress
from splitserve_bench.targets.scheduler_target import SchedulerTarget
from splitserve_bench.targets.target import Target
from splitserve_client import ClientConfig, RetryPolicy
from splitserve_client.api_key import ApiKey
from splitserve_rpc.tls import TlsFiles, load_files

# What is refused or lost is counted, not hidden behind another attempt.
_NO_RETRY = RetryPolicy(give_up_after_s=0.0)
_CONNECT_TIMEOUT_S = 10.0


class TargetRefused(ValueError):
    """An address cannot be asked; the message says what is allowed."""


def parse_target(text: str) -> TargetAddress:
    """Of `[NAME=]URL`, where URL is http(s)://host[:port][/path] or [grpc://]host:port.

    Raises TargetRefused.
    """
    name, separator, url = text.partition("=")
    if not separator or "/" in name:
        name, url = "", text
    if "://" not in url:
        url = f"grpc://{url}"
    parts = urlsplit(url)
    if parts.scheme not in ("grpc", "http", "https") or not parts.netloc:
        raise TargetRefused(
            f"{url!r} is no target; allowed: grpc://HOST:PORT, http://HOST:PORT/v1, https://..."
        )
    if "@" in parts.netloc:
        raise TargetRefused("a URL with a user or a password is seen by everybody here (ps)")
    return TargetAddress(name or parts.netloc, url)


def open_target(address: TargetAddress, options: AskOptions) -> Target:
    """Connects to nobody yet. Raises TargetRefused, SplitserveError, FilesUnusable."""
    if address.url.startswith("grpc://"):
        config = ClientConfig(
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            retry=_NO_RETRY,
            tls=address.tls,
            api_key=address.api_key,
            api_key_file=address.api_key_file,
        )
        return SchedulerTarget(address.url.removeprefix("grpc://"), config, options)
    return _open_http(address, options)


def _open_http(address: TargetAddress, options: AskOptions) -> Target:
    try:
        import httpx2
    except ImportError as error:
        raise TargetRefused(
            "targets over HTTP need the package httpx2: pip install 'splitserve[bench]'"
        ) from error
    from splitserve_bench.targets.openai_target import OpenAiTarget

    client = httpx2.AsyncClient(
        base_url=address.url.rstrip("/") + "/",
        headers=_headers(address),
        timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        verify=_tls_context(address.tls),
        # A proxy would be measured, too.
        trust_env=False,
    )
    return OpenAiTarget(client, options)


def _headers(address: TargetAddress) -> Mapping[str, str]:
    """Raises CredentialsUnusable."""
    key = ApiKey(address.api_key, address.api_key_file)
    # Compressed answers come in larger pieces.
    return {"accept-encoding": "identity", **dict(key.current())}


def _tls_context(files: TlsFiles | None) -> ssl.SSLContext | bool:
    """Raises FilesUnusable."""
    if files is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_files(context, files)
    if files.ca is None:
        context.load_default_certs()
    return context
