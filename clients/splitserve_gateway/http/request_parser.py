"""httptools' parser of requests, for clients that offer another protocol, too."""

from __future__ import annotations

from typing import Protocol

import httptools


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
        """Raises HttpParserError."""
        left = memoryview(data)
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
            raise httptools.HttpParserError("a tunnel is not offered")
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self._target.url, version)]
        headers = self._target.headers
        lines += [b"%s: %s" % header for header in headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


def _new_parser(target: Target) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(target)
    # A request that follows `connection: close` costs nobody the answer to that one.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
