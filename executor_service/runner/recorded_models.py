"""Models whose steps are recorded, as they are made, and what that took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from executor_service.device.cuda_graphs import CudaGraphs, Recorder
from executor_service.device.kv_cache import KVCache
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import MakeModel, PagedModel
from executor_service.runner.step_graphs import StepGraphs
from executor_service.runner.step_shapes import StepShape, decode_shapes, prompt_shapes
from executor_service.sampling.static_draw import StaticDraw

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded of a model. `pool_bytes`: memory that all recordings share."""

    num_graphs: int
    pool_bytes: int
    seconds: float


class RecordedModels:
    """Makes models as another does, with their steps recorded.

    What could not be recorded once is not tried again.
    """

    def __init__(
        self,
        make_model: MakeModel,
        max_num_rows: int,
        max_num_tokens: int = 0,
        static_draw: StaticDraw | None = None,
        make_recorder: Callable[[], Recorder] = CudaGraphs,
    ) -> None:
        """Decodes of up to `max_num_rows`, and other steps of up to `max_num_tokens`, or of 512.

        `static_draw`: what draws in a recording; None if nothing does.
        """
        self._make_model = make_model
        self._shapes = decode_shapes(max_num_rows) + prompt_shapes(max_num_rows, max_num_tokens)
        self._static_draw = static_draw
        self._make_recorder = make_recorder
        # Of the model that was made last.
        self.recorded: Recorded | None = None
        self._graphs: StepGraphs | None = None

    def make(self, loaded: LoadedModel, cache: KVCache) -> PagedModel:
        """A model to serve with."""
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

        Kernels that a recording holds are not compiled for the steps that are not recorded.
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
        """A model that takes about as much memory, made sooner: to measure it.

        Of each kind of steps only the largest is recorded: the others are computed in its memory.
        What the driver keeps for each of these is a megabyte or so.
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
        graphs = StepGraphs(model, loaded, cache, shapes, self._static_draw)
        refused = graphs.record(recorder)
        self._shapes = [shape for shape in self._shapes if shape.kind not in refused]
        seconds = time.perf_counter() - started
        recorded = Recorded(graphs.num_graphs, recorder.pool_bytes, seconds)
        return (graphs if graphs.num_graphs else model), recorded
