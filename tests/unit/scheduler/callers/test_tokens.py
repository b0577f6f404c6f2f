"""Tests callers by tokens: whose they are, and that nobody else gets in."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.callers import MAX_AT_ONCE, Caller, InvalidTokenLimit, Scope
from scheduler_service.callers.tokens import (
    LEEWAY_S,
    TokenKeys,
    TokenRules,
    TokenVerifier,
    parse_token_keys,
)
from splitserve_contract import DomainError
from tests.support.security.issuer import (
    AUDIENCE,
    NAME,
    Issuer,
    Signer,
    as_json,
    ec_key,
    encode,
    jwk,
    rsa_key,
    signature,
)

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "100"))
RSA = rsa_key()
INVALID, EXPIRED = "the credential is not valid", "the credential has expired"


@dataclass
class Keys:
    """Those of an issuer, which a test may change."""

    value: TokenKeys

    def refresh(self) -> bool:
        return False


@dataclass
class Setting:
    """A verifier of an issuer's tokens. `num_unknown`: how often a key was not there."""

    issuer: Issuer = field(default_factory=Issuer)
    num_unknown: int = 0

    def __post_init__(self) -> None:
        self.now_s = float(self.issuer.now)
        self.keys = Keys(parse_token_keys(self.issuer.key_set()))
        rules = TokenRules(NAME, AUDIENCE, "tenant")
        self.monotonic_ns = 0
        self.verifier = TokenVerifier(
            rules,
            self.keys,
            self._unknown,
            lambda: self.now_s,
            invalid_tokens=InvalidTokenLimit(lambda: self.monotonic_ns),
        )

    def _unknown(self) -> None:
        self.num_unknown += 1

    def identify(self, kid: str = "first", algorithm: str = "ES256", **claims: object) -> Caller:
        return self.verifier.identify(self.issuer.token(kid, algorithm, None, **claims))

    def refusal(self, token: str) -> str:
        with pytest.raises(DomainError) as raised:
            self.verifier.identify(token)
        assert raised.value.reason == "CALLER_UNKNOWN"
        # There is always time between them, but in the test of a flood.
        self.monotonic_ns += 10**9
        return raised.value.message


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_caller_is_who_the_token_says(setting: Setting) -> None:
    assert setting.identify() == Caller("token:somebody", "a", frozenset({Scope.GENERATE}))


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        *((name, RSA) for name in ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")),
        ("ES256", ec.generate_private_key(ec.SECP256R1())),
        ("ES384", ec.generate_private_key(ec.SECP384R1())),
        ("ES512", ec.generate_private_key(ec.SECP521R1())),
        *((name, ed25519.Ed25519PrivateKey.generate()) for name in ("EdDSA", "Ed25519")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_caller_is_known_by_each_algorithm(algorithm: str, key: Signer) -> None:
    assert Setting(Issuer({"k": key})).identify("k", algorithm).tenant == "a"


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({}, {Scope.GENERATE}),
        ({"scope": "openid profile"}, {Scope.GENERATE}),
        ({"scope": "operator tenants gateway"}, {Scope.GENERATE}),
        ({"scope": "openid splitserve:gateway"}, {Scope.GATEWAY}),
        (
            {"scope": "splitserve:generate splitserve:tenants"},
            {Scope.GENERATE, Scope.TENANTS},
        ),
        ({"scp": ["splitserve:operator", "x", 5]}, {Scope.OPERATOR}),
        ({"scp": "splitserve:operator x"}, {Scope.OPERATOR}),
        ({"scope": "splitserve:everything"}, set()),
        ({"scope": 5, "scp": {"splitserve:operator": 1}}, {Scope.GENERATE}),
    ],
)
def test_scopes_are_those_with_our_prefix(
    setting: Setting, claims: dict[str, Any], scopes: set[Scope]
) -> None:
    assert setting.identify(**claims).scopes == scopes


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://other.example"},
        {"iss": NAME + "/"},
        {"iss": [NAME]},
        {"iss": None},
        {"aud": "other"},
        {"aud": ["other", "more"]},
        {"aud": []},
        {"aud": None},
        {"exp": None},
        {"exp": "1900000000"},
        {"exp": True},
        {"exp": float("nan")},
        {"nbf": 1_800_000_000 + LEEWAY_S + 1},
        {"nbf": "now"},
        {"iat": 1_800_000_000 + LEEWAY_S + 1},
        {"sub": None},
        {"sub": ""},
        {"sub": "a\nb"},
        {"sub": "s" * 256},
        {"sub": 5},
    ],
    ids=str,
)
def test_token_is_not_valid_when_a_claim_is_another(
    setting: Setting, claims: dict[str, Any]
) -> None:
    assert setting.refusal(setting.issuer.token(**claims)) == INVALID


@pytest.mark.parametrize("claims", [{"aud": [AUDIENCE, "x"]}, {"nbf": 1_800_000_000 + LEEWAY_S}])
def test_token_is_valid_when_a_claim_allows_it(setting: Setting, claims: dict[str, Any]) -> None:
    assert setting.identify(**claims).tenant == "a"


@pytest.mark.parametrize("tenant", [None, "", "a\nb", "t" * 129, 5, ["a"]])
def test_token_without_a_tenant_is_told_so(setting: Setting, tenant: object) -> None:
    problem = "the token has no claim 'tenant' with a valid tenant name"
    assert setting.refusal(setting.issuer.token(tenant=tenant)) == problem


def test_token_expires_also_when_it_was_verified_before(setting: Setting) -> None:
    token = setting.issuer.token(exp=setting.issuer.now + 60)
    assert setting.verifier.identify(token).tenant == "a"
    setting.now_s += 60 + LEEWAY_S - 1
    assert setting.verifier.identify(token).tenant == "a"
    setting.now_s += 1
    assert setting.refusal(token) == EXPIRED


def test_expiry_is_not_told_when_the_token_is_forged(setting: Setting) -> None:
    forged = Issuer({"first": ec_key()}).token(exp=5)
    assert setting.refusal(forged) == INVALID


def test_token_is_refused_when_its_key_is_withdrawn(setting: Setting) -> None:
    token = setting.issuer.token()
    setting.verifier.identify(token)
    setting.keys.value = parse_token_keys(Issuer({"second": ec_key()}).key_set())
    assert setting.refusal(token) == INVALID
    assert setting.num_unknown == 1


def test_token_of_a_new_key_is_good_when_that_is_there(setting: Setting) -> None:
    setting.issuer.keys["second"] = RSA
    token = setting.issuer.token(kid="second", algorithm="RS256")
    assert setting.refusal(token) == INVALID
    assert setting.num_unknown == 1
    setting.keys.value = parse_token_keys(setting.issuer.key_set())
    assert setting.verifier.identify(token).tenant == "a"


def test_repeat_is_remembered_and_not_verified_again(setting: Setting) -> None:
    token = setting.issuer.token()
    assert setting.verifier.identify(token) is setting.verifier.identify(token)


def test_no_more_than_so_many_are_remembered(setting: Setting) -> None:
    verifier = TokenVerifier(
        TokenRules(NAME, AUDIENCE, "tenant"), setting.keys, max_remembered=2, now_s=lambda: 1.8e9
    )
    tokens = [setting.issuer.token(sub=name) for name in "abc"]
    first = [verifier.identify(token) for token in tokens]
    assert verifier.identify(tokens[2]) is first[2]
    assert verifier.identify(tokens[0]) is not first[0]


# -- forgeries -------------------------------------------------------------------------------------


def _hs256(setting: Setting, secret: bytes, kid: str = "first") -> str:
    claims = as_json(setting.issuer.claims())
    content = f"{as_json({'alg': 'HS256', 'kid': kid})}.{claims}"
    return f"{content}.{encode(hmac.digest(secret, content.encode(), hashlib.sha256))}"


def test_token_is_not_valid_when_the_public_key_is_its_secret() -> None:
    setting = Setting(Issuer({"first": RSA}))
    public = RSA.public_key()
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    secrets = [pem, pem.strip(), setting.issuer.key_set(), json.dumps(jwk(RSA)).encode(), b""]
    assert {setting.refusal(_hs256(setting, secret)) for secret in secrets} == {INVALID}


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "nOnE", "", "HS256", "ES256K", None])
@pytest.mark.parametrize("signed", ["", "AAAA", encode(b"\0" * 64)])
def test_token_is_not_valid_when_it_says_it_needs_no_signature(
    setting: Setting, algorithm: str | None, signed: str
) -> None:
    header = as_json({"alg": algorithm, "kid": "first"})
    assert setting.refusal(f"{header}.{as_json(setting.issuer.claims())}.{signed}") == INVALID


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "EdDSA", "ES384", "ES512"])
def test_token_is_refused_when_its_algorithm_is_not_its_keys(
    setting: Setting, algorithm: str
) -> None:
    token = setting.issuer.token(header={"alg": algorithm})
    assert setting.refusal(token) == INVALID


def test_token_is_not_valid_when_the_key_is_for_another_algorithm() -> None:
    setting = Setting(Issuer({"first": RSA}))
    key_set = {"keys": [jwk(RSA, kid="first", alg="RS512")]}
    setting.keys.value = parse_token_keys(json.dumps(key_set).encode())
    assert setting.refusal(setting.issuer.token(algorithm="RS256")) == INVALID
    assert setting.identify(algorithm="RS512").tenant == "a"


@pytest.mark.parametrize(
    "kid",
    ["second", "", "../../../dev/null", "/etc/passwd", "' OR 1=1 --", "first\0", 0, ["first"], {}],
)
def test_token_is_not_valid_when_its_kid_leads_elsewhere(setting: Setting, kid: object) -> None:
    assert setting.refusal(setting.issuer.token(header={"kid": kid})) == INVALID


@pytest.mark.parametrize("name", ["jwk", "jku", "x5u", "x5c"])
def test_token_brings_no_key_of_its_own(setting: Setting, name: str) -> None:
    thief = Issuer({"first": ec_key()})
    own = jwk(thief.keys["first"], kid="first")
    values = {"jwk": own, "jku": "http://127.0.0.1:1/", "x5u": "http://127.0.0.1:1/", "x5c": ["x"]}
    token = thief.token(header={name: values[name]})
    assert setting.refusal(token) == INVALID


def test_token_is_not_valid_when_it_demands_what_nobody_knows(setting: Setting) -> None:
    token = setting.issuer.token(header={"crit": ["must"], "must": True})
    assert setting.refusal(token) == INVALID


def test_token_without_kid_means_the_only_key_there_is(setting: Setting) -> None:
    token = setting.issuer.token(header={"kid": None})
    assert setting.verifier.identify(token).tenant == "a"
    setting.issuer.keys["second"] = ec_key()
    setting.keys.value = parse_token_keys(setting.issuer.key_set())
    assert setting.refusal(setting.issuer.token(header={"kid": None})) == INVALID


def test_token_is_not_valid_when_a_part_of_it_is_another(setting: Setting) -> None:
    header, claims, signed = setting.issuer.token().split(".")
    others = as_json(setting.issuer.claims(tenant="b"))
    tokens = [
        f"{header}.{others}.{signed}",
        f"{as_json({'alg': 'ES256', 'kid': 'first'})}.{claims}.{signed}",
        f"{header}.{claims}",
        f"{header}.{claims}.",
        f"{header}.{claims}.{signed}.{signed}",
        f"{header}.{claims}.{signed[:-4]}",
        f".{claims}.{signed}",
        f"..{signed}",
        "..",
        f"{as_json([])}.{claims}.{signed}",
        f"{encode(b'[' * 3000)}.{claims}.{signed}",
        f"{as_json({'alg': ['ES256'], 'kid': 'first'})}.{claims}.{signed}",
    ]
    assert {setting.refusal(token) for token in tokens} == {INVALID}


def test_token_is_not_valid_when_what_is_signed_is_no_object() -> None:
    setting = Setting()
    key = setting.issuer.keys["first"]
    for payload in (b"[]", b"5", b"null", b"\xff", b"", b"{", b"[" * 5000):
        content = f"{as_json({'alg': 'ES256', 'kid': 'first'})}.{encode(payload)}"
        token = f"{content}.{encode(signature(key, 'ES256', content.encode()))}"
        assert setting.refusal(token) == INVALID


_SETTING = Setting()
_TOKEN = _SETTING.issuer.token()


@settings(max_examples=NUM_EXAMPLES)
@given(
    st.text(st.characters(max_codepoint=127))
    | st.text("abc.=-_").map(lambda text: f"{_TOKEN.partition('.')[0]}.{text}")
    | st.builds(
        lambda at, char: _TOKEN[:at] + char + _TOKEN[at + 1 :],
        st.integers(0, len(_TOKEN) - 1),
        st.characters(max_codepoint=127),
    )
)
def test_nobody_is_a_caller_who_does_not_have_the_token(text: str) -> None:
    if text == _TOKEN:
        assert _SETTING.verifier.identify(text).tenant == "a"
    elif text[:-1] != _TOKEN[:-1]:
        # The last character has bits that say nothing.
        assert _SETTING.refusal(text) == INVALID


# -- floods ----------------------------------------------------------------------------------------


class Flood:
    """Forged tokens at one moment."""

    def __init__(self) -> None:
        self.setting = Setting()
        self.issuer, self.verifier = self.setting.issuer, self.setting.verifier
        self.num_forged = 0

    def forge(self) -> str:
        """Returns a token of a known key, with another signature each time."""
        self.num_forged += 1
        content, _, _ = self.issuer.token(sub="mallory").rpartition(".")
        return f"{content}.{encode(self.num_forged.to_bytes(64))}"

    def refusal(self, token: str) -> DomainError:
        with pytest.raises(DomainError) as raised:
            self.verifier.identify(token)
        return raised.value

    def flood(self) -> None:
        """Shows as many as are verified, and one more."""
        for _ in range(MAX_AT_ONCE):
            assert self.refusal(self.forge()).reason == "CALLER_UNKNOWN"
        assert self.refusal(self.forge()).reason == "QUOTA_EXCEEDED"


def test_tokens_are_not_verified_when_too_many_were_forged() -> None:
    flood = Flood()
    flood.flood()

    # One that is good is not, either: so nobody looked.
    refusal = flood.refusal(flood.issuer.token())

    assert refusal.reason == "QUOTA_EXCEEDED"
    assert refusal.retry_delay_s == 1.0


def test_known_callers_are_known_in_a_flood() -> None:
    flood = Flood()
    token = flood.issuer.token(sub="alice")
    flood.verifier.identify(token)
    flood.flood()

    assert flood.verifier.identify(token).name == "token:alice"
    flood.setting.keys.value = parse_token_keys(flood.issuer.key_set())
    assert flood.verifier.identify(token).name == "token:alice"


def test_caller_is_known_after_the_delay_of_its_refusal() -> None:
    flood = Flood()
    flood.flood()
    token = flood.issuer.token()
    delay_s = flood.refusal(token).retry_delay_s
    assert delay_s is not None

    flood.setting.monotonic_ns += int(delay_s * 1e9)

    assert flood.verifier.identify(token).name == "token:somebody"
    flood.flood()


def test_good_tokens_are_never_too_many() -> None:
    flood = Flood()
    for number in range(2 * MAX_AT_ONCE):
        token = flood.issuer.token(sub=f"user {number}")
        assert flood.verifier.identify(token).name == f"token:user {number}"
