"""The forward pass of a step, and its repetition row by row where it raises.

Shape letters: R rows of the step, S rows that sample, P scored prompt tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from executor_service.device.errors import is_beyond_rows
from executor_service.device.kv_cache import KVCache
from executor_service.errors import StepFailed
from executor_service.model.input_batch import Readout
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import PagedModel
from executor_service.runner.pass_batches import PassBatches
from executor_service.steps.step import Int64Array, StepInput

_logger = logging.getLogger(__name__)

_LEANS_ON_FAILED_ROW = "reads KV blocks that a failed row of the same step was to fill"


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logits of the rows that did not fail.

    `sampling_logits`: [S, V], `prompt_logits`: [P, V], both float32, as `readout` lists them.
    `row_errors`: for each row that failed, what to tell people. `token_ids`: [S] int32, what the
    rows sample, where the model has drawn as well; the next pass may overwrite them.
    """

    readout: Readout
    sampling_logits: Tensor
    prompt_logits: Tensor
    row_errors: dict[int, str]
    token_ids: Tensor | None = None


class ForwardPass:
    """Runs the model over the rows of a step, reading and writing the KV pools."""

    def __init__(
        self, loaded: LoadedModel, cache: KVCache, model: PagedModel, batches: PassBatches
    ) -> None:
        """`model` works on the pools of `cache`, as do `batches`."""
        self._loaded = loaded
        self._cache = cache
        self._model = model
        self._batches = batches

    def run(self, step: StepInput) -> ForwardResult:
        """Computes all rows of `step`, at least one.

        A row whose computation raises fails alone, and so does one that needs an adapter. Raises
        StepFailed if there are several rows and every one raises; whatever no row explains (out of
        memory, a lost device) is passed on.
        """
        rows = np.arange(step.num_rows)
        errors = _missing_adapters(step)
        if not errors:
            return self._run_apart(step, rows)
        rows = np.delete(rows, list(errors))
        if not len(rows):
            return self._merge([], errors)
        result = self._run_apart(step, rows)
        return replace(result, row_errors=result.row_errors | errors)

    def _run_apart(self, step: StepInput, rows: Int64Array) -> ForwardResult:
        """Computes `rows`, one by one if it has to."""
        try:
            return self._run_rows(step, rows)
        except Exception as error:
            if is_beyond_rows(error):
                raise
            _logger.exception("forward_failed step_id=%d num_rows=%d", step.step_id, step.num_rows)
            if len(rows) == 1:
                return self._merge([], {int(rows[0]): _describe(error)})
        return self._run_row_by_row(step, rows)

    def _run_rows(self, step: StepInput, rows: Int64Array) -> ForwardResult:
        """Computes `rows` (indexes into the step) in one pass; passes on what the model raises."""
        batch = self._batches.of_rows(step, rows)
        logits = self._model.logits(batch)
        num_sampling = len(batch.readout.sampling_rows)
        sampling, prompt = logits[:num_sampling], logits[num_sampling:]
        return ForwardResult(batch.readout, sampling, prompt, {}, batch.token_ids)

    def _run_row_by_row(self, step: StepInput, rows: Int64Array) -> ForwardResult:
        # A row may read what another row of this step writes. The writer's position then lies
        # before the reader's first input token, so in this order writers come first.
        results: dict[int, ForwardResult] = {}
        errors: dict[int, str] = {}
        spoiled_blocks: set[int] = set()
        raised: Exception | None = None
        for row in rows[np.argsort(step.num_computed_tokens[rows], kind="stable")].tolist():
            read, written = self._blocks(step, row)
            if spoiled_blocks.isdisjoint(read):
                try:
                    results[row] = _copy(self._run_rows(step, np.array([row])))
                    continue
                except Exception as error:
                    if is_beyond_rows(error):
                        raise
                    errors[row] = _describe(error)
                    raised = error
            else:
                errors[row] = _LEANS_ON_FAILED_ROW
            spoiled_blocks.update(written)
        if not results:
            raise StepFailed(f"every row failed, the last: {errors[row]}") from raised
        return self._merge([results[row] for row in sorted(results)], errors)

    def _merge(self, results: Sequence[ForwardResult], errors: dict[int, str]) -> ForwardResult:
        """One result of many; readouts stay ordered as in the parts."""
        none = np.empty(0, np.int64)
        no_logits = torch.empty(0, self._loaded.vocab_size, device=self._cache.device)
        readouts = [result.readout for result in results]
        return ForwardResult(
            readout=Readout(
                np.concatenate([none, *(r.sampling_rows for r in readouts)]),
                np.concatenate([none, *(r.prompt_rows for r in readouts)]),
                np.concatenate([none, *(r.prompt_positions for r in readouts)]),
            ),
            sampling_logits=torch.cat([no_logits, *(r.sampling_logits for r in results)]),
            prompt_logits=torch.cat([no_logits, *(r.prompt_logits for r in results)]),
            row_errors=errors,
        )

    def _blocks(self, step: StepInput, row: int) -> tuple[list[int], list[int]]:
        """The blocks a row reads of what is there before it runs, and those it writes."""
        block_size = self._cache.block_size
        computed = int(step.num_computed_tokens[row])
        end = computed + int(step.num_new_tokens[row])
        table, window = step.block_tables[row], self._loaded.sliding_window
        first = 0 if window is None else max(0, computed - window + 1)
        read = table[first // block_size : -(-computed // block_size)].tolist()
        return read, table[computed // block_size : -(-end // block_size)].tolist()


def _missing_adapters(step: StepInput) -> dict[int, str]:
    """What to tell people of each row with an adapter: this executor can apply none."""
    return {
        row: f"adapter {name!r} is not here; available: none"
        for row, name in enumerate(step.adapters)
        if name
    }


def _copy(result: ForwardResult) -> ForwardResult:
    """`result` with logits that the next forward pass does not overwrite."""
    return replace(
        result,
        sampling_logits=result.sampling_logits.clone(),
        prompt_logits=result.prompt_logits.clone(),
    )


def _describe(error: Exception) -> str:
    """The type only: the text of an exception might quote the input."""
    return f"{type(error).__name__} in the forward pass"
