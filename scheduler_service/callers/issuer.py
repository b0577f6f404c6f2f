"""What an issuer of tokens publishes over HTTP: where its keys are, and the keys."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from email.message import Message
from typing import IO

from scheduler_service.callers.fetched import CannotFetch
from scheduler_service.callers_config import SAFE_URLS, is_safe_url

_MAX_BYTES = 2**20
_TIMEOUT_S = 5.0
_WELL_KNOWN = "/.well-known/openid-configuration"


def fetch_keys_of(issuer: str) -> bytes:
    """The key set of `issuer`, as OpenID Connect Discovery finds it. Raises CannotFetch."""
    url = issuer.rstrip("/") + _WELL_KNOWN
    try:
        document = json.loads(fetch(url))
        said, keys_url = document["issuer"], document["jwks_uri"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CannotFetch(f"{url}: is no configuration of OpenID Connect") from error
    if said != issuer:
        raise CannotFetch(f"{url}: is that of the issuer {str(said)[:200]!r}; allowed: {issuer!r}")
    if not isinstance(keys_url, str) or not is_safe_url(keys_url):
        raise CannotFetch(f"{url}: jwks_uri is {str(keys_url)[:200]!r}; allowed: {SAFE_URLS}")
    return fetch(keys_url)


def fetch(url: str) -> bytes:
    """What is there, within seconds and 1 MiB; no redirects. Raises CannotFetch."""
    ends_at = time.monotonic() + _TIMEOUT_S
    try:
        with _OPENER.open(url, timeout=_TIMEOUT_S) as response:
            content = bytearray()
            while chunk := response.read1(2**16):
                content += chunk
                if len(content) > _MAX_BYTES:
                    raise CannotFetch(f"{url}: is too large; allowed: {_MAX_BYTES} bytes")
                if time.monotonic() > ends_at:
                    raise CannotFetch(f"{url}: takes too long; allowed: {_TIMEOUT_S:g} s")
            return bytes(content)
    except urllib.error.HTTPError as error:
        error.close()
        raise CannotFetch(f"{url}: answers {error.code}") from error
    except urllib.error.URLError as error:
        raise CannotFetch(f"{url}: {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CannotFetch(f"{url}: {error or type(error).__name__}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to where nobody has looked whether it is safe."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> None:
        return None


def _proxies() -> dict[str, str]:
    """Those of the environment, but for this machine itself."""
    return {kind: url for kind, url in urllib.request.getproxies().items() if kind == "https"}


_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler(_proxies()))
