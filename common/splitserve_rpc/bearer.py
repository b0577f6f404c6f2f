"""Bearer credential in the metadata of a call."""

from __future__ import annotations

from collections.abc import Iterable

from splitserve_rpc.domain_error import DomainError

Metadata = Iterable[tuple[str, str | bytes]]

# Limit of most servers for one header. A JWT is larger than an API key.
MAX_CREDENTIAL_CHARS = 8192

_KEY = "authorization"
_SCHEME = "bearer"


def is_credential(text: str) -> bool:
    """Returns whether `text` may be a credential: visible ASCII (RFC 6750), not too long."""
    is_visible = text.isascii() and text.isprintable() and " " not in text
    return is_visible and 0 < len(text) <= MAX_CREDENTIAL_CHARS


def split_bearer(value: str) -> str | None:
    """Returns the credential after `Bearer`, possibly empty; None for another scheme."""
    scheme, _, credential = value.partition(" ")
    return credential.strip(" \t") if scheme.lower() == _SCHEME else None


def bearer_credential(metadata: Metadata) -> str:
    """Returns the credential of a call, empty if there is none.

    Raises DomainError(CALLER_UNKNOWN) if `authorization` is repeated or has another scheme.
    """
    given = [value for key, value in metadata if key == _KEY]
    if not given:
        return ""
    credential = split_bearer(str(given[0]))
    if len(given) > 1 or credential is None:
        raise DomainError(
            "CALLER_UNKNOWN",
            "the metadata `authorization` is not usable; allowed: once, `Bearer CREDENTIAL`",
        )
    return credential
