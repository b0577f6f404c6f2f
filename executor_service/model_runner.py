"""One step: block moves, forward pass, sampling. What goes wrong with one row stays with it.

Shape letters: R rows of the step, S rows that sample, P scored prompt tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from executor_service.device_errors import is_out_of_memory, release_cached_memory
from executor_service.errors import OutOfMemory, StepFailed
from executor_service.forward_pass import ForwardPass, ForwardResult
from executor_service.kv_cache import KVCache
from executor_service.loaded_model import LoadedModel
from executor_service.logprobs import ScoredTokens, score_tokens
from executor_service.paged_model import PagedModel
from executor_service.sampler import Draw, SamplingRows, draw_in_torch, sample
from executor_service.step import (
    BoolArray,
    Int32Array,
    Int64Array,
    LogprobColumns,
    RowStatus,
    StepInput,
    StepOutput,
    UInt8Array,
)

_INVALID_LOGITS = "the model returned logits that are NaN, +inf, or -inf alone"


@dataclass(slots=True)
class _RowResults:
    """Columns of the output while they are filled; `statuses`, `token_ids`: [R]."""

    statuses: UInt8Array
    token_ids: Int32Array
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> BoolArray:
        """[R]; rows that are not OK."""
        return np.asarray(self.statuses != RowStatus.OK)

    def fail(self, rows: Iterable[int], status: RowStatus, message: str) -> None:
        """Marks rows; a row has no token then."""
        for row in rows:
            self.statuses[row] = status
            self.token_ids[row] = -1
            self.errors[row] = message


class ModelRunner:
    """Runs steps of one model against its KV pools. Not thread-safe: one step at a time."""

    def __init__(
        self, loaded: LoadedModel, cache: KVCache, model: PagedModel, draw: Draw = draw_in_torch
    ) -> None:
        """`model` computes what `loaded` says, on the pools of `cache`; `draw` chooses tokens."""
        self.cache = cache
        self._forward_pass = ForwardPass(loaded, cache, model)
        self._draw = draw
        self._ran_out_of_memory = False

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """Runs `step`; writes the KV pools.

        Raises StepFailed if no row can be answered; its `__cause__` is an OutOfMemory where memory
        ran out.
        """
        if self._ran_out_of_memory:
            # Not when it happened: the error still held the tensors of that step.
            self._ran_out_of_memory = False
            release_cached_memory(self.cache.device)
        try:
            return self._execute(step)
        except StepFailed:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                self._ran_out_of_memory = True
                raise StepFailed("out of memory") from OutOfMemory(str(error))
            raise StepFailed(f"{type(error).__name__} while the step ran") from error

    def _execute(self, step: StepInput) -> StepOutput:
        started = time.perf_counter()
        self.cache.swap_out(step.swap_out)
        self.cache.swap_in(step.swap_in)
        self.cache.copy(step.copy)
        moved = self._now()
        rows = _RowResults(
            statuses=np.full(step.num_rows, RowStatus.OK, dtype=np.uint8),
            token_ids=np.full(step.num_rows, -1, dtype=np.int32),
        )
        if step.num_rows == 0:
            return StepOutput(rows.statuses, rows.token_ids, move_us=_us(started, moved))
        forward = self._forward_pass.run(step)
        computed = self._now()
        for row, message in forward.row_errors.items():
            rows.fail([row], RowStatus.FAILED, message)
        prompt_logprobs = _score_prompts(step, forward, rows)
        logprobs = _sample(step, forward, rows, self._draw)
        return StepOutput(
            row_statuses=rows.statuses,
            sampled_token_ids=rows.token_ids,
            row_errors=rows.errors,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            move_us=_us(started, moved),
            forward_us=_us(moved, computed),
            sample_us=_us(computed, time.perf_counter()),
        )

    def _now(self) -> float:
        """Seconds, once the device has done what was asked of it."""
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
        return time.perf_counter()


def _sample(
    step: StepInput, forward: ForwardResult, rows: _RowResults, draw: Draw
) -> LogprobColumns | None:
    """Fills the tokens of `rows`; returns the scores that its rows ask for."""
    usable = ~rows.failed[forward.readout.sampling_rows]
    sampling_rows = forward.readout.sampling_rows[usable]
    if not len(sampling_rows):
        return None
    logits = _select(forward.sampling_logits, usable)
    ends = (step.num_computed_tokens + step.num_new_tokens)[sampling_rows]
    indexes = sampling_rows.tolist()
    params = [step.sampling_params[row] for row in indexes]
    sampled = sample(
        logits,
        SamplingRows(
            params=params,
            seeds=step.seeds[sampling_rows],
            positions=ends,
            num_prompt_tokens=step.num_prompt_tokens[sampling_rows],
            histories=[step.histories[row] for row in indexes],
        ),
        draw,
    )
    rows.token_ids[sampling_rows] = sampled.token_ids
    invalid = sampling_rows[~sampled.is_valid]
    rows.fail(invalid.tolist(), RowStatus.INVALID_LOGITS, _INVALID_LOGITS)
    num_top = np.array([-1 if row.num_logprobs is None else row.num_logprobs for row in params])
    scored = sampled.is_valid & (num_top >= 0)
    if not scored.any():
        return None
    tokens = ScoredTokens(
        row_indexes=sampling_rows[scored].astype(np.int32),
        positions=ends[scored].astype(np.int32),
        token_ids=sampled.token_ids[scored],
        num_top=num_top[scored].astype(np.int32),
    )
    return score_tokens(_select(logits, scored), tokens)


def _score_prompts(
    step: StepInput, forward: ForwardResult, rows: _RowResults
) -> LogprobColumns | None:
    """Scores of the prompt tokens that were asked for; rows without valid logits fail."""
    readout, logits = forward.readout, forward.prompt_logits
    if not len(readout.prompt_rows):
        return None
    is_valid = torch.isfinite(logits.max(dim=-1).values).cpu().numpy()
    invalid = np.unique(readout.prompt_rows[~is_valid])
    rows.fail(invalid.tolist(), RowStatus.INVALID_LOGITS, _INVALID_LOGITS)
    usable = ~rows.failed[readout.prompt_rows]
    prompt_rows = readout.prompt_rows[usable]
    positions = readout.prompt_positions[usable]
    tokens = ScoredTokens(
        row_indexes=prompt_rows.astype(np.int32),
        positions=positions.astype(np.int32),
        token_ids=_history_tokens(step, prompt_rows, positions),
        num_top=np.array(
            [step.sampling_params[row].num_prompt_logprobs for row in prompt_rows.tolist()],
            dtype=np.int32,
        ),
    )
    return score_tokens(_select(logits, usable), tokens) if len(prompt_rows) else None


def _history_tokens(step: StepInput, rows: Int64Array, positions: Int64Array) -> Int32Array:
    """The tokens at `positions` of the sequences of `rows`; [P] each."""
    tokens = np.empty(len(rows), dtype=np.int32)
    for row in np.unique(rows).tolist():
        history = step.histories[row]
        assert history is not None, "a row with prompt logprobs has its history"
        of_row = rows == row
        tokens[of_row] = np.asarray(history)[positions[of_row]]
    return tokens


def _select(logits: Tensor, kept: BoolArray) -> Tensor:
    """The lines of `logits` where `kept` holds; no copy if that is all of them."""
    return logits if kept.all() else logits[torch.from_numpy(kept).to(logits.device)]


def _us(start_s: float, end_s: float) -> int:
    return int((end_s - start_s) * 1e6)
