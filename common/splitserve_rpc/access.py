"""Access control of gRPC servers: one rule for each service or method, and its checks."""

from __future__ import annotations

import enum
import hmac
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import grpc
import grpc.aio

from splitserve_contract import DomainError
from splitserve_rpc.tls import Tls

# -- Bearer credential in the metadata of a call ---------------------------------------------------

Metadata = Iterable[tuple[str, str | bytes]]

# Limit of most servers for one header. A JWT is larger than an API key.
MAX_CREDENTIAL_CHARS = 8192

_KEY = "authorization"
_SCHEME = "bearer"


def is_credential(text: str) -> bool:
    """Returns whether `text` may be a credential: visible ASCII (RFC 6750), not too long."""
    is_visible = text.isascii() and text.isprintable() and " " not in text
    return is_visible and 0 < len(text) <= MAX_CREDENTIAL_CHARS


def split_bearer(value: str) -> str | None:
    """Returns the credential after `Bearer`, possibly empty; None for another scheme."""
    scheme, _, credential = value.partition(" ")
    return credential.strip(" \t") if scheme.lower() == _SCHEME else None


def bearer_credential(metadata: Metadata) -> str:
    """Returns the credential of a call, empty if there is none.

    Raises DomainError(CALLER_UNKNOWN) if `authorization` is repeated or has another scheme.
    """
    values = [value for key, value in metadata if key == _KEY]
    if not values:
        return ""
    credential = split_bearer(str(values[0]))
    if len(values) > 1 or credential is None:
        raise DomainError(
            "CALLER_UNKNOWN",
            "the metadata `authorization` is invalid; allowed: `Bearer CREDENTIAL`, once",
        )
    return credential


# --------------------------------------------------------------------------------------------------
# Identity of the cluster's own processes: certificates that name a role, or a shared token.
#
# A certificate of the cluster's own CA names its roles as DNS names
# (`executor.splitserve.internal`), so that each side of a connection checks the other, wherever it
# runs.

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
        token = dict(metadata).get(_TOKEN_KEY, "")
        if not hmac.compare_digest(str(token).encode(), self.token.encode()):
            raise DomainError("CALLER_NOT_ALLOWED", "the cluster token is missing or wrong")

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


# -- Access to the methods of a server -------------------------------------------------------------

# Returns the scopes of a credential, as named in `splitserve_keys.key_file`. Raises
# DomainError(CALLER_UNKNOWN), also for an empty credential.
ScopesOf = Callable[[str], Collection[str]]


@dataclass(frozen=True, slots=True)
class AccessRule:
    """Callers that a method admits: cluster processes with `role`, and credentials with a scope.

    `scopes`: the credential needs one of them. With neither, the method admits everybody. A server
    that knows no callers does not check scopes: a rule with scopes alone then admits everybody,
    too.
    """

    role: Role | None = None
    scopes: frozenset[str] = frozenset()


_ANYBODY = AccessRule()
_GENERATE = AccessRule(scopes=frozenset({"generate"}))
_GENERATE_OR_GATEWAY = AccessRule(scopes=frozenset({"generate", "gateway"}))
_GENERATE_OR_OPERATOR = AccessRule(scopes=frozenset({"generate", "operator"}))
_SERVED = AccessRule(scopes=frozenset({"generate", "gateway", "operator"}))
_CLIENTS = "splitserve.scheduler.v1.SchedulerService"

# Rules by service or by method. Calls of other methods are refused.
RULES: Mapping[str, AccessRule] = MappingProxyType(
    {
        "grpc.health.v1.Health": _ANYBODY,
        # Only offered on addresses of this machine.
        "grpc.reflection.v1alpha.ServerReflection": _ANYBODY,
        f"{_CLIENTS}/Generate": _GENERATE,
        f"{_CLIENTS}/Abort": _GENERATE,
        f"{_CLIENTS}/Session": _GENERATE_OR_GATEWAY,
        f"{_CLIENTS}/GetModel": _SERVED,
        f"{_CLIENTS}/GetTokenizer": _GENERATE_OR_GATEWAY,
        f"{_CLIENTS}/Identify": _GENERATE_OR_GATEWAY,
        f"{_CLIENTS}/ListAdapters": _GENERATE_OR_OPERATOR,
        "splitserve.scheduler.v1.RegistryService": AccessRule(Role.EXECUTOR),
        "splitserve.scheduler.v1.AdminService": AccessRule(Role.OPERATOR, frozenset({"operator"})),
        "splitserve.scheduler.v1.LiveService": AccessRule(Role.OPERATOR, frozenset({"operator"})),
        "splitserve.executor.v1.ExecutorService": AccessRule(Role.SCHEDULER),
    }
)


def rule_of(method: str) -> AccessRule:
    """Returns the rule of `method` (`/package.Service/Method`).

    Raises DomainError(CALLER_NOT_ALLOWED) for a method without a rule.
    """
    name = method.removeprefix("/")
    rule = RULES.get(name) or RULES.get(name.partition("/")[0])
    if rule is None:
        message = "this method has no access rule"
        raise DomainError("CALLER_NOT_ALLOWED", message)
    return rule


class Access:
    """Checks the calls to a server in two steps: first the metadata, then the certificate."""

    def __init__(
        self,
        identity: ClusterIdentity = NOBODY,
        scopes_of: ScopesOf | None = None,
        unchecked: Collection[Role] = (),
    ) -> None:
        """`identity`: identifies cluster processes.

        `scopes_of`: scopes of callers, None without keys. `unchecked`: roles that every caller may
        have, as if there were no `identity`.
        """
        self._identity = identity
        self._scopes_of = scopes_of
        self._unchecked = frozenset(unchecked)

    def check_metadata(self, method: str, metadata: Metadata) -> None:
        """Checks the metadata before any message is received.

        Raises DomainError(CALLER_UNKNOWN or CALLER_NOT_ALLOWED).
        """
        rule = rule_of(method)
        if self._scopes_of is not None and self._is_about_scopes(rule, metadata):
            check_scopes(self._scopes_of(bearer_credential(metadata)), rule.scopes)
        elif rule.role is not None and rule.role not in self._unchecked:
            self._identity.check_token(metadata)

    def check_peer(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Checks the certificate before a message is decoded.

        Raises DomainError(CALLER_NOT_ALLOWED).
        """
        rule = rule_of(method)
        if rule.role is None or rule.role in self._unchecked:
            return
        if self._is_about_scopes(rule, context.invocation_metadata() or ()):
            return
        self._identity.check_certificate(context, rule.role)

    def _is_about_scopes(self, rule: AccessRule, metadata: Metadata) -> bool:
        """Returns whether the scopes of the credential decide, rather than the cluster identity.

        If either would do, a credential without the scopes does not refuse the call: the cluster
        identity then decides, since clients send their credential with every call.
        """
        if self._scopes_of is None or not rule.scopes:
            return False
        if rule.role is None or rule.role in self._unchecked or not self._identity.is_proof:
            return True
        try:
            check_scopes(self._scopes_of(bearer_credential(metadata)), rule.scopes)
        except DomainError:
            return False
        return True


def check_scopes(scopes: Collection[str], needed: Collection[str], what: str = "") -> None:
    """Raises DomainError(CALLER_NOT_ALLOWED) if `scopes` has none of the `needed` ones.

    `what`: purpose for the message, such as "to submit a request".
    """
    if set(needed).isdisjoint(scopes):
        present, any_of = ", ".join(sorted(scopes)) or "none", " or ".join(sorted(needed))
        purpose = f" {what}" if what else ""
        raise DomainError(
            "CALLER_NOT_ALLOWED",
            f"the credential has the scopes: {present}; required{purpose}: {any_of}",
        )
