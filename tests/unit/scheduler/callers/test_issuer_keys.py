"""Tests the keys of an issuer: when and how they are fetched, and which are of use."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.callers import (
    LEAST_PAUSE_S,
    PERIOD_S,
    CannotFetch,
    Fetched,
    fetch,
    fetch_keys_of,
    hurried_opener,
)
from scheduler_service.callers.tokens import parse_token_keys, read_token_keys
from splitserve_common import FilesUnusable
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.issuer import Issuer, ec_key, http_server, jwk, rsa_key


class Source:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_fetches = 0
        self.value = "first"
        self.problem = ""
        self.fetched = Fetched("none", self._fetch, lambda: self.now_s)

    def _fetch(self) -> str:
        self.num_fetches += 1
        if self.problem:
            raise CannotFetch(self.problem)
        return self.value

    def refresh(self, after_s: float = 0) -> bool:
        self.now_s += after_s
        return self.fetched.refresh()


@pytest.fixture
def source() -> Source:
    return Source()


def test_value_is_fetched_at_once_and_then_in_periods(source: Source) -> None:
    assert source.fetched.value == "none"
    assert (source.refresh(), source.fetched.value) == (True, "first")
    source.value = "second"
    assert [source.refresh(PERIOD_S - 1), source.refresh(1)] == [False, True]
    assert (source.fetched.value, source.num_fetches) == ("second", 2)


def test_value_stays_the_same_object_when_nothing_is_new(source: Source) -> None:
    source.refresh()
    before = source.fetched.value
    source.value = "".join(["fir", "st"])
    assert source.refresh(PERIOD_S) is False
    assert source.fetched.value is before
    assert source.num_fetches == 2


def test_value_is_fetched_sooner_when_it_is_wanted(
    source: Source,
) -> None:
    source.refresh()
    for _ in range(80):
        source.fetched.want()
        source.refresh(LEAST_PAUSE_S / 80)
    assert source.num_fetches == 2
    assert source.refresh(LEAST_PAUSE_S) is False
    assert source.num_fetches == 2


def test_value_stays_when_it_cannot_be_fetched(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.refresh()
    source.problem = "issuer: is away"
    with caplog.at_level(logging.WARNING):
        source.refresh(PERIOD_S)
        assert [source.refresh(LEAST_PAUSE_S) for _ in range(3)] == [False] * 3
    assert source.fetched.value == "first"
    assert source.num_fetches == 5
    assert caplog.messages == ["token_keys_unavailable problem='issuer: is away'"]
    source.problem, source.value = "", "second"
    assert source.refresh(LEAST_PAUSE_S) is True


WITHIN_S = 1000.0


@contextmanager
def trickling(begin: bytes, again: bytes) -> Iterator[str]:
    """The URL of who answers `begin`, and then `again` for ever."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with suppress(OSError), listening.accept()[0] as connection:
            connection.recv(2**16)
            connection.sendall(begin)
            while True:
                connection.sendall(again)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/keys"
    finally:
        listening.close()
        thread.join()


def clock() -> Callable[[], float]:
    """Comes to an end of WITHIN_S with the fourth look after the first."""
    ticks = itertools.count(step=300)
    return lambda: float(next(ticks))


def read_all(opener: urllib.request.OpenerDirector, url: str) -> None:
    with opener.open(url, timeout=PATIENCE_S) as answer:
        while answer.read1(100):
            pass


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 500),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 500),
    ],
    ids=["headers", "interim answers", "body"],
)
def test_endless_answer_is_given_up(begin: bytes, again: bytes) -> None:
    opener = hurried_opener(WITHIN_S, clock())
    with trickling(begin, again) as url, pytest.raises(TimeoutError):
        read_all(opener, url)


def test_url_is_named_when_its_answer_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "scheduler_service.callers.issuer_keys.hurried_opener",
        lambda within_s: hurried_opener(WITHIN_S, clock()),
    )
    with (
        trickling(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 500) as url,
        pytest.raises(CannotFetch, match=rf"^{url}: timed out; allowed: 5 s$"),
    ):
        fetch(url)


WELL_KNOWN = "/.well-known/openid-configuration"


class Site:
    """What the server answers; everything else is not there."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        return self.answers.get(path, (404, b"{}"))

    def announces(self, issuer: str, keys_url: object) -> None:
        document = {"issuer": issuer, "jwks_uri": keys_url}
        self.answers[WELL_KNOWN] = (200, json.dumps(document).encode())


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with http_server(site.answer) as url:
        site.url = url
        yield site


def _problem(url: str) -> str:
    with pytest.raises(CannotFetch) as raised:
        fetch(url)
    return str(raised.value)


def test_keys_are_found_where_the_issuer_says(site: Site) -> None:
    content = Issuer().key_set()
    site.announces(site.url, f"{site.url}/keys")
    site.answers["/keys"] = (200, content)
    assert fetch_keys_of(site.url) == content
    assert site.asked == [WELL_KNOWN, "/keys"]


def test_path_of_an_issuer_stays_when_it_has_one(site: Site) -> None:
    issuer = f"{site.url}/realms/one/"
    document = {"issuer": issuer, "jwks_uri": f"{site.url}/keys"}
    site.answers["/realms/one" + WELL_KNOWN] = (200, json.dumps(document).encode())
    site.answers["/keys"] = (200, b"{}")
    assert fetch_keys_of(issuer) == b"{}"


@pytest.mark.parametrize(
    "keys_url",
    ["http://keys.example/", "file:///etc/passwd", "ftp://127.0.0.1/", "keys", "", 5, None],
)
def test_keys_are_not_fetched_when_the_issuer_says_an_unsafe_place(
    site: Site, keys_url: object
) -> None:
    site.announces(site.url, keys_url)
    with pytest.raises(CannotFetch, match=r"jwks_uri is .*; allowed: https://"):
        fetch_keys_of(site.url)


def test_keys_are_not_fetched_when_it_is_another_issuers_configuration(site: Site) -> None:
    site.announces("https://other.example", f"{site.url}/keys")
    with pytest.raises(CannotFetch, match=r"issuer is 'https://other\.example'"):
        fetch_keys_of(site.url)


@pytest.mark.parametrize("content", [b"", b"[]", b"5", b"{}", b"\xff", b"[" * 100_000])
def test_configuration_is_refused_when_it_is_none(site: Site, content: bytes) -> None:
    site.answers[WELL_KNOWN] = (200, content)
    with pytest.raises(CannotFetch, match="not an OpenID Connect configuration"):
        fetch_keys_of(site.url)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirect_is_not_followed(site: Site, status: int) -> None:
    site.answers["/keys"] = (status, f"{site.url}/other".encode())
    site.answers["/other"] = (200, b"{}")
    assert _problem(f"{site.url}/keys") == f"{site.url}/keys: HTTP status {status}"
    assert site.asked == ["/keys"]


def test_answer_is_refused_when_it_is_too_large(site: Site) -> None:
    site.answers["/keys"] = (200, b" " * (2**20 + 1))
    assert _problem(f"{site.url}/keys") == f"{site.url}/keys: too large; allowed: 1048576 bytes"


def test_problem_names_the_url_when_nobody_is_there(site: Site) -> None:
    assert _problem(f"{site.url}/none") == f"{site.url}/none: HTTP status 404"
    assert _problem("http://127.0.0.1:1/keys").startswith("http://127.0.0.1:1/keys: ")


GOOD = jwk(ec_key(), kid="good")


def _set(*keys: object) -> bytes:
    return json.dumps({"keys": keys}).encode()


@pytest.mark.parametrize(
    "key",
    [
        5,
        {},
        {"kty": ["EC"]},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "other"},
        {"kty": "new", "kid": "other"},
        {"kty": "EC", "crv": "P-1", "x": "AA", "y": "AA", "kid": "other"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "other"},
        {"kty": "RSA", "n": 5, "e": 3, "kid": "other"},
        jwk(rsa_key(1024), kid="other"),
        jwk(ec_key(), kid="other", use="enc"),
        jwk(ec_key(), kid="other", key_ops=["sign"]),
        jwk(ec_key(), kid="other", key_ops="verify"),
    ],
    # Not by their texts: keys are drawn anew in each process of the tests.
    ids=range(12),
)
def test_key_is_left_out_when_it_is_of_no_use_here(key: object) -> None:
    keys = parse_token_keys(_set(key, GOOD))
    assert [found.kid for found in keys.keys] == ["good"]
    assert keys.find("other") is None
    with pytest.raises(ValueError, match="no key for verifying signatures"):
        parse_token_keys(_set(key))


def test_keys_are_equal_when_the_set_says_the_same() -> None:
    issuer = Issuer({"a": ec_key(), "b": rsa_key()})
    assert parse_token_keys(issuer.key_set()) == parse_token_keys(issuer.key_set())
    assert parse_token_keys(issuer.key_set()) != parse_token_keys(_set(GOOD))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JWK set"),
        (b"{}", "not a JWK set"),
        (b'{"keys": {}}', "not a JWK set"),
        (_set(*[GOOD] * 101), "at most 100"),
        (_set(), "no key for verifying signatures"),
        (b" " * (2**20 + 1), "too large; allowed: 1048576 bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_file_is_refused_when_it_is_no_key_set(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    with pytest.raises(FilesUnusable, match=problem) as raised:
        read_token_keys(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_file_is_named_when_it_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FilesUnusable, match=r"none\.json: No such file or directory"):
        read_token_keys(tmp_path / "none.json")


@given(
    st.dictionaries(
        st.sampled_from([*GOOD, "use", "alg", "key_ops", "n", "e"]),
        st.none() | st.integers() | st.text() | st.lists(st.text(), max_size=2),
    )
)
def test_key_is_read_or_left_out_when_its_fields_are_anything(fields: dict[str, Any]) -> None:
    keys = parse_token_keys(_set(GOOD | fields, jwk(ec_key(), kid="last")))
    assert keys.keys[-1].kid == "last"
