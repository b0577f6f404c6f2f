"""The values: a caller, and what its tenant may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values.request import Request
from splitserve_keys.scope import Scope as Scope


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has shown a valid credential, or anybody where none is asked for.

    `name`: as the audit log calls it, `key:` and the id of a key, or `token:` and its subject.
    """

    name: str
    tenant: str
    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may have; None: no limit but the service's own.

    `weight`: its share under the fair policy. `min_priority` and `max_priority`: inclusive, smaller
    is more urgent. `max_output_tokens`: of each sequence. `adapters` and `models`: patterns of
    names as a shell has them; the model without an adapter needs no pattern in `adapters`.
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
    """Knows callers by their credentials. `knows_callers`: whether anybody needs one."""

    @property
    def knows_callers(self) -> bool:
        """False: everybody is `ANYBODY`, whatever credential they bring."""
        ...

    def identify(self, credential: str) -> Caller:
        """Whose it is; empty: none was given. Raises DomainError(CALLER_UNKNOWN)."""
        ...

    def limits(self, tenant: str) -> TenantLimits:
        """What `tenant` may have now."""
        ...


ANYBODY = Caller("", "", frozenset(Scope))
NO_LIMITS = TenantLimits()


class OpenDoor:
    """Asks nobody who they are. Implements `Callers`."""

    knows_callers = False

    def identify(self, credential: str) -> Caller:
        return ANYBODY

    def limits(self, tenant: str) -> TenantLimits:
        return NO_LIMITS


# -- On what terms a request was let in ------------------------------------------------------------


class Charge(Protocol):
    """What a request costs its tenant. After `begin` comes `end`, once."""

    def begin(self) -> None:
        """It is taken."""
        ...

    def end(self, request: Request) -> None:
        """It has ended, in whatever way; `request` has its tokens."""
        ...


class _Free:
    """Costs nobody anything. Implements `Charge`."""

    def begin(self) -> None:
        pass

    def end(self, request: Request) -> None:
        pass


FREE: Charge = _Free()


@dataclass(frozen=True, slots=True)
class Admission:
    """`name`: what the request is called; its `request_id` is the key of that.

    `trace_id`: of its trace, empty if there is none. `caller`: name of who submitted it.
    """

    name: RequestName
    charge: Charge = FREE
    trace_id: str = ""
    caller: str = ""
