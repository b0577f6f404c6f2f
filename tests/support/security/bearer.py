"""How calls and requests bring a credential along."""

from __future__ import annotations


def bearer(credential: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of a call, or headers of a request (`dict`); none without a credential."""
    return (("authorization", f"Bearer {credential}"),) if credential else ()
