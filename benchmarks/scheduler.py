"""The scheduler alone: plan, encode and apply a step of N decodes, and admit prompts.

Sequences have about 1000 tokens, 512 of them a prefix that all share; blocks hold 16, and in every
step one sequence in 16 needs a new one. `step_us` is `schedule()` + encoding of the batch +
`apply()`, the median over the steps; `p99_us` is their 99th percentile. `admit_us`: what a prompt
costs from the list of its tokens to the applied result of the step that computes it, beyond the
decodes of that step; with prefix caching 512 of its tokens are found. One JSON object for each N
and mode.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.report import emit, percentile
from scheduler_service.scheduler.values import (
    Feature,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from scheduler_service.step_codec import encode_plan
from tests.support.core.driver import EngineWithQueue

BLOCK_SIZE = 16
CONTEXT = 1000
SHARED = 512
MAX_TOKENS = 3000
VOCAB_SIZE = 32000
SAMPLED_TOKEN = 7
NUM_ADMITTED = 8
_WARM_UP_STEPS = 20
_SEED = 0


class ScheduledLoad:
    """A core with `num_seqs` running sequences, and an executor that answers at once.

    `num_adapters`: the sequences have so many adapters in turn; 0 for none.
    """

    def __init__(self, num_seqs: int, *, prefix_caching: bool, num_adapters: int = 0) -> None:
        self._num_adapters = num_adapters
        self._random = random.Random(_SEED)
        self._shared = self._tokens(SHARED)
        self._num_requests = 0
        self.core = EngineWithQueue(
            SchedulerConfig(
                block_size=BLOCK_SIZE,
                num_device_blocks=(num_seqs + 64) * 2 * CONTEXT // BLOCK_SIZE,
                max_num_seqs=num_seqs + 64,
                max_num_batched_tokens=8192 + num_seqs,
                max_model_len=CONTEXT + MAX_TOKENS,
                max_num_waiting=num_seqs + 64,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=frozenset({2}),
                prefix_caching=prefix_caching,
                model_digest="0" * 64,
                features=frozenset(Feature),
                max_adapters=num_adapters,
                num_adapter_slots=num_adapters,
            )
        )
        for _ in range(num_seqs):
            self.add(self.prompt())
        self._load_adapters()
        while self.core.num_waiting:
            self.step()
        for _ in range(_WARM_UP_STEPS):
            self.step()

    def prompt(self) -> list[int]:
        """A prompt that begins like all others, of a length that leaves its last block anywhere."""
        num_more = self._num_requests % BLOCK_SIZE
        return self._shared + self._tokens(CONTEXT - SHARED + num_more)

    def add(self, prompt: list[int]) -> Request:
        """Makes a request and adds it."""
        self._num_requests += 1
        number = self._num_requests
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=MAX_TOKENS)
        adapter = f"a{number % self._num_adapters}@1" if self._num_adapters else ""
        scheduling = SchedulingParams(adapter=adapter)
        request = Request.create(
            f"r{number}", prompt, params, arrival=number, seed=0, scheduling=scheduling
        )
        self.core.add(request)
        return request

    def _load_adapters(self) -> None:
        for number in range(self._num_adapters):
            self.core.adapter_slots.load(f"a{number}@1", (), 0, 0)
        for load in self.core.adapter_slots.take_begun():
            self.core.adapter_loaded(load.adapter, "")

    def step(self) -> float:
        """One step; returns its microseconds, without those of the executor that is not there."""
        start = time.perf_counter_ns()
        plan = self.core.schedule()
        assert plan is not None
        encode_plan(plan, scheduler_epoch=1, executor_epoch=1)
        planned = time.perf_counter_ns()
        outcome = _outcome(plan)
        answered = time.perf_counter_ns()
        self.core.apply(outcome)
        return (planned - start + time.perf_counter_ns() - answered) / 1e3

    def admit(self) -> float:
        """Microseconds that the admission of some prompts takes in one step, decodes included."""
        prompts = [self.prompt() for _ in range(NUM_ADMITTED)]
        start = time.perf_counter_ns()
        requests = [self.add(prompt) for prompt in prompts]
        added = time.perf_counter_ns()
        microseconds = (added - start) / 1e3 + self.step()
        for request in requests:
            self.core.abort(request.request_id)
        self.step()
        return microseconds

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, VOCAB_SIZE) for _ in range(count)]


def _outcome(plan: StepPlan) -> StepOutcome:
    token_ids = np.full(len(plan.work.row_ids), SAMPLED_TOKEN, np.int32)
    if plan.work.samples is not None:
        token_ids[~plan.work.samples] = -1
    return StepOutcome(plan.step_id, StepStatus.OK, token_ids, compute_us=10_000)


def measure(num_seqs: int, num_steps: int, *, prefix_caching: bool) -> dict[str, object]:
    """The figures of one load."""
    load = ScheduledLoad(num_seqs, prefix_caching=prefix_caching)
    gc.collect()
    gc.freeze()
    steps = _repeat(load.step, num_steps)
    step_us = statistics.median(steps)
    admissions = _repeat(load.admit, max(num_steps // 10, 1))
    gc.unfreeze()
    return {
        "n": num_seqs,
        "prefix_caching": prefix_caching,
        "step_us": round(step_us, 1),
        "p99_us": percentile(steps, 99),
        "admit_us": round((statistics.median(admissions) - step_us) / NUM_ADMITTED, 1),
    }


def _repeat(action: Callable[[], float], count: int) -> list[float]:
    return [action() for _ in range(count)]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", default="64,256,1024,4096", help="running sequences")
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    for num_seqs in map(int, arguments.seqs.split(",")):
        for prefix_caching in (True, False):
            emit("scheduler", **measure(num_seqs, arguments.steps, prefix_caching=prefix_caching))


if __name__ == "__main__":
    main()
