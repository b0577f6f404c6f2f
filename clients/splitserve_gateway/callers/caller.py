"""Who sends a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.requests import Request

from splitserve_gateway.http.errors import caller_unknown
from splitserve_gateway.upstreams.upstream import Upstream
from splitserve_rpc.bearer import MAX_CREDENTIAL_CHARS, is_credential, split_bearer


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has shown a credential that schedulers know, or anybody where none is asked for.

    `credential`: what schedulers are sent with each request; empty: none. `tenant`: None where it
    is what a request says of itself. `upstreams`: whose model the caller may use; None: all.
    `may_generate`: whether the credential is for requests at all; `may_operate`: for operators.
    """

    credential: str = field(default="", repr=False)
    tenant: str | None = None
    upstreams: frozenset[Upstream] | None = None
    may_generate: bool = True
    may_operate: bool = False

    @property
    def is_served(self) -> bool:
        """Whether one of `upstreams` can be chosen, as far as known; or there is none of them."""
        return not self.upstreams or any(
            each.is_named and each.served is not None for each in self.upstreams
        )

    @property
    def party(self) -> str | None:
        """Whose part of the gateway it uses; None where nobody is known: there are no parts.

        Those who may speak for tenants have one together.
        """
        return (self.tenant or "") if self.credential else None


ANYBODY = Caller()


def caller_of(request: Request) -> Caller:
    """Who sent `request`, as the door has found out."""
    caller: Caller = getattr(request.state, "caller", ANYBODY)
    return caller


# -- The credential that an HTTP request brings along ----------------------------------------------

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
