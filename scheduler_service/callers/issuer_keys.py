"""Key set of an issuer: fetched by HTTP, again from time to time, and sooner on demand.

Without joserfc, which only `tokens` needs.
"""

from __future__ import annotations

import http.client
import io
import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from functools import partial
from typing import IO, Any, Generic, Protocol, TypeVar, cast

from scheduler_service.config import SAFE_URLS, is_safe_url
from splitserve_common import parse_json

_MAX_BYTES = 2**20
_TIMEOUT_S = 5.0
_WELL_KNOWN = "/.well-known/openid-configuration"


def fetch_keys_of(issuer: str) -> bytes:
    """Fetches the key set of `issuer`, found by OpenID Connect Discovery. Raises CannotFetch."""
    url = issuer.rstrip("/") + _WELL_KNOWN
    try:
        document = parse_json(fetch(url))
        found_issuer, keys_url = document["issuer"], document["jwks_uri"]
    except (ValueError, KeyError, TypeError) as error:
        raise CannotFetch(f"{url}: not an OpenID Connect configuration") from error
    if found_issuer != issuer:
        raise CannotFetch(f"{url}: issuer is {str(found_issuer)[:200]!r}; allowed: {issuer!r}")
    if not isinstance(keys_url, str) or not is_safe_url(keys_url):
        raise CannotFetch(f"{url}: jwks_uri is {str(keys_url)[:200]!r}; allowed: {SAFE_URLS}")
    return fetch(keys_url)


def fetch(url: str) -> bytes:
    """Fetches the body at `url`: at most 1 MiB, within 5 s, no redirects. Raises CannotFetch."""
    try:
        with hurried_opener(_TIMEOUT_S).open(url, timeout=_TIMEOUT_S) as response:
            content: bytes = response.read(_MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise CannotFetch(f"{url}: HTTP status {error.code}") from error
    except TimeoutError as error:
        raise CannotFetch(f"{url}: timed out; allowed: {_TIMEOUT_S:g} s") from error
    except urllib.error.URLError as error:
        raise CannotFetch(f"{url}: {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CannotFetch(f"{url}: {error or type(error).__name__}") from error
    if len(content) > _MAX_BYTES:
        raise CannotFetch(f"{url}: too large; allowed: {_MAX_BYTES} bytes")
    return content


# -- Value that is fetched periodically, and sooner on demand --------------------------------------

_log = logging.getLogger(__name__)

T = TypeVar("T")
# Issuers announce keys long before they sign with them.
PERIOD_S = 300.0
# Shortest pause between two fetches, however many tokens name unknown keys.
LEAST_PAUSE_S = 10.0


class CannotFetch(Exception):
    """A fetch failed; the message names the URL and the problem in one line."""


class Fetched(Generic[T]):
    """Value that `fetch` returned last; `fetch` may raise CannotFetch. Implements `Refreshed`."""

    def __init__(
        self, initial: T, fetch: Callable[[], T], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.value = initial
        self._fetch = fetch
        self._now_s = now_s
        self._tried_at: float | None = None
        self._is_wanted = True
        self._problem = ""

    def want(self) -> None:
        """Asks for an early fetch, because a lookup in the value has failed."""
        self._is_wanted = True

    def refresh(self) -> bool:
        if not self._is_due():
            return False
        self._tried_at, self._is_wanted = self._now_s(), False
        try:
            value = self._fetch()
        except CannotFetch as error:
            self._is_wanted = True
            if str(error) != self._problem:
                _log.warning("token_keys_unavailable problem=%r", str(error))
            self._problem = str(error)
            return False
        self._problem = ""
        if value == self.value:
            return False
        self.value = value
        return True

    def _is_due(self) -> bool:
        if self._tried_at is None:
            return True
        pause_s = self._now_s() - self._tried_at
        return pause_s >= (LEAST_PAUSE_S if self._is_wanted else PERIOD_S)


# -- HTTP with a deadline for the whole answer -----------------------------------------------------
#
# The timeout of a socket only limits each single read.


def hurried_opener(
    within_s: float, now_s: Callable[[], float] = time.monotonic
) -> urllib.request.OpenerDirector:
    """Returns an opener for one request, whose reads fail `within_s` seconds from now.

    A late read raises TimeoutError or URLError. The deadline holds for headers, body and the answer
    of a proxy, however slowly they trickle. Redirects are not followed. Proxies of the environment
    are used for https only.
    """
    ends_at_s = now_s() + within_s

    def left_s() -> float:
        left_s = ends_at_s - now_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    return urllib.request.build_opener(
        _NoRedirects, urllib.request.ProxyHandler(_proxies()), _Http(left_s), _Https(left_s)
    )


class _Reads(io.RawIOBase):
    """Raw stream of a socket that sets the timeout of each read to the time left."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._raw = raw
        self._sock = sock
        self._left_s = left_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:  # noqa: ANN401
        self._sock.settimeout(self._left_s())
        return cast(Any, self._raw).readinto(buffer)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(
        self, sock: socket.socket, method: str | None = None, *, left_s: Callable[[], float]
    ) -> None:
        super().__init__(sock, method=method)
        self.fp = io.BufferedReader(_Reads(self.fp.detach(), sock, left_s))


class _Http(urllib.request.HTTPHandler):
    def __init__(self, left_s: Callable[[], float]) -> None:
        super().__init__()
        self._left_s = left_s

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_connection, http.client.HTTPConnection, self._left_s), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, left_s: Callable[[], float]) -> None:
        super().__init__()
        self._left_s = left_s

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_connection, http.client.HTTPSConnection, self._left_s), req)


def _connection(
    kind: type[http.client.HTTPConnection], left_s: Callable[[], float], host: str, timeout: float
) -> http.client.HTTPConnection:
    connection = kind(host, timeout=timeout)
    answer: Any = partial(_Answer, left_s=left_s)
    connection.response_class = answer
    return connection


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: its target has not been checked by `is_safe_url`."""

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
    """Returns the https proxy of the environment; plain http only goes to this machine."""
    return {kind: url for kind, url in urllib.request.getproxies().items() if kind == "https"}


# -- Interface of refreshed values -----------------------------------------------------------------

T_co = TypeVar("T_co", covariant=True)


class Refreshed(Protocol[T_co]):
    """Value from a file or URL, refreshed from time to time.

    `value` is the last valid one, and another object whenever it has changed.
    """

    @property
    def value(self) -> T_co: ...

    def refresh(self) -> bool:
        """Looks for a new value, and returns whether there was one. Blocks; any thread may call."""
        ...
