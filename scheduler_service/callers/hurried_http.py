"""HTTP whose answers come within a time as a whole, and not only each of their bytes."""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.request
from collections.abc import Callable
from email.message import Message
from functools import partial
from typing import IO, Any, cast


def hurried_opener(
    within_s: float, now_s: Callable[[], float] = time.monotonic
) -> urllib.request.OpenerDirector:
    """For one request: what is read after `within_s` from now is a TimeoutError, or a URLError.

    That counts for headers and bodies, and for the answer of a proxy, however they trickle. No
    redirects; proxies of the environment for https alone.
    """
    ends_at_s = now_s() + within_s

    def left_s() -> float:
        left_s = ends_at_s - now_s()
        if left_s <= 0:
            raise TimeoutError("it takes too long")
        return left_s

    return urllib.request.build_opener(
        _NoRedirects, urllib.request.ProxyHandler(_proxies()), _Http(left_s), _Https(left_s)
    )


class _Reads(io.RawIOBase):
    """Of a socket, each with the time that is left."""

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
