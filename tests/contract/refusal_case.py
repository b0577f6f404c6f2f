"""One wrong batch, and how to make such."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.steps.batches import NewRow, Sender, WorkRow, i32


@dataclass(frozen=True, slots=True)
class Case:
    """A wrong delta on step 1, after which rows 0 (blocks 0, 1, 2) and 1 (block 10) exist."""

    name: str
    reason: str
    field: str
    make: Callable[[Sender], pb.ScheduleBatch]


def work(*rows: WorkRow) -> Callable[[Sender], pb.ScheduleBatch]:
    """Makes a batch that computes `rows`."""
    return lambda sender: sender.batch(2, base=1, work=rows)


def new_rows(*rows: NewRow) -> Callable[[Sender], pb.ScheduleBatch]:
    """Makes a batch that adds `rows`."""
    return lambda sender: sender.batch(2, base=1, new=rows)


def params(**fields: object) -> Callable[[Sender], pb.ScheduleBatch]:
    """Makes a batch that adds a row with these sampling params."""
    return new_rows(NewRow(2, (5,), params=fields))


def table_writes(
    *writes: tuple[int, int, tuple[int, ...]],
) -> Callable[[Sender], pb.ScheduleBatch]:
    """Makes a batch with `writes`: row, start, blocks."""
    return lambda sender: sender.batch(2, base=1, writes=writes)


def moves(phase: str, *pairs: tuple[int, int]) -> Callable[[Sender], pb.ScheduleBatch]:
    """Makes a batch with moves of one phase: (source, destination)."""

    def make(sender: Sender) -> pb.ScheduleBatch:
        batch = sender.batch(2, base=1)
        phase_moves = getattr(batch, phase)
        phase_moves.source_block_ids = i32(source for source, _ in pairs)
        phase_moves.destination_block_ids = i32(destination for _, destination in pairs)
        return batch

    return make


def set_field(path: str, value: object) -> Callable[[Sender], pb.ScheduleBatch]:
    """Makes a batch that does a bit of everything, with one field replaced."""

    def make(sender: Sender) -> pb.ScheduleBatch:
        batch = sender.batch(
            2,
            base=1,
            removed=[1],
            new=[NewRow(2, (5,)), NewRow(3, (6,))],
            writes=[(2, 1, (7,))],
            swap_out=[(0, 0)],
            copy=[(0, 9)],
            work=[WorkRow(2, 0, [1]), WorkRow(3, 0, [2])],
        )
        *parents, name = path.split(".")
        message: object = batch
        for parent in parents:
            message = getattr(message, parent)
        setattr(message, name, value)
        return batch

    return make
