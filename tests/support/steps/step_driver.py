"""A scheduler in miniature, to drive a runner: fixed block tables, chunked prefill, no policy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from executor_service.sampling import SamplingRows
from executor_service.steps import (
    NO_MOVES,
    BlockMoves,
    CrossInput,
    ExecutorInfo,
    Int32Array,
    LogprobColumns,
    ModelInfo,
    ParamRows,
    PoolingParams,
    Runner,
    SamplingParams,
    StepInput,
    StepOutput,
    TokenMasks,
    TokenRuns,
    execute_step,
)

GREEDY = SamplingParams(temperature=0.0)


def make_executor_info(**fields: Any) -> ExecutorInfo:  # noqa: ANN401
    """An executor with a small float32 model; `fields`: those of ExecutorInfo or ModelInfo."""
    model: dict[str, Any] = {
        "name": "m",
        "digest": "d",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "vocab_size": 128,
        "max_model_len": 64,
    }
    model |= {name: fields.pop(name) for name in set(fields) & set(ModelInfo.__slots__)}
    pools = {"block_size": 4, "num_device_blocks": 16, "num_host_blocks": 0, "block_bytes": 1}
    return ExecutorInfo(**{"executor_epoch": 1, "model": ModelInfo(**model), **pools, **fields})


def make_moves(*pairs: tuple[int, int]) -> BlockMoves:
    """Moves of blocks: (source, destination) of each."""
    columns = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return BlockMoves(columns[:, 0].copy(), columns[:, 1].copy())


@dataclass(slots=True)
class DrivenSequence:
    """One sequence. `start_step`: the step at which it joins; `logprobs`: of sampled tokens."""

    prompt: list[int]
    num_output_tokens: int
    params: SamplingParams = GREEDY
    seed: int = 0
    start_step: int = 0
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.output

    @property
    def num_left(self) -> int:
        """Tokens that may follow, of which there are none after a stop token."""
        ends = bool(self.output) and self.output[-1] in self.params.stop_token_ids
        return 0 if ends else self.num_output_tokens - len(self.output)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to compute."""
        return len(self.output) >= self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: `tokens` at positions from `num_computed` on.

    `encoder`: the tokens to encode; `num_encoder` says how many there are where none is to be.
    """

    tokens: Sequence[int]
    num_computed: int
    block_table: Sequence[int]
    num_prompt_tokens: int
    samples: bool = True
    params: SamplingParams = GREEDY
    seed: int = 0
    history: Sequence[int] | None = None
    adapter: str = ""
    cross_blocks: Sequence[int] = ()
    encoder: Sequence[int] = ()
    num_encoder: int | None = None
    pooling: PoolingParams | None = None


def make_step(
    rows: Sequence[Row],
    swap_out: BlockMoves = NO_MOVES,
    swap_in: BlockMoves = NO_MOVES,
    copy: BlockMoves = NO_MOVES,
    step_id: int = 1,
) -> StepInput:
    """Packs rows into a step."""
    tokens = list(itertools.chain.from_iterable(row.tokens for row in rows))
    return StepInput(
        step_id=step_id,
        swap_out=swap_out,
        swap_in=swap_in,
        copy=copy,
        row_ids=np.arange(len(rows), dtype=np.int32),
        num_computed_tokens=np.array([row.num_computed for row in rows], dtype=np.int32),
        num_new_tokens=np.array([len(row.tokens) for row in rows], dtype=np.int32),
        token_ids=np.array(tokens, dtype=np.int32),
        samples=np.array([row.samples for row in rows], dtype=np.bool_),
        block_tables=_tables([row.block_table for row in rows]),
        num_prompt_tokens=np.array([row.num_prompt_tokens for row in rows], dtype=np.int32),
        seeds=np.array([row.seed for row in rows], dtype=np.int64),
        sampling_params=ParamRows.of([row.params for row in rows]),
        histories=[None if row.history is None else list(row.history) for row in rows],
        adapters=[row.adapter for row in rows] if any(row.adapter for row in rows) else (),
        cross=_cross(rows) if any(row.cross_blocks for row in rows) else None,
        pooling=[row.pooling for row in rows] if any(row.pooling for row in rows) else (),
    )


def _cross(rows: Sequence[Row]) -> CrossInput:
    counts = [len(row.encoder) if row.num_encoder is None else row.num_encoder for row in rows]
    return CrossInput(
        num_encoder_tokens=np.array(counts, dtype=np.int32),
        block_tables=_tables([row.cross_blocks for row in rows]),
        encoder_inputs=[np.array(row.encoder, dtype=np.int32) for row in rows],
    )


def _tables(tables: Sequence[Sequence[int]]) -> Int32Array:
    """Padded with -1."""
    columns = np.full((len(tables), max(map(len, tables), default=0)), -1, dtype=np.int32)
    for column, table in zip(columns, tables, strict=True):
        column[: len(table)] = table
    return columns


def drive(
    runner: Runner,
    sequences: Sequence[DrivenSequence],
    *,
    block_size: int,
    num_blocks: int,
    chunk_size: int | None,
    seed: int = 0,
) -> None:
    """Runs all sequences to their end, in each step a chunk of every one that has joined.

    `chunk_size` None: whole prompts. Block ids are shuffled with `seed`. Fills the sequences.
    """
    give_blocks(sequences, block_size, num_blocks, seed)
    for step_id in itertools.count():
        if all(sequence.is_finished for sequence in sequences):
            return
        joined = [s for s in sequences if s.start_step <= step_id and not s.is_finished]
        rows = [next_row(sequence, chunk_size) for sequence in joined]
        output = execute_step(runner, make_step(rows, step_id=step_id + 1))
        _apply(joined, rows, output)


def give_blocks(
    sequences: Sequence[DrivenSequence], block_size: int, num_blocks: int, seed: int
) -> None:
    """Gives each sequence all blocks that it will need, shuffled."""
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    for sequence in sequences:
        num_tokens = len(sequence.prompt) + sequence.num_output_tokens
        sequence.block_table = [free.pop() for _ in range(-(-num_tokens // block_size))]


def next_row(sequence: DrivenSequence, chunk_size: int | None) -> Row:
    """Next row of a sequence: all pending tokens, or the first chunk."""
    pending = sequence.tokens[sequence.num_computed :]
    chunk = pending if chunk_size is None else pending[:chunk_size]
    return Row(
        tokens=chunk,
        num_computed=sequence.num_computed,
        block_table=sequence.block_table,
        num_prompt_tokens=len(sequence.prompt),
        samples=len(chunk) == len(pending),
        params=sequence.params,
        seed=sequence.seed,
        history=sequence.tokens if sequence.params.needs_history else None,
    )


def _apply(joined: Sequence[DrivenSequence], rows: Sequence[Row], output: StepOutput) -> None:
    assert not output.row_errors, output.row_errors
    for sequence, row, token in zip(joined, rows, output.sampled_token_ids.tolist(), strict=True):
        sequence.num_computed += len(row.tokens)
        assert (token >= 0) == row.samples
        if token >= 0:
            sequence.output.append(token)
    for index, _, logprob in entries(output.logprobs):
        joined[index].logprobs.append(logprob)
    for index, position, logprob in entries(output.prompt_logprobs):
        assert position not in joined[index].prompt_logprobs
        joined[index].prompt_logprobs[position] = logprob


def entries(columns: LogprobColumns | None) -> Iterable[tuple[int, int, float]]:
    """Row, position and logprob of each."""
    if columns is None:
        return []
    return zip(
        columns.row_indexes.tolist(),
        columns.positions.tolist(),
        columns.logprobs.tolist(),
        strict=True,
    )


def drive_runs(
    runner: Runner, sequences: Sequence[DrivenSequence], rng: random.Random, most: int = 8
) -> None:
    """Runs all to their ends; in each step some of them, a part of a prompt or up to `most` + 1."""
    step_id = 0
    while unfinished := [(i, each) for i, each in enumerate(sequences) if each.num_left > 0]:
        chosen = [pair for pair in unfinished if rng.random() < 0.8] or unfinished[:1]
        step_id += 1
        rows, permitted = [], []
        for _, each in chosen:
            pending = each.tokens[each.num_computed :]
            chunk = pending[: rng.randint(1, len(pending))] if len(pending) > 1 else pending
            is_whole = len(chunk) == len(pending)
            rows.append(replace(next_row(each, None), tokens=chunk, samples=is_whole))
            permitted.append(min(rng.randint(0, most), each.num_left - 1) if is_whole else 0)
        step = make_step(rows, step_id=step_id)
        step = replace(step, row_ids=np.array([index for index, _ in chosen], np.int32))
        if any(permitted):
            step = replace(step, num_run_on_tokens=np.array(permitted, np.int32))
        output = execute_step(runner, step)
        for index, (_, each) in enumerate(chosen):
            tokens = output.token_ids_of(index)
            assert bool(tokens) == rows[index].samples
            assert len(tokens) <= permitted[index] + 1
            each.num_computed += len(rows[index].tokens) + max(0, len(tokens) - 1)
            each.output += tokens


_MAX_DRAFTS, _MAX_RUN_ON = 5, 3


@dataclass(frozen=True, slots=True)
class _Several:
    """Drafts and extra tokens that a row may get, and the tokens expected of it.

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
        _apply_drafted(
            [sequence for sequence, _ in running], rows, several, execute_step(runner, step)
        )
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


def _apply_drafted(
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


def make_sampling_rows(
    params: Sequence[SamplingParams],
    *,
    seeds: npt.ArrayLike | None = None,
    positions: npt.ArrayLike = 9,
    num_prompt_tokens: int = 4,
    histories: Sequence[Sequence[int] | None] | None = None,
    masks: TokenMasks | None = None,
) -> SamplingRows:
    """One row for each of `params`. A single position is that of all rows; seeds count from 0."""
    count = len(params)
    return SamplingRows(
        params=ParamRows.of(params),
        seeds=np.arange(count, dtype=np.int64) if seeds is None else np.array(seeds, np.int64),
        positions=np.broadcast_to(positions, count).astype(np.int32),
        num_prompt_tokens=np.full(count, num_prompt_tokens, np.int32),
        histories=[None] * count if histories is None else histories,
        masks=masks,
    )
