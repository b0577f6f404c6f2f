"""Tenants apart: what a tenant's flood does to the time to first token of another, in virtual time.

`steady` asks for little, at a random but steady rate. `other` asks for ten times more than there
is, and then just for what it got of that: the same load, politely. A core schedules them; an
executor that computes nothing takes as long for each step as its costs say, so the figures are of
the scheduler's decisions alone, and each run has the same. `moved`: p99 of the flood by that at the
same load, at most 1.2 is the aim. `refused`: requests of `steady` that found the
queue full, or had no token at the end. One JSON object for each load and policy.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from benchmarks.report import emit, percentile
from scheduler_service.core.config import SchedulerConfig
from tests.support.core.virtual_load import Arrival, VirtualLoad, random_arrivals

_STEADY, _OTHER = "steady", "other"
_CONFIG = SchedulerConfig(
    block_size=16,
    num_device_blocks=8192,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_model_len=8192,
    max_num_waiting=1024,
    vocab_size=2**20,
    eos_token_ids=frozenset(),
)


@dataclass(frozen=True)
class _Case:
    """What is scarce, and what `other` asks for, how often in a flood."""

    config: SchedulerConfig
    num_prompt_tokens: int
    num_output_tokens: int
    flood_per_s: float


_SCARCE = replace(_CONFIG, num_device_blocks=2560)
_MANY_ROWS = replace(_SCARCE, max_num_seqs=256)
_SWAP = replace(_MANY_ROWS, num_host_blocks=5120, block_bytes=2**20)
_CASES = {
    "rows are scarce": _Case(_CONFIG, 1024, 256, 55.0),
    "short steps": _Case(replace(_CONFIG, max_num_batched_tokens=512), 1024, 256, 55.0),
    "blocks are scarce": _Case(_SCARCE, 1024, 256, 45.0),
    "long outputs": _Case(_MANY_ROWS, 16, 500, 150.0),
    "long outputs, swap": _Case(_SWAP, 16, 500, 180.0),
}


def measure(case: _Case, policy: str, per_s: float, seconds: float) -> dict[str, float]:
    """What became of the requests of `steady` while `other` asked for so much."""
    until_us = int(seconds * 1e6)

    def arrivals(tenant: str, rate: float, prompt: int, output: int) -> list[Arrival]:
        return random_arrivals(
            tenant,
            rate,
            until_us,
            num_prompt_tokens=prompt,
            num_output_tokens=output,
            seed=len(tenant),
        )

    steady = arrivals(_STEADY, 2.0, 256, 64)
    # Before the last of them, there is time to answer.
    steady = [arrival for arrival in steady if arrival.at_us < until_us - 5_000_000]
    other = arrivals(_OTHER, per_s, case.num_prompt_tokens, case.num_output_tokens)
    fates = VirtualLoad(replace(case.config, queue_policy=policy)).run([*steady, *other], until_us)
    ttft_ms = [
        fate.ttft_us / 1e3
        for fate in fates
        if fate.arrival.tenant == _STEADY and fate.ttft_us is not None
    ]
    num_done = sum(f.finished_us is not None and f.arrival.tenant == _OTHER for f in fates)
    return {
        "ttft_ms_p50": percentile(ttft_ms, 50),
        "ttft_ms_p99": percentile(ttft_ms, 99),
        "refused": len(steady) - len(ttft_ms),
        "other_done_per_s": round(num_done / seconds, 2),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of virtual time")
    parser.add_argument("--case", choices=sorted(_CASES), nargs="*", default=list(_CASES))
    arguments = parser.parse_args()
    for name in arguments.case:
        case, p99_ms = _CASES[name], dict[str, float]()
        for policy in ("fair", "fcfs"):
            per_s = case.flood_per_s
            for load in ("flood", "same load"):
                values = measure(case, policy, per_s, arguments.seconds)
                emit("isolation", case=name, policy=policy, load=load, **values)
                per_s, p99_ms[load] = values["other_done_per_s"], values["ttft_ms_p99"]
            moved = round(p99_ms["flood"] / p99_ms["same load"], 2)
            emit("isolation_moved", case=name, policy=policy, moved=moved)


if __name__ == "__main__":
    main()
