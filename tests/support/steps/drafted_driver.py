"""Drives sequences whose rows get several tokens a step, when it is known what they will bring."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from executor_service.steps.step import Runner, StepOutput, execute_step
from executor_service.steps.token_runs import TokenRuns
from tests.support.steps.step_driver import (
    DrivenSequence,
    Row,
    entries,
    give_blocks,
    make_step,
    next_row,
)

_MAX_DRAFTS, _MAX_RUN_ON = 5, 3


@dataclass(frozen=True, slots=True)
class _Several:
    """What a row may get in a step, and the tokens that it is to get.

    `num_right`: of the drafts.
    """

    drafts: Sequence[int]
    num_right: int
    num_run_on: int
    expected: Sequence[int]


def drive_drafted(
    runner: Runner,
    sequences: Sequence[DrivenSequence],
    truths: Sequence[DrivenSequence],
    *,
    block_size: int,
    num_blocks: int,
    vocab_size: int,
    chunk_size: int | None = None,
    seed: int = 0,
) -> int:
    """Runs all `sequences` to their end, with drafts of any quality, and short runs.

    `truths`: the same sequences as they are without. Each step must bring what these have: as many
    tokens as there are right drafts, and as are run on for, up to one that ends the sequence.
    Fills the sequences. Returns how many drafts were taken.
    """
    rng, num_taken, step_id = random.Random(seed), 0, 0
    give_blocks(sequences, block_size, num_blocks, seed)
    while not all(sequence.is_finished for sequence in sequences):
        step_id += 1
        running = [pair for pair in zip(sequences, truths, strict=True) if not pair[0].is_finished]
        rows = [next_row(sequence, chunk_size) for sequence, _ in running]
        several = [
            _draft(row, sequence, truth, vocab_size, rng)
            for row, (sequence, truth) in zip(rows, running, strict=True)
        ]
        step = replace(
            make_step(rows, step_id=step_id),
            num_run_on_tokens=np.array([each.num_run_on for each in several], np.int32),
            drafts=TokenRuns.of([each.drafts for each in several]),
        )
        _apply([sequence for sequence, _ in running], rows, several, execute_step(runner, step))
        num_taken += sum(each.num_right for each in several)
    return num_taken


def _draft(
    row: Row, sequence: DrivenSequence, truth: DrivenSequence, vocab_size: int, rng: random.Random
) -> _Several:
    if not row.samples:
        return _Several((), 0, 0, ())
    rest = truth.output[len(sequence.output) :]
    drafts = rest[: rng.randint(0, min(_MAX_DRAFTS, len(rest) - 1))]
    num_right = rng.randint(0, len(drafts))
    for index in range(num_right, len(drafts)):
        # Behind a wrong one, anything.
        drafts[index] = (drafts[index] + rng.choice((0, 1)) + (index == num_right)) % vocab_size
    while num_right < len(drafts) and drafts[num_right] == rest[num_right]:
        num_right += 1
    num_run_on = rng.randint(0, min(_MAX_RUN_ON, len(rest) - 1 - len(drafts)))
    expected = rest[: 1 + num_right + num_run_on]
    for index, token_id in enumerate(expected):
        if token_id in sequence.params.stop_token_ids:
            expected = expected[: index + 1]
            break
    return _Several(drafts, num_right, num_run_on, expected)


def _apply(
    running: Sequence[DrivenSequence],
    rows: Sequence[Row],
    several: Sequence[_Several],
    output: StepOutput,
) -> None:
    assert not output.row_errors, output.row_errors
    assert output.runs is not None
    assert output.runs.rows == [list(each.expected) for each in several]
    assert [tokens[-1] if tokens else -1 for tokens in output.runs.rows] == (
        output.sampled_token_ids.tolist()
    )
    for sequence, row, tokens in zip(running, rows, output.runs.rows, strict=True):
        sequence.num_computed += len(row.tokens) + max(0, len(tokens) - 1)
        sequence.output += tokens
    for index, position, logprob in entries(output.logprobs):
        sequence = running[index]
        assert position == len(sequence.prompt) + len(sequence.logprobs)
        sequence.logprobs.append(logprob)
    for index, position, logprob in entries(output.prompt_logprobs):
        assert position not in running[index].prompt_logprobs
        running[index].prompt_logprobs[position] = logprob
