"""Callers by signed tokens (JWT): verification, the issuer's keys, and fetching these by HTTP.

Needs joserfc.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import logging
import socket
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar, cast

from joserfc import jwt
from joserfc.errors import ExpiredTokenError, UnsupportedAlgorithmError
from joserfc.jwk import ECKey, GuestProtocol, JWKRegistry, OKPKey, RSAKey
from joserfc.jws import JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from scheduler_service.callers.authenticator import StrangerBudget, expired, no_tenant, not_valid
from scheduler_service.callers.caller import Caller, Scope
from scheduler_service.config import SAFE_URLS, is_safe_url
from splitserve_keys.key_entry import is_tenant_name
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.files import FilesUnusable, read_bytes
from splitserve_rpc.text import parse_json

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
        strangers: StrangerBudget | None = None,
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
        raise ValueError(f"is too large; allowed: {MAX_SET_BYTES} bytes")
    try:
        document = parse_json(content)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > _MAX_KEYS:
        raise ValueError(f"is no JWK set; allowed: an object whose `keys` are at most {_MAX_KEYS}")
    keys = tuple(key for key in map(_key, entries) if key is not None)
    if not keys:
        raise ValueError(f"has no key that verifies signatures; allowed: {', '.join(_KINDS)}")
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


# -- Key set of an issuer, fetched by HTTP ---------------------------------------------------------

_MAX_BYTES = 2**20
_TIMEOUT_S = 5.0
_WELL_KNOWN = "/.well-known/openid-configuration"


def fetch_keys_of(issuer: str) -> bytes:
    """Fetches the key set of `issuer`, found by OpenID Connect Discovery. Raises CannotFetch."""
    url = issuer.rstrip("/") + _WELL_KNOWN
    try:
        document = parse_json(fetch(url))
        said, keys_url = document["issuer"], document["jwks_uri"]
    except (ValueError, KeyError, TypeError) as error:
        raise CannotFetch(f"{url}: is no configuration of OpenID Connect") from error
    if said != issuer:
        raise CannotFetch(f"{url}: is that of the issuer {str(said)[:200]!r}; allowed: {issuer!r}")
    if not isinstance(keys_url, str) or not is_safe_url(keys_url):
        raise CannotFetch(f"{url}: jwks_uri is {str(keys_url)[:200]!r}; allowed: {SAFE_URLS}")
    return fetch(keys_url)


def fetch(url: str) -> bytes:
    """Fetches the body at `url`: at most 1 MiB, within 5 s, no redirects. Raises CannotFetch."""
    try:
        with hurried_opener(_TIMEOUT_S).open(url, timeout=_TIMEOUT_S) as response:
            content: bytes = response.read(_MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise CannotFetch(f"{url}: answers {error.code}") from error
    except TimeoutError as error:
        raise CannotFetch(f"{url}: takes too long; allowed: {_TIMEOUT_S:g} s") from error
    except urllib.error.URLError as error:
        raise CannotFetch(f"{url}: {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CannotFetch(f"{url}: {error or type(error).__name__}") from error
    if len(content) > _MAX_BYTES:
        raise CannotFetch(f"{url}: is too large; allowed: {_MAX_BYTES} bytes")
    return content


# -- Value that is fetched periodically, and sooner on demand --------------------------------------

_log = logging.getLogger(__name__)

T = TypeVar("T")
# Issuers announce keys long before they sign with them.
PERIOD_S = 300.0
# Shortest pause between two fetches, however many tokens name unknown keys.
LEAST_PAUSE_S = 10.0


class CannotFetch(Exception):
    """A fetch failed; the message names the URL and the problem in one line."""


class Fetched(Generic[T]):
    """Value that `fetch` returned last; `fetch` may raise CannotFetch. Implements `Refreshed`."""

    def __init__(
        self, initial: T, fetch: Callable[[], T], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.value = initial
        self._fetch = fetch
        self._now_s = now_s
        self._tried_at: float | None = None
        self._is_wanted = True
        self._problem = ""

    def want(self) -> None:
        """Asks for an early fetch, because a lookup in the value has failed."""
        self._is_wanted = True

    def refresh(self) -> bool:
        if not self._is_due():
            return False
        self._tried_at, self._is_wanted = self._now_s(), False
        try:
            value = self._fetch()
        except CannotFetch as error:
            self._is_wanted = True
            if str(error) != self._problem:
                _log.warning("token_keys_unavailable problem=%r", str(error))
            self._problem = str(error)
            return False
        self._problem = ""
        if value == self.value:
            return False
        self.value = value
        return True

    def _is_due(self) -> bool:
        if self._tried_at is None:
            return True
        pause_s = self._now_s() - self._tried_at
        return pause_s >= (LEAST_PAUSE_S if self._is_wanted else PERIOD_S)


# -- HTTP with a deadline for the whole answer -----------------------------------------------------
#
# The timeout of a socket only limits each single read.


def hurried_opener(
    within_s: float, now_s: Callable[[], float] = time.monotonic
) -> urllib.request.OpenerDirector:
    """Returns an opener for one request, whose reads fail `within_s` seconds from now.

    A late read raises TimeoutError or URLError. The deadline holds for headers, body and the answer
    of a proxy, however slowly they trickle. Redirects are not followed. Proxies of the environment
    are used for https only.
    """
    ends_at_s = now_s() + within_s

    def left_s() -> float:
        left_s = ends_at_s - now_s()
        if left_s <= 0:
            raise TimeoutError("it takes too long")
        return left_s

    return urllib.request.build_opener(
        _NoRedirects, urllib.request.ProxyHandler(_proxies()), _Http(left_s), _Https(left_s)
    )


class _Reads(io.RawIOBase):
    """Raw stream of a socket that sets the timeout of each read to the time left."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._raw = raw
        self._sock = sock
        self._left_s = left_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:  # noqa: ANN401
        self._sock.settimeout(self._left_s())
        return cast(Any, self._raw).readinto(buffer)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(
        self, sock: socket.socket, method: str | None = None, *, left_s: Callable[[], float]
    ) -> None:
        super().__init__(sock, method=method)
        self.fp = io.BufferedReader(_Reads(self.fp.detach(), sock, left_s))


class _Http(urllib.request.HTTPHandler):
    def __init__(self, left_s: Callable[[], float]) -> None:
        super().__init__()
        self._left_s = left_s

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_connection, http.client.HTTPConnection, self._left_s), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, left_s: Callable[[], float]) -> None:
        super().__init__()
        self._left_s = left_s

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_connection, http.client.HTTPSConnection, self._left_s), req)


def _connection(
    kind: type[http.client.HTTPConnection], left_s: Callable[[], float], host: str, timeout: float
) -> http.client.HTTPConnection:
    connection = kind(host, timeout=timeout)
    answer: Any = partial(_Answer, left_s=left_s)
    connection.response_class = answer
    return connection


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: its target has not been checked by `is_safe_url`."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> None:
        return None


def _proxies() -> dict[str, str]:
    """Returns the https proxy of the environment; plain http only goes to this machine."""
    return {kind: url for kind, url in urllib.request.getproxies().items() if kind == "https"}


# -- Interface of refreshed values -----------------------------------------------------------------

T_co = TypeVar("T_co", covariant=True)


class Refreshed(Protocol[T_co]):
    """Value from a file or URL, refreshed from time to time.

    `value` is the last valid one, and another object whenever it has changed.
    """

    @property
    def value(self) -> T_co: ...

    def refresh(self) -> bool:
        """Looks for a new value, and returns whether there was one. Blocks; any thread may call."""
        ...
