"""What is fetched of an issuer, from a real server, and what is not believed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from scheduler_service.callers.issuer_keys import CannotFetch, fetch, fetch_keys_of
from tests.support.security.issuer import Issuer, http_server

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
    with pytest.raises(CannotFetch, match=r"is that of the issuer 'https://other\.example'"):
        fetch_keys_of(site.url)


@pytest.mark.parametrize("content", [b"", b"[]", b"5", b"{}", b"\xff", b"[" * 100_000])
def test_configuration_is_refused_when_it_is_none(site: Site, content: bytes) -> None:
    site.answers[WELL_KNOWN] = (200, content)
    with pytest.raises(CannotFetch, match="is no configuration of OpenID Connect"):
        fetch_keys_of(site.url)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirect_is_not_followed(site: Site, status: int) -> None:
    site.answers["/keys"] = (status, f"{site.url}/other".encode())
    site.answers["/other"] = (200, b"{}")
    assert _problem(f"{site.url}/keys") == f"{site.url}/keys: answers {status}"
    assert site.asked == ["/keys"]


def test_answer_is_refused_when_it_is_too_large(site: Site) -> None:
    site.answers["/keys"] = (200, b" " * (2**20 + 1))
    assert _problem(f"{site.url}/keys") == f"{site.url}/keys: is too large; allowed: 1048576 bytes"


def test_problem_names_the_url_when_nobody_is_there(site: Site) -> None:
    assert _problem(f"{site.url}/none") == f"{site.url}/none: answers 404"
    assert _problem("http://127.0.0.1:1/keys").startswith("http://127.0.0.1:1/keys: ")
