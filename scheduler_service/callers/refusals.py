"""What is said to whom is not known: never which part of a credential was wrong."""

from __future__ import annotations

from splitserve_rpc.domain_error import DomainError

_REASON = "CALLER_UNKNOWN"


def missing() -> DomainError:
    """No credential was given."""
    return DomainError(_REASON, "a credential is needed, and none was given")


def not_valid() -> DomainError:
    """Unknown, revoked, not ours, wrong: which of them is nobody's business."""
    return DomainError(_REASON, "the credential is not valid")


def expired() -> DomainError:
    """Only for one that is genuine."""
    return DomainError(_REASON, "the credential has expired")


def no_tenant(claim: str) -> DomainError:
    """Of a genuine token, whose issuer has to be told to say it."""
    return DomainError(_REASON, f"the token has no claim {claim!r} that names a tenant")


def too_many_strangers(retry_delay_s: float) -> DomainError:
    """Whether the token is good is not looked at, after so many that were not."""
    message = "too many tokens that are nobody's are shown; this one was not looked at, try again"
    return DomainError("QUOTA_EXCEEDED", message, retry_delay_s=retry_delay_s)
