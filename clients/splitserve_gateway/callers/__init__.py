"""Callers of the HTTP API: their credentials, and their identification by schedulers."""

from splitserve_gateway.callers.caller import ANYBODY, Caller, caller_of, credential_of
from splitserve_gateway.callers.identification import (
    CredentialGate,
    IdentificationThrottled,
    KnownCallers,
    Memory,
    TenantConcurrency,
    identify,
)

__all__ = [
    "ANYBODY",
    "Caller",
    "CredentialGate",
    "IdentificationThrottled",
    "KnownCallers",
    "Memory",
    "TenantConcurrency",
    "caller_of",
    "credential_of",
    "identify",
]
