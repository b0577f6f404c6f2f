"""Identity of callers, and the limits of their tenants."""

from scheduler_service.callers.authenticator import (
    MAX_AT_ONCE,
    Authenticator,
    InvalidTokenLimit,
    caller_with_key,
    read_key_file,
)
from scheduler_service.callers.caller import (
    ANYBODY,
    FREE,
    NO_LIMITS,
    Admission,
    AllowAllCallers,
    Caller,
    Callers,
    RequestCost,
    Scope,
    TenantLimits,
)
from scheduler_service.callers.from_options import OpenedCallers, open_callers
from scheduler_service.callers.issuer_keys import (
    LEAST_PAUSE_S,
    PERIOD_S,
    CannotFetch,
    Fetched,
    fetch,
    fetch_keys_of,
    hurried_opener,
)
from scheduler_service.callers.quotas import Quotas, UsageBucket, num_computed_outputs
from scheduler_service.callers.tenants_file import (
    Tenants,
    check_model,
    check_prompt,
    check_request,
    may_use_model,
    parse_tenants,
    read_tenants,
)

__all__ = [
    "ANYBODY",
    "FREE",
    "LEAST_PAUSE_S",
    "MAX_AT_ONCE",
    "NO_LIMITS",
    "PERIOD_S",
    "Admission",
    "AllowAllCallers",
    "Authenticator",
    "Caller",
    "Callers",
    "CannotFetch",
    "Fetched",
    "InvalidTokenLimit",
    "OpenedCallers",
    "Quotas",
    "RequestCost",
    "Scope",
    "TenantLimits",
    "Tenants",
    "UsageBucket",
    "caller_with_key",
    "check_model",
    "check_prompt",
    "check_request",
    "fetch",
    "fetch_keys_of",
    "hurried_opener",
    "may_use_model",
    "num_computed_outputs",
    "open_callers",
    "parse_tenants",
    "read_key_file",
    "read_tenants",
]
