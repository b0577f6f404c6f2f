"""Values about callers: a caller, the limits of its tenant, and the admission of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values import Request
from splitserve_keys import Scope as Scope


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller with a valid credential, or `ANYBODY` if callers need no credential.

    `name`: name in the audit log, `key:` and the id of an API key, or `token:` and the subject.
    """

    name: str
    tenant: str
    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant; None: only the limits of the service apply.

    `weight`: share under the fair policy. `min_priority` and `max_priority`: inclusive, a smaller
    priority is more urgent. `max_output_tokens`: limit of each sequence. `adapters` and `models`:
    shell patterns of names; a request without an adapter needs no pattern in `adapters`.
    """

    weight: float = 1.0
    min_priority: int = -100
    max_priority: int = 100
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent_requests: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_sequences: int | None = None
    adapters: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None


class Callers(Protocol):
    """Identifies callers by their credentials, and looks up the limits of tenants."""

    @property
    def knows_callers(self) -> bool:
        """Whether callers need a credential; without it, every caller is `ANYBODY`."""
        ...

    def identify(self, credential: str) -> Caller:
        """Returns the caller with `credential`, which is empty if the call brings none.

        Raises DomainError: CALLER_UNKNOWN, or QUOTA_EXCEEDED after too many invalid tokens.
        """
        ...

    def limits(self, tenant: str) -> TenantLimits:
        """Returns the limits of `tenant` at this moment."""
        ...


ANYBODY = Caller("", "", frozenset(Scope))
NO_LIMITS = TenantLimits()


class AllowAllCallers:
    """Lets every caller in without a credential and without limits. Implements `Callers`."""

    knows_callers = False

    def identify(self, credential: str) -> Caller:
        return ANYBODY

    def limits(self, tenant: str) -> TenantLimits:
        return NO_LIMITS


# -- Admission of a request ------------------------------------------------------------------------


class RequestCost(Protocol):
    """Cost of one request, counted against the quota of its tenant.

    `end` follows each `begin`, once.
    """

    def begin(self) -> None:
        """Charges the request as it is submitted."""
        ...

    def end(self, request: Request) -> None:
        """Charges the output tokens of `request`, which has ended, for whatever reason."""
        ...


class _Free:
    """Charge of a tenant without quotas: does nothing. Implements `RequestCost`."""

    def begin(self) -> None:
        pass

    def end(self, request: Request) -> None:
        pass


FREE: RequestCost = _Free()


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission of a request: its name, charge, trace and caller.

    `name`: name of the request; the key of that is the request's `request_id`. `trace_id`: id of
    its trace, empty if there is none. `caller`: name of the caller that submitted the request.
    """

    name: RequestName
    charge: RequestCost = FREE
    trace_id: str = ""
    caller: str = ""
