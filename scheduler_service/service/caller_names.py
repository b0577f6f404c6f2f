"""What the audit log calls who makes a call."""

from __future__ import annotations

import grpc.aio

from scheduler_service.callers.caller import Callers
from splitserve_rpc.bearer import bearer_credential
from splitserve_rpc.cluster_identity import roles_of
from splitserve_rpc.domain_error import DomainError

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
