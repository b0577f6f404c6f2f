"""Compares requests of several sequences (n, best_of, beam search) with Hugging Face.

They run side by side in pools that hold all of them, or little more than the largest of them. Beams
fork and end all the time, so their blocks are shared and copied.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from scheduler_service.scheduler.values import (
    BeamParams,
    EarlyStopping,
    FinishReason,
    PreemptionMode,
    Request,
)
from tests.support.covering import covering
from tests.support.models.model_pair import (
    BeamQuestion,
    ModelPair,
    ObservedEngine,
    ObservedScheduler,
    generate_beams,
    make_request,
)

PairOf = Callable[..., ModelPair]

SEED = -5
NUM_OUTPUT_TOKENS = 14
PROMPT_LENS = (21, 21, 21, 7)
GREEDY_N, SAMPLED_N, BEST_N, BEST_OF = 3, 4, 2, 5
# All but the first sequence copy the last block of the prompt, if it is not full.
NUM_FORKS = GREEDY_N + SAMPLED_N + BEST_OF - 3
SAMPLED: dict[str, Any] = {"temperature": 3.0, "max_tokens": NUM_OUTPUT_TOKENS}
# Enough stop tokens for completions of different lengths.
CHOSEN = SAMPLED | {"stop_token_ids": frozenset(range(20, 36))}
LOGPROB_TOLERANCE = 1e-3


class Pressure(Enum):
    """What becomes of requests that do not fit; NONE: all fit."""

    NONE = "none"
    SWAP = "swap"
    RECOMPUTE = "recompute"

    def options(self, block_size: int) -> dict[str, Any]:
        """Returns how an engine preempts."""
        if self is Pressure.SWAP:
            blocks = 1024 // block_size
            return {"num_host_blocks": blocks, "preemption_mode": PreemptionMode.SWAP}
        return {"num_host_blocks": 0, "preemption_mode": PreemptionMode.RECOMPUTE}


@dataclass(frozen=True)
class Case:
    architecture: str
    block_size: int
    pressure: Pressure
    prefix_caching: bool
    depth: int

    def num_device_blocks(self, sliding_window: int | None) -> int:
        """As many as the request with most sequences may need, or plenty."""
        if self.pressure is Pressure.NONE:
            return 1024 // self.block_size
        if sliding_window is not None:
            return BEST_OF * (self._num_blocks(sliding_window) + 2)
        num_shared = (PROMPT_LENS[2] - 1) // self.block_size
        num_own = self._num_blocks(PROMPT_LENS[2] + NUM_OUTPUT_TOKENS) - num_shared
        return num_shared + BEST_OF * num_own

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def cases() -> list[Case]:
    options = {
        "architecture": ("llama", "qwen3", "gemma2", "mistral"),
        "block_size": (1, 8, 16),
        "pressure": tuple(Pressure),
        "prefix_caching": (True, False),
        "depth": (1, 2),
    }
    return [Case(**setting) for setting in covering(options, strength=2)]  # type: ignore[arg-type]


@pytest.mark.cases(6)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_sequences_equal_requests_of_one_sequence(case: Case, pair_of: PairOf) -> None:
    pair = pair_of(case.architecture)
    engine = ObservedEngine(
        pair,
        depth=case.depth,
        preempt_at=() if case.pressure is Pressure.NONE else range(4, 60, 9),
        block_size=case.block_size,
        num_device_blocks=case.num_device_blocks(pair.served.sliding_window),
        prefix_caching=case.prefix_caching,
        **case.pressure.options(case.block_size),
    )
    prompts = pair.prompts(PROMPT_LENS)
    requests = make_requests(prompts)

    greedy, sampled, best, single = engine.serve(*requests)

    assert greedy == [pair.answer(prompts[0], NUM_OUTPUT_TOKENS)] * GREEDY_N
    assert sampled == alone(pair, prompts[1], SAMPLED_N, SAMPLED)
    assert best == best_completions(pair, prompts[2], requests[2])
    assert single == [pair.answer(prompts[3], NUM_OUTPUT_TOKENS)]
    assert len(set(map(tuple, sampled))) == SAMPLED_N
    assert_was_run_as_configured(case, engine.core)


def assert_was_run_as_configured(case: Case, core: ObservedScheduler) -> None:
    assert (core.num_preemptions > 0) == (case.pressure is not Pressure.NONE)
    assert (core.num_swapped_out > 0) == (case.pressure is Pressure.SWAP)
    if case.block_size == 1:
        assert core.num_blocks_copied == 0
    elif case.pressure is Pressure.NONE:
        assert core.num_blocks_copied == NUM_FORKS
    else:
        assert core.num_blocks_copied >= NUM_FORKS


def make_requests(prompts: list[list[int]]) -> list[Request]:
    greedy, sampled, chosen, single = prompts
    return [
        make_request(0, greedy, max_tokens=NUM_OUTPUT_TOKENS, n=GREEDY_N),
        make_request(1, sampled, seed=SEED, n=SAMPLED_N, **SAMPLED),
        make_request(2, chosen, seed=SEED, n=BEST_N, best_of=BEST_OF, **CHOSEN),
        make_request(3, single, max_tokens=NUM_OUTPUT_TOKENS),
    ]


def alone(
    pair: ModelPair, prompt: list[int], num_sequences: int, params: dict[str, Any]
) -> list[list[int]]:
    """The sequences of a request as requests, each with the seed that `scheduler.proto` says."""
    engine = ObservedEngine(pair, depth=1, block_size=16, num_device_blocks=64)
    words = [(SEED + index * 0x9E3779B97F4A7C15) % 2**64 for index in range(num_sequences)]
    seeds = [word - 2**64 if word >= 2**63 else word for word in words]
    requests = [
        make_request(index, prompt, seed=seed, **params) for index, seed in enumerate(seeds)
    ]
    return [tokens for [tokens] in engine.serve(*requests)]


def best_completions(pair: ModelPair, prompt: list[int], request: Request) -> list[list[int]]:
    """Those with the highest mean logprob by Hugging Face; checks the sums of `request`."""
    candidates = alone(pair, prompt, BEST_OF, CHOSEN)
    sums = {tuple(tokens): sum(pair.logprobs(prompt, tokens)) for tokens in candidates}
    ranked = sorted(candidates, key=lambda tokens: -sums[tuple(tokens)] / len(tokens))
    for completion in request.completions:
        expected = sums[tuple(completion.token_ids)]
        assert completion.cumulative_logprob == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    return ranked[:BEST_N]


# -- beam search ---------------------------------------------------------------------------------

# A small vocabulary, so that stop tokens are often among the best.
VOCAB_SIZE = 32
NUM_SEARCHES = 3
MAX_WIDTH = 4
SEARCH_PROMPT_LENS = (6, 13, 22)
MAX_TOKENS = (7, 12, 18)
SCORE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Search:
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
        num_tokens = max(SEARCH_PROMPT_LENS) + max(MAX_TOKENS)
        if sliding_window is not None:
            num_tokens = min(num_tokens, sliding_window + 2 * self.block_size)
        return MAX_WIDTH * -(-num_tokens // self.block_size)


def search_cases() -> list[Search]:
    options = {
        "architecture": ("llama", "qwen3", "gemma2", "mistral"),
        "pressure": tuple(Pressure),
        "block_size": (1, 4, 16),
        "depth": (1, 2),
        "prefix_caching": (True, False),
    }
    settings = covering(options, strength=2)
    return [Search(**setting, seed=seed) for seed, setting in enumerate(settings)]  # type: ignore[arg-type]


def make_questions(seed: int) -> list[BeamQuestion]:
    chance = random.Random(seed)
    questions = []
    for _ in range(NUM_SEARCHES):
        width = chance.randint(2, MAX_WIDTH)
        penalty = chance.choice((-1.0, 0.0, 0.5, 1.0, 2.0))
        num_stop_tokens = chance.choice((0, 2, 4))
        questions.append(
            BeamQuestion(
                prompt=[
                    chance.randrange(3, VOCAB_SIZE)
                    for _ in range(chance.choice(SEARCH_PROMPT_LENS))
                ],
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


@pytest.mark.cases(6)
@pytest.mark.parametrize("case", search_cases(), ids=str)
def test_beam_searches_equal_those_of_hugging_face(case: Search, pair_of: PairOf) -> None:
    pair = pair_of(case.architecture, vocab_size=VOCAB_SIZE)
    engine = ObservedEngine(
        pair,
        depth=case.depth,
        preempt_at=() if case.pressure is Pressure.NONE else range(3, 60, 4),
        block_size=case.block_size,
        num_device_blocks=case.num_device_blocks(pair.served.sliding_window),
        prefix_caching=case.prefix_caching,
        **case.pressure.options(case.block_size),
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
