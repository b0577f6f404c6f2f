"""Callers by tokens (JWT) that an issuer has signed. Needs joserfc."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from joserfc import jwt
from joserfc.errors import ExpiredTokenError, UnsupportedAlgorithmError
from joserfc.jwk import GuestProtocol
from joserfc.jws import JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from scheduler_service.callers.caller import Caller, Scope
from scheduler_service.callers.refreshed import Refreshed
from scheduler_service.callers.refusals import expired, no_tenant, not_valid
from scheduler_service.callers.stranger_budget import StrangerBudget
from scheduler_service.callers.token_keys import TokenKey, TokenKeys
from splitserve_keys.tenant_names import is_tenant_name
from splitserve_rpc.domain_error import DomainError

# All of them with a public key: with any other kind whoever verifies could sign, too.
ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA", "Ed25519", "Ed448"),
)
SCOPE_PREFIX = "splitserve:"
# Clocks of two machines differ.
LEEWAY_S = 30
_MAX_SUBJECT_CHARS = 255
_MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token has to say. `tenant_claim`: the claim that names its tenant."""

    issuer: str
    audience: str
    tenant_claim: str


@dataclass(frozen=True, slots=True)
class _Verified:
    """A token that was verified with `keys`, and holds until `until_s`."""

    caller: Caller
    keys: TokenKeys
    until_s: float


class _UnknownKey(Exception):
    """The token names a key that is not there."""


class _Algorithms(JWSRegistry):
    """Those above; the library's own choice has others, and warns of some that are fine."""

    def get_alg(self, name: str) -> Any:  # noqa: ANN401
        if name not in ALGORITHMS:
            raise UnsupportedAlgorithmError(name)
        return self.algorithms[name]


class TokenVerifier:
    """Knows callers by their tokens. What was verified is remembered, so that it costs once.

    What turns out to be nobody's has a budget. Where that is spent, those that are remembered are
    known as ever, and all others have to come again.
    """

    def __init__(
        self,
        rules: TokenRules,
        keys: Refreshed[TokenKeys],
        on_unknown_key: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.time,
        max_remembered: int = _MAX_REMEMBERED,
        strangers: StrangerBudget | None = None,
    ) -> None:
        """`on_unknown_key`: told when a token names a key that is not among `keys`."""
        self._rules = rules
        self._keys = keys
        self._on_unknown_key = on_unknown_key
        self._now_s = now_s
        self._max_remembered = max_remembered
        self._strangers = strangers or StrangerBudget()
        self._algorithms = _Algorithms(strict_check_header=False)
        self._claims = JWTClaimsRegistry(
            now=lambda: int(now_s()),
            leeway=LEEWAY_S,
            iss={"essential": True, "value": rules.issuer},
            aud={"essential": True, "value": rules.audience},
            exp={"essential": True},
            sub={"essential": True},
        )
        # By the digest of the token, least lately used first.
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    def identify(self, token: str) -> Caller:
        """Whose it is. Raises DomainError: CALLER_UNKNOWN, or QUOTA_EXCEEDED if nobody looked."""
        digest = hashlib.sha256(token.encode("ascii")).digest()
        keys = self._keys.value
        known = self._verified.get(digest)
        if known is not None and known.keys is keys and self._now_s() < known.until_s:
            self._verified.move_to_end(digest)
            return known.caller
        if known is None:
            self._strangers.check()
        try:
            verified = self._verify(token, keys)
        except DomainError:
            self._strangers.count()
            self._verified.pop(digest, None)
            raise
        self._verified[digest] = verified
        if len(self._verified) > self._max_remembered:
            self._verified.popitem(last=False)
        return verified.caller

    def _verify(self, token: str, keys: TokenKeys) -> _Verified:
        def find(unverified: GuestProtocol) -> TokenKey:
            key = keys.find(unverified.headers().get("kid"))
            if key is None:
                raise _UnknownKey
            return key

        try:
            claims = jwt.decode(token, find, registry=self._algorithms).claims
            self._claims.validate(claims)
        except ExpiredTokenError as error:
            raise expired() from error
        except _UnknownKey as error:
            self._on_unknown_key()
            raise not_valid() from error
        except Exception as error:
            # Whatever a library makes of bytes from anybody: nobody gets in by it.
            raise not_valid() from error
        return _Verified(self._caller(claims), keys, claims["exp"] + LEEWAY_S)

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        subject, tenant = claims["sub"], claims.get(self._rules.tenant_claim)
        if not (0 < len(subject) <= _MAX_SUBJECT_CHARS and subject.isprintable()):
            raise not_valid()
        if not is_tenant_name(tenant):
            raise no_tenant(self._rules.tenant_claim)
        return Caller(f"token:{subject}", str(tenant), _scopes(claims))


def _scopes(claims: Mapping[str, Any]) -> frozenset[Scope]:
    """Those among the token's that are for us; a token that names none of ours may generate.

    They have a prefix, for "operator" may be something else to the other services of an issuer.
    """
    ours = {
        name.removeprefix(SCOPE_PREFIX)
        for name in _scope_names(claims)
        if name.startswith(SCOPE_PREFIX)
    }
    if not ours:
        return frozenset({Scope.GENERATE})
    return frozenset(scope for scope in Scope if scope.value in ours)


def _scope_names(claims: Mapping[str, Any]) -> Iterator[str]:
    """As RFC 8693 has them, a text with spaces, or as others do, `scp` as a list."""
    for claim in ("scope", "scp"):
        names = claims.get(claim)
        if isinstance(names, str):
            yield from names.split()
        elif isinstance(names, list):
            yield from (name for name in names if isinstance(name, str))
