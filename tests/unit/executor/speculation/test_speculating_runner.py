"""Rows that run on by guesses get the tokens that they get without, in fewer passes.

Both models are fakes whose tokens follow from what is stored in their pools: the draft guesses
right only if it has computed all that the model has.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.errors import StepFailed
from executor_service.speculation import DraftLimits, DraftModel, SpeculatingRunner
from executor_service.steps import Int32Array, SamplingParams, StepInput, StepOutput, TokenRuns
from tests.support.fakes.fake_runner import FakeRunner, StepFault, expected_tokens, no_fault
from tests.support.steps.step_driver import GREEDY, DrivenSequence, drive_runs

BLOCK_SIZE = 4
NUM_BLOCKS = 256
VOCAB_SIZE = 64
MAX_MODEL_LEN = 1000
RANDOM = SamplingParams(temperature=1.0)
_SEEDS = st.integers(0, 2**32)


class _Clock:
    """Time that passes with passes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class _Pair:
    """A model, its draft, and a runner of both."""

    model: FakeRunner
    draft: FakeRunner
    runner: SpeculatingRunner
    clock: _Clock


def make_pair(
    draft_fault: Callable[[StepInput], StepFault] = no_fault,
    seconds: tuple[float, float] = (1.0, 0.01),
    **limits: int,
) -> _Pair:
    """`seconds`: of a pass of the model, and for each token of it; the draft's takes 0.05."""
    clock = _Clock()

    def pass_of_model(step: StepInput) -> StepFault:
        clock.now_s += seconds[0] + seconds[1] * len(step.token_ids)
        return no_fault(step)

    def pass_of_draft(step: StepInput) -> StepFault:
        clock.now_s += 0.05
        return draft_fault(step)

    model, draft = (
        FakeRunner(
            block_size=BLOCK_SIZE,
            num_device_blocks=NUM_BLOCKS,
            vocab_size=VOCAB_SIZE,
            fault=fault,
        )
        for fault in (pass_of_model, pass_of_draft)
    )
    known: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "target_vocab_size": VOCAB_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_tokens": 64,
    }
    proposer = DraftModel(draft.execute, DraftLimits(**(known | limits)))
    return _Pair(model, draft, SpeculatingRunner(model, proposer, clock), clock)


def make_sequences(
    rng: random.Random, count: int, params: SamplingParams = GREEDY
) -> list[DrivenSequence]:
    blocks = list(range(NUM_BLOCKS))
    rng.shuffle(blocks)
    sequences = []
    for number in range(count):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        num_output = rng.randint(1, 30)
        num_blocks = -(-(len(prompt) + num_output) // BLOCK_SIZE)
        table = [blocks.pop() for _ in range(num_blocks)]
        sequences.append(DrivenSequence(prompt, num_output, params, number + 1, block_table=table))
    return sequences


def assert_tokens_are_right(sequences: list[DrivenSequence]) -> None:
    for each in sequences:
        seed = each.seed if each.params.temperature > 0 else 0
        expected = expected_tokens(each.prompt, len(each.output), seed, VOCAB_SIZE)
        assert each.output == expected
        assert len(each.output) == each.num_output_tokens


def run_some(pair: _Pair, rng: random.Random, params: SamplingParams = GREEDY) -> None:
    """Runs a few random sequences, whose tokens must be those of the model alone."""
    sequences = make_sequences(rng, rng.randint(1, 3), params)
    drive_runs(pair.runner, sequences, rng)
    assert_tokens_are_right(sequences)
    assert not pair.model.violations


def run_one(pair: _Pair, num_output: int = 200, **fields: Any) -> DrivenSequence:  # noqa: ANN401
    """The same for one sequence, with up to 8 guesses a step."""
    sequence = _one(num_output, **fields)
    drive_runs(pair.runner, [sequence], random.Random(1), most=8)
    assert_tokens_are_right([sequence])
    return sequence


@settings(max_examples=30)
@given(_SEEDS, st.sampled_from([GREEDY, RANDOM]))
def test_tokens_are_those_of_the_model_when_guesses_are_right(
    seed: int, params: SamplingParams
) -> None:
    rng = random.Random(seed)
    pair = make_pair()
    run_some(pair, rng, params)
    assert not pair.draft.violations


@settings(max_examples=30)
@given(_SEEDS)
def test_tokens_are_those_of_the_model_when_guesses_are_random(seed: int) -> None:
    rng = random.Random(seed)
    # The draft begins with nothing in its blocks each time, so it says something else.
    pair = make_pair(lambda _: _spoil(pair, rng))
    run_some(pair, rng)


def _spoil(pair: _Pair, rng: random.Random) -> StepFault:
    if rng.random() < 0.5:
        pair.draft.spoil(range(NUM_BLOCKS))
    return StepFault()


@settings(max_examples=30)
@given(_SEEDS)
def test_tokens_are_those_of_the_model_when_the_draft_fails(seed: int) -> None:
    rng = random.Random(seed)

    def fault(_step: StepInput) -> StepFault:
        return StepFault(error=StepFailed("broken") if rng.random() < 0.3 else None)

    run_some(make_pair(fault), rng)


def _one(num_output: int = 200, params: SamplingParams = GREEDY) -> DrivenSequence:
    return DrivenSequence([5, 6, 7], num_output, params, seed=3, block_table=list(range(60)))


def test_model_makes_few_passes_when_guesses_are_right() -> None:
    pair = make_pair()
    sequence = run_one(pair)
    # Of some 200 / 5 steps, hardly any takes two passes.
    assert len(pair.model.steps) < 60
    # Of each pass that samples one token is the model's own.
    assert pair.runner.totals.num_accepted >= len(sequence.output) - len(pair.model.steps)
    assert pair.runner.totals.num_rejected == 0


def test_model_makes_no_pass_more_when_computing_binds_it() -> None:
    pair = make_pair(seconds=(0.0, 1.0))
    run_one(pair)
    assert len(pair.draft.steps) < 25


def test_nothing_is_guessed_beyond_the_length_of_the_draft() -> None:
    pair = make_pair(max_model_len=20)
    run_one(pair)
    written = (pair.draft.device_chains != pair.model.device_chains).sum()
    assert written >= 200 - 20
    assert not pair.draft.violations


def test_tokens_of_only_one_vocabulary_are_not_guessed() -> None:
    pair = make_pair()
    fed: list[int] = []
    guessed: list[int] = []

    def watched(step: StepInput) -> StepOutput:
        fed.extend(step.token_ids.tolist())
        return pair.draft.execute(step)

    class Watched(DraftModel):
        def propose(self, turn: StepInput, wanted: Int32Array) -> TokenRuns:
            guesses = super().propose(turn, wanted)
            guessed.extend(guesses.token_ids.tolist())
            return guesses

    limits = DraftLimits(40, 32, MAX_MODEL_LEN, 64)
    runner = SpeculatingRunner(pair.model, Watched(watched, limits), pair.clock)
    sequence = _one()
    drive_runs(runner, [sequence], random.Random(1), most=8)
    assert_tokens_are_right([sequence])
    assert 32 <= max(fed) < 40
    assert guessed
    assert max(guessed) < 32


def test_row_ends_at_its_stop_token_when_it_was_guessed() -> None:
    truth = expected_tokens([5, 6, 7], 40, 0, VOCAB_SIZE)
    stop = truth[20]
    end = truth.index(stop) + 1
    pair = make_pair()
    sequence = _one(params=replace(GREEDY, stop_token_ids=frozenset({stop})))
    drive_runs(pair.runner, [sequence], random.Random(2), most=8)
    assert sequence.output == truth[:end]


@pytest.mark.parametrize("num_prompt", [3, 33])
def test_draft_computes_prompts_before_the_next_step_when_they_are_long(num_prompt: int) -> None:
    pair, rng = make_pair(), random.Random(0)
    sequence = DrivenSequence([5] * num_prompt, 1, seed=3, block_table=list(range(10)))
    drive_runs(pair.runner, [sequence], rng)
    before = len(pair.draft.steps)
    drive_runs(pair.runner, [DrivenSequence([9], 1, seed=4, block_table=[20])], rng)
    assert (len(pair.draft.steps) - before > 0) == (num_prompt > 16 and before == 0)


def test_draft_guesses_at_once_when_it_was_not_asked_for_long() -> None:
    pair = make_pair()
    sequence = _one(150)
    drive_runs(pair.runner, [sequence], random.Random(0), most=0)
    assert not pair.draft.steps
    sequence.num_output_tokens = 200
    before = len(pair.model.steps)
    drive_runs(pair.runner, [sequence], random.Random(0), most=8)
    assert_tokens_are_right([sequence])
    assert len(pair.model.steps) - before < 20
    assert not pair.draft.violations
