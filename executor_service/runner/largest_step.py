"""The step that takes the most memory, and how much that is.

Shape letters: R rows of the step, T input tokens over all rows, M blocks of a block table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from executor_service.device.kv_cache import KVCache
from executor_service.device.memory import PeakMeter
from executor_service.errors import StepFailed
from executor_service.runner.prompt_logprob_chunks import MAX_SCORED_TOKENS
from executor_service.steps.block_tables import BlockTables
from executor_service.steps.sampling_params import ParamRows, SamplingParams
from executor_service.steps.step import NO_MOVES, RowStatus, Runner, StepInput, execute_step

# Nearly flat and cut late: all of the vocabulary has to be sorted.
_COSTLY_PARAMS = SamplingParams(
    temperature=1e3,
    top_p=0.999,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    num_logprobs=20,
    num_prompt_logprobs=20,
)


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step there can be.

    `num_rows`, `num_tokens`: rows, and input tokens over all of them, both at least 1.
    `max_model_len`: of a row, in tokens. `attends_back`: the first row, which has the most
    tokens, ends at `max_model_len`, so that it attends to as much as it can; all others begin at
    position 0. What one row attends to takes no memory when the next one does, or takes it by the
    widest table, so that more such rows would take time alone.
    """

    num_rows: int
    num_tokens: int
    max_model_len: int
    attends_back: bool


def make_worst_step(size: StepSize, block_size: int, vocab_size: int) -> StepInput:
    """All rows sample, with everything that takes memory, and have all tokens between them.

    As many prompt tokens are scored as ever are at a time.

    It needs the blocks 0 .. `num_worst_step_blocks` - 1. Rows write over each other, and read what
    was never written: its results mean nothing.
    """
    num_new = _num_new_tokens(size)
    ends = num_new.copy()
    if size.attends_back:
        ends[0] = size.max_model_len
    computed = ends - num_new
    # What is scored last is the token after the input.
    histories = [[0] * (end + 1) for end in ends.tolist()]
    tables = _block_tables(computed, ends, block_size)
    return StepInput(
        step_id=1,
        swap_out=NO_MOVES,
        swap_in=NO_MOVES,
        copy=NO_MOVES,
        row_ids=np.arange(len(num_new), dtype=np.int32),
        num_computed_tokens=computed.astype(np.int32),
        num_new_tokens=num_new.astype(np.int32),
        token_ids=(np.arange(num_new.sum()) % vocab_size).astype(np.int32),
        samples=np.ones(len(num_new), np.bool_),
        block_tables=tables,
        tables=BlockTables.of(tables),
        num_prompt_tokens=_num_prompt_tokens(computed, num_new),
        seeds=np.arange(len(num_new), dtype=np.int64),
        sampling_params=ParamRows.of([_COSTLY_PARAMS] * len(num_new)),
        histories=histories,
    )


def num_worst_step_blocks(size: StepSize, block_size: int) -> int:
    """How many blocks the step needs."""
    # Block 0, those of the first row, and one more where its tokens begin inside a block.
    return 2 + -(-int(_num_new_tokens(size)[0]) // block_size)


def measure_worst_step(
    size: StepSize,
    cache: KVCache,
    vocab_size: int,
    make_runner: Callable[[], Runner],
    meter: PeakMeter,
) -> int:
    """Bytes that a runner on `cache` takes beside it to be made and to run the step.

    Raises StepFailed if it cannot run it.
    """
    # On a CPU memory is taken when it is first written.
    for pool in (*cache.key_pools, *cache.value_pools):
        pool.zero_()
    step = make_worst_step(size, cache.block_size, vocab_size)

    def run() -> None:
        output = execute_step(make_runner(), step)
        for row, message in output.row_errors.items():
            if output.row_statuses[row] == RowStatus.FAILED:
                raise StepFailed(f"the largest step cannot be run: {message}")

    return meter.peak_bytes(run)


def _num_new_tokens(size: StepSize) -> np.ndarray:
    """[R] int64, falling: one for each row, and the rest for as few as possible."""
    num_rows = min(size.num_rows, size.num_tokens)
    most = size.max_model_len - 1
    rest = size.num_tokens - num_rows - most * np.arange(num_rows)
    return np.asarray(1 + np.clip(rest, 0, most))


def _num_prompt_tokens(computed: np.ndarray, num_new: np.ndarray) -> np.ndarray:
    """[R] int32: those of the first rows are so many that MAX_SCORED_TOKENS are scored."""
    num_before = np.cumsum(num_new) - num_new
    num_scored = np.clip(MAX_SCORED_TOKENS - num_before, 0, num_new)
    return np.asarray(computed + num_scored + 1, np.int32)


def _block_tables(computed: np.ndarray, ends: np.ndarray, block_size: int) -> np.ndarray:
    """[R, M] int32: block 0 for what lies before the row's tokens, others for the tokens."""
    indexes = np.arange(-(-int(ends.max()) // block_size))
    tables = indexes - (computed // block_size)[:, None] + 1
    is_used = indexes < -(-ends // block_size)[:, None]
    return np.where(is_used, np.maximum(tables, 0), -1).astype(np.int32)
