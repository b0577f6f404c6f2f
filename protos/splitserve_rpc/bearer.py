"""The credential that a call brings along."""

from __future__ import annotations

from collections.abc import Iterable

from splitserve_rpc.domain_error import DomainError

Metadata = Iterable[tuple[str, str | bytes]]

_KEY = "authorization"
_SCHEME = "bearer"


def bearer_credential(metadata: Metadata) -> str:
    """What follows `Bearer`; empty if there is nothing. Raises DomainError(CALLER_UNKNOWN)."""
    given = [value for key, value in metadata if key == _KEY]
    if not given:
        return ""
    scheme, _, credential = str(given[0]).partition(" ")
    if len(given) > 1 or scheme.lower() != _SCHEME:
        raise DomainError(
            "CALLER_UNKNOWN",
            "the metadata `authorization` is not usable; allowed: once, `Bearer CREDENTIAL`",
        )
    return credential.strip()
