"""A scheduler core over the real executor that keeps count of what its steps did to the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from executor_service.backends.compute import Compute
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.plan import StepEvents, StepPlan
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.engine_with_queue import EngineWithQueue
from tests.support.core.in_process import InProcessEngine
from tests.support.models.model_pair import MAX_MODEL_LEN, ModelPair

_EPOCH = 11
_US_PER_TOKEN = 1000


class ObservedScheduler(EngineWithQueue):
    """`num_swapped_out`: requests, not blocks. `max_blocks_in_use`: most at the end of a step."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.plans: list[StepPlan] = []
        self.num_swapped_out = 0
        self.max_blocks_in_use = 0
        self.num_evictions = 0
        self._num_device_blocks = config.num_device_blocks
        self._in_host_pool: set[Request] = set()
        self._device = self.placement.blocks.device
        self._allocate = self._device.allocate
        self._device.allocate = self._count_evictions  # type: ignore[method-assign]

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        in_host_pool = set(self.placement.swapped)
        self.num_swapped_out += len(in_host_pool - self._in_host_pool)
        self._in_host_pool = in_host_pool
        in_use = self._num_device_blocks - self.num_free_blocks
        self.max_blocks_in_use = max(self.max_blocks_in_use, in_use)
        if plan is not None:
            self.plans.append(plan)
        return plan

    @property
    def num_recomputed(self) -> int:
        """Preempted requests that were not swapped out."""
        return self.num_preemptions - self.num_swapped_out

    @property
    def num_computed_tokens(self) -> int:
        """Input tokens of all steps."""
        return sum(plan.num_tokens for plan in self.plans)

    @property
    def num_blocks_out(self) -> int:
        """Blocks copied to the host pool."""
        return sum(len(plan.moves.swap_out) for plan in self.plans)

    @property
    def num_blocks_in(self) -> int:
        """Blocks copied from the host pool."""
        return sum(len(plan.moves.swap_in) for plan in self.plans)

    @property
    def num_blocks_copied(self) -> int:
        """Blocks copied within the device pool."""
        return sum(len(plan.moves.copy) for plan in self.plans)

    def _count_evictions(self, count: int) -> list[int]:
        """Blocks that can be found no more because they were given out."""
        num_published = self._device.num_published
        blocks = self._allocate(count)
        self.num_evictions += num_published - self._device.num_published
        return blocks


class ObservedEngine(InProcessEngine):
    """A tiny model behind an observed core; every step has to succeed.

    `us_per_block`: the core is told that a move takes this long, and a token 1000 us; without it,
    what they really take. `compute`: what runs the model, instead of plain torch. `options` are
    those of SchedulerConfig that matter to the test.
    """

    def __init__(
        self,
        pair: ModelPair,
        *,
        depth: int = 2,
        preempt_at: Iterable[int] = (),
        us_per_block: float | None = None,
        compute: Compute | None = None,
        **options: object,
    ) -> None:
        self._us_per_block = us_per_block
        values: dict[str, object] = {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_waiting": 64,
            "vocab_size": pair.served.vocab_size,
            "eos_token_ids": frozenset(),
            "num_host_blocks": 0,
            "sliding_window": pair.served.sliding_window,
        }
        values |= options
        pools = CacheConfig(
            block_size=_int(values["block_size"]),
            num_device_blocks=_int(values["num_device_blocks"]),
            num_host_blocks=_int(values["num_host_blocks"]),
        )
        if compute is None:
            runner = build_runner(pair.served, pools)
        else:
            runner = build_runner(compute.loaded, pools, compute.make_model, compute.draw)
        values["block_bytes"] = runner.cache.block_bytes
        config = SchedulerConfig(**values)  # type: ignore[arg-type]
        super().__init__(
            config, runner, epoch=_EPOCH, depth=depth, preempt_at=frozenset(preempt_at)
        )
        self.core = self.scheduler = ObservedScheduler(config)

    def answer(self, alter: Callable[[pb.StepResult], None] | None = None) -> StepEvents:
        assert alter is None
        return super().answer(self._check)

    def _check(self, result: pb.StepResult) -> None:
        assert result.status == pb.STEP_STATUS_OK, result
        assert not result.row_errors, result
        if self._us_per_block is None:
            return
        plan = self.core.plans[result.step_id - 1]
        result.timings.move_us = round(len(plan.moves) * self._us_per_block)
        result.timings.forward_us = plan.num_tokens * _US_PER_TOKEN
        result.timings.sample_us = 0

    def serve(self, *requests: Request) -> list[list[list[int]]]:
        """Runs `requests`, which leave no block behind; returns the tokens of each sequence."""
        for request in requests:
            self.add(request)
        self.run()
        assert all(request.error is None for request in requests), [r.error for r in requests]
        assert self.scheduler.num_free_blocks == self.core.placement.blocks.device.num_blocks
        return [self.delivered[request.request_id] for request in requests]


def make_request(index: int, prompt: list[int], *, seed: int = 0, **params: object) -> Request:
    """The request named `index`, which is its arrival too; greedy unless `params` say otherwise."""
    values = {"temperature": 0.0} | params
    sampling = SamplingParams(**values)  # type: ignore[arg-type]
    return Request.create(str(index), prompt, sampling, arrival=index, seed=seed)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
