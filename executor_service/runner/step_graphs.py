"""Recordings of steps (CUDA graphs), one for each of some shapes, and their replay.

A replay launches all kernels of a forward pass at once; launching them one by one takes the host
longer than a small batch takes the device. A recording reads and writes the same memory each time,
so a step's inputs are copied into static buffers, with padding rows and tokens up to the next
recorded shape. The logits of padding are not read. Decodes whose rows have adapters have recordings
of their own, with kernels that read on the device which adapter a row has.

Tokens are drawn in the recording, too, with the parameters of the step's rows. Rows for which more
than logits decides are drawn again by the sampler, from the same logits. So decodes can also be
replayed back to back.

Shape letters: L lines of logits of a shape, S rows that sample, V vocabulary, R rows that run on, m
most tokens of such a row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from executor_service.device import CudaGraphs, KVCache, Recorder, Uploads, streams_of
from executor_service.errors import RecordingFailed, TrialFailed
from executor_service.model import (
    Adapter,
    AdapterSlots,
    AdaptingModel,
    InputBatch,
    LoadedModel,
    MakeModel,
    PagedModel,
    PassRows,
    slots_of,
    takes_adapters,
)
from executor_service.runner.recorded_runs import (
    RecordedRuns,
    no_rows,
    readout_of_lines,
    trial_draws,
    trial_rows,
    with_adapters,
)
from executor_service.runner.static_inputs import (
    Kind,
    StaticInputs,
    StepShape,
    adapted_shapes,
    decode_shapes,
    prompt_shapes,
    smallest,
)
from executor_service.sampling import StaticDraw
from executor_service.trials import Trial
from splitserve_kernels.decoder_inputs import RunRows
from splitserve_kernels.draw_rows import DrawRows

# Largest relative error of a replay's logits, compared with the same pass without recording.
# Rounding in half precision stays below half of it; a row that reads foreign blocks is off by
# about 1.
_TOLERANCE = 0.06

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Output buffers that all recordings share.

    `logits`: [L, V] float32. `token_ids`: [L] int32.
    """

    logits: Tensor
    token_ids: Tensor


class StepGraphs:
    """Model that replays steps of recorded shapes and passes all others on. A PagedModel."""

    def __init__(
        self,
        model: PagedModel,
        loaded: LoadedModel,
        cache: KVCache,
        shapes: Sequence[StepShape],
        static_draw: StaticDraw | None = None,
        *,
        records_adapted: bool = True,
    ) -> None:
        """Allocates buffers; records nothing yet.

        `model` is that of `loaded`, on the pools of `cache`. `shapes`: of decodes and of steps with
        prompts, rising. `static_draw`: draws tokens in a recording; None if tokens are drawn
        elsewhere. `records_adapted`: decodes are recorded with adapters, too, if the model has
        slots for them.
        """
        self._slots = slots_of(model) if records_adapted else None
        self._model = model
        self._cache = cache
        self._max_model_len = loaded.max_model_len
        self._static_draw = static_draw
        self._shapes = shapes
        self._inputs = StaticInputs(shapes, loaded.max_model_len, cache, static_draw, self._slots)
        most_lines = max(shape.num_lines for shape in shapes)
        logits = torch.zeros(most_lines, loaded.vocab_size, device=cache.device)
        self._outputs = _Outputs(logits, logits.new_zeros(most_lines, dtype=torch.int32))
        self._replays: dict[StepShape, Callable[[], None]] = {}
        self._adapted_replays: dict[StepShape, Callable[[], None]] = {}
        self._runs: RecordedRuns | None = None
        if static_draw is not None:
            token_ids = self._outputs.token_ids
            self._runs = RecordedRuns(self._inputs, static_draw, token_ids, cache.block_size)
        # If True, all steps go to the model.
        self.is_left_out = False
        self._has_warned = False

    @property
    def takes_adapters(self) -> bool:
        return takes_adapters(self._model)

    def prepare_adapter(self, adapter: Adapter) -> None:
        assert isinstance(self._model, AdaptingModel)
        self._model.prepare_adapter(adapter)

    @property
    def slots(self) -> AdapterSlots | None:
        return slots_of(self._model)

    @property
    def num_graphs(self) -> int:
        """Number of recordings."""
        return len(self._replays) + len(self._adapted_replays)

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> frozenset[Kind]:
        """Records all shapes and tries the recordings. Overwrites the pools.

        Returns the kinds of steps that are not recorded, because recording raised or a replay
        differs from the model; an error in the log says why, and such steps go to the model. Raises
        RecordingFailed if the process cannot go on.
        """
        refused: set[Kind] = set()
        for kind in ("prompt", "decode"):
            shapes = [shape for shape in self._shapes if shape.kind == kind]
            if shapes and not self._record(kind, shapes, self._replays, recorder):
                refused.add(kind)
        decodes = [shape for shape in self._replays if shape.is_decode]
        if decodes and self._slots is not None:
            shapes = adapted_shapes(decodes)
            if not self._record("adapted", shapes, self._adapted_replays, recorder):
                refused.add("adapted")
        if decodes and self._runs is not None:
            uploads = Uploads(self._cache.device, streams_of(self._cache.device))
            self._runs.record(decodes, recorder, self._trial_rows, uploads)
        return frozenset(refused)

    def logits(self, batch: InputBatch) -> Tensor:
        replays = self._replays_for(batch.rows)
        shape = smallest(replays, batch.rows) if batch.rows.num_rows else None
        if shape is None or self.is_left_out:
            return self._model.logits(batch)
        draws = None if self._static_draw is None else batch.draws()
        logits = self._replay(replays[shape], shape, batch.rows, batch.uploads, draws)
        if draws is not None:
            batch.token_ids = self._outputs.token_ids[: len(draws)]
        return logits

    @property
    def can_run(self) -> bool:
        return self._runs is not None and self._runs.is_recorded and not self.is_left_out

    def can_run_adapted(self, adapters: Collection[Adapter]) -> bool:
        return bool(self._adapted_replays) and _are_of_linears(adapters)

    def decode_run(self, batch: InputBatch, rows: RunRows) -> Tensor:
        replays = self._replays_for(batch.rows)
        shape = smallest(replays, batch.rows)
        assert shape is not None, "all decodes are recorded"
        assert self._runs is not None, "runs are recorded"
        self._inputs.fill(batch.rows, shape, batch.uploads, rows.draws, rows.num_tokens)
        return self._runs.run(shape, replays[shape], len(rows), rows.max_num_tokens)

    def _replays_for(self, rows: PassRows) -> Mapping[StepShape, Callable[[], None]]:
        """Returns the recordings that may compute `rows`."""
        if rows.adapted is None:
            return self._replays
        if _are_of_linears(rows.adapted.adapters) and self._adapted_replays:
            return self._adapted_replays
        if not self._has_warned:
            reason = "steps with such adapters are launched kernel by kernel, which is slower"
            _log.warning("adapters_unrecorded reason=%r", reason)
            self._has_warned = True
        return {}

    def _record(
        self,
        kind: Kind,
        shapes: Sequence[StepShape],
        target: dict[StepShape, Callable[[], None]],
        recorder: Recorder,
    ) -> bool:
        """Records and tries shapes of one kind, into `target`. Returns whether that succeeded."""
        uploads = Uploads(self._cache.device, streams_of(self._cache.device))
        is_adapted = kind == "adapted"
        replays = {}
        try:
            # The largest first: the smaller ones then fit into its memory.
            for shape in reversed(shapes):
                self._inputs.fill(no_rows(), shape, uploads)
                run = partial(self._run, shape, uploads, is_adapted=is_adapted)
                replays[shape] = recorder.record(run)
            # Steps look for a shape from the smallest on.
            target.update((shape, replays[shape]) for shape in shapes)
            adapters = self._trial_adapters() if is_adapted else ()
            for shape in shapes:
                self._try(target[shape], shape, uploads, adapters)
        except RecordingFailed:
            raise
        except Exception as error:  # whatever a model's own code raises
            for shape in shapes:
                target.pop(shape, None)
            if isinstance(error, TrialFailed):
                _log.error("cuda_graphs_refused kind=%s reason=%r", kind, str(error))
            else:
                name = type(error).__name__
                _log.exception("cuda_graphs_not_recorded kind=%s reason=%r", kind, name)
            return False
        return True

    def _run(self, shape: StepShape, uploads: Uploads, *, is_adapted: bool) -> None:
        """Computes one step of `shape`; this is what is recorded."""
        lines = slice(shape.num_lines)
        # A new batch each time: attention caches facts about a batch, which must be recorded, too.
        tensors = self._inputs.tensors(shape, is_adapted=is_adapted)
        batch = InputBatch(readout_of_lines(shape.num_lines), no_rows(), uploads, tensors)
        logits = self._outputs.logits[lines].copy_(self._model.logits(batch))
        if self._static_draw is not None:
            drawn = self._static_draw.draw(logits, self._inputs.words(shape))
            self._outputs.token_ids[lines].copy_(drawn)

    def _replay(
        self,
        replay: Callable[[], None],
        shape: StepShape,
        rows: PassRows,
        uploads: Uploads,
        draws: DrawRows | None,
    ) -> Tensor:
        """Replays `shape` for `rows` and returns their logits."""
        self._inputs.fill(rows, shape, uploads, draws)
        replay()
        return self._outputs.logits[: len(rows.logits_index)]

    def _try(
        self,
        replay: Callable[[], None],
        shape: StepShape,
        uploads: Uploads,
        adapters: tuple[Adapter, ...],
    ) -> None:
        """Raises TrialFailed if a replay of `shape` gives other logits or tokens than the model.

        `adapters`: those of some rows, in turn; empty for none.
        """
        rows = with_adapters(self._trial_rows(shape), adapters)
        num_lines = len(rows.logits_index)
        batch = InputBatch(readout_of_lines(num_lines), rows, uploads)
        expected = self._model.logits(batch).to(torch.float32, copy=True)
        draws = trial_draws(num_lines, expected.shape[1])
        # A replay that does nothing must not find the expected results in its buffers.
        self._outputs.logits.fill_(torch.nan)
        self._outputs.token_ids.fill_(-1)
        Trial(
            reference=lambda _rows: expected,
            candidate=lambda rows: self._replay(replay, shape, rows, uploads, draws),
            cases=(rows,),
            error_of=lambda _rows, expected, actual: _relative_error(expected, actual),
            allowed=_TOLERANCE,
            complaint=lambda error: f"relative error {error:.2g} of the logits of {num_lines} rows",
        ).check()
        if self._static_draw is None:
            return
        draw, logits = self._static_draw.draw, self._outputs.logits[: shape.num_lines]
        Trial(
            reference=lambda words: draw(logits, words)[:num_lines],
            candidate=lambda _words: self._outputs.token_ids[:num_lines],
            cases=(self._inputs.words(shape),),
            error_of=lambda _words, expected, actual: float((expected != actual).sum()),
            complaint=lambda wrong: f"{wrong:.0f} of {num_lines} rows draw different tokens",
        ).check()

    def _trial_adapters(self) -> tuple[Adapter, ...]:
        slots = self._slots
        assert slots is not None, "there are slots"
        return tuple(slots.random_adapter(seed) for seed in range(min(2, slots.limits.max_num)))

    def _trial_rows(self, shape: StepShape) -> PassRows:
        vocab_size = self._outputs.logits.shape[1]
        return trial_rows(shape, self._cache, self._max_model_len, vocab_size)


def _are_of_linears(adapters: Iterable[Adapter]) -> bool:
    """Returns whether recordings can apply adapters: those that change linear layers only."""
    return all(adapter.changes_linears_only for adapter in adapters)


# -- Creation of models with recordings ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """Size and cost of a model's recordings. `pool_bytes`: memory that all recordings share."""

    num_graphs: int
    pool_bytes: int
    seconds: float


class RecordedModels:
    """Creates models by `make_model` and records their steps.

    A kind of steps that could not be recorded once is not tried again.
    """

    def __init__(
        self,
        make_model: MakeModel,
        max_num_rows: int,
        max_num_tokens: int = 0,
        static_draw: StaticDraw | None = None,
        make_recorder: Callable[[], Recorder] = CudaGraphs,
    ) -> None:
        """Plans the recorded shapes.

        These are decodes of up to `max_num_rows` rows, and steps with prompts of up to
        `max_num_tokens` tokens, at most MAX_PROMPT_SIZE. `static_draw`: draws tokens in a
        recording; None if none are drawn there.
        """
        self._make_model = make_model
        self._shapes = decode_shapes(max_num_rows) + prompt_shapes(max_num_rows, max_num_tokens)
        self._static_draw = static_draw
        self._make_recorder = make_recorder
        # Recordings of the model that was made last.
        self.recorded: Recorded | None = None
        self._graphs: StepGraphs | None = None
        self._records_adapted = True

    def make(self, loaded: LoadedModel, cache: KVCache) -> PagedModel:
        """Creates the serving model, with all its recordings."""
        started = time.perf_counter()
        model, self.recorded = self._make(loaded, cache, self._shapes, started)
        self._graphs = model if isinstance(model, StepGraphs) else None
        _log.info(
            "cuda_graphs_recorded num_graphs=%d pool_bytes=%d seconds=%.1f",
            self.recorded.num_graphs,
            self.recorded.pool_bytes,
            self.recorded.seconds,
        )
        return model

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, the model that was made last computes all steps without its recordings.

        Replays compile no kernels for steps that are not recorded; without recordings they are
        compiled.
        """
        graphs = self._graphs
        if graphs is None:
            yield
            return
        graphs.is_left_out = True
        try:
            yield
        finally:
            graphs.is_left_out = False

    def make_largest(self, loaded: LoadedModel, cache: KVCache) -> PagedModel:
        """Creates, sooner, a model that takes about as much memory as the serving one.

        Its memory can then be measured. Only the largest step of each kind is recorded: the smaller
        ones are computed in its memory. The driver's own memory for each left-out recording is
        about a megabyte.
        """
        last_of_kinds = {shape.kind: shape for shape in self._shapes}
        model, _ = self._make(loaded, cache, list(last_of_kinds.values()), time.perf_counter())
        return model

    def _make(
        self, loaded: LoadedModel, cache: KVCache, shapes: Sequence[StepShape], started: float
    ) -> tuple[PagedModel, Recorded]:
        model = self._make_model(loaded, cache)
        if not shapes:
            return model, Recorded(0, 0, 0.0)
        recorder = self._make_recorder()
        graphs = StepGraphs(
            model,
            loaded,
            cache,
            shapes,
            self._static_draw,
            records_adapted=self._records_adapted,
        )
        refused = graphs.record(recorder)
        self._records_adapted &= "adapted" not in refused
        self._shapes = [shape for shape in self._shapes if shape.kind not in refused]
        seconds = time.perf_counter() - started
        recorded = Recorded(graphs.num_graphs, recorder.pool_bytes, seconds)
        return (graphs if graphs.num_graphs else model), recorded


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest error of a line of logits [L, V], relative to its norm."""
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    return float(errors.max())
