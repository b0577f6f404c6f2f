"""The scores in a StepResult, made into objects only for rows that somebody looks at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from scheduler_service.core.request import Int32Array, ScoredToken
from splitserve.executor.v1 import executor_pb2 as executor

# Scores and alternatives of one row; more than a step of the largest kind has.
_MAX_OF_ROW = 2**20


class ScoreColumns(Mapping[int, list[ScoredToken]]):
    """By row index, in the order they came. Rows with more than could be true have none.

    Raises ValueError if the columns contradict each other.
    """

    def __init__(self, columns: executor.Logprobs) -> None:
        rows = np.frombuffer(columns.row_indexes, "<i4")
        self._positions = np.frombuffer(columns.positions, "<i4")
        self._token_ids = np.frombuffer(columns.token_ids, "<i4")
        self._logprobs = np.frombuffer(columns.logprobs, "<f4")
        self._ranks = np.frombuffer(columns.ranks, "<i4")
        self._offsets = _offsets(np.frombuffer(columns.top_offsets, "<i4"), len(rows))
        self._top_ids = np.frombuffer(columns.top_token_ids, "<i4")
        self._top_logprobs = np.frombuffer(columns.top_logprobs, "<f4")
        lengths = {len(self._positions), len(self._token_ids), len(self._logprobs), len(rows)}
        if lengths != {len(self._ranks)}:
            raise ValueError(f"columns of scores have different lengths: {sorted(lengths)}")
        if len(self._top_ids) != self._offsets[-1] or len(self._top_logprobs) != self._offsets[-1]:
            raise ValueError(f"{len(self._top_ids)} alternatives, offsets {self._offsets[-1]}")
        self._order: npt.NDArray[np.intp] = np.argsort(rows, kind="stable")
        self._rows: Int32Array = rows[self._order]

    def __getitem__(self, row_index: int) -> list[ScoredToken]:
        first, end = np.searchsorted(self._rows, [row_index, row_index + 1]).tolist()
        chosen = self._order[first:end]
        num_top = int((self._offsets[chosen + 1] - self._offsets[chosen]).sum())
        if first == end or len(chosen) + num_top > _MAX_OF_ROW:
            raise KeyError(row_index)
        return [self._score(index) for index in chosen.tolist()]

    def __iter__(self) -> Iterator[int]:
        rows = sorted(set(self._rows.tolist()))
        return (row for row in rows if row in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _score(self, index: int) -> ScoredToken:
        start, end = self._offsets[index : index + 2].tolist()
        top_ids: list[int] = self._top_ids[start:end].tolist()
        return ScoredToken(
            int(self._positions[index]),
            int(self._token_ids[index]),
            float(self._logprobs[index]),
            int(self._ranks[index]),
            list(zip(top_ids, self._top_logprobs[start:end].tolist(), strict=True)),
        )


def _offsets(offsets: Int32Array, count: int) -> Int32Array:
    if count == 0 and len(offsets) == 0:
        return np.zeros(1, np.int32)
    if len(offsets) != count + 1 or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise ValueError(f"top_offsets do not delimit {count} things")
    return offsets
