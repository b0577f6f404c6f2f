"""What a tenant may ask for in one request. Each refusal names the limit and what is allowed."""

from __future__ import annotations

from fnmatch import fnmatchcase

from scheduler_service.callers.caller import TenantLimits
from scheduler_service.core.request import Request
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError


def may_use_model(limits: TenantLimits, model: str) -> bool:
    """Whether `model` is one of the tenant's."""
    return limits.models is None or _is_one_of(model, limits.models)


def check_model(limits: TenantLimits, tenant: str, model: str) -> None:
    """Raises DomainError(CALLER_NOT_ALLOWED)."""
    if not may_use_model(limits, model):
        what = f"tenant {tenant!r} may not use the model {model!r}"
        raise _not_allowed("models", what, limits.models)


def check_prompt(message: api.GenerateRequest, limits: TenantLimits, tenant: str) -> None:
    """Raises DomainError(PROMPT_TOO_LONG), before anything is decoded."""
    most = limits.max_prompt_tokens
    num_prompt_tokens = max(len(message.prompt_token_ids), len(message.encoder_token_ids))
    if most is not None and num_prompt_tokens > most:
        raise DomainError(
            "PROMPT_TOO_LONG",
            f"the prompt has {num_prompt_tokens} tokens; allowed for tenant {tenant!r}: at most "
            f"max_prompt_tokens {most}",
            limit="max_prompt_tokens",
        )


def check_request(request: Request, limits: TenantLimits, tenant: str) -> None:
    """Raises DomainError: CALLER_NOT_ALLOWED, SAMPLING_PARAMS_INVALID."""
    priority, adapter = request.scheduling.priority, request.scheduling.adapter
    if not limits.min_priority <= priority <= limits.max_priority:
        raise DomainError(
            "CALLER_NOT_ALLOWED",
            f"priority is {priority}; allowed for tenant {tenant!r}: "
            f"{limits.min_priority} to {limits.max_priority}",
            limit="min_priority" if priority < limits.min_priority else "max_priority",
        )
    if adapter and limits.adapters is not None and not _is_one_of(adapter, limits.adapters):
        raise _not_allowed(
            "adapters", f"tenant {tenant!r} may not use the adapter {adapter!r}", limits.adapters
        )
    params = request.params
    numbers = (
        ("max_tokens", params.max_tokens, "max_output_tokens", limits.max_output_tokens),
        ("min_tokens", params.min_tokens, "max_output_tokens", limits.max_output_tokens),
        (
            "the number of sequences (n, best_of or beam_search.width)",
            params.num_sequences,
            "max_sequences",
            limits.max_sequences,
        ),
    )
    for what, value, limit, most in numbers:
        if value is not None and most is not None and value > most:
            raise DomainError(
                "SAMPLING_PARAMS_INVALID",
                f"{what} is {value}; allowed for tenant {tenant!r}: at most {limit} {most}",
                limit=limit,
            )


def _is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _not_allowed(limit: str, what: str, allowed: tuple[str, ...] | None) -> DomainError:
    return DomainError(
        "CALLER_NOT_ALLOWED",
        f"{what}; allowed: {', '.join(allowed or ()) or 'none'}",
        limit=limit,
    )
