"""Asks all schedulers whose a credential is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from splitserve_client import CallerUnknown, Identity, QuotaExceeded, SplitserveError
from splitserve_gateway.callers.caller import Caller
from splitserve_gateway.callers.known_callers import AskAgain
from splitserve_gateway.http.errors import (
    UPSTREAM_REFUSED,
    no_scheduler,
    upstream_refused,
)
from splitserve_gateway.upstreams.fleet import Fleet
from splitserve_gateway.upstreams.upstream import Upstream

_GENERATE = "generate"
_TENANTS = "tenants"
_OPERATOR = "operator"
_RETRY_DELAY_S = 1.0


async def identify(fleet: Fleet, credential: str) -> Caller | None:
    """Whose `credential` is; None if all who can be asked say: nobody's.

    A scheduler that knows no callers is not believed: the gateway was told that there are some.
    Raises ApiError if that cannot be found out, and AskAgain if it can be later.
    """
    await fleet.wait_read(None)
    upstreams = fleet.reachable()
    answers = await asyncio.gather(*(_ask(upstream, credential) for upstream in upstreams))
    known = [
        (upstream, answer)
        for upstream, answer in zip(upstreams, answers, strict=True)
        if isinstance(answer, Identity)
    ]
    if known:
        return _caller(credential, known)
    if any(getattr(answer, "reason", "") == UPSTREAM_REFUSED for answer in answers):
        raise upstream_refused()
    for answer in answers:
        if isinstance(answer, QuotaExceeded):
            raise AskAgain(answer.retry_delay_s or _RETRY_DELAY_S)
    if not answers or any(not isinstance(answer, CallerUnknown) for answer in answers):
        raise no_scheduler()
    return None


async def _ask(upstream: Upstream, credential: str) -> Identity | SplitserveError | None:
    """None: it asks nobody who they are."""
    try:
        identity = await upstream.identify(credential)
    except SplitserveError as error:
        return error
    return identity if identity.knows_callers else None


def _caller(credential: str, known: Sequence[tuple[Upstream, Identity]]) -> Caller:
    able = [(upstream, identity) for upstream, identity in known if _GENERATE in identity.scopes]
    _, first = (able or known)[0]
    return Caller(
        credential,
        # Who may speak for tenants is not one of them.
        tenant=None if _TENANTS in first.scopes else first.tenant,
        upstreams=frozenset(upstream for upstream, identity in able if identity.may_use_model),
        may_generate=bool(able),
        may_operate=any(_OPERATOR in identity.scopes for _, identity in known),
    )
