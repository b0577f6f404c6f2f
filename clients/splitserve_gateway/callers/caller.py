"""Caller of a request: tenant, rights and credential."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.requests import Request

from splitserve_gateway.http import caller_unknown
from splitserve_gateway.upstreams import Upstream
from splitserve_rpc import MAX_CREDENTIAL_CHARS, is_credential, split_bearer


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller identified by a credential that schedulers know, or anonymous if none is required.

    `credential`: sent to schedulers with each request; empty without one. `tenant`: None if
    requests name their tenant themselves. `upstreams`: schedulers whose model the caller may use;
    None for all. `may_generate`: the credential allows requests at all; `may_operate`: it is an
    operator's.
    """

    credential: str = field(default="", repr=False)
    tenant: str | None = None
    upstreams: frozenset[Upstream] | None = None
    may_generate: bool = True
    may_operate: bool = False

    @property
    def is_served(self) -> bool:
        """Whether a known scheduler of `upstreams` serves a model now.

        True if `upstreams` is empty.
        """
        return not self.upstreams or any(
            each.is_named and each.served is not None for each in self.upstreams
        )

    @property
    def party(self) -> str | None:
        """Name by which the caller shares the gateway's resources; None if callers are unknown.

        Callers that may name their tenant share one party, the empty name.
        """
        return (self.tenant or "") if self.credential else None


ANYBODY = Caller()


def caller_of(request: Request) -> Caller:
    """Returns the caller of `request` as CredentialGate identified it; else `ANYBODY`."""
    caller: Caller = getattr(request.state, "caller", ANYBODY)
    return caller


# -- Credential of an HTTP request -----------------------------------------------------------------

_HEADER = b"authorization"
_KEY_HEADER = b"x-api-key"


def credential_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Returns the credential of the header `Authorization: Bearer` or `x-api-key`.

    Raises ApiError (401) if both headers are missing or differ, or one is repeated or malformed.
    """
    bearers, keys = [], []
    for name, value in headers:
        if name == _HEADER:
            bearers.append(split_bearer(value.decode("latin-1")))
        elif name == _KEY_HEADER:
            keys.append(value.decode("latin-1").strip(" \t"))
    if not bearers and not keys:
        message = "no credential was given; allowed: `Authorization: Bearer CREDENTIAL` or "
        raise caller_unknown(f"{message}`x-api-key: CREDENTIAL`")
    credential = (bearers or keys)[0]
    if bearers and (len(bearers) > 1 or not credential):
        raise caller_unknown("authorization is invalid; allowed: `Bearer CREDENTIAL`, once")
    if not credential or keys not in ([], [credential]):
        message = "x-api-key is invalid; allowed: a credential, once, the same as in authorization"
        raise caller_unknown(message)
    if not is_credential(credential):
        raise caller_unknown(
            f"the credential has {len(credential)} characters; allowed: at most "
            f"{MAX_CREDENTIAL_CHARS} visible ASCII characters"
        )
    return credential
