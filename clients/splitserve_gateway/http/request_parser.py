"""Parser of HTTP/1.1 requests: httptools with support for `Upgrade`, and checks of the head."""

from __future__ import annotations

import re
from http import HTTPMethod, HTTPStatus
from typing import Protocol

import httptools

# Syntax and error texts of llhttp.
_REQUEST_LINE = re.compile(rb"(?:\A|\n)([!#$%&'*+.^`|~\w-]+) [^ \r\n]+ HTTP/1\.[01]\r\n", re.ASCII)
_KNOWN_METHODS = frozenset(method.encode() for method in HTTPMethod)
_VERSION_PROBLEMS = ("Invalid HTTP version", "Pause on PRI/Upgrade")


class Target(Protocol):
    """Receiver of parser callbacks. `url`, `headers`: of the latest request."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser:
    """Parses requests and calls `target`, like `httptools.HttpRequestParser`.

    A request with `Upgrade` is handled like any other, since a server may ignore the offer (RFC
    9110, 7.8); Java's client makes it with its first request. httptools takes all bytes after such
    a head for the other protocol. Therefore the head is parsed again without the header; until then
    `should_upgrade` returns True, and the head counts as incomplete.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._parser = _new_parser(target)

    def feed_data(self, data: bytes) -> None:
        """Parses `data`.

        Raises HeadRefused, also for an invalid body, or an exception of the target.
        """
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
        """Returns the method of the latest request."""
        return self._parser.get_method()

    def get_http_version(self) -> str:
        """Returns the HTTP version of the latest request."""
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        """Returns whether another request may follow the latest."""
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Returns whether the head of the latest request will be parsed again."""
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
    """Returns the refusal of `data`: a request with an unknown method, or no HTTP at all."""
    unknown = [each for each in _REQUEST_LINE.findall(data) if each not in _KNOWN_METHODS]
    if not unknown:
        message = "this is not HTTP/1.1: it does not begin with a method"
        return HeadRefused(HTTPStatus.BAD_REQUEST, message)
    message = f"the method is {unknown[0][:80].decode()!r}; allowed: those of RFC 9110, in capitals"
    return HeadRefused(HTTPStatus.NOT_IMPLEMENTED, message)


def _new_parser(target: Target) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(target)
    # Data after a request with `connection: close` must not cost the client its answer.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


# -- Checks of the request head beyond syntax, by RFC 9110 and RFC 9112 ----------------------------

_VERSIONS = ("1.0", "1.1")
# RFC 3986: an address in brackets, or a name, with an optional port; no userinfo.
_HOST = re.compile(rb"(?:\[[\w:.%]+\]|[\w.~!$&'()*+,;=%-]+)(?::\d{0,5})?", re.ASCII)
_ABSOLUTE = re.compile(rb"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<host>[^/?]*)(?P<rest>.*)", re.ASCII)
_CHUNKED = b"chunked"
_MAX_QUOTED_CHARS = 80

Headers = list[tuple[bytes, bytes]]


class HeadRefused(Exception):
    """Refusal of a request after which nothing on its connection can be parsed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def check_head(version: str, method: str, target: bytes, headers: Headers, is_tls: bool) -> bytes:
    """Checks a request head. Returns the path with its query, or `*` for OPTIONS.

    Names in `headers` are in lower case. The host of an absolute target replaces the header `host`.
    Raises HeadRefused.
    """
    if version not in _VERSIONS:
        message = f"the version is HTTP/{version}; allowed: HTTP/1.1, HTTP/1.0"
        raise HeadRefused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, message)
    _check_host(version, headers)
    _check_transfer_encoding(version, headers)
    if b"#" in target:
        raise _bad_target(target)
    if target.startswith(b"/") or (target == b"*" and method == "OPTIONS"):
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise _bad_target(target)
    _check_scheme(absolute["scheme"].lower(), is_tls)
    if _HOST.fullmatch(absolute["host"]) is None:
        raise _bad_target(target)
    headers[:] = [field for field in headers if field[0] != b"host"]
    headers.append((b"host", absolute["host"]))
    rest = absolute["rest"]
    if not rest and method == "OPTIONS":
        return b"*"
    return rest if rest.startswith(b"/") else b"/" + rest


def _check_host(version: str, headers: Headers) -> None:
    hosts = [value for name, value in headers if name == b"host"]
    if not hosts and version != "1.0":
        raise HeadRefused(HTTPStatus.BAD_REQUEST, "the header host is missing")
    if len(hosts) > 1:
        raise HeadRefused(
            HTTPStatus.BAD_REQUEST, f"there are {len(hosts)} host headers; allowed: one"
        )
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        message = f"the header host is {_shown(hosts[0])}; allowed: a name or address with a port"
        raise HeadRefused(HTTPStatus.BAD_REQUEST, message)


def _check_transfer_encoding(version: str, headers: Headers) -> None:
    """Raises HeadRefused for any coding but chunked: other codings are not decoded here.

    A body whose last coding is not chunked has no known end.
    """
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return
    if version == "1.0":
        message = "the header transfer-encoding is given; allowed: none in HTTP/1.0"
        raise HeadRefused(HTTPStatus.BAD_REQUEST, message)
    names = [coding.strip().lower() for coding in b",".join(codings).split(b",")]
    if names != [_CHUNKED]:
        message = f"the header transfer-encoding is {_shown(b', '.join(codings))}; allowed: chunked"
        is_framed = names[-1] == _CHUNKED
        status = HTTPStatus.NOT_IMPLEMENTED if is_framed else HTTPStatus.BAD_REQUEST
        raise HeadRefused(status, message)


def _check_scheme(scheme: bytes, is_tls: bool) -> None:
    if scheme not in (b"http", b"https"):
        message = f"the scheme of the target is {_shown(scheme)}; allowed: http, https"
        raise HeadRefused(HTTPStatus.BAD_REQUEST, message)
    if scheme == b"https" and not is_tls:
        message = "the target is an https URL, but the connection is not encrypted"
        raise HeadRefused(HTTPStatus.MISDIRECTED_REQUEST, message)


def _bad_target(target: bytes) -> HeadRefused:
    message = f"the target is {_shown(target)}; allowed: a path that begins with /, or a URL"
    return HeadRefused(HTTPStatus.BAD_REQUEST, message)


def _shown(value: bytes) -> str:
    return repr(value[:_MAX_QUOTED_CHARS].decode("latin-1"))
