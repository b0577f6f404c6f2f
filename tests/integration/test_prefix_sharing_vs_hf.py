"""KV that requests share: tokens equal Hugging Face `generate`, and little is computed twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import pytest

from scheduler_service.scheduler.values import BatchPolicyName, PreemptionMode
from tests.support.covering import covering
from tests.support.models.model_pair import ModelPair, ObservedEngine, make_request

pytestmark = pytest.mark.cases(12)

PairOf = Callable[..., ModelPair]

ARCHITECTURES = ("llama", "gemma2", "qwen3", "mistral")
NUM_OUTPUT_TOKENS = 8

# -- stems that do not fit together ----------------------------------------------------------------

STEM_LEN = 48
# Which stem each prompt begins with: some come again at once, some after others took their blocks.
STEMS = (0, 1, 0, 1, 1, 2, 0, 3, 2, 3, 2, 1)
TAIL_LENS = (3, 1, 9, 5)
NUM_DEVICE_TOKENS = 112
ENOUGH_HOST_TOKENS = 512


@dataclass(frozen=True)
class Thrashing:
    """`num_host_tokens`: size of the host pool, which caches prefixes if `host_prefix_cache`."""

    architecture: str
    num_host_tokens: int
    host_prefix_cache: bool
    block_size: int
    depth: int


def thrashing_cases() -> list[Thrashing]:
    options = {
        "num_host_tokens": (0, 64, ENOUGH_HOST_TOKENS),
        "host_prefix_cache": (True, False),
        "block_size": (1, 8, 16),
        "depth": (1, 2),
    }
    settings = covering(options, strength=2)
    return [
        Thrashing(architecture, **setting)  # type: ignore[arg-type]
        for architecture, setting in zip(cycle(ARCHITECTURES), settings, strict=False)
    ]


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", thrashing_cases(), ids=str)
def test_tokens_equal_hugging_face_when_the_prefix_cache_thrashes(
    case: Thrashing, pair_of: PairOf
) -> None:
    pair = pair_of(case.architecture)
    engine = ObservedEngine(
        pair,
        depth=case.depth,
        block_size=case.block_size,
        num_device_blocks=NUM_DEVICE_TOKENS // case.block_size,
        num_host_blocks=case.num_host_tokens // case.block_size,
        host_prefix_cache=case.host_prefix_cache,
        preemption_mode=PreemptionMode.RECOMPUTE,
    )
    stems = pair.prompts([STEM_LEN] * (max(STEMS) + 1))
    tails = pair.prompts([n for n, _ in zip(cycle(TAIL_LENS), STEMS, strict=False)], seed=6)
    prompts = [stems[stem] + tail for stem, tail in zip(STEMS, tails, strict=True)]
    requests = [
        make_request(index, prompt, max_tokens=NUM_OUTPUT_TOKENS)
        for index, prompt in enumerate(prompts)
    ]

    delivered = engine.serve(*requests)

    assert delivered == [[pair.answer(prompt, NUM_OUTPUT_TOKENS)] for prompt in prompts]
    core = engine.core
    assert core.num_evictions > 0
    num_cached = [request.num_cached_tokens for request in requests]
    assert sum(num_cached) > 0
    if not case.host_prefix_cache or case.num_host_tokens == 0:
        assert core.num_blocks_out == core.num_blocks_in == 0
        return
    assert core.num_blocks_out > 0
    assert core.num_blocks_in > 0
    if case.num_host_tokens == ENOUGH_HOST_TOKENS:
        is_known = [stem in STEMS[:index] for index, stem in enumerate(STEMS)]
        assert [count >= STEM_LEN for count in num_cached] == is_known


# -- prompts that arrive together ------------------------------------------------------------------

NUM_SHARING = 32
PREFIX_LEN = 64


@dataclass(frozen=True)
class Arrivals:
    architecture: str
    policy: BatchPolicyName
    cut: tuple[int, int]
    depth: int


def arrivals() -> list[Arrivals]:
    options = {
        "architecture": ARCHITECTURES,
        "policy": tuple(BatchPolicyName),
        # Block size, budget.
        "cut": ((1, 4096), (8, 100), (16, 40), (16, 4096)),
        "depth": (1, 2),
    }
    return [Arrivals(**setting) for setting in covering(options, strength=2)]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", arrivals(), ids=str)
def test_shared_prefix_of_arrivals_is_computed_once(case: Arrivals, pair_of: PairOf) -> None:
    pair = pair_of(case.architecture)
    block_size, budget = case.cut
    engine = ObservedEngine(
        pair,
        depth=case.depth,
        block_size=block_size,
        num_device_blocks=2560 // block_size,
        max_num_seqs=NUM_SHARING,
        max_num_batched_tokens=budget,
        batch_policy=case.policy,
    )
    [prefix] = pair.prompts([PREFIX_LEN])
    # No two begin with the same token, or they would share that, too.
    tails = [[3 + index, *range(20, 20 + index % 4)] for index in range(NUM_SHARING)]
    requests = [
        make_request(index, prefix + tail, max_tokens=3) for index, tail in enumerate(tails)
    ]

    delivered = engine.serve(*requests)

    assert delivered == [[pair.answer(prefix + tail, 3)] for tail in tails]
    # The last token of each is not computed.
    least = PREFIX_LEN + sum(map(len, tails)) + NUM_SHARING * 2
    if pair.served.sliding_window is None:
        assert engine.core.num_computed_tokens == least
    else:
        # Those that come first have room for a window each, and go on side by side.
        assert engine.core.num_computed_tokens < least + (NUM_SHARING - 1) * PREFIX_LEN
