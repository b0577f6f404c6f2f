"""Steps of decodes, recorded once for each of some numbers of rows and then replayed.

A replay launches all kernels of a forward pass at once; one by one, launching them takes the host
longer than a small batch takes the device. A recording reads and writes the same memory each time,
so a step's inputs are copied into buffers that stay, and rows are added up to the next recorded
number. Added rows write to no slot and read one of block 0; nobody reads their logits.

Shape letters: R rows of a step, N rows of a recording, M blocks of the longest table that a
sequence can have, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from executor_service.device.kv_cache import KVCache
from executor_service.model.input_batch import InputBatch, Readout
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import MakeModel, PagedModel
from splitserve_kernels.paged_batch import PagedBatch

# Largest relative error of logits that a replay may show against the same pass without it. Rounding
# in half precision stays below half of it; a row that reads what is not its own is off by about 1.
_TOLERANCE = 0.06

_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records what `run` asks of the device."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs `run` once or more; returns what repeats its work on the same memory."""
        ...


class CudaGraphs:
    """Records CUDA graphs. They share memory, so only one may run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        # Kernels are compiled and libraries set up before, not while it is recorded.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay


class DecodeInputs:
    """The buffers that recordings read, for up to `max_num_rows` rows."""

    def __init__(self, max_num_rows: int, max_model_len: int, cache: KVCache) -> None:
        """All rows are added ones until `fill` is called."""
        device, block_size = cache.device, cache.block_size
        self._width = -(-max_model_len // block_size)
        self._max_num_tokens = self._width * block_size
        self._input_ids = torch.zeros(1, max_num_rows, dtype=torch.int64, device=device)
        self._position_ids = torch.zeros_like(self._input_ids)
        self._rows = torch.arange(max_num_rows + 1, device=device)
        self._query_starts = self._rows.to(torch.int32)
        self._num_computed = torch.zeros(max_num_rows, dtype=torch.int32, device=device)
        self._slots = torch.full((max_num_rows,), -1, device=device)
        self._tables = torch.zeros(max_num_rows, self._width, dtype=torch.int32, device=device)

    def batch(self, num_rows: int) -> InputBatch:
        """The first `num_rows` rows, as views of the buffers; each has one new token."""
        no_rows = np.empty(0, dtype=np.int64)
        return InputBatch(
            input_ids=self._input_ids[:, :num_rows],
            position_ids=self._position_ids[:, :num_rows],
            paged=PagedBatch(
                block_tables=self._tables[:num_rows],
                num_computed_tokens=self._num_computed[:num_rows],
                query_starts=self._query_starts[: num_rows + 1],
                slot_mapping=self._slots[:num_rows],
                max_num_new_tokens=1,
                # Kernels are launched for the longest sequence that there can be.
                max_num_tokens=self._max_num_tokens,
            ),
            logits_index=self._rows[:num_rows],
            readout=Readout(np.arange(num_rows), no_rows, no_rows),
        )

    def fill(self, batch: InputBatch, num_rows: int) -> None:
        """Copies `batch`, of R rows with one new token each, and adds rows up to `num_rows`."""
        paged = batch.paged
        real, added = slice(paged.num_rows), slice(paged.num_rows, num_rows)
        # What lies beyond the last token of the longest sequence is never read.
        tables = paged.block_tables[:, : self._width]
        self._input_ids[:, real].copy_(batch.input_ids)
        self._position_ids[:, real].copy_(batch.position_ids)
        self._num_computed[real].copy_(paged.num_computed_tokens)
        self._slots[real].copy_(paged.slot_mapping)
        self._tables[real, : tables.shape[1]].copy_(tables)
        if paged.num_rows < num_rows:
            self._num_computed[added] = 0
            self._slots[added] = -1
            self._tables[added, 0] = 0


class DecodeGraphs:
    """A model whose decodes are replayed, up to a number of rows; all else goes to it as it is."""

    def __init__(
        self, model: PagedModel, loaded: LoadedModel, cache: KVCache, max_num_rows: int
    ) -> None:
        """Nothing is recorded yet. `model` is that of `loaded`, on the pools of `cache`."""
        self._model = model
        self._cache = cache
        self._sizes = recorded_sizes(max_num_rows)
        self._inputs = DecodeInputs(max_num_rows, loaded.max_model_len, cache)
        self._num_trial_positions = min(cache.block_size, loaded.max_model_len)
        self._logits = torch.zeros(max_num_rows, loaded.vocab_size, device=cache.device)
        self._replays: dict[int, Callable[[], None]] = {}

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> None:
        """Records, and tries what was recorded; what it writes to the pools nobody may need yet.

        If that fails, says so; all steps then go to the model.
        """
        started = time.perf_counter()
        try:
            # The largest first: the others then fit into its memory.
            for size in reversed(self._sizes):
                self._replays[size] = recorder.record(self._forward(size))
            errors = [self._error(size) for size in self._sizes]
        except Exception as error_raised:  # whatever a model's own code raises
            self._replays.clear()
            _log.exception("decode_graphs_failed reason=%r", type(error_raised).__name__)
            return
        # Some may be NaN.
        wrong = [error for error in errors if not error <= _TOLERANCE]
        if wrong:
            self._replays.clear()
            _log.error("decode_graphs_refused relative_error=%.2g", wrong[0])
            return
        seconds = time.perf_counter() - started
        _log.info("decode_graphs_recorded num_graphs=%d seconds=%.1f", len(self._sizes), seconds)

    def logits(self, batch: InputBatch) -> Tensor:
        num_rows = batch.paged.num_rows
        is_decode = batch.paged.max_num_new_tokens == 1 and batch.input_ids.shape[1] == num_rows
        if not self._replays or not is_decode or num_rows > self._sizes[-1]:
            return self._model.logits(batch)
        logits = self._replay(batch)
        readout = batch.readout
        if len(readout.sampling_rows) == num_rows and not len(readout.prompt_rows):
            return logits
        return logits[batch.logits_index]

    def _replay(self, batch: InputBatch) -> Tensor:
        """Logits of all rows, [R, V]."""
        num_rows = batch.paged.num_rows
        size = next(size for size in self._sizes if size >= num_rows)
        self._inputs.fill(batch, size)
        self._replays[size]()
        return self._logits[:num_rows]

    def _forward(self, size: int) -> Callable[[], None]:
        batch = self._inputs.batch(size)

        def run() -> None:
            # Into memory of its own: that of a recording is used again by the others.
            self._logits[:size].copy_(self._model.logits(batch))

        return run

    def _error(self, size: int) -> float:
        """How far a replay of `size` rows is from the model's logits, relative to these."""
        trial = DecodeInputs(size, self._cache.block_size, self._cache)
        batch = trial.batch(min(size, self._cache.num_device_blocks))
        num_rows = batch.paged.num_rows
        blocks = torch.arange(num_rows, device=self._cache.device)
        offsets = blocks % self._num_trial_positions
        batch.input_ids.copy_(blocks % self._logits.shape[1])
        batch.position_ids.copy_(offsets)
        batch.paged.num_computed_tokens.copy_(offsets)
        batch.paged.block_tables[:, 0] = blocks
        batch.paged.slot_mapping.copy_(blocks * self._cache.block_size + offsets)
        expected = self._model.logits(batch).clone()
        difference = self._replay(batch) - expected
        return float((difference.norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)).max())


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
) -> MakeModel:
    """Makes models as `make_model` does, with their decodes recorded."""

    def make(loaded: LoadedModel, cache: KVCache) -> PagedModel:
        graphs = DecodeGraphs(make_model(loaded, cache), loaded, cache, max_num_rows)
        graphs.record(make_recorder())
        return graphs

    return make
