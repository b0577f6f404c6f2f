from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_service.errors import StepFailed
from executor_service.steps import (
    NO_MOVES,
    BlockMoves,
    RowStatus,
    SamplingParams,
    StepInput,
    StepOutput,
    TokenRuns,
    drafts,
    run_on,
    verify_drafts,
)
from tests.support.fakes.fake_runner import FakeRunner, StepFault, no_fault
from tests.support.steps.step_driver import DrivenSequence, Row, drive, drive_drafted, make_step

VOCAB_SIZE, BLOCK_SIZE, NUM_BLOCKS = 12, 4, 64
PROMPT = [3, 7, 1, 9, 4]
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, num_logprobs=2),
    SamplingParams(temperature=0.8, repetition_penalty=1.5, num_prompt_logprobs=1),
    SamplingParams(temperature=0.0, bad_words_token_ids=((1, 2), (5,))),
    SamplingParams(temperature=0.8, stop_token_ids=frozenset([3, 8])),
)


def make_runner(
    fault: Callable[[StepInput], StepFault] = no_fault, window: int | None = None
) -> FakeRunner:
    return FakeRunner(
        block_size=BLOCK_SIZE,
        num_device_blocks=NUM_BLOCKS,
        num_host_blocks=2,
        vocab_size=VOCAB_SIZE,
        fault=fault,
        sliding_window_tokens=window,
    )


def make_sequences(prompts: Sequence[list[int]], params: Sequence[int]) -> list[DrivenSequence]:
    return [
        DrivenSequence(prompt, 3 + 2 * index, PARAMS[which], seed=index)
        for index, (prompt, which) in enumerate(zip(prompts, params, strict=True))
    ]


@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9),
            st.integers(0, len(PARAMS) - 1),
        ),
        min_size=1,
        max_size=5,
    ),
    window=st.sampled_from([None, 1, 3, 6]),
    chunk_size=st.sampled_from([None, 2]),
    seed=st.integers(0, 10_000),
)
def test_step_brings_the_same_tokens_with_any_drafts(
    rows: list[tuple[list[int], int]], window: int | None, chunk_size: int | None, seed: int
) -> None:
    prompts, params = [prompt for prompt, _ in rows], [which for _, which in rows]
    truths, sequences = make_sequences(prompts, params), make_sequences(prompts, params)
    drive(
        make_runner(window=window),
        truths,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        chunk_size=chunk_size,
    )
    runner = make_runner(window=window)
    drive_drafted(
        runner,
        sequences,
        truths,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        vocab_size=VOCAB_SIZE,
        chunk_size=chunk_size,
        seed=seed,
    )
    for sequence, truth in zip(sequences, truths, strict=True):
        assert sequence.output == truth.output
        assert sequence.logprobs == truth.logprobs
        assert sequence.prompt_logprobs == truth.prompt_logprobs
    assert runner.violations == []


@dataclass(slots=True)
class Watched:
    """Executes steps; `num_rows`, `num_tokens`: of each."""

    runner: FakeRunner
    num_rows: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def execute(self, step: StepInput) -> StepOutput:
        self.num_rows.append(step.num_rows)
        self.num_tokens.append(len(step.token_ids))
        return self.runner.execute(step)


def drafted_step(
    *row_drafts: Sequence[int], samples: Sequence[bool] = (), swap_out: BlockMoves = NO_MOVES
) -> StepInput:
    rows = [
        Row(PROMPT, 0, range(8 * i, 8 * i + 8), len(PROMPT), samples=not samples or samples[i])
        for i in range(len(row_drafts))
    ]
    step = make_step(rows, swap_out=swap_out)
    no_runs = np.zeros(len(rows), np.int32)
    return replace(step, num_run_on_tokens=no_runs, drafts=TokenRuns.of(row_drafts))


def truth(num_tokens: int) -> list[int]:
    sequence = DrivenSequence(PROMPT, num_tokens)
    drive(make_runner(), [sequence], block_size=BLOCK_SIZE, num_blocks=8, chunk_size=None)
    return sequence.output


def test_pass_is_as_ever_when_no_row_has_drafts() -> None:
    watched, step = Watched(make_runner()), drafted_step((), ())
    output = verify_drafts(step, watched.execute)
    assert (watched.num_rows, watched.num_tokens) == ([2], [2 * len(PROMPT)])
    assert output.runs is None
    assert output.sampled_token_ids.tolist() == truth(1) * 2


def test_all_drafts_are_in_one_pass_when_some_rows_have_none() -> None:
    watched, right = Watched(make_runner()), truth(4)
    samples = [True, True, False, True]
    output = verify_drafts(
        drafted_step(right[:3], (), (), [*right[:1], 99], samples=samples), watched.execute
    )
    assert (watched.num_rows, watched.num_tokens) == ([9], [4 * len(PROMPT) + 5])
    assert output.runs is not None
    assert output.runs.rows == [right, right[:1], [], right[:2]]
    assert output.sampled_token_ids.tolist() == [right[3], right[0], -1, right[1]]


def test_longest_drafts_are_shortened_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafts, "MAX_NUM_DRAFTS", 6)
    watched, right = Watched(make_runner()), truth(6)
    output = verify_drafts(drafted_step(right[:5], right[:1], right[:4]), watched.execute)
    assert watched.num_rows == [3 + 2 + 1 + 2]
    assert output.runs is not None
    assert output.runs.rows == [right[:3], right[:2], right[:3]]


def fails_with_drafts(step: StepInput) -> StepFault:
    return StepFault(error=StepFailed("too many rows") if step.num_rows > 2 else None)


def test_drafts_are_left_out_when_the_pass_fails_with_them() -> None:
    watched = Watched(make_runner(fails_with_drafts))
    output = verify_drafts(drafted_step(truth(2), ()), watched.execute)
    assert watched.num_rows == [4, 2]
    assert output.sampled_token_ids.tolist() == truth(1) * 2


def test_blocks_are_not_moved_twice_when_the_pass_fails_with_drafts() -> None:
    watched = Watched(make_runner(fails_with_drafts))
    moves = BlockMoves(np.array([3], np.int32), np.array([1], np.int32))
    with pytest.raises(StepFailed, match="too many rows"):
        verify_drafts(drafted_step(truth(2), (), swap_out=moves), watched.execute)
    assert watched.num_rows == [4]


@pytest.mark.parametrize("status", [RowStatus.INVALID_LOGITS, RowStatus.FAILED])
def test_status_is_that_of_the_row_when_drafts_fail(
    status: RowStatus,
) -> None:
    """Rows have the ids 0 and 1, drafts others."""
    right = truth(3)
    fault = StepFault(rows={1: status, 2: status, 4: status})
    runner = make_runner(lambda _: fault)
    output = verify_drafts(drafted_step(right[:2], right[:2]), runner.execute)
    assert output.row_statuses.tolist() == [RowStatus.OK, status]
    assert list(output.row_errors) == [1]
    assert output.runs is not None
    assert output.runs.rows == [right[:1], []]


@dataclass(slots=True)
class Watch:
    """Ends a run once its rows have `most` tokens; `reports`: the tokens of each call."""

    most: int
    reports: list[list[list[int]]] = field(default_factory=list)

    def __call__(self, runs: TokenRuns) -> bool:
        self.reports.append(runs.rows)
        return int(runs.counts.max()) < self.most


def running_step(watch: Watch | None, *num_run_on: int) -> StepInput:
    step = drafted_step(*[()] * len(num_run_on))
    return replace(step, drafts=None, num_run_on_tokens=np.array(num_run_on, np.int32), watch=watch)


def test_watch_gets_all_tokens_after_each_turn_but_the_last() -> None:
    watch, right = Watch(99), truth(4)
    output = run_on(running_step(watch, 3, 1), make_runner().execute)
    assert output.runs is not None
    assert output.runs.rows == [right, right[:2]]
    assert watch.reports == [
        [right[:1], right[:1]],
        [right[:2], right[:2]],
        [right[:3], right[:2]],
    ]


def test_run_ends_after_the_turn_when_the_watch_says_so() -> None:
    runner, right = make_runner(), truth(3)
    output = run_on(running_step(Watch(2), 9, 0, 9), runner.execute)
    assert output.runs is not None
    assert output.runs.rows == [right[:2], right[:1], right[:2]]
    assert output.sampled_token_ids.tolist() == [right[1], right[0], right[1]]
    assert len(runner.steps) == 2


def test_watch_gets_tokens_of_all_rows_when_a_runner_takes_over_the_rest() -> None:
    """A runner that runs on alone sees rows and tokens of its own part only."""
    watch, right, runner = Watch(3), truth(5), make_runner()

    def execute_run(step: StepInput) -> StepOutput | None:
        return None if step.num_rows == 3 else run_on(step, runner.execute)

    output = run_on(running_step(watch, 0, 4, 4), runner.execute, execute_run)
    assert output.runs is not None
    assert output.runs.rows == [right[:1], right[:3], right[:3]]
    assert watch.reports[:3] == [[right[:1], right[:n], right[:n]] for n in (1, 2, 3)]
