"""Forward pass of a step, repeated row by row if it raises; batches for it; steps run in parts.

Shape letters: R rows of the step, S rows that sample, P scored prompt tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from executor_service.device import KVCache, ResidentTables, SampledTokens, Uploads, is_beyond_rows
from executor_service.errors import StepFailed
from executor_service.model import (
    Adapter,
    EncodingModel,
    InputBatch,
    LoadedAdapters,
    LoadedModel,
    PagedModel,
    Readout,
    build_input_batch,
)
from executor_service.runner.static_inputs import MOST_PROMPTS
from executor_service.sampling import SamplingRows, draw_rows
from executor_service.steps import (
    BoolArray,
    EncoderInput,
    Int32Array,
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

_NO_ENCODER_TOKENS = "the row has no encoder tokens, which this model needs"
_LEANS_ON_FAILED_ROW = "reads KV blocks that a failed row of the same step was to fill"


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logits of the rows that did not fail.

    `sampling_logits`: [S, V], `prompt_logits`: [P, V], both float32, in the order of `readout`.
    `row_errors`: error text of each failed row, for people. `token_ids`: [S] int32, sampled tokens
    if the model draws as well; the next pass may overwrite them.
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
        """Prepares passes of `model`, which works on the pools of `cache`, as `batches` do."""
        self._loaded = loaded
        self._cache = cache
        self._model = model
        self._batches = batches

    def run(self, step: StepInput) -> ForwardResult:
        """Computes all rows of `step`, at least one.

        A row whose computation raises fails alone, and so does a row without its adapter, or
        without the encoder tokens that the model needs. Raises
        StepFailed if there are several rows and every one raises. An error that no row explains
        (out of memory, a lost device) is passed on.
        """
        rows = np.arange(step.num_rows)
        errors = self._batches.missing_adapters(step)
        if isinstance(self._model, EncodingModel) and self._loaded.has_encoder:
            errors |= self._encode(self._model, step)
        if not errors:
            return self._run_apart(step, rows)
        rows = np.delete(rows, list(errors))
        if not len(rows):
            return self._merge([], errors)
        result = self._run_apart(step, rows)
        return replace(result, row_errors=result.row_errors | errors)

    def _encode(self, model: EncodingModel, step: StepInput) -> dict[int, str]:
        """Encodes the encoder inputs that the rows of `step` bring.

        Returns the error text of each row that has none, or that reads blocks whose input could
        not be encoded.
        """
        cross = step.cross
        if cross is None:
            return dict.fromkeys(range(step.num_rows), _NO_ENCODER_TOKENS)
        without = np.flatnonzero(cross.num_encoder_tokens == 0).tolist()
        errors = dict.fromkeys(without, _NO_ENCODER_TOKENS)
        for row, encoder_input in enumerate(cross.encoder_inputs):
            if not len(encoder_input):
                continue
            num_blocks = -(-int(cross.num_encoder_tokens[row]) // self._cache.block_size)
            blocks = cross.block_tables[row, :num_blocks]
            why_not = self._encode_row(model, encoder_input, blocks)
            if why_not:
                readers = np.isin(cross.block_tables, blocks).any(axis=1)
                errors |= dict.fromkeys(np.flatnonzero(readers).tolist(), why_not)
        return errors

    def _encode_row(
        self, model: EncodingModel, encoder_input: EncoderInput, blocks: Int32Array
    ) -> str:
        """Encodes an input. Returns why that cannot be done; empty if it is done."""
        most, audio = self._loaded.max_encoder_tokens, self._loaded.audio
        if audio is not None:
            if not np.isfinite(encoder_input).all():
                return "the row has encoder features that are not finite"
            prepared = torch.from_numpy(encoder_input).view(-1, audio.num_frames)
        elif most is not None and len(encoder_input) > most:
            return f"the row has {len(encoder_input)} encoder tokens; allowed: at most {most}"
        else:
            prepared = torch.from_numpy(encoder_input.astype(np.int64))
        try:
            model.encode(prepared, torch.from_numpy(blocks))
        except Exception as error:
            if is_beyond_rows(error):
                raise
            _logger.exception("encoding_failed num_inputs=%d", len(encoder_input))
            return _describe(error)
        return ""

    def _run_apart(self, step: StepInput, rows: Int64Array) -> ForwardResult:
        """Computes `rows` in one pass; row by row if that raises."""
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
        """Computes `rows` (indexes into the step) in one pass. Passes on what the model raises."""
        batch = self._batches.of_rows(step, rows)
        logits = self._model.logits(batch).float()
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
            raise StepFailed(f"all rows failed; last error: {errors[row]}") from raised
        return self._merge([results[row] for row in sorted(results)], errors)

    def _merge(self, results: Sequence[ForwardResult], errors: dict[int, str]) -> ForwardResult:
        """Joins results into one; readouts keep their order."""
        none = np.empty(0, np.int64)
        no_logits = torch.empty(0, self._loaded.num_outputs, device=self._cache.device)
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
        """Returns the blocks with earlier KV that a row reads, and the blocks that it writes."""
        block_size = self._cache.block_size
        computed = int(step.num_computed_tokens[row])
        end = computed + int(step.num_new_tokens[row])
        table, window = step.block_tables[row], self._loaded.sliding_window
        first = 0 if window is None else max(0, computed - window + 1)
        read = table[first // block_size : -(-computed // block_size)].tolist()
        return read, table[computed // block_size : -(-end // block_size)].tolist()


def _copy(result: ForwardResult) -> ForwardResult:
    """Returns `result` with logits that the next forward pass does not overwrite."""
    return replace(
        result,
        sampling_logits=result.sampling_logits.clone(),
        prompt_logits=result.prompt_logits.clone(),
    )


def _describe(error: Exception) -> str:
    """Returns the exception's type only: its text might quote the input."""
    return f"{type(error).__name__} in the forward pass"


# -- Input batches of forward passes ---------------------------------------------------------------
#
# Shape letter: R rows of the step.


class PassBatches:
    """Builds the batches of forward passes. A device with its own memory keeps all block tables."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        uploads: Uploads,
        sampled: SampledTokens | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """Prepares batches for the device of `cache`, to which `uploads` go.

        `sampled`: tokens that steps await; None if no step ever awaits any. `adapters`: None if the
        model takes none.
        """
        self._cache = cache
        self._vocab_size = loaded.vocab_size
        self._uploads = uploads
        self._sampled = sampled
        self._adapters = adapters
        # On a CPU, attention itself reads shared keys only once.
        self._max_joined = 0 if uploads.shares_memory else MOST_PROMPTS
        max_num_blocks = -(-loaded.max_model_len // cache.block_size)
        self._tables = ResidentTables(max_num_blocks, cache.device, uploads)

    def missing_adapters(self, step: StepInput) -> dict[int, str]:
        """Returns the error text of each row whose adapter is not loaded."""
        return {
            row: _why_missing(name, self._adapters)
            for row, name in enumerate(step.adapters)
            if name and (self._adapters is None or name not in self._adapters.by_name)
        }

    def adapters_of(self, step: StepInput) -> list[Adapter]:
        """Returns the adapters of a step's rows that are loaded, each once."""
        loaded = {} if self._adapters is None else self._adapters.by_name
        return [loaded[name] for name in set(step.adapters) if name in loaded]

    def of_rows(self, step: StepInput, rows: Int64Array) -> InputBatch:
        """Builds the pass that computes `rows` of `step`, rising indexes, with its draws."""
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
            None if self._adapters is None else self._adapters.by_name,
        )
        sampling_rows = batch.readout.sampling_rows
        batch.draws = lambda: plain_draws(step, sampling_rows, self._vocab_size)
        return batch


def _why_missing(name: str, adapters: LoadedAdapters | None) -> str:
    why = None if adapters is None else adapters.why_not.get(name)
    if why is not None:
        return f"adapter {name!r} cannot be loaded: {why}"
    loaded = [] if adapters is None else list(adapters.by_name)
    return f"adapter {name!r} is not available; available: {', '.join(loaded) or 'none'}"


# -- Draws inside the forward pass -----------------------------------------------------------------
#
# Shape letter: S rows that sample.


def plain_draws(step: StepInput, sampling_rows: Int64Array, vocab_size: int) -> DrawRows | None:
    """Returns how `sampling_rows` [S] of `step`, indexes, are drawn, if logits alone decide.

    Returns None if S is 0, or if a row has penalties, a bias, a grammar or anything else that
    changes logits before the draw: that may be known only when the logits are there.
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
    # Prompt lengths and histories make no difference to such draws.
    histories = [None] * len(positions)
    return draw_rows(SamplingRows(params, seeds, positions, positions, histories), vocab_size)


# -- Steps that score many prompt tokens, run in parts ---------------------------------------------
#
# The logits of all scored tokens together may not fit into memory. The parts give the same results
# as if the tokens had come in several steps.
#
# Shape letters: R rows of the step, K rows of a part.

# Limit of scored prompt tokens per pass; with a vocabulary of 150 000, their logits take 150 MB.
MAX_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """New tokens `starts` .. `ends` - 1 of the rows `rows` of a step; [K] each."""

    rows: Int64Array
    starts: Int64Array
    ends: Int64Array


def scores_too_much(step: StepInput) -> bool:
    """Returns whether `step` must be run in parts."""
    if len(step.token_ids) <= MAX_SCORED_TOKENS or step.cross is not None:
        return False
    return int(_num_scored(step).sum()) > MAX_SCORED_TOKENS


def run_in_parts(step: StepInput, execute: Callable[[StepInput], StepOutput]) -> StepOutput:
    """Returns what `execute` would return for `step`, scoring at most MAX_SCORED_TOKENS at a time.

    A row fails if one of its parts fails.
    """
    parts = list(_cut(step, _num_scored(step)))
    outputs = [execute(_take(step, part, is_first=part is parts[0])) for part in parts]
    return _merge(step, parts, outputs)


def _num_scored(step: StepInput) -> Int64Array:
    """Returns how many tokens of each row are scored, [R]: the first of its new tokens."""
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
    """Builds the step that computes `part`. Only the first part has the block moves."""
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
        # A row samples in its last part.
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
    """Joins `columns`, renumbers their rows as in the step, and drops failed rows."""
    of_step = [
        replace(of_part, row_indexes=part.rows[of_part.row_indexes].astype(np.int32))
        for part, of_part in zip(parts, columns, strict=True)
        if of_part is not None
    ]
    return join_columns(of_step, is_ok)
