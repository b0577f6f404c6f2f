"""Columns of a step from lists and back, and what the contract demands of block moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_service.steps.step import BlockMoves, Int32Array, LogprobColumns
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.plan import StepPlan
from scheduler_service.scheduler.values.request import ScoredToken

NOTHING = np.empty(0, np.int32)


def check_moves(plan: StepPlan, config: SchedulerConfig) -> None:
    """Ids are in range, destinations distinct, and no block is both ends of a copy."""
    device, host = range(config.num_device_blocks), range(config.num_host_blocks)
    moves = plan.moves
    for pairs, sources, destinations in (
        (moves.swap_out, device, host),
        (moves.swap_in, host, device),
        (moves.copy, device, device),
    ):
        assert all(source in sources and to in destinations for source, to in pairs)
        assert len({to for _, to in pairs}) == len(pairs), "a destination occurs twice"
    assert {source for source, _ in moves.copy}.isdisjoint(to for _, to in moves.copy)
    assert len({to for _, to in moves.swap_in + moves.copy}) == len(moves.swap_in + moves.copy)


def move_columns(pairs: Sequence[tuple[int, int]]) -> BlockMoves:
    """Sources and destinations."""
    if not pairs:
        return BlockMoves(NOTHING, NOTHING)
    columns = np.array(pairs, np.int32)
    return BlockMoves(columns[:, 0], columns[:, 1])


def padded_tables(tables: Sequence[list[int]]) -> Int32Array:
    """[R, M], padded with -1."""
    width = max(map(len, tables), default=0)
    return np.array([table + [-1] * (width - len(table)) for table in tables], np.int32).reshape(
        len(tables), width
    )


def scores_by_index(
    columns: LogprobColumns | None, indexes: list[int]
) -> dict[int, list[ScoredToken]]:
    """Scores by index in the step; `indexes`: of the rows of the runner."""
    by_row: dict[int, list[ScoredToken]] = {}
    if columns is None:
        return by_row
    offsets = columns.top_offsets.tolist()
    top = list(zip(columns.top_token_ids.tolist(), columns.top_logprobs.tolist(), strict=True))
    for k, row in enumerate(columns.row_indexes.tolist()):
        token = ScoredToken(
            int(columns.positions[k]),
            int(columns.token_ids[k]),
            float(columns.logprobs[k]),
            int(columns.ranks[k]),
            top[offsets[k] : offsets[k + 1]],
        )
        by_row.setdefault(indexes[row], []).append(token)
    return by_row
