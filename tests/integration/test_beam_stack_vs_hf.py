"""Beam search through core, step contract and executor equals that of Hugging Face.

Beams fork and end all the time, so their blocks are shared and copied; here they are also swapped
out, computed again and scheduled beside others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import pytest

from scheduler_service.scheduler.values.config import PreemptionMode
from scheduler_service.scheduler.values.request import FinishReason, Request
from scheduler_service.scheduler.values.sampling_params import BeamParams, EarlyStopping
from tests.support.core.observed_engine import ObservedEngine, make_request
from tests.support.covering import covering
from tests.support.models.hugging_face import BeamQuestion, generate_beams
from tests.support.models.model_pair import ModelPair

PairOf = Callable[..., ModelPair]

# A small vocabulary, so that stop tokens are often among the best.
VOCAB_SIZE = 32
NUM_SEARCHES = 3
MAX_WIDTH = 4
PROMPT_LENS = (6, 13, 22)
MAX_TOKENS = (7, 12, 18)
SCORE_TOLERANCE = 1e-3


class Pressure(Enum):
    """What becomes of searches that do not fit; NONE: all fit."""

    NONE = "none"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Case:
    architecture: str
    pressure: Pressure
    block_size: int
    depth: int
    prefix_caching: bool
    seed: int

    def __str__(self) -> str:
        prefix = "prefix" if self.prefix_caching else "no_prefix"
        return (
            f"{self.architecture}-{self.pressure.value}-block{self.block_size}-depth{self.depth}"
            f"-{prefix}"
        )

    def num_device_blocks(self, sliding_window: int | None) -> int:
        """As many as the largest search may need, or plenty."""
        if self.pressure is Pressure.NONE:
            return 1024 // self.block_size
        num_tokens = max(PROMPT_LENS) + max(MAX_TOKENS)
        if sliding_window is not None:
            num_tokens = min(num_tokens, sliding_window + 2 * self.block_size)
        return MAX_WIDTH * -(-num_tokens // self.block_size)


def cases() -> list[Case]:
    options = {
        "architecture": ("llama", "qwen3", "gemma2", "mistral"),
        "pressure": tuple(Pressure),
        "block_size": (1, 4, 16),
        "depth": (1, 2),
        "prefix_caching": (True, False),
    }
    settings = covering(options, strength=2)
    return [Case(**setting, seed=seed) for seed, setting in enumerate(settings)]  # type: ignore[arg-type]


def make_questions(seed: int) -> list[BeamQuestion]:
    chance = random.Random(seed)
    questions = []
    for _ in range(NUM_SEARCHES):
        width = chance.randint(2, MAX_WIDTH)
        penalty = chance.choice((-1.0, 0.0, 0.5, 1.0, 2.0))
        num_stop_tokens = chance.choice((0, 2, 4))
        questions.append(
            BeamQuestion(
                prompt=[chance.randrange(3, VOCAB_SIZE) for _ in range(chance.choice(PROMPT_LENS))],
                params=BeamParams(width, penalty, chance.choice(tuple(EarlyStopping))),
                n=chance.choice((1, width)),
                max_tokens=chance.choice(MAX_TOKENS),
                min_tokens=chance.choice((0, 0, 3)),
                stop_token_ids=frozenset(chance.sample(range(3, VOCAB_SIZE), num_stop_tokens)),
            )
        )
    return questions


def make_beam_request(index: int, question: BeamQuestion) -> Request:
    return make_request(
        index,
        question.prompt,
        beam=question.params,
        n=question.n,
        max_tokens=question.max_tokens,
        min_tokens=question.min_tokens,
        stop_token_ids=question.stop_token_ids,
    )


@pytest.mark.parametrize("case", cases(), ids=str)
def test_beam_searches_equal_those_of_hugging_face(case: Case, pair_of: PairOf) -> None:
    pair = pair_of(case.architecture, vocab_size=VOCAB_SIZE)
    engine = ObservedEngine(
        pair,
        depth=case.depth,
        preempt_at=() if case.pressure is Pressure.NONE else range(3, 60, 4),
        block_size=case.block_size,
        num_device_blocks=case.num_device_blocks(pair.served.sliding_window),
        num_host_blocks=1024 // case.block_size if case.pressure is Pressure.SWAP else 0,
        prefix_caching=case.prefix_caching,
        preemption_mode=(
            PreemptionMode.SWAP if case.pressure is Pressure.SWAP else PreemptionMode.RECOMPUTE
        ),
        max_num_seqs=NUM_SEARCHES * MAX_WIDTH + 1,
    )
    questions = make_questions(case.seed)
    searches = [make_beam_request(index, asked) for index, asked in enumerate(questions, 1)]
    [prompt] = pair.prompts([11])

    # Somebody greedy keeps the pipeline filled.
    greedy, *_ = engine.serve(make_request(0, prompt, max_tokens=30), *searches)

    for question, search in zip(questions, searches, strict=True):
        assert_equals_hugging_face(pair, question, search)
    assert greedy == [pair.answer(prompt, 30)]
    core, is_pressed = engine.core, case.pressure is not Pressure.NONE
    assert any(search.num_preemptions > 0 for search in searches) == is_pressed
    assert (core.num_swapped_out > 0) == (case.pressure is Pressure.SWAP)
    assert (core.num_blocks_copied > 0) == (case.block_size > 1)


def assert_equals_hugging_face(pair: ModelPair, question: BeamQuestion, search: Request) -> None:
    expected_token_ids, expected_scores = generate_beams(pair.reference, question)
    found = search.completions
    assert [completion.token_ids for completion in found] == expected_token_ids
    assert [completion.score for completion in found] == pytest.approx(
        expected_scores, abs=SCORE_TOLERANCE
    )
    for completion in found:
        last = completion.token_ids[-1]
        stopped = last in question.stop_token_ids
        assert completion.stop_token_id == (last if stopped else None)
        assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        logprobs = pair.logprobs(question.prompt, completion.token_ids)
        assert completion.cumulative_logprob == pytest.approx(sum(logprobs), abs=SCORE_TOLERANCE)
