"""One step: block moves, forward pass, sampling. What goes wrong with one row stays with it.

Shape letters: R rows of the step, S rows that sample, P scored prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from executor_service.block_transfers import BlockTransfers
from executor_service.device_errors import is_out_of_memory, release_cached_memory
from executor_service.device_streams import streams_of
from executor_service.errors import OutOfMemory, StepFailed
from executor_service.forward_pass import ForwardPass, ForwardResult
from executor_service.host_copies import Array, to_device, to_host
from executor_service.kv_cache import KVCache
from executor_service.loaded_model import LoadedModel
from executor_service.logprobs import ScoredTokens, make_columns, score
from executor_service.paged_model import PagedModel
from executor_service.sampler import Draw, SamplingRows, draw_in_torch, sample
from executor_service.scored_parts import run_in_parts
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
        self._streams = streams_of(cache.device)
        self._transfers = BlockTransfers(cache, self._streams)
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
            return run_in_parts(step, self._execute)
        except StepFailed:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                self._ran_out_of_memory = True
                raise StepFailed("out of memory") from OutOfMemory(str(error))
            raise StepFailed(f"{type(error).__name__} while the step ran") from error

    def _execute(self, step: StepInput) -> StepOutput:
        self._transfers.begin(step)
        rows = _RowResults(
            statuses=np.full(step.num_rows, RowStatus.OK, dtype=np.uint8),
            token_ids=np.full(step.num_rows, -1, dtype=np.int32),
        )
        if step.num_rows == 0:
            return StepOutput(rows.statuses, rows.token_ids, move_us=self._transfers.finish())
        forward_timer = self._streams.start_timer()
        forward = self._forward_pass.run(step)
        forward_timer.stop()
        sample_timer = self._streams.start_timer()
        for row, message in forward.row_errors.items():
            rows.fail([row], RowStatus.FAILED, message)
        prompt_logprobs = _score_prompts(step, forward, rows)
        logprobs = _sample(step, forward, rows, self._draw)
        sample_timer.stop()
        return StepOutput(
            row_statuses=rows.statuses,
            sampled_token_ids=rows.token_ids,
            row_errors=rows.errors,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            move_us=self._transfers.finish(),
            forward_us=forward_timer.elapsed_us(),
            sample_us=sample_timer.elapsed_us(),
        )


def _sample(
    step: StepInput, forward: ForwardResult, rows: _RowResults, draw: Draw
) -> LogprobColumns | None:
    """Fills the tokens of `rows`; returns the scores that its rows ask for."""
    usable = ~rows.failed[forward.readout.sampling_rows]
    sampling_rows = forward.readout.sampling_rows[usable]
    if not len(sampling_rows):
        return None
    logits = _select(forward.sampling_logits, usable)
    of_rows = _sampling_rows(step, sampling_rows)
    token_ids = sample(logits, of_rows, draw)
    num_top = of_rows.params.num_logprobs
    is_scored = num_top >= 0
    scores: tuple[Tensor, ...] = ()
    if is_scored.any():
        # A row without a token is scored too, and left out below.
        scored_ids = _select(token_ids, is_scored).clamp(min=0)
        scores = score(_select(logits, is_scored), scored_ids, int(num_top.max()))
    sampled_ids, *columns = to_host(token_ids, *scores)
    rows.token_ids[sampling_rows] = sampled_ids
    is_valid = sampled_ids >= 0
    rows.fail(sampling_rows[~is_valid].tolist(), RowStatus.INVALID_LOGITS, _INVALID_LOGITS)
    if not scores:
        return None
    tokens = ScoredTokens(sampling_rows.astype(np.int32), of_rows.positions, sampled_ids, num_top)
    return _columns(tokens.select(is_scored), columns, is_valid[is_scored])


def _sampling_rows(step: StepInput, sampling_rows: Int64Array) -> SamplingRows:
    """What the sampler is to know of `sampling_rows`, indexes of rows."""
    return SamplingRows(
        params=step.sampling_params.take(sampling_rows),
        seeds=step.seeds[sampling_rows],
        positions=(step.num_computed_tokens + step.num_new_tokens)[sampling_rows],
        num_prompt_tokens=step.num_prompt_tokens[sampling_rows],
        histories=[step.histories[row] for row in sampling_rows.tolist()],
    )


def _score_prompts(
    step: StepInput, forward: ForwardResult, rows: _RowResults
) -> LogprobColumns | None:
    """Scores of the prompt tokens that were asked for; rows without valid logits fail."""
    readout, logits = forward.readout, forward.prompt_logits
    if not len(readout.prompt_rows):
        return None
    prompt_rows, positions = readout.prompt_rows, readout.prompt_positions
    tokens = ScoredTokens(
        row_indexes=prompt_rows.astype(np.int32),
        positions=positions.astype(np.int32),
        token_ids=_history_tokens(step, prompt_rows, positions),
        num_top=step.sampling_params.num_prompt_logprobs[prompt_rows],
    )
    token_ids = to_device(tokens.token_ids, logits.device)
    scores = score(logits, token_ids, int(tokens.num_top.max()))
    is_valid, *columns = to_host(torch.isfinite(logits.max(dim=-1).values), *scores)
    rows.fail(np.unique(prompt_rows[~is_valid]).tolist(), RowStatus.INVALID_LOGITS, _INVALID_LOGITS)
    return _columns(tokens, columns, ~rows.failed[prompt_rows])


def _columns(
    tokens: ScoredTokens, scores: Sequence[Array], kept: BoolArray
) -> LogprobColumns | None:
    """The scores of those `tokens` that are `kept`; None if that is none."""
    if not kept.any():
        return None
    return make_columns(tokens.select(kept), tuple(column[kept] for column in scores))


def _history_tokens(step: StepInput, rows: Int64Array, positions: Int64Array) -> Int32Array:
    """The tokens at `positions` of the sequences of `rows`; [P] each."""
    tokens = np.empty(len(rows), dtype=np.int32)
    for row in np.unique(rows).tolist():
        history = step.histories[row]
        assert history is not None, "a row with prompt logprobs has its history"
        of_row = rows == row
        tokens[of_row] = np.asarray(history)[positions[of_row]]
    return tokens


def _select(lines: Tensor, kept: BoolArray) -> Tensor:
    """The lines where `kept` holds; no copy if that is all of them."""
    return lines if kept.all() else lines[to_device(np.flatnonzero(kept), lines.device)]
