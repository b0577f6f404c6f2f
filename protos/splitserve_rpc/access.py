"""Who may call what: one rule for each service."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import grpc.aio

from splitserve_rpc.cluster_identity import NOBODY, ClusterIdentity, Metadata, Role
from splitserve_rpc.domain_error import DomainError

# The role that a caller needs, or None. What is not here is refused.
_ROLE_OF_SERVICE: Mapping[str, Role | None] = MappingProxyType(
    {
        "grpc.health.v1.Health": None,
        "grpc.reflection.v1alpha.ServerReflection": None,
        "splitserve.scheduler.v1.SchedulerService": None,
        "splitserve.scheduler.v1.RegistryService": Role.EXECUTOR,
        "splitserve.scheduler.v1.AdminService": Role.OPERATOR,
        "splitserve.executor.v1.ExecutorService": Role.SCHEDULER,
    }
)


def role_needed(method: str) -> Role | None:
    """Who may call `method` (`/package.Service/Method`); None: anybody.

    Raises DomainError(CALLER_NOT_ALLOWED) for a method without a rule.
    """
    service = method.removeprefix("/").partition("/")[0]
    try:
        return _ROLE_OF_SERVICE[service]
    except KeyError:
        message = "this method has no rule who may call it"
        raise DomainError("CALLER_NOT_ALLOWED", message) from None


class Access:
    """Decides about calls to a server, in two looks."""

    def __init__(self, identity: ClusterIdentity = NOBODY) -> None:
        """`identity`: by which others of the cluster are known."""
        self._identity = identity

    def check_metadata(self, method: str, metadata: Metadata) -> None:
        """Before any message is received. Raises DomainError(CALLER_NOT_ALLOWED)."""
        if role_needed(method) is not None:
            self._identity.check_token(metadata)

    def check_peer(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Before a message is decoded. Raises DomainError(CALLER_NOT_ALLOWED)."""
        role = role_needed(method)
        if role is not None:
            self._identity.check_certificate(context, role)
