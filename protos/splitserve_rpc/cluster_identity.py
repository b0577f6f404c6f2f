"""The identity of the cluster's own processes: certificates that name a role, or a shared token.

A certificate of the cluster's own CA names its roles as DNS names (`executor.splitserve.internal`),
so that either side of a connection checks the other, wherever it runs.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from splitserve_rpc.bearer import Metadata
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.tls import Tls

DOMAIN = "splitserve.internal"
_TOKEN_KEY = "x-splitserve-cluster-token"


class Role(enum.Enum):
    """What a process of the cluster is."""

    SCHEDULER = "scheduler"
    EXECUTOR = "executor"
    OPERATOR = "operator"

    @property
    def dns_name(self) -> str:
        """As certificates have it."""
        return f"{self.value}.{DOMAIN}"


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """Who this process is to others of its cluster, and how it knows them.

    `token`: a secret that all of them share. Where both are set a caller needs both.
    """

    tls: Tls | None = None
    token: str | None = None

    @property
    def is_proof(self) -> bool:
        """Whether callers have to prove who they are."""
        return self.token is not None or (self.tls is not None and self.tls.checks_clients)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call brings along."""
        return () if self.token is None else ((_TOKEN_KEY, self.token),)

    def channel(
        self, address: str, role: Role, options: Sequence[tuple[str, int]]
    ) -> grpc.aio.Channel:
        """A channel to who is `role` at `address`; nobody else is spoken to where there is TLS."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options)
        named = [*options, ("grpc.ssl_target_name_override", role.dns_name)]
        return grpc.aio.secure_channel(address, self.tls.channel_credentials(), named)

    def check_token(self, metadata: Metadata) -> None:
        """Raises DomainError(CALLER_NOT_ALLOWED) for a call without the token, if there is one."""
        if self.token is None:
            return
        given = dict(metadata).get(_TOKEN_KEY, "")
        if not hmac.compare_digest(str(given).encode(), self.token.encode()):
            raise DomainError("CALLER_NOT_ALLOWED", "the call does not have the cluster's token")

    def check_certificate(self, context: grpc.aio.ServicerContext, role: Role) -> None:
        """Raises DomainError(CALLER_NOT_ALLOWED) if the caller's certificate is not for `role`."""
        if self.tls is None or not self.tls.checks_clients:
            return
        if role not in roles_of(context):
            message = f"the caller's certificate is not for {role.dns_name}"
            raise DomainError("CALLER_NOT_ALLOWED", message)


def roles_of(context: grpc.aio.ServicerContext) -> list[Role]:
    """Those of the caller's certificate; none without one that the server has checked."""
    names = context.auth_context().get("peer_dns", ())
    return [role for role in Role if role.dns_name.encode() in names]


# Speaks in plain text, and believes everybody.
NOBODY = ClusterIdentity()
