"""API keys: their form, and what a file may know of them."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_keys.key_file import ApiKey, is_key_id


def test_keys_are_read_as_they_were_drawn_and_differ() -> None:
    keys = [ApiKey.draw() for _ in range(200)]
    assert [ApiKey.parse(key.text) for key in keys] == keys
    assert len({key.key_id for key in keys}) == len({key.secret for key in keys}) == 200
    assert all(is_key_id(key.key_id) for key in keys)


def test_secret_is_not_shown_when_a_key_is() -> None:
    key = ApiKey.draw()
    assert key.secret not in repr(key)
    assert key.key_id in repr(key)


def test_key_has_the_digest_of_its_secret_and_no_other() -> None:
    key = ApiKey("0123456789ab", "s" * 43)
    assert key.has(hashlib.sha256(b"s" * 43).hexdigest())
    assert not key.has(hashlib.sha256(b"t" * 43).hexdigest())
    assert not key.has("0" * 64)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sk-ss-",
        "sk-ss-0123456789ab",
        "sk-ss-0123456789ab-" + "s" * 42,
        "sk-ss-0123456789ab-" + "s" * 44,
        "sk-ss-0123456789ab-" + "s" * 42 + "\n",
        "sk-ss-0123456789ab-" + "s" * 43 + "\n",
        "sk-ss-0123456789AB-" + "s" * 43,
        "sk-ss-01234-6789ab-" + "s" * 43,
        "sk-0123456789ab-" + "s" * 43,
        " sk-ss-0123456789ab-" + "s" * 43,
        "sk-ss-012345678\u0669ab-" + "s" * 43,
    ],
)
def test_text_is_no_key_when_its_form_is_another(text: str) -> None:
    assert ApiKey.parse(text) is None


@given(st.text())
def test_any_text_is_a_key_that_says_it_again_or_none(text: str) -> None:
    key = ApiKey.parse(text)
    assert key is None or key.text == text
