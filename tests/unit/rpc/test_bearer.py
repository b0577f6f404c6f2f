from __future__ import annotations

import pytest

from splitserve_rpc.bearer import bearer_credential
from splitserve_rpc.domain_error import DomainError


@pytest.mark.parametrize(
    ("metadata", "credential"),
    [
        ((), ""),
        ((("user-agent", "Bearer x"),), ""),
        ((("authorization", "Bearer a.b-c"),), "a.b-c"),
        ((("authorization", "bearer  x "),), "x"),
        ((("authorization", "Bearer"),), ""),
    ],
)
def test_credential_is_what_follows_bearer(
    metadata: tuple[tuple[str, str], ...], credential: str
) -> None:
    assert bearer_credential(metadata) == credential


@pytest.mark.parametrize("given", [["Basic abc"], ["abc"], [""], ["Bearer a", "Bearer b"]])
def test_authorization_is_refused_without_a_quote_when_it_is_not_one_bearer(
    given: list[str],
) -> None:
    metadata = [("authorization", text) for text in given]
    with pytest.raises(DomainError) as caught:
        bearer_credential(metadata)
    assert caught.value.reason == "CALLER_UNKNOWN"
    assert "abc" not in caught.value.message
