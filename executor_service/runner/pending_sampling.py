"""Sampling and scoring of a step on the device, and the step's output on the host.

Nothing is launched depending on a result: rows that turn out to have no token are sampled and
scored like the others, and left out of the output.

Shape letters: R rows of the step, S rows that sample, P scored prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from executor_service.device import Array, DeviceStreams, HostCopy, Uploads, to_device
from executor_service.model import Readout
from executor_service.runner.forward_pass import ForwardResult
from executor_service.sampling import (
    Adjust,
    Draw,
    SamplingRows,
    ScoredTokens,
    TokenCounts,
    make_columns,
    sample,
    score,
)
from executor_service.steps import (
    INVALID_LOGITS,
    BoolArray,
    Int32Array,
    Int64Array,
    LogprobColumns,
    RowStatus,
    StepInput,
    StepOutput,
    TokenMasks,
    TokenRuns,
    UInt8Array,
)


@dataclass(slots=True)
class _RowResults:
    """Columns of the output while they are filled. `statuses`, `token_ids`: [R]."""

    statuses: UInt8Array
    token_ids: Int32Array
    errors: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, num_rows: int) -> _RowResults:
        """Returns results of rows that are OK and have no token."""
        statuses = np.full(num_rows, RowStatus.OK, dtype=np.uint8)
        return cls(statuses, np.full(num_rows, -1, dtype=np.int32))

    @property
    def is_ok(self) -> BoolArray:
        """Mask of rows that are OK, [R]."""
        return np.asarray(self.statuses == RowStatus.OK)

    @property
    def is_computed(self) -> BoolArray:
        """Mask of rows that are OK, or computed but not sampled, [R]."""
        return np.isin(self.statuses, (RowStatus.OK, RowStatus.NOT_SAMPLED))

    def fail(self, rows: Iterable[int], status: RowStatus, message: str) -> None:
        """Marks rows with `status` and removes their tokens."""
        for row in rows:
            self.statuses[row] = status
            self.token_ids[row] = -1
            self.errors[row] = message

    def leave_out(self, row: int) -> None:
        """Marks the row as not sampled: it gets its token in a later step."""
        self.statuses[row] = RowStatus.NOT_SAMPLED
        self.token_ids[row] = -1
        self.errors.pop(row, None)


class PendingSampling:
    """Tokens and scores of a step, on their way to the host in one copy.

    `rows`: [S], indexes of the rows that sample. `token_ids`: [S] int32 on the device, the sampled
    tokens; -1 for none.
    """

    def __init__(
        self,
        step: StepInput,
        forward: ForwardResult,
        draw: Draw,
        counts: TokenCounts,
        streams: DeviceStreams,
        adjust: Adjust,
        uploads: Uploads,
    ) -> None:
        """Launches sampling, scoring and the copy.

        `counts`: token counts of the rows before this step; the sampled tokens are added to them.
        """
        self._num_rows = step.num_rows
        self._may_be_several = step.num_run_on_tokens is not None
        self._row_errors = forward.row_errors
        self.rows = forward.readout.sampling_rows
        self._sampling = _sampling_rows(step, self.rows, counts)
        self._prompt_tokens = _prompt_tokens(step, forward.readout)
        self.token_ids, scores = _sample(
            forward,
            self._sampling,
            lambda logits, rows: sample(logits, rows, draw, adjust, uploads),
        )
        if self._sampling.counted is not None:
            counts.add(self._sampling.counted, self.token_ids)
        prompt_scores = _score_prompts(forward.prompt_logits, self._prompt_tokens)
        self._num_scores = len(scores)
        tensors = (self.token_ids, *scores, *prompt_scores)
        self._copy = HostCopy(tensors, streams.copy_to_host)

    def output(self, move_us: int, forward_us: int, sample_us: int) -> StepOutput:
        """Returns the step's output with its durations. Call it when the device has finished."""
        sampled_ids, *columns = self._copy.arrays()
        rows = _RowResults.of(self._num_rows)
        for row, message in self._row_errors.items():
            rows.fail([row], RowStatus.FAILED, message)
        rows.token_ids[self.rows] = sampled_ids
        rows.fail(self.rows[sampled_ids < 0].tolist(), RowStatus.INVALID_LOGITS, INVALID_LOGITS)
        self._leave_out(rows)
        prompt_logprobs = self._prompt_logprobs(rows, columns[self._num_scores :])
        return StepOutput(
            row_statuses=rows.statuses,
            sampled_token_ids=rows.token_ids,
            row_errors=rows.errors,
            logprobs=self._logprobs(rows, sampled_ids, columns[: self._num_scores]),
            prompt_logprobs=prompt_logprobs,
            move_us=move_us,
            forward_us=forward_us,
            sample_us=sample_us,
            runs=TokenRuns.of_each(rows.token_ids) if self._may_be_several else None,
        )

    def _leave_out(self, rows: _RowResults) -> None:
        """Removes the tokens of rows whose grammar mask is pending, lost or invalid."""
        masks = self._sampling.masks
        if masks is None:
            return
        for index in masks.pending:
            rows.leave_out(int(self.rows[index]))
        for index in masks.lost:
            rows.fail([int(self.rows[index])], RowStatus.INPUT_UNAVAILABLE, "")
        for index, error in masks.invalid.items():
            rows.fail([int(self.rows[index])], RowStatus.GRAMMAR_INVALID, error)

    def _logprobs(
        self, rows: _RowResults, sampled_ids: Int32Array, scores: Sequence[Array]
    ) -> LogprobColumns | None:
        if not scores:
            return None
        num_top = self._sampling.params.num_logprobs
        is_scored = num_top >= 0
        row_indexes = self.rows.astype(np.int32)
        tokens = ScoredTokens(row_indexes, self._sampling.positions, sampled_ids, num_top)
        return _columns(tokens.select(is_scored), scores, rows.is_ok[self.rows[is_scored]])

    def _prompt_logprobs(self, rows: _RowResults, scores: Sequence[Array]) -> LogprobColumns | None:
        """Returns the logprobs of prompt tokens, and fails rows without valid logits."""
        tokens = self._prompt_tokens
        if tokens is None:
            return None
        is_valid, *columns = scores
        invalid_rows = np.unique(tokens.row_indexes[~is_valid])
        rows.fail(invalid_rows.tolist(), RowStatus.INVALID_LOGITS, INVALID_LOGITS)
        return _columns(tokens, columns, rows.is_computed[tokens.row_indexes])


def _sample(
    forward: ForwardResult,
    rows: SamplingRows,
    sample_rows: Callable[[Tensor, SamplingRows], Tensor],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the tokens of all rows, and the results of `score` for rows that ask for logprobs."""
    logits, token_ids = forward.sampling_logits, forward.token_ids
    if not len(logits):
        return logits.new_empty(0, dtype=torch.int32), ()
    if token_ids is None:
        token_ids = sample_rows(logits, rows)
    num_top = rows.params.num_logprobs
    is_scored = num_top >= 0
    if not is_scored.any():
        return token_ids, ()
    # A row without a token is scored, too, and left out at the end.
    scored_ids = _select(token_ids, is_scored).clamp(min=0)
    return token_ids, score(_select(logits, is_scored), scored_ids, int(num_top.max()))


def _sampling_rows(step: StepInput, sampling_rows: Int64Array, counts: TokenCounts) -> SamplingRows:
    """Collects the sampler's inputs for `sampling_rows`, rising indexes of rows."""
    positions, row_ids = step.num_computed_tokens + step.num_new_tokens, step.row_ids
    if len(sampling_rows) == step.num_rows:
        # The usual case: all rows sample, and a dozen columns need not be copied.
        rows = SamplingRows(
            step.sampling_params,
            step.seeds,
            positions,
            step.num_prompt_tokens,
            step.histories,
            _masks(step, sampling_rows),
        )
    else:
        row_ids = row_ids[sampling_rows]
        rows = SamplingRows(
            params=step.sampling_params.take(sampling_rows),
            seeds=step.seeds[sampling_rows],
            positions=positions[sampling_rows],
            num_prompt_tokens=step.num_prompt_tokens[sampling_rows],
            histories=[step.histories[row] for row in sampling_rows.tolist()],
            masks=_masks(step, sampling_rows),
        )
    return rows.with_counts(counts, row_ids)


def _masks(step: StepInput, sampling_rows: Int64Array) -> TokenMasks | None:
    return None if step.grammars is None else step.grammars.masks(sampling_rows)


def _prompt_tokens(step: StepInput, readout: Readout) -> ScoredTokens | None:
    """Returns the prompt tokens whose scores are asked for; None if there are none."""
    prompt_rows, positions = readout.prompt_rows, readout.prompt_positions
    if not len(prompt_rows):
        return None
    return ScoredTokens(
        row_indexes=prompt_rows.astype(np.int32),
        positions=positions.astype(np.int32),
        token_ids=_history_tokens(step, prompt_rows, positions),
        num_top=step.sampling_params.num_prompt_logprobs[prompt_rows],
    )


def _score_prompts(logits: Tensor, tokens: ScoredTokens | None) -> tuple[Tensor, ...]:
    """Returns which lines of `logits` [P, V] are valid, and the scores of `tokens` [P]."""
    if tokens is None:
        return ()
    token_ids = to_device(tokens.token_ids, logits.device)
    scores = score(logits, token_ids, int(tokens.num_top.max()))
    return (torch.isfinite(logits.max(dim=-1).values), *scores)


def _columns(
    tokens: ScoredTokens, scores: Sequence[Array], kept: BoolArray
) -> LogprobColumns | None:
    """Returns logprob columns of the kept `tokens`; None for an empty selection."""
    if not kept.any():
        return None
    return make_columns(tokens.select(kept), tuple(column[kept] for column in scores))


def _history_tokens(step: StepInput, rows: Int64Array, positions: Int64Array) -> Int32Array:
    """Returns the tokens at `positions` [P] of the sequences of `rows` [P]."""
    tokens = np.empty(len(rows), dtype=np.int32)
    for row in np.unique(rows).tolist():
        history = step.histories[row]
        assert history is not None, "a row with prompt logprobs has its history"
        of_row = rows == row
        tokens[of_row] = np.asarray(history)[positions[of_row]]
    return tokens


def _select(lines: Tensor, kept: BoolArray) -> Tensor:
    """Returns the lines where `kept` is True; `lines` itself, not copied, if all are."""
    return lines if kept.all() else lines[to_device(np.flatnonzero(kept), lines.device)]
