"""What of an `Authorization` header is a credential."""

from __future__ import annotations

import pytest

from splitserve_gateway.callers.caller import credential_of
from splitserve_gateway.http.errors import ApiError

HOST = (b"host", b"x")


@pytest.mark.parametrize(
    ("value", "credential"),
    [
        (b"Bearer sk-ss-a-b", "sk-ss-a-b"),
        (b"bearer  a.b.c ", "a.b.c"),
        (b"BEARER " + b"a" * 8192, "a" * 8192),
    ],
)
def test_credential_follows_the_scheme(value: bytes, credential: str) -> None:
    assert credential_of([HOST, (b"authorization", value)]) == credential


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ((), "no credential was given"),
        ((b"",), "authorization is not usable"),
        ((b"Bearer",), "authorization is not usable"),
        ((b"Bearer ",), "authorization is not usable"),
        ((b"Basic YTpi",), "authorization is not usable"),
        ((b"Bearer a", b"Bearer a"), "authorization is not usable"),
        ((b"Bearer a", b"Bearer b"), "authorization is not usable"),
        ((b"Bearer a b",), "3 characters; allowed: at most 8192, visible ones of ASCII"),
        ((b"Bearer \xc3\xa4",), "2 characters"),
        ((b"Bearer a\x7f",), "2 characters"),
        ((b"Bearer " + b"a" * 8193,), "8193 characters"),
    ],
)
def test_what_cannot_be_a_credential_is_refused(values: tuple[bytes, ...], problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as refused:
        credential_of([HOST, *((b"authorization", value) for value in values)])
    answer = refused.value.response()
    assert (answer.status_code, refused.value.code) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
