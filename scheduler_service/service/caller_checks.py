"""Who calls, from what calls and messages bring along."""

from __future__ import annotations

import grpc.aio

from scheduler_service.callers.caller import Caller, Callers, Scope
from scheduler_service.callers.tenants_file import check_model, may_use_model
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.access import ScopesOf, check_scopes
from splitserve_rpc.addresses import peer_host
from splitserve_rpc.bearer import bearer_credential
from splitserve_rpc.cluster_identity import roles_of
from splitserve_rpc.domain_error import DomainError


class CallerChecks:
    """Asks `callers` who somebody is, each time anew: a credential may be revoked at any time."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def credential_of(self, context: grpc.aio.ServicerContext) -> str:
        """What the call brings; empty where nobody has to bring any."""
        if not self._callers.knows_callers:
            return ""
        return bearer_credential(context.invocation_metadata() or ())

    def of_call(self, context: grpc.aio.ServicerContext) -> Caller:
        """Whose call it is. Raises DomainError(CALLER_UNKNOWN)."""
        return self._callers.identify(self.credential_of(context))

    def known_tenant(self, caller: Caller) -> str | None:
        """None where nobody is asked who they are."""
        return caller.tenant if self._callers.knows_callers else None

    def owner_of(self, context: grpc.aio.ServicerContext) -> str:
        """Whom a call is counted for: its tenant, or its host where nobody is asked.

        Raises DomainError(CALLER_UNKNOWN).
        """
        tenant = self.known_tenant(self.of_call(context))
        return peer_host(context.peer()) if tenant is None else f"tenant {tenant!r}"

    def of_submit(self, session_credential: str, credential: str) -> Caller:
        """Whose request is submitted with `credential` in a Session of `session_credential`.

        Raises DomainError: CALLER_UNKNOWN, CALLER_NOT_ALLOWED.
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
        """Whether it is known that a gateway has submitted a request with `credential`.

        After `of_submit`, which lets nobody else do that.
        """
        return self._callers.knows_callers and bool(credential)

    def check_model(self, caller: Caller, model: str) -> None:
        """Raises DomainError(CALLER_NOT_ALLOWED) if the model is not for the caller.

        A gateway looks at it for others, of whom each is asked for by itself.
        """
        if Scope.GATEWAY not in caller.scopes:
            check_model(self._callers.limits(caller.tenant), caller.tenant, model)

    def identify(self, credential: str, model: executor.ModelInfo | None) -> api.IdentifyResponse:
        """Whose `credential` is. Raises DomainError(CALLER_UNKNOWN)."""
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
    """How a server asks what a credential is for; None where nobody needs one."""
    if not callers.knows_callers:
        return None
    return lambda credential: _names(callers.identify(credential))


def _check_scope(caller: Caller, scope: Scope, what: str) -> None:
    check_scopes(_names(caller), {scope.value}, what)


def _names(caller: Caller) -> set[str]:
    return {scope.value for scope in caller.scopes}


# -- What the audit log calls who makes a call -----------------------------------------------------

_UNKNOWN = "CALLER_UNKNOWN"


class CallerNames:
    """`key:ID`, `token:SUB`, `certificate:ROLE`, several of them, or nothing if nobody knows."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def of_call(self, context: grpc.aio.ServicerContext) -> str:
        """Who calls, by all that the call brings."""
        name = self.of_credential(bearer_credential(context.invocation_metadata() or ()))
        return ", ".join([*([name] if name else []), *_certified(context)])

    def of_refused(self, context: grpc.aio.ServicerContext, reason: str) -> str:
        """The same of a call that was refused for `reason`."""
        # What was found to be unknown is not looked at again: that has a cost, with tokens.
        return ", ".join(_certified(context)) if reason == _UNKNOWN else self.of_call(context)

    def of_submit(self, session_credential: str, credential: str, reason: str) -> str:
        """Whose request a Session brought: the gateway's, if nobody knows its `credential`."""
        is_known = credential and reason != _UNKNOWN
        return self.of_credential(credential if is_known else session_credential)

    def of_credential(self, credential: str) -> str:
        """Empty for one that is not valid."""
        try:
            return self._callers.identify(credential).name
        except DomainError:
            return ""


def _certified(context: grpc.aio.ServicerContext) -> list[str]:
    return [f"certificate:{role.value}" for role in roles_of(context)]
