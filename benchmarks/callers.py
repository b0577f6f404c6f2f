"""What it costs to know callers: microseconds a request, each the median of its runs.

`door` and `known`: from a client's message to a request of the core, where nobody is asked and
where a tenant has every limit and quota. Beside them the parts of the difference: whose key it is,
whether the method is for it, and the tenant's account. No wire and no executor is in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import cast

from benchmarks.report import emit, percentile
from scheduler_service.adapters import AdapterRegistry
from scheduler_service.callers import (
    AllowAllCallers,
    Caller,
    Callers,
    Quotas,
    TenantLimits,
    caller_with_key,
)
from scheduler_service.driver import Driver
from scheduler_service.scheduler.values import Request, SamplingParams, SchedulerConfig
from scheduler_service.service import Intake, scopes_of
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_keys import ApiKey, KeyEntry, Scope
from splitserve_rpc import Access

METHOD = "/splitserve.scheduler.v1.SchedulerService/Generate"
LIMITS = TenantLimits(
    requests_per_minute=1e12,
    tokens_per_minute=1e15,
    max_concurrent_requests=10**9,
    max_prompt_tokens=10**6,
    max_output_tokens=10**6,
    max_sequences=8,
    adapters=("mine-*",),
    models=("*",),
)


class ServedOfNobody:
    """The limits of executors that there are not."""

    model = None
    largest_config = SchedulerConfig(
        block_size=16,
        num_device_blocks=100_000,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=32_768,
        max_num_waiting=1024,
        vocab_size=32_000,
        eos_token_ids=frozenset({2}),
    )


class ClusterOfNobody:
    """As much of a Driver as a request needs before it is submitted."""

    served = ServedOfNobody()
    adapters = AdapterRegistry()
    now_ns = staticmethod(time.monotonic_ns)

    def next_arrival(self) -> int:
        """A number."""
        return 1


class ManyKeys:
    """Implements `Callers` with `num_keys` keys; the last is `credential`."""

    knows_callers = True

    def __init__(self, num_keys: int) -> None:
        keys = [ApiKey.draw() for _ in range(num_keys)]
        now, scopes = datetime.now(UTC), frozenset({Scope.GENERATE})
        self._keys = {key.key_id: KeyEntry.of(key, "acme", scopes, now) for key in keys}
        self.credential = keys[-1].text

    def identify(self, credential: str) -> Caller:
        """Whose it is."""
        return caller_with_key(self._keys, credential, datetime.now(UTC))

    def limits(self, tenant: str) -> TenantLimits:
        """The same for all."""
        return LIMITS


def median_us(call: Callable[[], object], num_runs: int) -> float:
    """Of one call."""
    times_us = []
    for _ in range(num_runs):
        start_ns = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - start_ns) / 1000)
    return percentile(times_us, 50)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--prompt-len", type=int, default=512)
    arguments = parser.parse_args()
    keys, cluster = ManyKeys(arguments.keys), cast("Driver", ClusterOfNobody())
    request = api.GenerateRequest(
        prompt_token_ids=range(arguments.prompt_len),
        sampling_params=api.SamplingParams(max_tokens=100),
    )
    metadata = [("authorization", f"Bearer {keys.credential}")]
    access, quotas = Access(scopes_of=scopes_of(keys)), Quotas(keys.limits, time.monotonic_ns)

    ended = Request.create("", [1], SamplingParams(), arrival=1, seed=1)

    def account() -> None:
        charge = quotas.charge("acme", arguments.prompt_len, 0)
        charge.begin()
        charge.end(ended)

    def intake(callers: Callers, credential: str) -> Callable[[], object]:
        desk = Intake(cluster, callers)
        return lambda: desk.accept(request, callers.identify(credential))

    parts: dict[str, Callable[[], object]] = {
        "door_us": intake(AllowAllCallers(), ""),
        "known_us": intake(keys, keys.credential),
        "identify_us": lambda: keys.identify(keys.credential),
        "access_us": lambda: access.check_metadata(METHOD, metadata),
        "account_us": account,
    }
    measured = {name: median_us(call, arguments.runs) for name, call in parts.items()}
    emit("callers", num_keys=arguments.keys, prompt_len=arguments.prompt_len, **measured)


if __name__ == "__main__":
    main()
