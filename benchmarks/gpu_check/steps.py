"""Steps as an executor gets them, over rows of given lengths."""

from __future__ import annotations

import numpy as np

from benchmarks.gpu_check.sizes import Rows
from executor_service.steps import NO_MOVES, Int32Array, ParamRows, SamplingParams, StepInput

GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.7)
TOP_P = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)
PENALTIES = SamplingParams(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.1)
LOGPROBS = SamplingParams(temperature=0.7, num_logprobs=5)
ALL_PARAMS = {
    "greedy": GREEDY,
    "random": RANDOM,
    "top-p": TOP_P,
    "penalties": PENALTIES,
    "logprobs": LOGPROBS,
}
# Ids that every model has.
_NUM_TOKEN_IDS = 97


def make_step(
    rows: Rows,
    block_size: int,
    num_blocks: int,
    params: SamplingParams = GREEDY,
    step_id: int = 1,
) -> StepInput:
    """All rows sample. Their blocks are taken in turn, from the first again after the last."""
    computed, new = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    num_rows, num_tokens = len(rows), int(new.sum())
    # As a scheduler sends it: the same list in all steps of a row.
    history = [7] * int((computed + new).max() + 2) if params.needs_history else None
    return StepInput(
        step_id=step_id,
        swap_out=NO_MOVES,
        swap_in=NO_MOVES,
        copy=NO_MOVES,
        row_ids=np.arange(num_rows, dtype=np.int32),
        num_computed_tokens=computed,
        num_new_tokens=new,
        token_ids=(np.arange(num_tokens, dtype=np.int32) * 7 + 11) % _NUM_TOKEN_IDS,
        samples=np.ones(num_rows, dtype=np.bool_),
        block_tables=_block_tables(-(-(computed + new) // block_size), num_blocks),
        num_prompt_tokens=np.ones(num_rows, dtype=np.int32),
        seeds=np.arange(num_rows, dtype=np.int64),
        sampling_params=ParamRows.of([params] * num_rows),
        histories=[history] * num_rows,
    )


def num_blocks_of(rows: Rows, block_size: int) -> int:
    """So many blocks have rows of their own."""
    return sum(-(-(computed + new) // block_size) for computed, new in rows)


def grown(rows: Rows, num_tokens: int) -> Rows:
    """The same rows so many decodes later; prompts are others' then, and as long."""
    return tuple((computed + num_tokens * (new == 1), new) for computed, new in rows)


def _block_tables(counts: Int32Array, num_blocks: int) -> Int32Array:
    """[R, M], of `counts` [R] blocks each."""
    first = np.cumsum(counts) - counts
    places = np.arange(int(counts.max()))
    tables = (first[:, None] + places) % num_blocks
    return np.where(places < counts[:, None], tables, -1).astype(np.int32)
