"""httptools' parser of requests, for clients that offer another protocol, too."""

from __future__ import annotations

import re
from http import HTTPMethod, HTTPStatus
from typing import Protocol

import httptools

from splitserve_gateway.http.request_head import HeadRefused

# By what llhttp says.
_REQUEST_LINE = re.compile(rb"(?:\A|\n)([!#$%&'*+.^`|~\w-]+) [^ \r\n]+ HTTP/1\.[01]\r\n", re.ASCII)
_KNOWN_METHODS = frozenset(method.encode() for method in HTTPMethod)
_VERSION_PROBLEMS = ("Invalid HTTP version", "Pause on PRI/Upgrade")


class Target(Protocol):
    """What is told of each request; `url` and `headers`: what it was told of the latest."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser:
    """Parses what comes and tells `target`, as `httptools.HttpRequestParser` does.

    A request with `Upgrade` is one like any other, since nobody has to take up that offer (RFC
    9110, 7.8); Java's client makes it with its first request. httptools takes what follows the head
    for the other protocol: so the head is parsed again without the header, and until then
    `should_upgrade` says that it is not complete.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._parser = _new_parser(target)

    def feed_data(self, data: bytes) -> None:
        """Raises HeadRefused, also for what is wrong with a body; or what the target raised."""
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserCallbackError as error:
            raise (error.__context__ or error) from None
        except httptools.HttpParserInvalidMethodError as error:
            raise _method_unknown(data) from error
        except httptools.HttpParserError as error:
            if str(error) in _VERSION_PROBLEMS:
                message = "the version is not supported; allowed: HTTP/1.1, HTTP/1.0"
                raise HeadRefused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, message) from error
            message = f"this is not HTTP/1.1: {error}"
            raise HeadRefused(HTTPStatus.BAD_REQUEST, message) from error

    def _feed(self, left: memoryview) -> None:
        while left:
            try:
                self._parser.feed_data(left)
                return
            except httptools.HttpParserUpgrade as upgrade:
                (num_parsed,) = upgrade.args
                head = self._head_without_upgrade()
            self._parser = _new_parser(self._target)
            self._parser.feed_data(head)
            left = left[num_parsed:]

    def get_method(self) -> bytes:
        """Of the latest request."""
        return self._parser.get_method()

    def get_http_version(self) -> str:
        """Of the latest request."""
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        """Whether another request may follow the latest."""
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Whether the head of the latest request comes again."""
        return self._parser.should_upgrade()

    def _head_without_upgrade(self) -> bytes:
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise HeadRefused(HTTPStatus.NOT_IMPLEMENTED, "CONNECT is not implemented")
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self._target.url, version)]
        headers = self._target.headers
        lines += [b"%s: %s" % header for header in headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


def _method_unknown(data: bytes) -> HeadRefused:
    """`data` may be anything, or a request whose method is none that anybody knows."""
    unknown = [each for each in _REQUEST_LINE.findall(data) if each not in _KNOWN_METHODS]
    if not unknown:
        return HeadRefused(HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1: it begins with no method")
    message = f"the method is {unknown[0][:80].decode()!r}; allowed: those of RFC 9110, in capitals"
    return HeadRefused(HTTPStatus.NOT_IMPLEMENTED, message)


def _new_parser(target: Target) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(target)
    # A request that follows `connection: close` costs nobody the answer to that one.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
