"""Access control of gRPC servers: one rule for each service or method, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import grpc.aio

from splitserve_rpc.bearer import Metadata, bearer_credential
from splitserve_rpc.cluster_identity import NOBODY, ClusterIdentity, Role
from splitserve_rpc.domain_error import DomainError

# Returns the scopes of a credential, as named in `splitserve_keys.scope`. Raises
# DomainError(CALLER_UNKNOWN), also for an empty credential.
ScopesOf = Callable[[str], Collection[str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """Callers that a method admits: cluster processes with `role`, and credentials with a scope.

    `scopes`: the credential needs one of them. With neither, the method admits everybody. A server
    that knows no callers does not check scopes: a rule with scopes alone then admits everybody,
    too.
    """

    role: Role | None = None
    scopes: frozenset[str] = frozenset()


_ANYBODY = Rule()
_GENERATE = Rule(scopes=frozenset({"generate"}))
_GENERATE_OR_GATEWAY = Rule(scopes=frozenset({"generate", "gateway"}))
_SERVED = Rule(scopes=frozenset({"generate", "gateway", "operator"}))
_CLIENTS = "splitserve.scheduler.v1.SchedulerService"

# Rules by service or by method. Calls of other methods are refused.
RULES: Mapping[str, Rule] = MappingProxyType(
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
        "splitserve.scheduler.v1.RegistryService": Rule(Role.EXECUTOR),
        "splitserve.scheduler.v1.AdminService": Rule(Role.OPERATOR, frozenset({"operator"})),
        "splitserve.scheduler.v1.LiveService": Rule(Role.OPERATOR, frozenset({"operator"})),
        "splitserve.executor.v1.ExecutorService": Rule(Role.SCHEDULER),
    }
)


def rule_of(method: str) -> Rule:
    """Returns the rule of `method` (`/package.Service/Method`).

    Raises DomainError(CALLER_NOT_ALLOWED) for a method without a rule.
    """
    name = method.removeprefix("/")
    rule = RULES.get(name) or RULES.get(name.partition("/")[0])
    if rule is None:
        message = "this method has no rule who may call it"
        raise DomainError("CALLER_NOT_ALLOWED", message)
    return rule


class Access:
    """Checks the calls to a server in two steps: first the metadata, then the certificate."""

    def __init__(
        self,
        identity: ClusterIdentity = NOBODY,
        scopes_of: ScopesOf | None = None,
        believed: Collection[Role] = (),
    ) -> None:
        """`identity`: identifies cluster processes.

        `scopes_of`: scopes of callers, None without keys. `believed`: roles that every caller may
        have, as if there were no `identity`.
        """
        self._identity = identity
        self._scopes_of = scopes_of
        self._believed = frozenset(believed)

    def check_metadata(self, method: str, metadata: Metadata) -> None:
        """Checks the metadata before any message is received.

        Raises DomainError(CALLER_UNKNOWN or CALLER_NOT_ALLOWED).
        """
        rule = rule_of(method)
        if self._scopes_of is not None and self._is_about_scopes(rule, metadata):
            check_scopes(self._scopes_of(bearer_credential(metadata)), rule.scopes)
        elif rule.role is not None and rule.role not in self._believed:
            self._identity.check_token(metadata)

    def check_peer(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Checks the certificate before a message is decoded.

        Raises DomainError(CALLER_NOT_ALLOWED).
        """
        rule = rule_of(method)
        if rule.role is None or rule.role in self._believed:
            return
        if self._is_about_scopes(rule, context.invocation_metadata() or ()):
            return
        self._identity.check_certificate(context, rule.role)

    def _is_about_scopes(self, rule: Rule, metadata: Metadata) -> bool:
        """Returns whether the scopes of the credential decide, rather than the cluster identity.

        If either would do, a credential without the scopes does not refuse the call: the cluster
        identity then decides, since clients send their credential with every call.
        """
        if self._scopes_of is None or not rule.scopes:
            return False
        if rule.role is None or rule.role in self._believed or not self._identity.is_proof:
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
        given, any_of = ", ".join(sorted(scopes)) or "none", " or ".join(sorted(needed))
        needed_for = f"needed {what}" if what else "needed"
        raise DomainError(
            "CALLER_NOT_ALLOWED",
            f"the credential has the scopes: {given}; {needed_for} is {any_of}",
        )
