"""What RFC 9110 and RFC 9112 ask of the head of a request, beyond its syntax."""

from __future__ import annotations

import re
from http import HTTPStatus

_VERSIONS = ("1.0", "1.1")
# RFC 3986: an address in brackets, or a name, and perhaps a port; without userinfo.
_HOST = re.compile(rb"(?:\[[\w:.%]+\]|[\w.~!$&'()*+,;=%-]+)(?::\d{0,5})?", re.ASCII)
_ABSOLUTE = re.compile(rb"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<host>[^/?]*)(?P<rest>.*)", re.ASCII)
_CHUNKED = b"chunked"
_MAX_QUOTED_CHARS = 80

Headers = list[tuple[bytes, bytes]]


class HeadRefused(Exception):
    """The request is refused, and nothing that follows on its connection can be understood."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def check_head(version: str, method: str, target: bytes, headers: Headers, is_tls: bool) -> bytes:
    """Returns `target` as a path with its query, or `*` for OPTIONS.

    Names of `headers` are in small letters; `host` is replaced by the host of an absolute target.
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
            HTTPStatus.BAD_REQUEST, f"there are {len(hosts)} headers host; allowed: one"
        )
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        message = f"the header host is {_shown(hosts[0])}; allowed: a name or address with a port"
        raise HeadRefused(HTTPStatus.BAD_REQUEST, message)


def _check_transfer_encoding(version: str, headers: Headers) -> None:
    """Codings are not undone here, but for chunks, and the end of all others is unknown."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return
    if version == "1.0":
        message = "the header transfer-encoding is given; allowed: none in HTTP/1.0"
        raise HeadRefused(HTTPStatus.BAD_REQUEST, message)
    given = [coding.strip().lower() for coding in b",".join(codings).split(b",")]
    if given != [_CHUNKED]:
        message = f"the header transfer-encoding is {_shown(b', '.join(codings))}; allowed: chunked"
        is_framed = given[-1] == _CHUNKED
        status = HTTPStatus.NOT_IMPLEMENTED if is_framed else HTTPStatus.BAD_REQUEST
        raise HeadRefused(status, message)


def _check_scheme(scheme: bytes, is_tls: bool) -> None:
    if scheme not in (b"http", b"https"):
        message = f"the scheme of the target is {_shown(scheme)}; allowed: http, https"
        raise HeadRefused(HTTPStatus.BAD_REQUEST, message)
    if scheme == b"https" and not is_tls:
        message = "the target is of https, and this connection is not"
        raise HeadRefused(HTTPStatus.MISDIRECTED_REQUEST, message)


def _bad_target(target: bytes) -> HeadRefused:
    message = f"the target is {_shown(target)}; allowed: a path that begins with /, or a URL"
    return HeadRefused(HTTPStatus.BAD_REQUEST, message)


def _shown(value: bytes) -> str:
    return repr(value[:_MAX_QUOTED_CHARS].decode("latin-1"))
