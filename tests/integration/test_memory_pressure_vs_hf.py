"""A pool that holds little more than one sequence: tokens still equal Hugging Face `generate`.

Requests are preempted all the time, by swap and by recompute, with and without a prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import cycle

import pytest

from scheduler_service.scheduler.values import BatchPolicyName, PreemptionMode
from tests.support.covering import covering
from tests.support.models.model_pair import (
    ModelPair,
    ObservedEngine,
    ObservedScheduler,
    make_request,
)

pytestmark = pytest.mark.cases(8)

PROMPT_LENS = (23, 5, 40, 17, 31, 9, 2, 28)
NUM_OUTPUT_TOKENS = 20
# The longest sequence has 60 tokens.
NUM_DEVICE_TOKENS = 76
# Besides what the lack of blocks does by itself.
PREEMPT_AT = range(3, 120, 4)
LEAST_PREEMPTIONS = 12
# Between what swap and recompute cost, so that AUTO chooses now one, now the other.
US_PER_BLOCK_TOKEN = 375
# The last has a sliding window in every layer, so that blocks are given back all the time.
ARCHITECTURES = ("llama", "gemma2", "qwen3", "mistral")


class HostPool(Enum):
    """How many tokens it holds: of small ones, a short sequence and no long one."""

    NONE = 0
    SMALL = 24
    LARGE = 256


OPTIONS = {
    "mode": tuple(PreemptionMode),
    "host_pool": tuple(HostPool),
    "prefix_caching": (True, False),
    "depth": (1, 2),
    "block_size": (1, 8, 16),
    "batch_policy": tuple(BatchPolicyName),
    "budget": (20, 64),
}


@dataclass(frozen=True)
class Case:
    architecture: str
    mode: PreemptionMode
    host_pool: HostPool
    prefix_caching: bool
    depth: int
    block_size: int
    batch_policy: BatchPolicyName
    budget: int

    def __str__(self) -> str:
        prefix = "prefix" if self.prefix_caching else "no_prefix"
        return (
            f"{self.architecture}-{self.mode.value}-host{self.host_pool.value}-{prefix}-depth"
            f"{self.depth}-block{self.block_size}-{self.batch_policy.value}-budget{self.budget}"
        )


def cases() -> list[Case]:
    settings = covering(OPTIONS, strength=3)
    return [
        Case(architecture, **setting)  # type: ignore[arg-type]
        for architecture, setting in zip(cycle(ARCHITECTURES), settings, strict=False)
    ]


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_tokens_equal_hugging_face_when_requests_are_preempted(
    case: Case, pair_of: Callable[..., ModelPair]
) -> None:
    pair = pair_of(case.architecture)
    engine = ObservedEngine(
        pair,
        depth=case.depth,
        preempt_at=PREEMPT_AT,
        us_per_block=US_PER_BLOCK_TOKEN * case.block_size,
        block_size=case.block_size,
        num_device_blocks=-(-NUM_DEVICE_TOKENS // case.block_size),
        num_host_blocks=case.host_pool.value // case.block_size,
        prefix_caching=case.prefix_caching,
        preemption_mode=case.mode,
        batch_policy=case.batch_policy,
        max_num_batched_tokens=case.budget,
    )
    prompts = pair.prompts(PROMPT_LENS)
    requests = [
        make_request(index, prompt, max_tokens=NUM_OUTPUT_TOKENS)
        for index, prompt in enumerate(prompts)
    ]

    delivered = engine.serve(*requests)

    assert delivered == [[pair.answer(prompt, NUM_OUTPUT_TOKENS)] for prompt in prompts]
    assert_was_preempted_as_configured(case, engine.core)


def assert_was_preempted_as_configured(case: Case, core: ObservedScheduler) -> None:
    assert core.num_preemptions >= LEAST_PREEMPTIONS
    swaps = case.host_pool is not HostPool.NONE and case.mode is not PreemptionMode.RECOMPUTE
    assert (core.num_swapped_out > 0) == swaps
    if swaps:
        assert core.num_blocks_in > 0
    if not swaps or case.host_pool is HostPool.SMALL:
        assert core.num_recomputed > 0
    if case.host_pool is HostPool.NONE or not (swaps or case.prefix_caching):
        assert core.num_blocks_out == core.num_blocks_in == 0
    if core.num_recomputed == 0:
        # Nobody computes the last token.
        assert core.num_computed_tokens == sum(PROMPT_LENS) + len(PROMPT_LENS) * (
            NUM_OUTPUT_TOKENS - 1
        )
