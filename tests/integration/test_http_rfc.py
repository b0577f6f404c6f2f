"""What RFC 9110 and RFC 9112 ask of a server, by the byte, of the gateway and the live page.

Numbers in comments are sections of RFC 9112, or with `9110:` of RFC 9110. Requests for which the
gateway needs a model: test_gateway_rude_requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import pytest
import pytest_asyncio

from splitserve_client import ClientConfig
from splitserve_common import StaticDiscovery
from splitserve_gateway.config import GatewayConfig
from splitserve_live import Feeds
from splitserve_live.server import build_page
from tests.support.processes.gateway import serving as serving_gateway
from tests.support.processes.live_page import serving as serving_page
from tests.support.processes.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
NOBODY = "127.0.0.1:1"
HOST = "host: localhost\r\n"
JSON = "content-type: application/json\r\n"
CLOSE = "connection: close\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    version: str
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Listener:
    """`path`: something to get. `post`: where bodies of any content are sent to, and not taken."""

    address: str
    path: str
    post: str

    async def ask(self, data: bytes | str, methods: str = "", *, eof: bool = False) -> list[Answer]:
        """All answers until the end of the connection, to requests with these methods."""
        host, _, port = self.address.rpartition(":")
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data if isinstance(data, bytes) else data.encode("latin-1"))
            if eof:
                writer.write_eof()
            found = await reader.read()
            writer.close()
        return answers_in(found, methods.split())

    async def status(self, data: str) -> int:
        """Of the only answer to `data`."""
        (answer,) = await self.ask(data)
        return answer.status


def answers_in(data: bytes, methods: list[str]) -> list[Answer]:
    found: list[Answer] = []
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        assert end, f"no end of the head: {head!r}"
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, _ = first.split(" ", 2)
        fields = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in fields}
        assert len(headers) == len(fields), f"a header is there twice: {fields}"
        has_body = status not in ("204", "304") and methods[len(found) : len(found) + 1] != ["HEAD"]
        length = int(headers.get("content-length", len(data))) if has_body else 0
        found.append(Answer(version, int(status), headers, data[:length]))
        data = data[length:]
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["gateway", "live page"])
async def listener(request: pytest.FixtureRequest) -> AsyncIterator[Listener]:
    if request.param == "gateway":
        async with serving_gateway(GatewayConfig(schedulers=NOBODY)) as gateway:
            address = f"{gateway.config.host}:{gateway.config.port}"
            yield Listener(address, "/health/live", "/v1/models")
        return
    feeds = Feeds(StaticDiscovery([NOBODY]), ClientConfig())
    async with serving_page(build_page(feeds, ("127.0.0.1",))) as address:
        yield Listener(address, "/schedulers", "/schedulers")
    feeds.close()


# -- versions and connections ----------------------------------------------------------------------


async def test_old_client_gets_the_end_of_the_connection(listener: Listener) -> None:
    # 9.3, and 3.2: without Host, too.
    for head in ("", HOST, CLOSE):
        (answer,) = await listener.ask(f"GET {listener.path} HTTP/1.0\r\n{head}\r\n")
        assert (answer.version, answer.status) == ("HTTP/1.1", 200)
        assert answer.headers["connection"] == "close"
        assert "transfer-encoding" not in answer.headers


async def test_old_client_may_keep_the_connection(listener: Listener) -> None:
    kept = f"GET {listener.path} HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"
    last = f"GET {listener.path} HTTP/1.0\r\n\r\n"
    first, second, third = await listener.ask(kept * 2 + last)
    assert [first.status, second.status, third.status] == [200] * 3
    assert first.headers["connection"] == second.headers["connection"] == "keep-alive"
    assert third.headers["connection"] == "close"


@pytest.mark.parametrize("option", ["close", "Close", "x, close", "close, x"])
async def test_connection_ends_when_the_client_says_so(listener: Listener, option: str) -> None:
    request = f"GET {listener.path} HTTP/1.1\r\n{HOST}connection: {option}\r\n\r\n"
    # 9.6: what follows is not answered.
    (answer,) = await listener.ask(request * 2)
    assert (answer.status, answer.headers["connection"]) == (200, "close")


@pytest.mark.parametrize(
    ("version", "status"),
    [("HTTP/2.0", 505), ("HTTP/3.0", 505), ("HTTP/0.9", 505), ("http/1.1", 400), ("HTTP/1.", 400)],
)
async def test_version_is_refused(listener: Listener, version: str, status: int) -> None:
    assert await listener.status(f"GET {listener.path} {version}\r\n{HOST}\r\n") == status


async def test_pipelined_requests_are_answered_in_order(listener: Listener) -> None:
    methods = ["GET", "HEAD", "OPTIONS", "DELETE", "GET", "HEAD", "GET"]
    paths = [listener.path] * 4 + ["/nothing", "/nothing", listener.path]
    requests = [f"{m} {p} HTTP/1.1\r\n{HOST}\r\n" for m, p in zip(methods, paths, strict=True)]
    requests[-1] = f"GET {listener.path} HTTP/1.1\r\n{HOST}{CLOSE}\r\n"
    found = await listener.ask("".join(requests), " ".join(methods))
    assert [answer.status for answer in found] == [200, 200, 204, 405, 404, 404, 200]
    assert found[0].body == found[-1].body


async def test_requests_before_a_wrong_one_are_answered(listener: Listener) -> None:
    good = f"GET {listener.path} HTTP/1.1\r\n{HOST}\r\n"
    for wrong in ("GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01\r\n\r\n", f"{good[:-2]}x\r\n\r\n"):
        found = await listener.ask(good * 2 + wrong + good)
        assert [answer.status for answer in found] == [200, 200, 400]
        assert found[-1].headers["connection"] == "close"


async def test_client_that_has_said_everything_is_answered(listener: Listener) -> None:
    # 9.6 has half-closed connections of a server; those of clients are as old as `nc`.
    request = f"GET {listener.path} HTTP/1.1\r\n{HOST}\r\n"
    found = await listener.ask(request * 3, eof=True)
    assert [answer.status for answer in found] == [200] * 3


# -- targets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("{path}", 200),
        ("{path}?", 200),
        ("{path}?x=%zz&&=", 200),
        # 9110: 4.2.3: escapes of letters mean these letters.
        ("{escaped}", 200),
        # 3.2.2: absolute, whatever Host says.
        ("http://localhost{path}", 200),
        ("HTTP://127.0.0.1:80{path}?x", 200),
        ("http://evil.example{path}", 400),
        # 9110: 7.4
        ("https://localhost{path}", 421),
        ("ftp://localhost{path}", 400),
        ("http://user@localhost{path}", 400),
        ("http://{path}", 400),
        # Other resources, which there are not.
        ("/{path}", 404),
        ("{path}/", 404),
        ("{path}//", 404),
        ("{path}/x", 404),
        ("/x/..{path}", 404),
        ("//localhost{path}", 404),
        ("/nothing", 404),
        ("/%zz%ff", 404),
        # No request targets.
        ("*", 400),
        ("{path}#x", 400),
        ("localhost:80", 400),
        ("nothing", 400),
        ("?x", 400),
        ("/\xff", 400),
        ("/\x00", 400),
    ],
)
async def test_target_is_taken_as_it_is_written(
    listener: Listener, target: str, status: int
) -> None:
    path = listener.path
    written = target.format(path=path, escaped=path[:1] + f"%{ord(path[1]):x}" + path[2:])
    assert await listener.status(f"GET {written} HTTP/1.1\r\n{HOST}{CLOSE}\r\n") == status


async def test_target_may_be_long_but_not_too_long(listener: Listener) -> None:
    # 3: at least 8000 bytes.
    for num_bytes, status in ((8000, 200), (20_000, 414), (200_000, 414)):
        target = f"{listener.path}?{'x' * num_bytes}"
        assert await listener.status(f"GET {target} HTTP/1.1\r\n{HOST}{CLOSE}\r\n") == status


# -- headers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        # 3.2
        ("", 400),
        (HOST * 2, 400),
        ("host: a b\r\n", 400),
        ("host: \r\n", 400),
        ("host: a/b\r\n", 400),
        ("host: user@localhost\r\n", 400),
        ("host: localhost, localhost\r\n", 400),
        ("host: localhost:x\r\n", 400),
        ("host:localhost\r\n", 200),
        ("HOST: \t localhost:80 \t\r\n", 200),
        ("host: [::1]:80\r\n", 200),
        # 5.1
        (HOST + "x : y\r\n", 400),
        (HOST + " x: y\r\n", 400),
        (HOST + "x\r\n", 400),
        (HOST + ": y\r\n", 400),
        (HOST + "(x): y\r\n", 400),
        # 5.2
        (HOST + "x: y\r\n z\r\n", 400),
        # 9110: 5.5
        (HOST + "x: y\0\r\n", 400),
        (HOST + "x: y\x01\r\n", 400),
        (HOST + "x: y\rz\r\n", 400),
        (HOST + "x: \r\n", 200),
        (HOST + "x: \xe9\r\n", 200),
        (HOST + "x!#$%&'*+-.^_`|~1: y\r\n", 200),
        (HOST + f"x: {'y' * 70_000}\r\n", 431),
        (HOST + "x: y\r\n" * 12_000, 431),
        # 2.2
        (HOST.replace("\r\n", "\n"), 400),
    ],
)
async def test_headers_are_refused_when_they_are_none(
    listener: Listener, head: str, status: int
) -> None:
    assert await listener.status(f"GET {listener.path} HTTP/1.1\r\n{CLOSE}{head}\r\n") == status


async def test_empty_lines_before_a_request_are_ignored(listener: Listener) -> None:
    # 2.2
    request = f"GET {listener.path} HTTP/1.1\r\n{HOST}{CLOSE}\r\n"
    assert await listener.status(f"\r\n\r\n{request}") == 200


# -- methods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "status"),
    [
        *(("PUT", 405), ("DELETE", 405), ("PATCH", 405), ("TRACE", 405), ("POST", 405)),
        *(("BREW", 501), ("get", 501), ("CONNECT", 501), ("G@T", 400), ("", 400)),
    ],
)
async def test_method_is_refused(listener: Listener, method: str, status: int) -> None:
    # 9110: 9.1, 10.2.1, 15.5.6, 15.6.2
    target = "localhost:80" if method == "CONNECT" else listener.path
    (answer,) = await listener.ask(f"{method} {target} HTTP/1.1\r\n{HOST}{CLOSE}\r\n")
    assert answer.status == status
    assert answer.headers.get("allow") == ("GET, HEAD" if status == 405 else None)


@pytest.mark.parametrize("path", ["{path}", "/nothing", "/v1/completions"])
async def test_head_says_what_get_would(listener: Listener, path: str) -> None:
    # 9110: 9.3.2
    target = path.format(path=listener.path)
    rest = f"{target} HTTP/1.1\r\n{HOST}{CLOSE}\r\n"
    (get,), (head,) = await listener.ask(f"GET {rest}"), await listener.ask(f"HEAD {rest}", "HEAD")
    assert (head.status, head.body) == (get.status, b"")
    for answer in (get, head):
        answer.headers.pop("date")
        answer.headers.pop("x-request-id", None)
    assert head.headers.keys() == get.headers.keys()
    of_the_method = {"content-length"} if get.status >= 400 else set()
    for name in get.headers.keys() - of_the_method:
        assert head.headers[name] == get.headers[name]


async def test_options_are_told(listener: Listener) -> None:
    # 9110: 9.3.7, and 3.2.4
    for target in (listener.path, "*", "http://localhost"):
        (answer,) = await listener.ask(f"OPTIONS {target} HTTP/1.1\r\n{HOST}{CLOSE}\r\n")
        assert answer.status == 204
        assert answer.headers["allow"].startswith("GET, HEAD")
        assert "content-length" not in answer.headers


@pytest.mark.parametrize("request_line", ["GET {path}", "GET /nothing", "PUT {path}", "GET *"])
async def test_answer_has_a_date(listener: Listener, request_line: str) -> None:
    # 9110: 6.6.1
    line = request_line.format(path=listener.path)
    (answer,) = await listener.ask(f"{line} HTTP/1.1\r\n{HOST}{CLOSE}\r\n")
    assert answer.headers["date"].endswith(" GMT")
    parsedate_to_datetime(answer.headers["date"])


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        # 6.1, 6.2, 6.3
        ("content-length: 2\r\n", "{}", None),
        ("content-length: 002\r\n", "{}", None),
        ("content-length: 2\r\ncontent-length: 2\r\n", "{}", 400),
        ("content-length: 2\r\ncontent-length: 3\r\n", "{}", 400),
        ("content-length: 2, 2\r\n", "{}", 400),
        ("content-length: +2\r\n", "{}", 400),
        ("content-length: 0x2\r\n", "{}", 400),
        ("content-length: 2 2\r\n", "{}", 400),
        ("content-length: \r\n", "{}", 400),
        ("content-length: -2\r\n", "{}", 400),
        ("content-length: 99999999999999999999\r\n", "{}", 400),
        ("content-length: 2\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\ncontent-length: 2\r\n", "0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n", None),
        ("Transfer-Encoding: Chunked\r\n", "2\r\n{}\r\n0\r\n\r\n", None),
        ("transfer-encoding: chunked, chunked\r\n", "0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n" * 2, "0\r\n\r\n", 400),
        ("transfer-encoding: identity\r\n", "", 400),
        ("transfer-encoding: chunked, gzip\r\n", "", 400),
        ("transfer-encoding: xchunked\r\n", "", 400),
        ("transfer-encoding: \x0bchunked\r\n", "0\r\n\r\n", 400),
        ("transfer-encoding : chunked\r\n", "0\r\n\r\n", 400),
        ("transfer-encoding: gzip, chunked\r\n", "0\r\n\r\n", 501),
        # 7.1
        ("transfer-encoding: chunked\r\n", "2;a=b;c\r\n{}\r\n0\r\nx: y\r\n\r\n", None),
        ("transfer-encoding: chunked\r\n", "2\n{}\r\n0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n", "2 \r\n{}\r\n0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n", "0x2\r\n{}\r\n0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n", "-2\r\n{}\r\n0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n", "\r\n{}\r\n0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n", "2;a\nb\r\n{}\r\n0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n", "2\r\n{}xx0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n", "fffffffffffffffff\r\n{}\r\n0\r\n\r\n", 400),
        ("transfer-encoding: chunked\r\n", "0\r\ncontent-length: 3\r\n\r\n", 400),
    ],
)
async def test_body_is_as_long_as_both_sides_know(
    listener: Listener, head: str, body: str, status: int | None
) -> None:
    """A body that cannot be told from the next request ends the connection with a refusal."""
    request = f"POST {listener.post} HTTP/1.1\r\n{HOST}{JSON}{head}\r\n{body}"
    next_one = f"GET {listener.path} HTTP/1.1\r\n{HOST}{CLOSE}\r\n"
    found = [answer.status for answer in await listener.ask(request + next_one)]
    if status is None:
        assert found[1:] == [200]
        assert found[0] not in (400, 501)
    else:
        assert found == [status]


async def test_chunks_of_an_old_client_are_refused(listener: Listener) -> None:
    # 6.1
    head = f"POST {listener.post} HTTP/1.0\r\n{JSON}transfer-encoding: chunked\r\n\r\n"
    assert await listener.status(head + "2\r\n{}\r\n0\r\n\r\n") == 400


async def test_body_of_a_get_is_no_request(listener: Listener) -> None:
    # 9110: 9.3.1
    inside = f"GET /nothing HTTP/1.1\r\n{HOST}\r\n"
    request = f"GET {listener.path} HTTP/1.1\r\n{HOST}content-length: {len(inside)}\r\n\r\n{inside}"
    last = f"GET {listener.path} HTTP/1.1\r\n{HOST}{CLOSE}\r\n"
    found = await listener.ask(request + last)
    assert [answer.status for answer in found] == [200, 200]


async def test_old_client_is_not_told_to_go_on(listener: Listener) -> None:
    # 9110: 10.1.1
    head = f"POST {listener.post} HTTP/1.0\r\n{JSON}expect: 100-continue\r\n"
    (answer,) = await listener.ask(f"{head}content-length: 2\r\n\r\n{{}}")
    assert answer.status != 100


async def test_trailers_are_no_headers() -> None:
    # 9110: 6.5.1
    async with serving_gateway(GatewayConfig(schedulers=NOBODY)) as gateway:
        listener = Listener(f"{gateway.config.host}:{gateway.config.port}", "", "")
        head = f"POST /v1/completions HTTP/1.1\r\n{HOST}{CLOSE}transfer-encoding: chunked\r\n\r\n"
        body = f"2\r\n{{}}\r\n0\r\n{JSON}\r\n"
        assert await listener.status(head + body) == 415
