"""Vectors of a step: of rows that an uncached model computes whole, and of rows with KV blocks.

Shape letters: R rows of the step, S rows that return vectors, N numbers of a vector.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from executor_service.device import DeviceStreams, HostCopy, is_out_of_memory, release_cached_memory
from executor_service.errors import OutOfMemory, StepFailed
from executor_service.model import LoadedModel, VectorHead
from executor_service.runner.forward_pass import ForwardResult
from executor_service.steps import (
    FinishedStep,
    Float32Array,
    Int64Array,
    PendingStep,
    PoolingParams,
    RowStatus,
    StepInput,
    StepOutput,
    execute_step,
)

_NOT_FINITE = "the model returned a vector that is not finite"
_NOT_ASKED = "the row asks for no vector, and this model returns nothing else"


class UncachedRunner:
    """Runs steps of a model whose rows have no blocks. Not thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Prepares a runner for `loaded`, which is uncached."""
        parts = loaded.vector_parts
        assert parts is not None, "the model returns vectors"
        assert parts.uncached is not None, "the model is uncached"
        self._model = parts.uncached
        self._device = loaded.device
        self._ran_out_of_memory = False

    def execute(self, step: StepInput) -> StepOutput:
        """Begins and finishes `step`. Raises StepFailed."""
        return execute_step(self, step)

    def begin(self, step: StepInput) -> PendingStep:
        """Runs `step`, which is done on return. Raises StepFailed."""
        if self._ran_out_of_memory:
            # Not earlier: the error still held the tensors of the failed step.
            self._ran_out_of_memory = False
            release_cached_memory(self._device)
        started_s = time.perf_counter()
        try:
            output = self._run(step)
        except Exception as error:
            if is_out_of_memory(error):
                self._ran_out_of_memory = True
                raise StepFailed("out of memory") from OutOfMemory(str(error))
            raise StepFailed(f"{type(error).__name__} while the step ran") from error
        took_us = round((time.perf_counter() - started_s) * 1e6)
        return FinishedStep(replace(output, forward_us=took_us))

    def _run(self, step: StepInput) -> StepOutput:
        token_ids = torch.from_numpy(step.token_ids.astype(np.int64))
        of_rows = torch.split(token_ids, step.num_new_tokens.tolist())
        asking = _asking(step)
        found = self._model.vectors([(of_rows[row], params) for row, params in asking])
        vectors: dict[int, Float32Array] = {}
        errors: dict[int, str] = {}
        for (row, _), result in zip(asking, found, strict=True):
            if isinstance(result, str):
                errors[row] = result
            else:
                vectors[row] = result.numpy()
        return _output(step, vectors, errors)


class PendingVectors:
    """Vectors of rows with KV blocks, on their way to the host in one copy.

    `rows`: [S], indexes of the rows that return vectors. `token_ids`: [S] int32 on the device, -1,
    since these rows sample nothing.
    """

    def __init__(
        self, step: StepInput, forward: ForwardResult, head: VectorHead, streams: DeviceStreams
    ) -> None:
        """Launches the last steps of the vectors, and the copy."""
        self._step = step
        self._row_errors = forward.row_errors
        outputs = forward.sampling_logits
        self.rows: Int64Array = forward.readout.sampling_rows
        self.token_ids = torch.full((len(self.rows),), -1, dtype=torch.int32, device=outputs.device)
        asking = dict(_asking(step))
        self._indexes = [row for row in self.rows.tolist() if row in asking]
        kept = [index for index, row in enumerate(self.rows.tolist()) if row in asking]
        vectors: list[Tensor] = []
        if kept:
            vectors = head.finish(outputs[kept], [asking[row] for row in self._indexes])
        self._sizes = [len(vector) for vector in vectors]
        numbers = torch.cat(vectors) if vectors else outputs.new_empty(0)
        self._copy = HostCopy((numbers,), streams.copy_to_host)

    def output(self, move_us: int, forward_us: int, sample_us: int) -> StepOutput:
        """Returns the step's output with its durations. Call it when the device has finished."""
        (numbers,) = self._copy.arrays()
        parts = np.split(numbers, np.cumsum(self._sizes)[:-1]) if self._sizes else []
        vectors = dict(zip(self._indexes, parts, strict=True))
        output = _output(self._step, vectors, self._row_errors)
        return replace(output, move_us=move_us, forward_us=forward_us, sample_us=sample_us)


def _asking(step: StepInput) -> list[tuple[int, PoolingParams]]:
    """Returns the rows that return a vector in this step, and what they ask for."""
    return [
        (row, params)
        for row, params in enumerate(step.pooling)
        if params is not None and step.samples[row]
    ]


def _output(
    step: StepInput, vectors: Mapping[int, Float32Array], errors: Mapping[int, str]
) -> StepOutput:
    """Returns the output of all rows. `vectors`, `errors`: of those that have any."""
    statuses = np.full(step.num_rows, RowStatus.OK, np.uint8)
    told = dict(errors)
    found: list[Float32Array | None] = [None] * step.num_rows
    for row in range(step.num_rows):
        vector = vectors.get(row)
        if row in told:
            statuses[row] = RowStatus.FAILED
        elif vector is not None and np.isfinite(vector).all():
            found[row] = np.ascontiguousarray(vector, np.float32)
        elif vector is not None:
            statuses[row], told[row] = RowStatus.INVALID_LOGITS, _NOT_FINITE
        elif step.samples[row]:
            statuses[row], told[row] = RowStatus.FAILED, _NOT_ASKED
    none = np.full(step.num_rows, -1, np.int32)
    return StepOutput(statuses, none, told, vectors=found)
