"""Authentication of callers: API keys, the budget for invalid tokens, and the refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from scheduler_service.callers.caller import Caller, TenantLimits
from scheduler_service.callers.quotas import UsageBucket
from scheduler_service.callers.tenants_file import NO_TENANTS, Tenants
from splitserve_common import FilesUnusable, WatchedFiles
from splitserve_contract import DomainError
from splitserve_keys import PREFIX, ApiKey, KeyFileUnusable, Keys, read_keys
from splitserve_rpc import is_credential


class Authenticator:
    """Identifies callers by API keys and tokens, and looks up tenants' limits in the tenants file.

    Implements `Callers`. Reads no file and never blocks: `OpenedCallers` refreshes the values.
    """

    knows_callers = True

    def __init__(
        self,
        keys: WatchedFiles[Keys] | None,
        tenants: WatchedFiles[Tenants] | None,
        identify_token: Callable[[str], Caller] | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Keeps the sources of keys and tenants.

        `identify_token`: returns the caller of a token, or raises DomainError; None: tokens are
        not accepted. `now_s`: wall clock in seconds since 1970, by which keys expire.
        """
        self._keys = keys
        self._tenants = tenants
        self._identify_token = identify_token
        self._now_s = now_s

    def identify(self, credential: str) -> Caller:
        if not credential:
            raise missing()
        if not is_credential(credential):
            raise not_valid()
        if self._keys is not None and credential.startswith(PREFIX):
            now = datetime.fromtimestamp(self._now_s(), UTC)
            return caller_with_key(self._keys.value, credential, now)
        if self._identify_token is not None:
            return self._identify_token(credential)
        raise not_valid()

    def limits(self, tenant: str) -> TenantLimits:
        tenants = NO_TENANTS if self._tenants is None else self._tenants.value
        return tenants.limits(tenant)


# -- API keys --------------------------------------------------------------------------------------

# Digest that an unknown key is compared with, so that its refusal takes as long.
_OF_NO_KEY = "0" * 64


def read_key_file(path: Path) -> Keys:
    """Reads the file of API keys. Raises FilesUnusable."""
    try:
        return read_keys(path)
    except KeyFileUnusable as error:
        raise FilesUnusable(str(error)) from error


def caller_with_key(keys: Keys, text: str, now: datetime) -> Caller:
    """Returns the caller with the API key `text`. Raises DomainError(CALLER_UNKNOWN)."""
    key = ApiKey.parse(text)
    if key is None:
        raise not_valid()
    entry = keys.get(key.key_id)
    is_genuine = key.has(_OF_NO_KEY if entry is None else entry.sha256)
    if entry is None or not is_genuine or entry.revoked is not None:
        raise not_valid()
    if entry.expires is not None and entry.expires <= now:
        raise expired()
    return Caller(f"key:{entry.key_id}", entry.tenant, entry.scopes)


# -- Budget for the verification of invalid tokens -------------------------------------------------
#
# Verification blocks the event loop, so every other call waits for it.

# Invalid tokens a second. Each takes 0.1 to 0.3 ms, so all take at most 6 % of the time.
MAX_AT_ONCE = 200
_PER_MINUTE = 60.0 * MAX_AT_ONCE
# Reduces the burst that the bucket allows, a minute's worth, to MAX_AT_ONCE.
_LESS = MAX_AT_ONCE - _PER_MINUTE
# The whole budget is available again by then.
_RETRY_DELAY_S = 1.0


class InvalidTokenLimit:
    """Rate limit of invalid tokens: MAX_AT_ONCE at once, and as many a second."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._refused = UsageBucket()

    def check(self) -> None:
        """Raises DomainError(QUOTA_EXCEEDED) if the budget is used up."""
        if self._refused.delay_s(_PER_MINUTE, self._now_ns(), debt=_LESS) > 0:
            raise too_many_invalid_tokens(_RETRY_DELAY_S)

    def count(self) -> None:
        """Counts one more invalid token."""
        self._refused.use(1.0, _PER_MINUTE, self._now_ns())


# -- Refusals of credentials -----------------------------------------------------------------------
#
# A refusal never tells which part of a credential was wrong.

_REASON = "CALLER_UNKNOWN"


def missing() -> DomainError:
    """Returns the refusal of a call without a credential."""
    return DomainError(_REASON, "a credential is required")


def not_valid() -> DomainError:
    """Returns the refusal of a credential that is unknown, revoked, foreign or wrong.

    The text does not tell which, so that it cannot be probed.
    """
    return DomainError(_REASON, "the credential is not valid")


def expired() -> DomainError:
    """Returns the refusal of an expired credential; only for a credential that is genuine."""
    return DomainError(_REASON, "the credential has expired")


def no_tenant(claim: str) -> DomainError:
    """Returns the refusal of a genuine token without a tenant; its issuer must add `claim`."""
    return DomainError(_REASON, f"the token has no claim {claim!r} with a valid tenant name")


def too_many_invalid_tokens(retry_delay_s: float) -> DomainError:
    """Returns the refusal of a token that was not verified, after too many invalid tokens."""
    message = "too many invalid tokens; this token was not verified, retry later"
    return DomainError("QUOTA_EXCEEDED", message, retry_delay_s=retry_delay_s)
