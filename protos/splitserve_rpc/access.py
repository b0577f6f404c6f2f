"""Who may call what: one rule for each service, or for each of its methods."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import grpc.aio

from splitserve_rpc.bearer import Metadata, bearer_credential
from splitserve_rpc.cluster_identity import NOBODY, ClusterIdentity, Role
from splitserve_rpc.domain_error import DomainError

# What a credential is for: names of `splitserve_keys.scope`. Raises DomainError(CALLER_UNKNOWN),
# for an empty one, too.
ScopesOf = Callable[[str], Collection[str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call: a process of the cluster with `role`, or whose credential has one of `scopes`.

    Neither: anybody. Scopes are asked for where the server knows callers; if it does not, a rule of
    scopes alone is for anybody, too.
    """

    role: Role | None = None
    scopes: frozenset[str] = frozenset()


_ANYBODY = Rule()
_GENERATE = Rule(scopes=frozenset({"generate"}))
_GENERATE_OR_GATEWAY = Rule(scopes=frozenset({"generate", "gateway"}))
_SERVED = Rule(scopes=frozenset({"generate", "gateway", "operator"}))
_CLIENTS = "splitserve.scheduler.v1.SchedulerService"

# By service or by method. What is not here is refused.
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "grpc.health.v1.Health": _ANYBODY,
        # Offered on addresses of this machine alone.
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
    """Who may call `method` (`/package.Service/Method`).

    Raises DomainError(CALLER_NOT_ALLOWED) for a method without a rule.
    """
    name = method.removeprefix("/")
    rule = RULES.get(name) or RULES.get(name.partition("/")[0])
    if rule is None:
        message = "this method has no rule who may call it"
        raise DomainError("CALLER_NOT_ALLOWED", message)
    return rule


class Access:
    """Decides about calls to a server, in two looks."""

    def __init__(
        self,
        identity: ClusterIdentity = NOBODY,
        scopes_of: ScopesOf | None = None,
        believed: Collection[Role] = (),
    ) -> None:
        """`identity`: how others of the cluster are known; `scopes_of`: how callers are, if so.

        `believed`: roles that anybody may have, as if there were no `identity`.
        """
        self._identity = identity
        self._scopes_of = scopes_of
        self._believed = frozenset(believed)

    def check_metadata(self, method: str, metadata: Metadata) -> None:
        """Before any message is received. Raises CALLER_UNKNOWN or CALLER_NOT_ALLOWED."""
        rule = rule_of(method)
        if self._scopes_of is not None and self._is_about_scopes(rule, metadata):
            check_scopes(self._scopes_of(bearer_credential(metadata)), rule.scopes)
        elif rule.role is not None and rule.role not in self._believed:
            self._identity.check_token(metadata)

    def check_peer(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Before a message is decoded. Raises DomainError(CALLER_NOT_ALLOWED)."""
        rule = rule_of(method)
        if rule.role is None or rule.role in self._believed:
            return
        if self._is_about_scopes(rule, context.invocation_metadata() or ()):
            return
        self._identity.check_certificate(context, rule.role)

    def _is_about_scopes(self, rule: Rule, metadata: Metadata) -> bool:
        """Whether the scopes of a credential decide, and not what processes of the cluster have.

        Where either would do, a credential that does not is no hindrance: clients send theirs with
        every call.
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
    """Raises DomainError(CALLER_NOT_ALLOWED) if `scopes` has none of those that are `needed`.

    `what`: for which; to submit a request, say.
    """
    if set(needed).isdisjoint(scopes):
        given, any_of = ", ".join(sorted(scopes)) or "none", " or ".join(sorted(needed))
        needed_for = f"needed {what}" if what else "needed"
        raise DomainError(
            "CALLER_NOT_ALLOWED",
            f"the credential has the scopes: {given}; {needed_for} is {any_of}",
        )
