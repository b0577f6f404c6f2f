"""Quotas of tenants: requests and tokens per minute, and concurrent requests."""

from __future__ import annotations

import math
from collections.abc import Callable

from scheduler_service.callers.caller import FREE, RequestCost, TenantLimits
from scheduler_service.scheduler.values import Request
from splitserve_contract import DomainError

_CONCURRENCY_RETRY_S = 1.0
# With fewer tenants, unused accounts are not looked for.
_MIN_NUM_KEPT = 64


class _Account:
    """Usage of one tenant, and its limits at this moment."""

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.num_running = 0
        self.requests = UsageBucket()
        self.tokens = UsageBucket()

    def is_blank(self, now_ns: int) -> bool:
        """Returns whether the account has no usage, so that it can be dropped."""
        rates = (
            (self.requests, self.limits.requests_per_minute),
            (self.tokens, self.limits.tokens_per_minute),
        )
        is_unused = (rate is None or bucket.used(rate, now_ns) == 0 for bucket, rate in rates)
        return self.num_running == 0 and all(is_unused)


class Quotas:
    """Counts requests and tokens per minute, and concurrent requests, of each tenant.

    `limits_of` returns the current limits of a tenant. Accounts without usage are dropped, so the
    number of accounts is bounded by the tenants that called in the last minutes.
    """

    def __init__(self, limits_of: Callable[[str], TenantLimits], now_ns: Callable[[], int]) -> None:
        self._limits_of = limits_of
        self._now_ns = now_ns
        self._accounts: dict[str, _Account] = {}
        self._sweep_at = _MIN_NUM_KEPT

    @property
    def num_tenants(self) -> int:
        """Number of tenants with an account."""
        return len(self._accounts)

    def num_running(self, tenant: str) -> int:
        """Returns the number of requests of `tenant` that have begun and not ended."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.num_running

    def charge(self, tenant: str, num_prompt_tokens: int, num_resumed_tokens: int) -> RequestCost:
        """Returns the charge of a new request of `tenant`. Raises DomainError(QUOTA_EXCEEDED).

        The number of output tokens is not known beforehand: a request is let in while there is room
        for one token, and the next request waits until an overdraft is paid back. Refusing a
        resumed request would lose the tokens it already has, so it is refused only at twice each
        limit.
        """
        limits = self._limits_of(tenant)
        account = self._accounts.get(tenant)
        if account is None:
            if not _is_limited(limits):
                return FREE
            account = _Account(limits)  # kept by `use`, when something is charged
        account.limits = limits
        self._check(tenant, account, resumes=num_resumed_tokens > 0)
        return _Charge(self, tenant, num_prompt_tokens + num_resumed_tokens, num_resumed_tokens)

    def _check(self, tenant: str, account: _Account, *, resumes: bool) -> None:
        limits, now_ns = account.limits, self._now_ns()
        refusals: list[tuple[float, str, float]] = []
        most = limits.max_concurrent_requests
        if most is not None and account.num_running >= most * (2 if resumes else 1):
            refusals.append((_CONCURRENCY_RETRY_S, "max_concurrent_requests", most))
        for name, bucket, rate in (
            ("requests_per_minute", account.requests, limits.requests_per_minute),
            ("tokens_per_minute", account.tokens, limits.tokens_per_minute),
        ):
            if rate is not None:
                delay_s = bucket.delay_s(rate, now_ns, debt=rate if resumes else 0.0)
                if delay_s > 0:
                    refusals.append((delay_s, name, rate))
        if refusals:
            delay_s, name, value = max(refusals)
            raise DomainError(
                "QUOTA_EXCEEDED",
                f"tenant {tenant!r} has used up {name} {value:g}; retry in {delay_s:g} s",
                retry_delay_s=delay_s,
                limit=name,
            )

    def use(self, tenant: str, *, num_running: int, num_requests: int, num_tokens: int) -> None:
        """Adds to the usage of a tenant; negative numbers give back."""
        account = self._accounts.get(tenant)
        now_ns = self._now_ns()
        if account is None:
            self._forget_blank(now_ns)
            account = self._accounts[tenant] = _Account(self._limits_of(tenant))
        limits = account.limits
        account.num_running += num_running
        if limits.requests_per_minute is not None:
            account.requests.use(num_requests, limits.requests_per_minute, now_ns)
        if limits.tokens_per_minute is not None:
            account.tokens.use(num_tokens, limits.tokens_per_minute, now_ns)

    def _forget_blank(self, now_ns: int) -> None:
        if len(self._accounts) < self._sweep_at:
            return
        kept = {name: one for name, one in self._accounts.items() if not one.is_blank(now_ns)}
        self._accounts = kept
        self._sweep_at = max(_MIN_NUM_KEPT, 2 * len(kept))


class _Charge:
    """Charge of one request whose tenant has quotas. Implements `RequestCost`.

    `num_first_tokens`: prompt and resumed tokens, charged at `begin`. `num_resumed_tokens`: output
    tokens that the request came with, not charged again at `end`.
    """

    def __init__(
        self, quotas: Quotas, tenant: str, num_first_tokens: int, num_resumed_tokens: int
    ) -> None:
        self._quotas = quotas
        self._tenant = tenant
        self._num_first_tokens = num_first_tokens
        self._num_resumed_tokens = num_resumed_tokens

    def begin(self) -> None:
        num_tokens = self._num_first_tokens
        self._quotas.use(self._tenant, num_running=1, num_requests=1, num_tokens=num_tokens)

    def end(self, request: Request) -> None:
        num_tokens = max(0, num_computed_outputs(request) - self._num_resumed_tokens)
        self._quotas.use(self._tenant, num_running=-1, num_requests=0, num_tokens=num_tokens)


def num_computed_outputs(request: Request) -> int:
    """Returns the number of output tokens computed for all sequences, also for unreturned ones."""
    lengths = [sequence.num_output_tokens for sequence in request.sequences]
    if request.params.beam is None:
        return sum(lengths)
    # Every step computed one token for each beam, also for beams that were given up.
    lengths += [len(completion.token_ids) for completion in request.completions]
    return request.params.num_sequences * max(lengths, default=0)


def _is_limited(limits: TenantLimits) -> bool:
    quotas = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent_requests)
    return any(quota is not None for quota in quotas)


# -- Leaky bucket ----------------------------------------------------------------------------------

_MINUTE_NS = 60 * 10**9
# Longest retry delay: a very low limit would otherwise ask a client to wait for longer than a day.
_MAX_DELAY_S = 86400.0
_ROUNDING = 1e-6


class UsageBucket:
    """Leaky bucket of recent usage, which drains at the rate of the tenant's limit.

    The bucket holds a minute's worth and may be overdrawn. The rate is an argument of each call, so
    nothing has to be converted when the limit changes. Rates are above 0. `now_ns` never goes back.
    """

    def __init__(self) -> None:
        self._used = 0.0
        self._at_ns = 0

    def use(self, amount: float, per_minute: float, now_ns: int) -> None:
        """Adds `amount` to the usage; a negative amount gives back."""
        self._used = max(0.0, self.used(per_minute, now_ns) + amount)
        self._at_ns = now_ns

    def used(self, per_minute: float, now_ns: int) -> float:
        """Returns the usage that has not drained yet."""
        return max(0.0, self._used - per_minute * (now_ns - self._at_ns) / _MINUTE_NS)

    def delay_s(self, per_minute: float, now_ns: int, *, debt: float = 0.0) -> float:
        """Returns the seconds until the bucket has room for 1.0; 0 if it has room now.

        `debt`: how far the bucket may be filled beyond a minute's worth; a negative debt makes the
        allowed burst smaller.
        """
        # A limit below one a minute has room for one.
        room = max(per_minute, min(math.ceil(per_minute), 1.0)) + debt
        excess = self.used(per_minute, now_ns) + 1.0 - room
        if excess <= _ROUNDING:
            return 0.0
        # One millisecond more, because the sum is rounded.
        delay_ms = min(60_000.0 * excess / per_minute + 1, 1000.0 * _MAX_DELAY_S)
        return math.floor(delay_ms) / 1000.0
