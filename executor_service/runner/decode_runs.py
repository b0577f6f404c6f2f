"""Steps whose rows get several tokens in one go, from a model that feeds its tokens back itself.

Shape letters: R rows of the step, m most tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from executor_service.device import HostCopy, to_device
from executor_service.model import LoadedModel, PagedModel, RunningModel
from executor_service.runner.forward_pass import PassBatches, plain_draws
from executor_service.steps import (
    INVALID_LOGITS,
    Int32Array,
    Int64Array,
    RowStatus,
    RunWatch,
    StepInput,
    StepOutput,
    TokenRuns,
)
from splitserve_kernels.decoder_inputs import RunRows

# Limit of tokens of a row in one call: all other work of the executor waits for its end.
_MAX_NUM_TOKENS = 256


class DecodeRuns:
    """Runs several decode turns of plain rows in a single call, if the model supports it."""

    def __init__(self, loaded: LoadedModel, model: PagedModel, batches: PassBatches) -> None:
        """Prepares runs of `model`, which computes what `loaded` describes.

        `model` and `batches` work on the same pools.
        """
        self._loaded = loaded
        self._model = model if isinstance(model, RunningModel) else None
        self._batches = batches

    @property
    def is_possible(self) -> bool:
        """True if the model supports several decode turns per call."""
        return self._model is not None and self._model.can_run

    def has_plain_rows(self, step: StepInput) -> bool:
        """Returns whether logits alone decide the tokens of `step`, without logprobs."""
        params = step.sampling_params
        return (
            step.cross is None
            and step.grammars is None
            and self._can_adapt(step)
            and not params.adjusts_logits.any()
            and not (params.num_logprobs >= 0).any()
            and not (params.num_prompt_logprobs >= 0).any()
        )

    def _can_adapt(self, step: StepInput) -> bool:
        """Returns whether the model runs on with the adapters of `step`, and has them all."""
        if not any(step.adapters):
            return True
        if self._model is None or self._batches.missing_adapters(step):
            return False
        return self._model.can_run_adapted(self._batches.adapters_of(step))

    def serves(self, step: StepInput) -> bool:
        """Returns whether `run` can take `step`.

        All its rows must be plain, sample, and have one input token; and the model must run on by
        itself.
        """
        return (
            self.is_possible
            and step.num_run_on_tokens is not None
            and step.num_rows > 0
            and step.drafts is None
            and bool((step.num_new_tokens == 1).all() and step.samples.all())
            and self.has_plain_rows(step)
        )

    def serves_all(self, step: StepInput) -> bool:
        """Returns whether `run` can take `step` and give each row all tokens that it may get."""
        if not self.serves(step):
            return False
        assert step.num_run_on_tokens is not None, "the step has run-on rows"
        return np.array_equal(self._num_tokens(step), step.num_run_on_tokens + 1)

    def run(self, step: StepInput) -> tuple[Tensor, RunRows]:
        """Launches `step` without its block moves. Call it only if `serves` returns True.

        Returns the tokens [R, m], in the form of `RunningModel`, and the run rows with their
        limits.
        """
        assert self._model is not None, "the model supports runs"
        rows = np.arange(step.num_rows)
        draws = plain_draws(step, rows, self._loaded.vocab_size)
        assert draws is not None, "all rows have plain draws"
        stops = [params.stop_token_ids for params in step.sampling_params.objects]
        after_token = None if step.watch is None else partial(_goes_on, step.watch)
        run_rows = RunRows.of(draws, self._num_tokens(step), stops, after_token)
        return self._model.decode_run(self._batches.of_rows(step, rows), run_rows), run_rows

    def _num_tokens(self, step: StepInput) -> Int32Array:
        """Returns the limit of tokens of each row, [R].

        The model has no positions beyond max_model_len.
        """
        assert step.num_run_on_tokens is not None, "the step has run-on rows"
        num_positions = np.maximum(self._loaded.max_model_len - step.num_computed_tokens, 1)
        return np.minimum(step.num_run_on_tokens + 1, np.minimum(num_positions, _MAX_NUM_TOKENS))


def _goes_on(watch: RunWatch, tokens: Int32Array) -> bool:
    """Shows `tokens` [R, n], padded with -1, to `watch`; returns whether the run goes on."""
    is_token = tokens >= 0
    offsets = np.concatenate([[0], np.cumsum(is_token.sum(axis=1))]).astype(np.int32)
    return watch(TokenRuns(offsets, tokens[is_token]))


class PendingRun:
    """Tokens of rows that run on, on their way to the host in one copy."""

    def __init__(
        self, tokens: Tensor, rows: RunRows, copy_to_host: Callable[[Tensor], Tensor]
    ) -> None:
        """Starts the copy of `tokens` to the host.

        They are [R, m] int32 on the device, as a `RunningModel` returns them.
        """
        self._tokens = tokens
        self._run_rows = rows
        self._copy = HostCopy((tokens,), copy_to_host)

    @property
    def rows(self) -> Int64Array:
        """Indexes of the rows, [R]: all rows of the step."""
        return np.arange(len(self._run_rows))

    @property
    def token_ids(self) -> Tensor:
        """[R] int32 on the device: the last token of each row that did not end earlier."""
        last = (self._run_rows.num_tokens - 1).astype(np.int64)[:, None]
        return self._tokens.gather(1, to_device(last, self._tokens.device)).squeeze(1)

    def output(self, move_us: int, forward_us: int, sample_us: int) -> StepOutput:
        """Returns the step's output with its durations. Call it when the device has finished."""
        (tokens,) = self._copy.arrays()
        counts = _num_taken(tokens, self._run_rows)
        has_tokens = counts > 0
        last = np.where(has_tokens, tokens[self.rows, np.maximum(counts - 1, 0)], -1)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        statuses = np.where(has_tokens, RowStatus.OK, RowStatus.INVALID_LOGITS)
        return StepOutput(
            row_statuses=statuses.astype(np.uint8),
            sampled_token_ids=last.astype(np.int32),
            row_errors=dict.fromkeys(np.flatnonzero(~has_tokens).tolist(), INVALID_LOGITS),
            move_us=move_us,
            forward_us=forward_us,
            sample_us=sample_us,
            runs=TokenRuns(offsets, tokens[np.arange(tokens.shape[1]) < counts[:, None]]),
        )


def _num_taken(tokens: Int32Array, rows: RunRows) -> Int64Array:
    """Counts the tokens of each row, [R], in `tokens` [R, m].

    They are those before the first -1, up to the first stop token, itself included.
    """
    width = tokens.shape[1]
    is_nothing = tokens < 0
    counts: Int64Array = np.where(is_nothing.any(axis=1), is_nothing.argmax(axis=1), width)
    # One line for each token that ends a row.
    row_of_stop = np.repeat(np.arange(len(rows)), np.diff(rows.stop_offsets))
    is_stop = tokens[row_of_stop] == rows.stop_token_ids[:, None]
    up_to_stop = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, width)
    np.minimum.at(counts, row_of_stop, up_to_stop)
    return counts
