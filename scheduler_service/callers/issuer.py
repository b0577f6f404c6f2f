"""What an issuer of tokens publishes over HTTP: where its keys are, and the keys."""

from __future__ import annotations

import http.client
import urllib.error

from scheduler_service.callers.fetched import CannotFetch
from scheduler_service.callers.hurried_http import hurried_opener
from scheduler_service.callers_config import SAFE_URLS, is_safe_url
from splitserve_rpc.json_text import parse_json

_MAX_BYTES = 2**20
_TIMEOUT_S = 5.0
_WELL_KNOWN = "/.well-known/openid-configuration"


def fetch_keys_of(issuer: str) -> bytes:
    """The key set of `issuer`, as OpenID Connect Discovery finds it. Raises CannotFetch."""
    url = issuer.rstrip("/") + _WELL_KNOWN
    try:
        document = parse_json(fetch(url))
        said, keys_url = document["issuer"], document["jwks_uri"]
    except (ValueError, KeyError, TypeError) as error:
        raise CannotFetch(f"{url}: is no configuration of OpenID Connect") from error
    if said != issuer:
        raise CannotFetch(f"{url}: is that of the issuer {str(said)[:200]!r}; allowed: {issuer!r}")
    if not isinstance(keys_url, str) or not is_safe_url(keys_url):
        raise CannotFetch(f"{url}: jwks_uri is {str(keys_url)[:200]!r}; allowed: {SAFE_URLS}")
    return fetch(keys_url)


def fetch(url: str) -> bytes:
    """What is there, within seconds and 1 MiB; no redirects. Raises CannotFetch."""
    try:
        with hurried_opener(_TIMEOUT_S).open(url, timeout=_TIMEOUT_S) as response:
            content: bytes = response.read(_MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise CannotFetch(f"{url}: answers {error.code}") from error
    except TimeoutError as error:
        raise CannotFetch(f"{url}: takes too long; allowed: {_TIMEOUT_S:g} s") from error
    except urllib.error.URLError as error:
        raise CannotFetch(f"{url}: {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CannotFetch(f"{url}: {error or type(error).__name__}") from error
    if len(content) > _MAX_BYTES:
        raise CannotFetch(f"{url}: is too large; allowed: {_MAX_BYTES} bytes")
    return content
