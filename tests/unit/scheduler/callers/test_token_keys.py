"""Key sets: which keys are of use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.callers.tokens import parse_token_keys, read_token_keys
from splitserve_rpc.files import FilesUnusable
from tests.support.security.issuer import Issuer, ec_key, jwk, rsa_key

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
    with pytest.raises(ValueError, match="has no key that verifies signatures"):
        parse_token_keys(_set(key))


def test_keys_are_equal_when_the_set_says_the_same() -> None:
    issuer = Issuer({"a": ec_key(), "b": rsa_key()})
    assert parse_token_keys(issuer.key_set()) == parse_token_keys(issuer.key_set())
    assert parse_token_keys(issuer.key_set()) != parse_token_keys(_set(GOOD))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not valid JSON"),
        (b"\xff\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "is no JWK set"),
        (b"{}", "is no JWK set"),
        (b'{"keys": {}}', "is no JWK set"),
        (_set(*[GOOD] * 101), "at most 100"),
        (_set(), "has no key that verifies"),
        (b" " * (2**20 + 1), "is too large; allowed: 1048576 bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_file_is_refused_with_a_line_when_it_is_no_key_set(
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
