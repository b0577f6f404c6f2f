"""Scheduler core, step contract and executor together: tokens equal to Hugging Face `generate`.

Float32 and greedy, for every architecture of the correctness bar, over block sizes, token budgets,
forced preemption and pipelining depths. With Llama every three of their values come together; every
two of them, and every one with every architecture, among the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from scheduler_service.scheduler.values import FinishReason
from tests.support.covering import covering
from tests.support.models.model_pair import ModelPair, ObservedEngine, make_request

pytestmark = pytest.mark.cases(20)

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "phi3",
    "olmo2",
    "gpt_neox",
    "qwen3_moe",
)
BLOCK_SIZES = (1, 8, 16, 256)
BUDGETS = (1, 7, 64, 4096)
DEPTHS = (1, 2, 3)
NUM_OUTPUT_TOKENS = 12
SHORT_PROMPTS = (5, 23, 40)
# Three sequences that each cross into their second block of 256.
LONG_PROMPTS = (250, 252, 249)


@dataclass(frozen=True)
class Case:
    """One combination of the correctness bar."""

    block_size: int
    budget: int
    preempt: bool
    depth: int

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        return LONG_PROMPTS if self.preempt and self.block_size == 256 else SHORT_PROMPTS

    @property
    def num_blocks(self) -> int:
        """Enough for all, or one block more than the longest sequence needs."""
        needs = [-(-(n + NUM_OUTPUT_TOKENS) // self.block_size) for n in self.prompt_lens]
        return max(needs) + 1 if self.preempt else sum(needs)


def serve(pair: ModelPair, case: Case) -> ObservedEngine:
    """The engine after it has served the prompts of `case`."""
    engine = ObservedEngine(
        pair,
        depth=case.depth,
        # Ever rarer, so that a prompt of many chunks gets through.
        preempt_at={2, 4, 9, 27, 81} if case.preempt else (),
        block_size=case.block_size,
        num_device_blocks=case.num_blocks,
        max_num_batched_tokens=case.budget,
        # A core that knows of no window keeps what is behind it; nobody reads it.
        sliding_window=None,
    )
    prompts = pair.prompts(case.prompt_lens)
    engine.serve(
        *(
            make_request(index, prompt, max_tokens=NUM_OUTPUT_TOKENS)
            for index, prompt in enumerate(prompts)
        )
    )
    return engine


def cases() -> list[tuple[Any, Case]]:
    options = {
        "block_size": BLOCK_SIZES,
        "budget": BUDGETS,
        "preempt": (False, True),
        "depth": DEPTHS,
    }
    llamas: list[dict[str, Any]] = [
        {"architecture": "llama", **case} for case in covering(options, strength=3)
    ]
    others: list[dict[str, Any]] = covering(
        {"architecture": ARCHITECTURES[1:], **options}, strength=2
    )
    return [(case.pop("architecture"), Case(**case)) for case in (*llamas, *others)]


@pytest.mark.cases(8)
@pytest.mark.parametrize(("architecture", "case"), cases(), ids=lambda value: str(value))
def test_tokens_equal_hugging_face_generate(
    architecture: str, case: Case, pair_of: Callable[[str], ModelPair]
) -> None:
    pair = pair_of(architecture)
    engine = serve(pair, case)
    answers = [pair.answer(prompt, NUM_OUTPUT_TOKENS) for prompt in pair.prompts(case.prompt_lens)]
    assert list(engine.delivered.values()) == [[answer] for answer in answers]
    assert all(request.finish_reason is FinishReason.LENGTH for request in engine.finished)
    assert (engine.scheduler.num_preemptions > 0) == case.preempt
