"""Routers compared: hit rate, time to first token and balance, with 4 executors in virtual time.

`hit_ratio`: prompt tokens that were not computed. `balance`: the tokens computed by the busiest
executor by the mean. `ttft_ms`: from the arrival, waiting included. The first fifth of the time is
not counted. One JSON object for each trace, load and router; then what a decision costs.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable

from benchmarks.report import emit, percentile
from benchmarks.routing.decision_cost import measure_decisions
from benchmarks.routing.routers import ROUTERS
from benchmarks.routing.traces import multi_turn_chat, shared_system_prompts
from benchmarks.routing.virtual_fleet import Fate, Turn, VirtualFleet
from scheduler_service.scheduler.values import SchedulerConfig
from tests.support.core.virtual_fleet import StepCosts

_NUM_EXECUTORS = 4
_COSTS = StepCosts(step_us=8_000, row_us=30, prompt_token_us=50)
_CONFIG = SchedulerConfig(
    block_size=16,
    num_device_blocks=6144,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    max_model_len=32768,
    max_num_waiting=1024,
    vocab_size=2**20,
    eos_token_ids=frozenset(),
)
_Trace = Callable[[int], Iterable[Turn]]


def _traces() -> dict[tuple[str, str], _Trace]:
    traces: dict[tuple[str, str], _Trace] = {}
    for people in (100, 250, 400):
        traces["multi-turn chat", f"{people} people"] = lambda _us, n=people: multi_turn_chat(n)  # type: ignore[misc]
    for per_s in (40, 100, 160):
        traces["shared system prompts", f"{per_s} per s"] = lambda us, r=per_s: (  # type: ignore[misc]
            shared_system_prompts(float(r), us)
        )
    return traces


def _summary(fates: list[Fate], from_us: int) -> dict[str, float]:
    counted = [fate for fate in fates if fate.turn.at_us >= from_us and fate.is_finished]
    ttft_ms = [
        (fate.first_token_us - fate.turn.at_us) / 1e3
        for fate in counted
        if fate.first_token_us is not None
    ]
    num_prompt = sum(len(fate.turn.prompt) for fate in counted)
    computed = Counter[int]()
    for fate in counted:
        computed[fate.host] += len(fate.turn.prompt) - fate.num_cached_tokens
        computed[fate.host] += fate.turn.num_output_tokens
    busiest = max(computed.values()) * _NUM_EXECUTORS / sum(computed.values())
    return {
        "num_requests": len(counted),
        "hit_ratio": round(sum(fate.num_cached_tokens for fate in counted) / num_prompt, 3),
        "ttft_ms_p50": percentile(ttft_ms, 50),
        "ttft_ms_p99": percentile(ttft_ms, 99),
        "balance": round(busiest, 2),
        "num_preemptions": sum(fate.num_preemptions for fate in counted),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of virtual time")
    parser.add_argument("--router", choices=sorted(ROUTERS), nargs="*", default=list(ROUTERS))
    parser.add_argument("--only-decisions", action="store_true")
    arguments = parser.parse_args()
    until_us = int(arguments.seconds * 1e6)
    for (trace, load), turns in _traces().items():
        for name in () if arguments.only_decisions else arguments.router:
            fleet = VirtualFleet([(_CONFIG, _COSTS)] * _NUM_EXECUTORS, ROUTERS[name]())
            values = _summary(fleet.run(turns(until_us), until_us), until_us // 5)
            emit("routing", trace=trace, load=load, router=name, **values)
    measure_decisions()


if __name__ == "__main__":
    main()
