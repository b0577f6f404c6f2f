"""Tenants file (TOML) with the limits of tenants, and checks of requests against these limits."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scheduler_service.callers.caller import NO_LIMITS, TenantLimits
from scheduler_service.scheduler.values import Request
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_common import FilesUnusable, read_bytes
from splitserve_contract import DomainError
from splitserve_keys import TENANT_NAMES, is_tenant_name

_MAX_FILE_BYTES = 16 * 2**20
_MAX_PRIORITY = 100
_MAX_WEIGHT = 1_000_000
_MAX_COUNT = 2**53


@dataclass(frozen=True, slots=True)
class Tenants:
    """Limits of all tenants: `named` for tenants with an entry, `default` for all others."""

    default: TenantLimits
    named: Mapping[str, TenantLimits]

    def limits(self, tenant: str) -> TenantLimits:
        """Returns the limits of `tenant`."""
        return self.named.get(tenant, self.default)

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the named tenants for the policy `fair`, where unnamed tenants have 1."""
        return {name: limits.weight / self.default.weight for name, limits in self.named.items()}


NO_TENANTS = Tenants(NO_LIMITS, {})


def read_tenants(path: Path) -> Tenants:
    """Reads the tenants file.

    Raises FilesUnusable, which names table, field, value and what is allowed.
    """
    try:
        return parse_tenants(read_bytes(path, _MAX_FILE_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FilesUnusable(f"{path}: {error}") from error


def parse_tenants(text: str) -> Tenants:
    """Parses the text of a tenants file.

    Raises ValueError, and RecursionError if values are nested too deeply.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not valid TOML: {error}") from error
    for name in document:
        if name not in ("default", "tenants"):
            raise ValueError(f"{name[:80]!r} is not known; allowed: [default], [tenants.NAME]")
    default = _limits(NO_LIMITS, "default", document.get("default", {}))
    tables = _table("tenants", document.get("tenants", {}))
    named = {}
    for name, table in tables.items():
        if not is_tenant_name(name):
            raise ValueError(f"tenants has {name[:80]!r}; allowed: {TENANT_NAMES}")
        named[name] = _limits(default, f"tenants.{name}", table)
    return Tenants(default, named)


def _limits(base: TenantLimits, where: str, table: object) -> TenantLimits:
    """Returns `base` with the fields that `table` sets. Raises ValueError."""
    values: dict[str, Any] = {}
    for name, value in _table(where, table).items():
        if name not in _FIELDS:
            raise ValueError(f"{where} has {name[:80]!r}; allowed: {', '.join(_FIELDS)}")
        fits, allowed = _FIELDS[name]
        if not fits(value):
            raise ValueError(f"{where}.{name} is {str(value)[:80]!r}; allowed: {allowed}")
        values[name] = tuple(value) if isinstance(value, list) else value
    limits = replace(base, **values)
    if limits.min_priority > limits.max_priority:
        raise ValueError(
            f"{where}.min_priority is {limits.min_priority}; "
            f"allowed: at most max_priority, which is {limits.max_priority}"
        )
    return limits


def _table(where: str, table: object) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ValueError(f"{where} is not a table; allowed: [{where}] with one line per field")
    return table


def _is_weight(value: object) -> bool:
    return _is_number(value) and 1 / _MAX_WEIGHT <= value <= _MAX_WEIGHT  # type: ignore[operator]


def _is_rate(value: object) -> bool:
    return _is_number(value) and 0 < value <= _MAX_COUNT  # type: ignore[operator]


def _is_priority(value: object) -> bool:
    return type(value) is int and abs(value) <= _MAX_PRIORITY


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MAX_COUNT


def _are_patterns(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _is_number(value: object) -> bool:
    # A bool is an int in Python, but no number in the tenants file.
    return type(value) in (int, float)


_Field = tuple[Callable[[object], bool], str]
_WEIGHT: _Field = (_is_weight, f"a number from {1 / _MAX_WEIGHT:f} to {_MAX_WEIGHT}")
_RATE: _Field = (_is_rate, f"a number above 0, to {_MAX_COUNT}")
_PRIORITY: _Field = (_is_priority, f"an integer from {-_MAX_PRIORITY} to {_MAX_PRIORITY}")
_COUNT: _Field = (_is_count, f"an integer from 1 to {_MAX_COUNT}")
_PATTERNS: _Field = (_are_patterns, "a list of non-empty strings")
# Check of each field, and the text about its allowed values.
_FIELDS: Mapping[str, _Field] = MappingProxyType(
    {
        "weight": _WEIGHT,
        "min_priority": _PRIORITY,
        "max_priority": _PRIORITY,
        "requests_per_minute": _RATE,
        "tokens_per_minute": _RATE,
        "max_concurrent_requests": _COUNT,
        "max_prompt_tokens": _COUNT,
        "max_output_tokens": _COUNT,
        "max_sequences": _COUNT,
        "adapters": _PATTERNS,
        "models": _PATTERNS,
    }
)


# -- Checks of one request against the limits of its tenant ----------------------------------------
#
# Each refusal names the limit and what is allowed.


def may_use_model(limits: TenantLimits, model: str) -> bool:
    """Returns whether a tenant with `limits` may use `model`."""
    return limits.models is None or _is_one_of(model, limits.models)


def check_model(limits: TenantLimits, tenant: str, model: str) -> None:
    """Checks that `tenant` may use `model`. Raises DomainError(CALLER_NOT_ALLOWED)."""
    if not may_use_model(limits, model):
        what = f"tenant {tenant!r} may not use the model {model!r}"
        raise _not_allowed("models", what, limits.models)


def check_prompt(message: api.GenerateRequest, limits: TenantLimits, tenant: str) -> None:
    """Checks the prompt length before anything is decoded. Raises DomainError(PROMPT_TOO_LONG)."""
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
    """Checks priority, adapter, output tokens and sequences of a request.

    Raises DomainError: CALLER_NOT_ALLOWED, SAMPLING_PARAMS_INVALID.
    """
    priority, adapter = request.scheduling.priority, request.scheduling.adapter
    if not limits.min_priority <= priority <= limits.max_priority:
        raise DomainError(
            "CALLER_NOT_ALLOWED",
            f"priority is {priority}; allowed for tenant {tenant!r}: "
            f"{limits.min_priority} to {limits.max_priority}",
            limit="min_priority" if priority < limits.min_priority else "max_priority",
        )
    if not may_use_adapter(adapter, limits):
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


def may_use_adapter(adapter: str, limits: TenantLimits) -> bool:
    """Returns whether a tenant may use an adapter of this name; all may use none (empty)."""
    return not adapter or limits.adapters is None or _is_one_of(adapter, limits.adapters)


def _not_allowed(limit: str, what: str, allowed: tuple[str, ...] | None) -> DomainError:
    return DomainError(
        "CALLER_NOT_ALLOWED",
        f"{what}; allowed: {', '.join(allowed or ()) or 'none'}",
        limit=limit,
    )
