"""The credential that an HTTP request brings along."""

from __future__ import annotations

from collections.abc import Iterable

from splitserve_gateway.http.errors import caller_unknown
from splitserve_rpc.bearer import MAX_CREDENTIAL_CHARS, is_credential, split_bearer

_HEADER = b"authorization"


def credential_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """What follows `Bearer`. Raises ApiError if there is nothing that may be a credential."""
    given = [value for name, value in headers if name == _HEADER]
    if not given:
        raise caller_unknown("no credential was given; allowed: `Authorization: Bearer CREDENTIAL`")
    credential = split_bearer(given[0].decode("latin-1"))
    if len(given) > 1 or not credential:
        raise caller_unknown("authorization is not usable; allowed: once, `Bearer CREDENTIAL`")
    if not is_credential(credential):
        raise caller_unknown(
            f"the credential has {len(credential)} characters; allowed: at most "
            f"{MAX_CREDENTIAL_CHARS}, visible ones of ASCII"
        )
    return credential
