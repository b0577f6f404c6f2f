from __future__ import annotations

import pytest

from splitserve_rpc.access import bearer_credential, is_credential
from splitserve_rpc.domain_error import DomainError


@pytest.mark.parametrize(
    ("metadata", "credential"),
    [
        ((), ""),
        ((("user-agent", "Bearer x"),), ""),
        ((("authorization", "Bearer a.b-c"),), "a.b-c"),
        ((("authorization", "bearer  x "),), "x"),
        ((("authorization", "Bearer"),), ""),
        ((("authorization", "Bearer \x85x"),), "\x85x"),
    ],
)
def test_credential_is_what_follows_bearer(
    metadata: tuple[tuple[str, str], ...], credential: str
) -> None:
    assert bearer_credential(metadata) == credential


@pytest.mark.parametrize("text", ["!", "~", "a.b-c", "x" * 8192])
def test_text_is_a_credential_when_it_is_visible(text: str) -> None:
    assert is_credential(text)


@pytest.mark.parametrize("text", ["", "a b", "a\t", "\x7f", "\x00", "ä", "x" * 8193])
def test_text_is_no_credential_when_a_header_could_not_have_it(text: str) -> None:
    assert not is_credential(text)


@pytest.mark.parametrize("given", [["Basic abc"], ["abc"], [""], ["Bearer a", "Bearer b"]])
def test_authorization_is_refused_without_a_quote_when_it_is_not_one_bearer(
    given: list[str],
) -> None:
    metadata = [("authorization", text) for text in given]
    with pytest.raises(DomainError) as caught:
        bearer_credential(metadata)
    assert caught.value.reason == "CALLER_UNKNOWN"
    assert "abc" not in caught.value.message
