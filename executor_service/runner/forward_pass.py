"""The forward pass of a step, and its repetition row by row where it raises.

Shape letters: R rows of the step, S rows that sample, P scored prompt tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from executor_service.device.kv_cache import KVCache
from executor_service.device.memory import is_beyond_rows
from executor_service.device.resident_tables import ResidentTables, SampledTokens
from executor_service.device.uploads import Uploads
from executor_service.errors import StepFailed
from executor_service.model.input_batch import InputBatch, Readout, build_input_batch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import PagedModel
from executor_service.runner.static_inputs import MOST_PROMPTS
from executor_service.sampling.sampler import SamplingRows, draw_rows
from executor_service.steps.step import (
    BoolArray,
    Int64Array,
    LogprobColumns,
    RowStatus,
    StepInput,
    StepOutput,
    join_columns,
    part_of,
)
from splitserve_kernels.draw_rows import DrawRows

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


# -- Passes over rows of steps, as a model is given them -------------------------------------------
#
# Shape letter: R rows of the step.


class PassBatches:
    """Makes them. The device keeps the block tables of all rows, where it has memory of its own."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        uploads: Uploads,
        sampled: SampledTokens | None = None,
    ) -> None:
        """`uploads` go to the device of `cache`.

        `sampled` has the tokens that a step awaits; None if none ever will.
        """
        self._cache = cache
        self._vocab_size = loaded.vocab_size
        self._uploads = uploads
        self._sampled = sampled
        # On a CPU, attention itself reads keys once that rows share.
        self._max_joined = 0 if uploads.shares_memory else MOST_PROMPTS
        max_num_blocks = -(-loaded.max_model_len // cache.block_size)
        self._tables = ResidentTables(max_num_blocks, cache.device, uploads)

    def of_rows(self, step: StepInput, rows: Int64Array) -> InputBatch:
        """The pass that computes `rows` of `step`, rising indexes, and how these are drawn."""
        cache, tables = self._cache, None
        if step.tables is not None and not self._uploads.shares_memory:
            tables = self._tables.follow(step.tables)
        batch = build_input_batch(
            step,
            rows,
            cache.block_size,
            cache.device,
            self._sampled,
            self._uploads,
            tables,
            self._max_joined,
        )
        sampling_rows = batch.readout.sampling_rows
        batch.draws = lambda: plain_draws(step, sampling_rows, self._vocab_size)
        return batch


# -- Steps whose tokens can be drawn where their logits are computed -------------------------------
#
# Shape letter: S rows that sample.


def plain_draws(step: StepInput, sampling_rows: Int64Array, vocab_size: int) -> DrawRows | None:
    """How `sampling_rows` [S] of `step`, indexes, are drawn, if nothing but logits decides.

    None if a row has penalties, a bias, a grammar or whatever else changes logits before they are
    drawn from: what that is may be known only when they are there. None, too, if S is 0.
    """
    params, seeds, positions = (
        step.sampling_params,
        step.seeds,
        step.num_computed_tokens + step.num_new_tokens,
    )
    if len(sampling_rows) < step.num_rows:
        params = params.take(sampling_rows)
        seeds, positions = seeds[sampling_rows], positions[sampling_rows]
    if not len(sampling_rows) or params.adjusts_logits.any():
        return None
    # How long prompts and histories are makes no difference then.
    histories = [None] * len(positions)
    return draw_rows(SamplingRows(params, seeds, positions, positions, histories), vocab_size)


# -- A step that scores many prompt tokens, run in parts: together their logits may not fit --------
#
# It is as if its tokens had come in several steps. Shape letters: R rows of the step, K rows of a
# part.

# Prompt tokens whose logits there are at a time; with 150 000 tokens in the vocabulary, 150 MB.
MAX_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """Of rows `rows` of a step, the new tokens `starts` .. `ends` - 1; [K] each."""

    rows: Int64Array
    starts: Int64Array
    ends: Int64Array


def scores_too_much(step: StepInput) -> bool:
    """Whether `step` is to be run in parts."""
    if len(step.token_ids) <= MAX_SCORED_TOKENS or step.cross is not None:
        return False
    return int(_num_scored(step).sum()) > MAX_SCORED_TOKENS


def run_in_parts(step: StepInput, execute: Callable[[StepInput], StepOutput]) -> StepOutput:
    """What `execute` would return for `step`, with at most MAX_SCORED_TOKENS scored at a time.

    A row of which a part fails has failed.
    """
    parts = list(_cut(step, _num_scored(step)))
    outputs = [execute(_take(step, part, is_first=part is parts[0])) for part in parts]
    return _merge(step, parts, outputs)


def _num_scored(step: StepInput) -> Int64Array:
    """[R]; they are the first new tokens of a row."""
    num_left = step.num_prompt_tokens.astype(np.int64) - 1 - step.num_computed_tokens
    num_left[step.sampling_params.num_prompt_logprobs < 0] = 0
    return np.asarray(np.clip(num_left, 0, step.num_new_tokens))


def _cut(step: StepInput, num_scored: Int64Array) -> Iterator[_Part]:
    pieces: list[tuple[int, int, int]] = []
    room = MAX_SCORED_TOKENS
    # A row may read what another row of this step writes. The writer's position then lies before
    # the reader's first input token, so in this order writers come first.
    for row in np.argsort(step.num_computed_tokens, kind="stable").tolist():
        start = 0
        while num_scored[row] - start > room:
            if room:
                pieces.append((row, start, start + room))
                start += room
            yield _part(pieces)
            pieces, room = [], MAX_SCORED_TOKENS
        pieces.append((row, start, int(step.num_new_tokens[row])))
        room -= max(0, int(num_scored[row]) - start)
    yield _part(pieces)


def _part(pieces: list[tuple[int, int, int]]) -> _Part:
    rows, starts, ends = np.array(sorted(pieces), dtype=np.int64).T
    return _Part(rows, starts, ends)


def _take(step: StepInput, part: _Part, *, is_first: bool) -> StepInput:
    """The step that computes `part`; the first one has the block moves."""
    rows = part.rows
    first_tokens = np.cumsum(step.num_new_tokens, dtype=np.int64) - step.num_new_tokens
    spans = zip(first_tokens[rows] + part.starts, first_tokens[rows] + part.ends, strict=True)
    taken = part_of(
        step,
        rows,
        num_computed_tokens=(step.num_computed_tokens[rows] + part.starts).astype(np.int32),
        num_new_tokens=(part.ends - part.starts).astype(np.int32),
        token_ids=np.concatenate([step.token_ids[start:end] for start, end in spans]),
        samples=step.samples[rows] & (part.ends == step.num_new_tokens[rows]),
    )
    if not is_first:
        return taken
    return replace(taken, swap_out=step.swap_out, swap_in=step.swap_in, copy=step.copy)


def _merge(step: StepInput, parts: list[_Part], outputs: list[StepOutput]) -> StepOutput:
    statuses = np.full(step.num_rows, RowStatus.OK, np.uint8)
    token_ids = np.full(step.num_rows, -1, np.int32)
    errors: dict[int, str] = {}
    for part, output in zip(parts, outputs, strict=True):
        has_failed = output.row_statuses != RowStatus.OK
        statuses[part.rows[has_failed]] = output.row_statuses[has_failed]
        # What a row samples comes in its last part.
        token_ids[part.rows] = output.sampled_token_ids
        errors |= {int(part.rows[row]): text for row, text in output.row_errors.items()}
    is_ok: BoolArray = statuses == RowStatus.OK
    token_ids[~is_ok] = -1
    is_computed: BoolArray = is_ok | (statuses == RowStatus.NOT_SAMPLED)
    return StepOutput(
        row_statuses=statuses,
        sampled_token_ids=token_ids,
        row_errors=errors,
        logprobs=_join(parts, [output.logprobs for output in outputs], is_ok),
        prompt_logprobs=_join(parts, [output.prompt_logprobs for output in outputs], is_computed),
        move_us=sum(output.move_us for output in outputs),
        forward_us=sum(output.forward_us for output in outputs),
        sample_us=sum(output.sample_us for output in outputs),
    )


def _join(
    parts: list[_Part], columns: list[LogprobColumns | None], is_ok: BoolArray
) -> LogprobColumns | None:
    """All `columns`, with the rows of the step, without those that failed."""
    of_step = [
        replace(of_part, row_indexes=part.rows[of_part.row_indexes].astype(np.int32))
        for part, of_part in zip(parts, columns, strict=True)
        if of_part is not None
    ]
    return join_columns(of_step, is_ok)
