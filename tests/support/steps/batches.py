"""Batches made by hand from the contract, without anybody's codec."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitserve.executor.v1 import executor_pb2 as pb

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row to add; `params` are fields of SamplingParams, greedy unless they say otherwise.

    `encoder`: the tokens to encode; `num_encoder` says how many there are where none is to be.
    """

    row_id: int
    blocks: Sequence[int] = ()
    num_prompt: int = 1
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    history: Sequence[int] = ()
    adapter: str = ""
    cross_blocks: Sequence[int] = ()
    encoder: Sequence[int] = ()
    num_encoder: int | None = None


@dataclass(frozen=True, slots=True)
class WorkRow:
    """A row to compute: `tokens` from position `start` on, or the token of `back` steps ago.

    It may get `run_on` tokens more, and brings `drafts`.
    """

    row_id: int
    start: int
    tokens: Sequence[int] = ()
    back: int = 0
    samples: bool = True
    run_on: int = 0
    drafts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sender:
    """Makes batches of one scheduler for one executor."""

    scheduler_epoch: int
    executor_epoch: int

    def batch(
        self,
        step_id: int,
        *,
        base: int | None = None,
        removed: Sequence[int] = (),
        new: Sequence[NewRow] = (),
        writes: Sequence[tuple[int, int, Sequence[int]]] = (),
        swap_out: Pairs = (),
        swap_in: Pairs = (),
        copy: Pairs = (),
        work: Sequence[WorkRow] = (),
    ) -> pb.ScheduleBatch:
        """`writes`: (row id, start index, block ids). Moves: (source, destination)."""
        batch = pb.ScheduleBatch(
            scheduler_epoch=self.scheduler_epoch,
            executor_epoch=self.executor_epoch,
            step_id=step_id,
            base_step_id=base,
            removed_row_ids=i32(removed),
        )
        if new:
            batch.new_rows.CopyFrom(_new_rows(new))
        if writes:
            batch.table_writes.CopyFrom(_table_writes(writes))
        for name, pairs in (("swap_out", swap_out), ("swap_in", swap_in), ("copy", copy)):
            if pairs:
                moves = getattr(batch, name)
                moves.source_block_ids = i32(source for source, _ in pairs)
                moves.destination_block_ids = i32(destination for _, destination in pairs)
        if work:
            batch.work.CopyFrom(_work(work))
        return batch


def i32(values: Iterable[int]) -> bytes:
    """An i32 column."""
    return b"".join(struct.pack("<i", value) for value in values)


def i64(values: Iterable[int]) -> bytes:
    """An i64 column."""
    return b"".join(struct.pack("<q", value) for value in values)


def read_i32(column: bytes) -> list[int]:
    """The values of an i32 column."""
    return [value for (value,) in struct.iter_unpack("<i", column)]


def read_f32(column: bytes) -> list[float]:
    """The values of an f32 column."""
    return [value for (value,) in struct.iter_unpack("<f", column)]


def tokens_of(result: pb.StepResult) -> list[int]:
    """The sampled tokens of a result that must be OK, and all of whose rows must be."""
    assert result.status == pb.STEP_STATUS_OK, result
    assert result.row_statuses == b"", result
    return read_i32(result.sampled_token_ids)


def runs_of(result: pb.StepResult) -> list[list[int]]:
    """The tokens of each row of a result that must be OK."""
    assert result.status == pb.STEP_STATUS_OK, result
    tokens, offsets = read_i32(result.sampled_token_ids), read_i32(result.sampled_offsets)
    if not offsets:
        return [[token] if token >= 0 else [] for token in tokens]
    assert (offsets[0], offsets[-1]) == (0, len(tokens))
    return [tokens[start:end] for start, end in itertools.pairwise(offsets)]


def _offsets(parts: Sequence[Sequence[int]]) -> bytes:
    return i32([0, *itertools.accumulate(len(part) for part in parts)])


def _new_rows(rows: Sequence[NewRow]) -> pb.NewRows:
    params: list[dict[str, Any]] = []
    indexes = []
    for row in rows:
        wanted = {"temperature": 0.0, **row.params}
        if wanted not in params:
            params.append(wanted)
        indexes.append(params.index(wanted))
    new = pb.NewRows(
        row_ids=i32(row.row_id for row in rows),
        sampling_params_indexes=i32(indexes),
        seeds=i64(row.seed for row in rows),
        num_prompt_tokens=i32(row.num_prompt for row in rows),
        block_offsets=_offsets([row.blocks for row in rows]),
        block_ids=i32(block for row in rows for block in row.blocks),
        history_offsets=_offsets([row.history for row in rows]),
        history_token_ids=i32(token for row in rows for token in row.history),
        sampling_params=[pb.SamplingParams(**fields) for fields in params],
    )
    adapters = sorted({row.adapter for row in rows if row.adapter})
    if adapters:
        new.adapters.extend(adapters)
        indexes = [adapters.index(row.adapter) if row.adapter else -1 for row in rows]
        new.adapter_indexes = i32(indexes)
    _add_cross(new, rows)
    return new


def _add_cross(new: pb.NewRows, rows: Sequence[NewRow]) -> None:
    """Leaves columns empty that say nothing."""
    counts = [len(row.encoder) if row.num_encoder is None else row.num_encoder for row in rows]
    if any(counts):
        new.num_encoder_tokens = i32(counts)
    if any(row.cross_blocks for row in rows):
        new.cross_block_offsets = _offsets([row.cross_blocks for row in rows])
        new.cross_block_ids = i32(block for row in rows for block in row.cross_blocks)
    if any(row.encoder for row in rows):
        new.encoder_offsets = _offsets([row.encoder for row in rows])
        new.encoder_token_ids = i32(token for row in rows for token in row.encoder)


def _table_writes(writes: Sequence[tuple[int, int, Sequence[int]]]) -> pb.TableWrites:
    return pb.TableWrites(
        row_ids=i32(row_id for row_id, _, _ in writes),
        start_indexes=i32(start for _, start, _ in writes),
        block_offsets=_offsets([blocks for _, _, blocks in writes]),
        block_ids=i32(block for _, _, blocks in writes for block in blocks),
    )


def _work(rows: Sequence[WorkRow]) -> pb.Work:
    work = pb.Work(
        row_ids=i32(row.row_id for row in rows),
        num_computed_tokens=i32(row.start for row in rows),
        num_new_tokens=i32(1 if row.back else len(row.tokens) for row in rows),
        token_ids=i32(token for row in rows for token in row.tokens),
    )
    if any(row.back for row in rows):
        work.sampled_steps_back = i32(row.back for row in rows)
    if not all(row.samples for row in rows):
        work.samples = bytes(row.samples for row in rows)
    if any(row.run_on for row in rows):
        work.num_run_on_tokens = i32(row.run_on for row in rows)
    if any(row.drafts for row in rows):
        work.draft_offsets = _offsets([row.drafts for row in rows])
        work.draft_token_ids = i32(token for row in rows for token in row.drafts)
    return work
