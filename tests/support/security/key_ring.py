"""Callers whose credentials are in memory."""

from __future__ import annotations

from scheduler_service.callers.caller import NO_LIMITS, Caller, Scope, TenantLimits
from splitserve_rpc.domain_error import DomainError


class KeyRing:
    """Implements `Callers`. `limits_of`: what tenants may have, where that is not everything."""

    knows_callers = True

    def __init__(self) -> None:
        self._callers: dict[str, Caller] = {}
        self.limits_of: dict[str, TenantLimits] = {}

    def add(self, tenant: str, *scopes: Scope) -> str:
        """A new credential, to generate if nothing else is said."""
        name = f"key{len(self._callers)}"
        credential = f"secret-of-{name}"
        self._callers[credential] = Caller(name, tenant, frozenset(scopes or {Scope.GENERATE}))
        return credential

    def revoke(self, credential: str) -> None:
        """It is nobody's from now on."""
        del self._callers[credential]

    def identify(self, credential: str) -> Caller:
        try:
            return self._callers[credential]
        except KeyError:
            raise DomainError("CALLER_UNKNOWN", "no valid credential") from None

    def limits(self, tenant: str) -> TenantLimits:
        return self.limits_of.get(tenant, NO_LIMITS)
