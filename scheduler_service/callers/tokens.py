"""Callers by signed tokens (JWT): verification, and the keys that verify.

Needs joserfc.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joserfc import jwt
from joserfc.errors import ExpiredTokenError, UnsupportedAlgorithmError
from joserfc.jwk import ECKey, GuestProtocol, JWKRegistry, OKPKey, RSAKey
from joserfc.jws import JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from scheduler_service.callers.authenticator import InvalidTokenLimit, expired, no_tenant, not_valid
from scheduler_service.callers.caller import Caller, Scope
from scheduler_service.callers.issuer_keys import Refreshed
from splitserve_common import FilesUnusable, parse_json, read_bytes
from splitserve_contract import DomainError
from splitserve_keys import is_tenant_name

# Asymmetric algorithms only: with a symmetric key, every verifier could also sign.
ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA", "Ed25519", "Ed448"),
)
SCOPE_PREFIX = "splitserve:"
# Tolerated difference between the clocks of two machines.
LEEWAY_S = 30
_MAX_SUBJECT_CHARS = 255
_MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Required claims of a token. `tenant_claim`: name of the claim that holds the tenant."""

    issuer: str
    audience: str
    tenant_claim: str


@dataclass(frozen=True, slots=True)
class _Verified:
    """Verified token: its caller, the keys it was verified with, and its expiry.

    `until_s`: wall clock in seconds, with leeway.
    """

    caller: Caller
    keys: TokenKeys
    until_s: float


class _UnknownKey(Exception):
    """The token names a key that the issuer's key set does not have."""


class _Algorithms(JWSRegistry):
    """Restricts signatures to `ALGORITHMS`.

    The default of the library allows others, and warns of some that are safe.
    """

    def get_alg(self, name: str) -> Any:  # noqa: ANN401
        if name not in ALGORITHMS:
            raise UnsupportedAlgorithmError(name)
        return self.algorithms[name]


class TokenVerifier:
    """Identifies callers by their tokens; verified tokens are cached.

    A cached token holds until it expires or the keys of the issuer change.

    Invalid tokens have a budget. Once it is spent, cached tokens are still accepted, and all other
    tokens are refused with a retry delay.
    """

    def __init__(
        self,
        rules: TokenRules,
        keys: Refreshed[TokenKeys],
        on_unknown_key: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.time,
        max_remembered: int = _MAX_REMEMBERED,
        invalid_tokens: InvalidTokenLimit | None = None,
    ) -> None:
        """Keeps the rules and keys of the issuer.

        `on_unknown_key` is called when a token names a key that is not among `keys`. `now_s`: wall
        clock. `max_remembered`: size of the cache of verified tokens.
        """
        self._rules = rules
        self._keys = keys
        self._on_unknown_key = on_unknown_key
        self._now_s = now_s
        self._max_remembered = max_remembered
        self._invalid_tokens = invalid_tokens or InvalidTokenLimit()
        self._algorithms = _Algorithms(strict_check_header=False)
        self._claims = JWTClaimsRegistry(
            now=lambda: int(now_s()),
            leeway=LEEWAY_S,
            iss={"essential": True, "value": rules.issuer},
            aud={"essential": True, "value": rules.audience},
            exp={"essential": True},
            sub={"essential": True},
        )
        # LRU cache by the SHA-256 of the token; the least recently used token comes first.
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    def identify(self, token: str) -> Caller:
        """Returns the caller of `token`.

        Raises DomainError: CALLER_UNKNOWN, or QUOTA_EXCEEDED if the token was not verified.
        """
        digest = hashlib.sha256(token.encode("ascii")).digest()
        keys = self._keys.value
        known = self._verified.get(digest)
        if known is not None and known.keys is keys and self._now_s() < known.until_s:
            self._verified.move_to_end(digest)
            return known.caller
        if known is None:
            self._invalid_tokens.check()
        try:
            verified = self._verify(token, keys)
        except DomainError:
            self._invalid_tokens.count()
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
            # The library may raise anything for arbitrary bytes; every error refuses the token.
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
    """Returns the scopes that the token grants at this service; GENERATE if it names none of ours.

    Our scopes have a prefix, because "operator" may mean something else to the issuer's other
    services.
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
    """Yields the names of scopes in the claims `scope` and `scp`.

    Each may be a text with spaces (RFC 8693) or, as some issuers write it, a list.
    """
    for claim in ("scope", "scp"):
        names = claims.get(claim)
        if isinstance(names, str):
            yield from names.split()
        elif isinstance(names, list):
            yield from (name for name in names if isinstance(name, str))


# -- Public keys of an issuer: a JWK set -----------------------------------------------------------

MAX_SET_BYTES = 2**20
_MAX_KEYS = 100
# Without `oct`, the symmetric kind: such a key would also let its reader sign.
_KINDS = ("RSA", "EC", "OKP")
# Base64 of the modulus of the shortest RSA key that counts as safe, 2048 bits.
_MIN_MODULUS_CHARS = 342

TokenKey = RSAKey | ECKey | OKPKey


@dataclass(frozen=True, slots=True)
class TokenKeys:
    """Keys of an issuer that verify signatures."""

    keys: tuple[TokenKey, ...]

    def find(self, kid: object) -> TokenKey | None:
        """Returns the key named `kid`, or the only key if `kid` is None; None if there is none."""
        if kid is None:
            return self.keys[0] if len(self.keys) == 1 else None
        return next((key for key in self.keys if key.kid == kid), None)


NO_TOKEN_KEYS = TokenKeys(())


def read_token_keys(path: Path) -> TokenKeys:
    """Reads the file of a JWK set. Raises FilesUnusable."""
    try:
        return parse_token_keys(read_bytes(path, MAX_SET_BYTES))
    except ValueError as error:
        raise FilesUnusable(f"{path}: {error}") from error


def parse_token_keys(content: bytes) -> TokenKeys:
    """Parses a JWK set. Raises ValueError if the set is malformed or has no key that verifies.

    Keys that do not verify signatures are left out, as RFC 7517 has it.
    """
    if len(content) > MAX_SET_BYTES:
        raise ValueError(f"too large; allowed: {MAX_SET_BYTES} bytes")
    try:
        document = parse_json(content)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > _MAX_KEYS:
        raise ValueError(f"not a JWK set; allowed: an object with at most {_MAX_KEYS} `keys`")
    keys = tuple(key for key in map(_key, entries) if key is not None)
    if not keys:
        raise ValueError(f"no key for verifying signatures; allowed: {', '.join(_KINDS)}")
    return TokenKeys(keys)


def _key(entry: object) -> TokenKey | None:
    if not isinstance(entry, dict) or entry.get("kty") not in _KINDS:
        return None
    if entry.get("use", "sig") != "sig" or not _may_verify(entry.get("key_ops")):
        return None
    if entry["kty"] == "RSA" and len(str(entry.get("n"))) < _MIN_MODULUS_CHARS:
        return None
    try:
        key = JWKRegistry.import_key(entry)
    except Exception:
        # The key has an unknown curve or is broken, for which the library raises many errors. The
        # other keys of the set are still of use.
        return None
    return key if isinstance(key, TokenKey) else None


def _may_verify(operations: object) -> bool:
    return operations is None or (isinstance(operations, list) and "verify" in operations)
