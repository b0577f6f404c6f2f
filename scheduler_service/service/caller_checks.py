"""Identity of callers, from the credentials and certificates of calls and messages."""

from __future__ import annotations

from collections.abc import Iterable

import grpc.aio

from scheduler_service.adapters import RegisteredAdapter
from scheduler_service.callers import (
    Caller,
    Callers,
    Scope,
    check_model,
    may_use_adapter,
    may_use_model,
)
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_common import peer_host
from splitserve_contract import DomainError
from splitserve_rpc import ScopesOf, bearer_credential, check_scopes, roles_of


class CallerChecks:
    """Identifies the caller of a call or message.

    Nothing is cached here: a credential may be revoked at any time.
    """

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def credential_of(self, context: grpc.aio.ServicerContext) -> str:
        """Returns the bearer credential of a call; empty if callers need no credential."""
        if not self._callers.knows_callers:
            return ""
        return bearer_credential(context.invocation_metadata() or ())

    def of_call(self, context: grpc.aio.ServicerContext) -> Caller:
        """Returns the caller of a call. Raises DomainError(CALLER_UNKNOWN)."""
        return self._callers.identify(self.credential_of(context))

    def known_tenant(self, caller: Caller) -> str | None:
        """Returns the tenant of `caller`; None if callers need no credential."""
        return caller.tenant if self._callers.knows_callers else None

    def owner_of(self, context: grpc.aio.ServicerContext) -> str:
        """Returns the owner that a call is counted for: its tenant, or the host of its peer.

        The host is used if callers need no credential. Raises DomainError(CALLER_UNKNOWN).
        """
        tenant = self.known_tenant(self.of_call(context))
        return peer_host(context.peer()) if tenant is None else f"tenant {tenant!r}"

    def of_submit(self, session_credential: str, credential: str) -> Caller:
        """Returns the caller of a request that is submitted in a Session.

        `session_credential`: credential of the Session's opener. `credential`: credential of the
        request's own caller, sent by a gateway; empty if the opener is the caller. Raises
        DomainError: CALLER_UNKNOWN, CALLER_NOT_ALLOWED.
        """
        caller = self._callers.identify(session_credential)
        if not self._callers.knows_callers:
            return caller
        if credential:
            _check_scope(caller, Scope.GATEWAY, "to submit a request with a credential of its own")
            caller = self._callers.identify(credential)
        _check_scope(caller, Scope.GENERATE, "to submit a request")
        return caller

    def is_of_gateway(self, credential: str) -> bool:
        """Returns whether a request submitted with `credential` certainly came from a gateway.

        To be called after `of_submit`, which lets only gateways submit with a credential.
        """
        return self._callers.knows_callers and bool(credential)

    def check_model(self, caller: Caller, model: str) -> None:
        """Raises DomainError(CALLER_NOT_ALLOWED) if the caller's tenant may not use the model.

        A gateway always may: it asks on behalf of callers that are checked one by one.
        """
        if Scope.GATEWAY not in caller.scopes:
            check_model(self._callers.limits(caller.tenant), caller.tenant, model)

    def allowed_adapters(
        self, caller: Caller, adapters: Iterable[RegisteredAdapter]
    ) -> list[RegisteredAdapter]:
        """Returns the adapters that the caller's tenant may use."""
        limits = self._callers.limits(caller.tenant)
        return [each for each in adapters if may_use_adapter(each.name, limits)]

    def identify(self, credential: str, model: executor.ModelInfo | None) -> api.IdentifyResponse:
        """Returns caller, tenant and scopes of `credential`, and whether it may use `model`.

        Raises DomainError(CALLER_UNKNOWN).
        """
        caller = self._callers.identify(credential)
        limits = self._callers.limits(caller.tenant)
        return api.IdentifyResponse(
            knows_callers=self._callers.knows_callers,
            caller=caller.name,
            tenant=caller.tenant,
            scopes=sorted(_names(caller)),
            may_use_model=model is not None and may_use_model(limits, model.name),
        )


def scopes_of(callers: Callers) -> ScopesOf | None:
    """Returns the function that maps a credential to its scopes; None if callers need none."""
    if not callers.knows_callers:
        return None
    return lambda credential: _names(callers.identify(credential))


def _check_scope(caller: Caller, scope: Scope, what: str) -> None:
    check_scopes(_names(caller), {scope.value}, what)


def _names(caller: Caller) -> set[str]:
    return {scope.value for scope in caller.scopes}


# -- Names of callers in the audit log -------------------------------------------------------------

_UNKNOWN = "CALLER_UNKNOWN"


class CallerNames:
    """Names of callers in the audit log.

    A name is `key:ID`, `token:SUB`, `certificate:ROLE`, several of these joined by ", ", or empty
    for an unknown caller.
    """

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def of_call(self, context: grpc.aio.ServicerContext) -> str:
        """Returns the name of the caller, by the credential and certificate of the call."""
        name = self.of_credential(bearer_credential(context.invocation_metadata() or ()))
        return ", ".join([*([name] if name else []), *_certified(context)])

    def of_refused(self, context: grpc.aio.ServicerContext, reason: str) -> str:
        """Returns the name of the caller of a call that was refused for `reason`."""
        # An unknown credential is not identified again: with tokens, that costs time.
        return ", ".join(_certified(context)) if reason == _UNKNOWN else self.of_call(context)

    def of_submit(self, session_credential: str, credential: str, reason: str) -> str:
        """Returns the name of the caller of a request that a Session refused for `reason`.

        If `credential` is unknown, that is the opener of the Session, a gateway.
        """
        is_known = credential and reason != _UNKNOWN
        return self.of_credential(credential if is_known else session_credential)

    def of_credential(self, credential: str) -> str:
        """Returns the name of the caller with `credential`; empty if it is not valid."""
        try:
            return self._callers.identify(credential).name
        except DomainError:
            return ""


def _certified(context: grpc.aio.ServicerContext) -> list[str]:
    return [f"certificate:{role.value}" for role in roles_of(context)]
