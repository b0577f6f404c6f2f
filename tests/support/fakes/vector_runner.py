"""A runner without a model that returns vectors, which follow from what its KV pools hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from executor_service.steps import (
    FinishedStep,
    Float32Array,
    Int32Array,
    PoolingParams,
    PoolingTask,
    RowStatus,
    StepInput,
    StepOutput,
)
from tests.support.fakes.fake_runner import StepFault, no_fault

EMBEDDING_SIZE = 6
LABELS = ("no", "yes", "perhaps")
_SALTS = {PoolingTask.EMBEDDING: 1.0, PoolingTask.SCORES: 2.0}


def expected_vector(token_ids: Sequence[int], pooling: PoolingParams) -> list[float]:
    """Returns a vector that differs between texts, and between kinds of vectors."""
    size = len(LABELS) if pooling.task is PoolingTask.SCORES else EMBEDDING_SIZE
    positions = np.arange(1, len(token_ids) + 1)
    angles = np.multiply.outer(np.arange(1, size + 1), positions) * np.array(token_ids)
    numbers = np.cos(angles + pooling.second_text_start).sum(axis=1)
    numbers = (numbers if pooling.raw else numbers / 2) + _SALTS[pooling.task]
    cut = numbers[: pooling.num_dimensions] if pooling.num_dimensions else numbers
    vector: list[float] = cut.astype(np.float32).tolist()
    return vector


class VectorRunner:
    """Writes tokens to slots of blocks, and makes vectors of the slots that a row's table names.

    Without a pool (`num_blocks` 0) rows are whole texts. `fault`: as of FakeRunner. `steps`: number
    of tokens of each row, step by step. `violations`: always empty, since wrong slots show in
    vectors.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        fault: Callable[[StepInput], StepFault] = no_fault,
    ) -> None:
        self.fault = fault
        self.violations: list[str] = []
        self.steps: list[list[int]] = []
        self._block_size = block_size
        self._slots = np.full(num_blocks * block_size, -1, np.int32)

    def begin(self, step: StepInput) -> FinishedStep:
        fault = self.fault(step)
        if fault.error is not None:
            raise fault.error
        self.steps.append(step.num_new_tokens.tolist())
        self._copy_blocks(step)
        texts = self._texts(step)
        vectors: list[Float32Array | None] = []
        statuses = np.full(step.num_rows, RowStatus.OK, np.uint8)
        for row in range(step.num_rows):
            pooling, is_due = step.pooling[row], bool(step.samples[row])
            assert pooling is not None
            statuses[row] = fault.rows.get(int(step.row_ids[row]), RowStatus.OK)
            vector = expected_vector(texts[row].tolist(), pooling)
            is_missing = statuses[row] != RowStatus.OK or not is_due
            vectors.append(None if is_missing else np.array(vector, np.float32))
        tokens = np.full(step.num_rows, -1, np.int32)
        return FinishedStep(StepOutput(statuses, tokens, vectors=vectors))

    def _copy_blocks(self, step: StepInput) -> None:
        assert not len(step.swap_in.sources), "there is no host pool"
        blocks = self._slots.reshape(-1, self._block_size)
        blocks[step.copy.destinations] = blocks[step.copy.sources]

    def _texts(self, step: StepInput) -> list[Int32Array]:
        """Returns the tokens of each row up to its last input token."""
        inputs = np.split(step.token_ids, np.cumsum(step.num_new_tokens)[:-1])
        if not len(self._slots):
            assert not step.num_computed_tokens.any(), "a text is not computed in parts"
            assert step.samples.all()
            return inputs
        spans = []
        for row, token_ids in enumerate(inputs):
            start = int(step.num_computed_tokens[row])
            end = start + len(token_ids)
            positions = np.arange(end)
            table = step.block_tables[row]
            slots = table[positions // self._block_size] * self._block_size
            slots += (positions % self._block_size).astype(np.int32)
            self._slots[slots[start:]] = token_ids
            spans.append(slots)
        return [self._slots[slots] for slots in spans]
