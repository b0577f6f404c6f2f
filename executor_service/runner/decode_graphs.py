"""Steps of decodes, recorded once for each of some numbers of rows and then replayed.

A replay launches all kernels of a forward pass at once; one by one, launching them takes the host
longer than a small batch takes the device. A recording reads and writes the same memory each time,
so a step's inputs are copied into buffers that stay, and rows are added up to the next recorded
number. Nobody reads the logits of added rows.

Tokens are drawn in the recording, too, as the step's rows say. Where more than logits decides, they
are drawn again by others, from the same logits.

Shape letters: R rows of a step, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from executor_service.device.cuda_graphs import CudaGraphs, Recorder
from executor_service.device.kv_cache import KVCache
from executor_service.device.streams import streams_of
from executor_service.device.uploads import Numbers, Uploads
from executor_service.errors import RecordingFailed, TrialFailed
from executor_service.model.input_batch import InputBatch, PassRows, Readout
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import MakeModel, PagedModel
from executor_service.runner.decode_inputs import DecodeInputs
from executor_service.sampling.static_draw import StaticDraw
from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.paged_batch import lay_out_rows

# Largest relative error of logits that a replay may show against the same pass without it. Rounding
# in half precision stays below half of it; a row that reads what is not its own is off by about 1.
_TOLERANCE = 0.06

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """A model whose decodes are replayed, up to a number of rows; all else goes to it as it is."""

    def __init__(
        self,
        model: PagedModel,
        loaded: LoadedModel,
        cache: KVCache,
        max_num_rows: int,
        static_draw: StaticDraw | None = None,
    ) -> None:
        """Nothing is recorded yet. `model` is that of `loaded`, on the pools of `cache`.

        `static_draw`: what draws in a recording; None if that is left to others.
        """
        self._model = model
        self._cache = cache
        self._sizes = recorded_sizes(max_num_rows)
        self._static_draw = static_draw
        self._inputs = DecodeInputs(max_num_rows, loaded.max_model_len, cache, static_draw)
        self._num_trial_positions = min(cache.block_size, loaded.max_model_len)
        self._logits = torch.zeros(max_num_rows, loaded.vocab_size, device=cache.device)
        self._token_ids = torch.zeros(max_num_rows, dtype=torch.int32, device=cache.device)
        self._replays: dict[int, Callable[[], None]] = {}

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> bool:
        """Records, and tries what was recorded; what it writes to the pools nobody may need yet.

        Returns whether all is well. If not, says so, and all steps go to the model. Raises
        RecordingFailed if the process cannot go on.
        """
        started = time.perf_counter()
        uploads = Uploads(self._cache.device, streams_of(self._cache.device))
        try:
            # The largest first: the others then fit into its memory.
            for size in reversed(self._sizes):
                self._replays[size] = recorder.record(self._forward(size, uploads))
            for size in self._sizes:
                self._try(size, uploads)
        except RecordingFailed:
            raise
        except TrialFailed as refusal:
            self._replays.clear()
            _log.error("decode_graphs_refused reason=%r", str(refusal))
            return False
        except Exception as error_raised:  # whatever a model's own code raises
            self._replays.clear()
            _log.exception("decode_graphs_failed reason=%r", type(error_raised).__name__)
            return False
        seconds = time.perf_counter() - started
        _log.info("decode_graphs_recorded num_graphs=%d seconds=%.1f", len(self._sizes), seconds)
        return True

    def logits(self, batch: InputBatch) -> Tensor:
        rows, readout = batch.rows, batch.readout
        if not self._replays or not rows.is_decode or not 0 < rows.num_rows <= self._sizes[-1]:
            return self._model.logits(batch)
        draws = None if self._static_draw is None else batch.draws()
        logits = self._replay(rows, batch.uploads, draws)
        if draws is not None:
            batch.token_ids = self._token_ids[: rows.num_rows]
        if len(readout.sampling_rows) == rows.num_rows and not len(readout.prompt_rows):
            return logits
        ((index,), _) = batch.uploads.send(Numbers([rows.logits_index], []))
        return logits[index]

    def _replay(self, rows: PassRows, uploads: Uploads, draws: DrawRows | None) -> Tensor:
        """Logits of all rows, [R, V]."""
        size = next(size for size in self._sizes if size >= rows.num_rows)
        self._inputs.fill(rows, size, uploads, draws)
        self._replays[size]()
        return self._logits[: rows.num_rows]

    def _forward(self, size: int, uploads: Uploads) -> Callable[[], None]:
        tensors = self._inputs.tensors(size)
        batch = InputBatch(_readout(size), self._trial_rows(size), uploads, tensors)

        def run() -> None:
            # Into memory of its own: that of a recording is used again by the others.
            logits = self._logits[:size].copy_(self._model.logits(batch))
            if self._static_draw is not None:
                drawn = self._static_draw.draw(logits, self._inputs.words(size))
                self._token_ids[:size].copy_(drawn)

        return run

    def _try(self, size: int, uploads: Uploads) -> None:
        """Raises TrialFailed if a replay of `size` rows says something else than the model."""
        rows = self._trial_rows(min(size, self._cache.num_device_blocks))
        num_rows = rows.num_rows
        expected = self._model.logits(InputBatch(_readout(num_rows), rows, uploads)).clone()
        logits = self._replay(rows, uploads, trial_draws(num_rows, self._logits.shape[1]))
        difference = logits - expected
        errors = difference.norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
        error = float(errors.max())
        if not error <= _TOLERANCE:  # it may be NaN
            raise TrialFailed(f"relative error {error:.2g} of the logits of {num_rows} rows")
        if self._static_draw is None:
            return
        drawn = self._static_draw.draw(self._logits[:size], self._inputs.words(size))
        wrong = int((drawn != self._token_ids[:size])[:num_rows].sum())
        if wrong:
            raise TrialFailed(f"{wrong} of {num_rows} rows draw another token")

    def _trial_rows(self, num_rows: int) -> PassRows:
        """Row i has block i alone, and there its token."""
        rows = np.arange(num_rows)
        tables, computed = rows[:, None].astype(np.int32), rows % self._num_trial_positions
        layout = lay_out_rows(tables, computed, np.ones_like(rows), self._cache.block_size)
        return PassRows(rows % self._logits.shape[1], computed, tables, layout, rows)


def _readout(num_rows: int) -> Readout:
    """Of rows that all sample."""
    no_rows = np.empty(0, dtype=np.int64)
    return Readout(np.arange(num_rows), no_rows, no_rows)


def trial_draws(num_rows: int, vocab_size: int) -> DrawRows:
    """Rows that are greedy, drawn whole, and cut."""
    rows = np.arange(num_rows)
    is_cut = rows % 3 == 2
    return DrawRows(
        temperatures=(rows % 3 > 0).astype(np.float32),
        top_k=np.where(is_cut, min(20, vocab_size), vocab_size).astype(np.int32),
        top_p=np.where(is_cut, 0.9, 1.0),
        min_p=np.zeros(num_rows, np.float32),
        seeds=rows.astype(np.int64),
        positions=rows.astype(np.int64),
    )


def recorded_sizes(max_num_rows: int) -> list[int]:
    """Numbers of rows to record, rising: close together where a step is short; the last is given.

    1, 2, 4, multiples of 8 up to 256, then of 64.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(320, max_num_rows, 64)]
    return [size for size in sizes if size < max_num_rows] + [max_num_rows]


def with_decode_graphs(
    make_model: MakeModel,
    max_num_rows: int,
    make_recorder: Callable[[], Recorder] = CudaGraphs,
    static_draw: StaticDraw | None = None,
) -> MakeModel:
    """Makes models as `make_model` does, with their decodes recorded, and drawn by `static_draw`.

    What could not be recorded once is not tried again.
    """
    is_recordable = True

    def make(loaded: LoadedModel, cache: KVCache) -> PagedModel:
        nonlocal is_recordable
        model = make_model(loaded, cache)
        if not is_recordable:
            return model
        graphs = DecodeGraphs(model, loaded, cache, max_num_rows, static_draw)
        is_recordable = graphs.record(make_recorder())
        return graphs if is_recordable else model

    return make
