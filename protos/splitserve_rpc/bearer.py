"""The credential that a call brings along."""

from __future__ import annotations

from collections.abc import Iterable

from splitserve_rpc.domain_error import DomainError

Metadata = Iterable[tuple[str, str | bytes]]

# As much as a header may have with most servers; a JWT is larger than an API key.
MAX_CREDENTIAL_CHARS = 8192

_KEY = "authorization"
_SCHEME = "bearer"


def is_credential(text: str) -> bool:
    """Whether it may be one: of ASCII that is visible, as RFC 6750 has it, and not too long."""
    is_visible = text.isascii() and text.isprintable() and " " not in text
    return is_visible and 0 < len(text) <= MAX_CREDENTIAL_CHARS


def split_bearer(value: str) -> str | None:
    """What follows `Bearer`, which may be nothing; None where something else is said."""
    scheme, _, credential = value.partition(" ")
    return credential.strip(" \t") if scheme.lower() == _SCHEME else None


def bearer_credential(metadata: Metadata) -> str:
    """What follows `Bearer`; empty if there is nothing. Raises DomainError(CALLER_UNKNOWN)."""
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
