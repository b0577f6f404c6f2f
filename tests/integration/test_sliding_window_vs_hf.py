"""A model that attends to a window in every layer, in a pool that holds little more than windows.

Sequences get far longer than the pool, their tokens equal Hugging Face `generate`, and the blocks
in use stay bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from scheduler_service.scheduler.values import BeamParams, PreemptionMode, Request
from tests.support.covering import covering
from tests.support.models.model_pair import (
    BeamQuestion,
    ModelPair,
    ObservedEngine,
    generate_beams,
    make_request,
)
from tests.support.models.tiny_models import SLIDING_WINDOW

pytestmark = pytest.mark.cases(8)

PairOf = Callable[..., ModelPair]

PROMPT_LENS = (5, 70, 31)
PLENTY = 512


def num_window_blocks(block_size: int) -> int:
    """What one sequence may hold: its window, and a block that is written beyond it."""
    return -(-SLIDING_WINDOW // block_size) + 2


def make_requests(prompts: list[list[int]], num_tokens: int) -> list[Request]:
    return [
        make_request(index, prompt, max_tokens=num_tokens) for index, prompt in enumerate(prompts)
    ]


# -- as long as they want --------------------------------------------------------------------------

NUM_LONG_TOKENS = 90


@dataclass(frozen=True)
class Long:
    """`is_tight`: whether the pool has no more blocks than the sequences need."""

    architecture: str
    block_size: int
    is_tight: bool
    budget: int
    depth: int
    prefix_caching: bool

    @property
    def most_blocks(self) -> int:
        """A chunk of a prompt is written beyond its window, too."""
        chunk = 0 if self.is_tight else self.budget
        each = num_window_blocks(self.block_size) + -(-chunk // self.block_size) + 1
        return len(PROMPT_LENS) * each


def long_cases() -> list[Long]:
    options = {
        "architecture": ("mistral", "phi3"),
        "block_size": (1, 4, 16),
        "is_tight": (True, False),
        "budget": (5, 24),
        "depth": (1, 2, 3),
        "prefix_caching": (True, False),
    }
    return [Long(**setting) for setting in covering(options, strength=2)]  # type: ignore[arg-type]


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", long_cases(), ids=str)
def test_long_sequences_need_a_window_of_blocks_each(case: Long, pair_of: PairOf) -> None:
    pair = pair_of(case.architecture)
    assert pair.served.sliding_window == SLIDING_WINDOW
    engine = ObservedEngine(
        pair,
        depth=case.depth,
        block_size=case.block_size,
        num_device_blocks=case.most_blocks if case.is_tight else PLENTY,
        max_num_batched_tokens=case.budget,
        prefix_caching=case.prefix_caching,
    )
    prompts = pair.prompts(PROMPT_LENS)

    delivered = engine.serve(*make_requests(prompts, NUM_LONG_TOKENS))

    assert delivered == [[pair.answer(prompt, NUM_LONG_TOKENS)] for prompt in prompts]
    core = engine.core
    assert core.max_blocks_in_use <= case.most_blocks
    # In a tight pool, the next chunk of a prompt may take what another then lacks.
    assert core.num_preemptions == 0 or case.is_tight


# -- several sequences -----------------------------------------------------------------------------

WIDTH = 3
NUM_SHARED_TOKENS = 40


@pytest.mark.cases(4)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("preempt_at", [(), range(5, 100, 7)], ids=["undisturbed", "preempted"])
def test_sequences_share_what_is_in_their_windows(
    block_size: int, preempt_at: range, pair_of: PairOf
) -> None:
    pair = pair_of("mistral")
    engine = ObservedEngine(
        pair,
        preempt_at=preempt_at,
        block_size=block_size,
        num_device_blocks=WIDTH * num_window_blocks(block_size),
        max_num_batched_tokens=30,
    )
    prompts = pair.prompts((37, 52))
    beam = BeamParams(WIDTH)
    search = make_request(0, prompts[0], beam=beam, n=WIDTH, max_tokens=NUM_SHARED_TOKENS)
    several = make_request(1, prompts[1], n=WIDTH, max_tokens=NUM_SHARED_TOKENS)

    hypotheses, greedy = engine.serve(search, several)

    assert search.num_preemptions + several.num_preemptions >= len(preempt_at) // 2
    question = BeamQuestion(prompts[0], beam, n=WIDTH, max_tokens=NUM_SHARED_TOKENS)
    assert hypotheses == generate_beams(pair.reference, question)[0]
    assert greedy == [pair.answer(prompts[1], NUM_SHARED_TOKENS)] * WIDTH


@pytest.mark.parametrize(("block_size", "n"), [(1, 2), (1, 4), (4, 3)])
def test_recomputed_sequences_share_a_pool_of_windows(
    block_size: int, n: int, pair_of: PairOf
) -> None:
    """Each may have its whole past computed in one step; they must not take it from each other."""
    pair = pair_of("mistral")
    params: dict[str, Any] = {"n": n, "temperature": 2.0, "max_tokens": NUM_SHARED_TOKENS}
    [prompt] = pair.prompts([20])
    undisturbed = ObservedEngine(pair, block_size=16, num_device_blocks=PLENTY)
    expected = undisturbed.serve(make_request(0, prompt, **params))
    engine = ObservedEngine(
        pair,
        depth=1,
        preempt_at={25},
        block_size=block_size,
        num_device_blocks=n * num_window_blocks(block_size),
        max_num_batched_tokens=1000,
        prefix_caching=False,
        preemption_mode=PreemptionMode.RECOMPUTE,
    )

    delivered = engine.serve(make_request(0, prompt, **params))

    assert engine.core.num_recomputed == 1
    assert delivered == expected
