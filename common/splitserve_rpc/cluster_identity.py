"""Identity of the cluster's own processes: certificates that name a role, or a shared token.

A certificate of the cluster's own CA names its roles as DNS names (`executor.splitserve.internal`),
so that each side of a connection checks the other, wherever it runs.
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
    """Role of a process in the cluster."""

    SCHEDULER = "scheduler"
    EXECUTOR = "executor"
    OPERATOR = "operator"

    @property
    def dns_name(self) -> str:
        """DNS name of the role in certificates."""
        return f"{self.value}.{DOMAIN}"


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """Identity that this process shows to its cluster, and checks of other processes.

    `tls`: certificates, None for plain text. `token`: secret shared by all processes of the
    cluster. If both are set, a caller needs both.
    """

    tls: Tls | None = None
    token: str | None = None

    @property
    def is_proof(self) -> bool:
        """Whether callers have to prove their identity."""
        return self.token is not None or (self.tls is not None and self.tls.checks_clients)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call to another process of the cluster."""
        return () if self.token is None else ((_TOKEN_KEY, self.token),)

    def channel(
        self, address: str, role: Role, options: Sequence[tuple[str, int]]
    ) -> grpc.aio.Channel:
        """Returns a channel to the process with `role` at `address`.

        With TLS, the process must have a certificate for that role.
        """
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options)
        named = [*options, ("grpc.ssl_target_name_override", role.dns_name)]
        return grpc.aio.secure_channel(address, self.tls.channel_credentials(), named)

    def check_token(self, metadata: Metadata) -> None:
        """Raises DomainError(CALLER_NOT_ALLOWED) if a token is set and the call lacks it."""
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
    """Returns the roles in the caller's verified certificate; none without a certificate."""
    names = context.auth_context().get("peer_dns", ())
    return [role for role in Role if role.dns_name.encode() in names]


# Identity without TLS and token: plain text, and every caller is accepted.
NOBODY = ClusterIdentity()
