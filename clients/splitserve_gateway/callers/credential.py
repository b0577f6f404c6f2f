"""The credential that an HTTP request brings along."""

from __future__ import annotations

from collections.abc import Iterable

from splitserve_gateway.http.errors import caller_unknown

_HEADER = b"authorization"
_SCHEME = b"bearer"
# What a scheduler takes.
_MAX_CHARS = 8192


def credential_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """What follows `Bearer`. Raises ApiError if there is nothing that may be a credential."""
    given = [value for name, value in headers if name == _HEADER]
    if not given:
        raise caller_unknown("no credential was given; allowed: `Authorization: Bearer CREDENTIAL`")
    scheme, _, credential = given[0].partition(b" ")
    credential = credential.strip()
    if len(given) > 1 or scheme.lower() != _SCHEME or not credential:
        raise caller_unknown("authorization is not usable; allowed: once, `Bearer CREDENTIAL`")
    # Bytes that are visible, as RFC 6750 has it.
    if len(credential) > _MAX_CHARS or not all(0x21 <= byte <= 0x7E for byte in credential):
        raise caller_unknown(
            f"the credential has {len(credential)} characters; allowed: at most {_MAX_CHARS}, "
            "visible ones of ASCII"
        )
    return credential.decode("ascii")
