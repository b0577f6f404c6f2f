"""A flood of forged tokens takes no time of those who are known."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from scheduler_service.callers.authenticator import MAX_AT_ONCE, StrangerBudget
from scheduler_service.callers.tokens import TokenKeys, TokenRules, TokenVerifier, parse_token_keys
from splitserve_rpc.domain_error import DomainError
from tests.support.security.issuer import AUDIENCE, NAME, Issuer, encode


@dataclass
class Keys:
    """Of an issuer; a test may change them."""

    value: TokenKeys

    def refresh(self) -> bool:
        return False


@dataclass
class Flooded:
    """A verifier, and its clock."""

    issuer: Issuer = field(default_factory=Issuer)
    now_ns: int = 0
    num_forged: int = 0

    def __post_init__(self) -> None:
        self.keys = Keys(parse_token_keys(self.issuer.key_set()))
        self.verifier = TokenVerifier(
            TokenRules(NAME, AUDIENCE, "tenant"),
            self.keys,
            now_s=lambda: float(self.issuer.now),
            strangers=StrangerBudget(lambda: self.now_ns),
        )

    def forge(self) -> str:
        """A token of a key that is known, with a signature that is another each time."""
        self.num_forged += 1
        content, _, _ = self.issuer.token(sub="mallory").rpartition(".")
        return f"{content}.{encode(self.num_forged.to_bytes(64))}"

    def refusal(self, token: str) -> DomainError:
        with pytest.raises(DomainError) as raised:
            self.verifier.identify(token)
        return raised.value

    def flood(self) -> None:
        """As many as are looked at, and one more."""
        for _ in range(MAX_AT_ONCE):
            assert self.refusal(self.forge()).reason == "CALLER_UNKNOWN"
        assert self.refusal(self.forge()).reason == "QUOTA_EXCEEDED"


def test_forged_tokens_are_not_even_looked_at_when_there_were_too_many() -> None:
    flooded = Flooded()
    flooded.flood()

    # One that is good is not, either: so nobody looked.
    refusal = flooded.refusal(flooded.issuer.token())

    assert refusal.reason == "QUOTA_EXCEEDED"
    assert refusal.retry_delay_s == 1.0


def test_those_who_are_known_are_known_in_a_flood_also_when_the_issuer_changes_its_keys() -> None:
    flooded = Flooded()
    token = flooded.issuer.token(sub="alice")
    flooded.verifier.identify(token)
    flooded.flood()

    assert flooded.verifier.identify(token).name == "token:alice"
    flooded.keys.value = parse_token_keys(flooded.issuer.key_set())
    assert flooded.verifier.identify(token).name == "token:alice"


def test_who_comes_again_after_the_time_that_was_said_is_known() -> None:
    flooded = Flooded()
    flooded.flood()
    token = flooded.issuer.token()
    delay_s = flooded.refusal(token).retry_delay_s
    assert delay_s is not None

    flooded.now_ns += int(delay_s * 1e9)

    assert flooded.verifier.identify(token).name == "token:somebody"
    flooded.flood()


def test_good_tokens_are_never_too_many() -> None:
    flooded = Flooded()
    for number in range(2 * MAX_AT_ONCE):
        token = flooded.issuer.token(sub=f"user {number}")
        assert flooded.verifier.identify(token).name == f"token:user {number}"
