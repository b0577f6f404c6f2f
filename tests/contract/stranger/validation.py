"""Validates a whole ScheduleBatch before anything changes; the result is a plan to carry out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.stranger.columns import Refusal, check_length, malformed, read_groups, read_i32
from tests.contract.stranger.rows import NewRowsReader, Row, check_distinct, check_range


@dataclass(frozen=True, slots=True)
class WorkRow:
    """One row to compute. `token_ids` is None if the input was sampled `steps_back` steps ago."""

    row_id: int
    first_position: int
    token_ids: list[int] | None
    steps_back: int
    samples: bool
    num_run_on: int
    drafts: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """A valid batch. Moves are pairs of (source, destination)."""

    rows: dict[int, Row]
    swap_out: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]
    copy: list[tuple[int, int]]
    work: list[WorkRow]


def _take(rows: Mapping[int, Row], row_id: int, name: str) -> Row:
    try:
        return rows[row_id]
    except KeyError:
        reason = pb.STEP_ERROR_REASON_ROW_UNKNOWN
        raise Refusal(reason, name, f"row {row_id} is not in the row table") from None


class Validator:
    """Knows what one executor allows. Never mutates what it is given."""

    def __init__(self, info: pb.ExecutorInfo) -> None:
        self._limits = info.limits
        self._vocab_size = info.model.vocab_size
        self._block_size = info.block_size_tokens
        self._num_device_blocks = info.num_device_blocks
        self._num_host_blocks = info.num_host_blocks
        self._info = info
        self._new_rows = NewRowsReader(info)

    def plan(self, batch: pb.ScheduleBatch, table: Mapping[int, Row]) -> Plan:
        """What to do for `batch` on the row table `table`. Raises `Refusal`."""
        if batch.step_id < 1:
            raise malformed("step_id", f"{batch.step_id}; allowed is >= 1")
        rows = self._remove(batch, table)
        rows |= self._new_rows.read(batch.new_rows, rows)
        self._write_tables(batch.table_writes, rows)
        device, host = self._num_device_blocks, self._num_host_blocks
        copy = self._moves(batch.copy, "copy", device, device)
        overlap = {source for source, _ in copy} & {target for _, target in copy}
        if overlap:
            reason = pb.STEP_ERROR_REASON_BLOCK_OVERLAP
            raise Refusal(reason, "copy", f"{overlap} are sources and destinations")
        return Plan(
            rows=rows,
            swap_out=self._moves(batch.swap_out, "swap_out", device, host),
            swap_in=self._moves(batch.swap_in, "swap_in", host, device),
            copy=copy,
            work=self._work(batch.work, rows),
        )

    def _remove(self, batch: pb.ScheduleBatch, table: Mapping[int, Row]) -> dict[int, Row]:
        is_snapshot = not batch.HasField("base_step_id")
        removed = read_i32(batch.removed_row_ids, "removed_row_ids")
        if is_snapshot and removed:
            raise malformed("removed_row_ids", "not allowed in a snapshot")
        rows = {} if is_snapshot else dict(table)
        for row_id in removed:
            _take(rows, row_id, "removed_row_ids")
            del rows[row_id]
        return rows

    def _write_tables(self, writes: pb.TableWrites, rows: dict[int, Row]) -> None:
        row_ids = read_i32(writes.row_ids, "table_writes.row_ids")
        starts = read_i32(writes.start_indexes, "table_writes.start_indexes")
        check_length(starts, len(row_ids), "table_writes.start_indexes")
        blocks = read_i32(writes.block_ids, "table_writes.block_ids")
        groups = read_groups(
            writes.block_offsets, blocks, len(row_ids), "table_writes.block_offsets"
        )
        check_distinct(row_ids, "table_writes.row_ids")
        self._check_blocks(blocks, self._num_device_blocks, "table_writes.block_ids")
        for row_id, start, group in zip(row_ids, starts, groups, strict=True):
            row = _take(rows, row_id, "table_writes.row_ids")
            old = row.block_table
            if not 0 <= start <= len(old):
                reason = pb.STEP_ERROR_REASON_POSITION_OUT_OF_RANGE
                raise Refusal(reason, "table_writes.start_indexes", f"{start} > {len(old)}")
            new = (*old[:start], *group, *old[start + len(group) :])
            rows[row_id] = replace(row, block_table=new)

    def _moves(
        self, moves: pb.BlockMoves, name: str, num_sources: int, num_destinations: int
    ) -> list[tuple[int, int]]:
        sources = read_i32(moves.source_block_ids, f"{name}.source_block_ids")
        targets = read_i32(moves.destination_block_ids, f"{name}.destination_block_ids")
        check_length(targets, len(sources), f"{name}.destination_block_ids")
        self._check_blocks(sources, num_sources, f"{name}.source_block_ids")
        self._check_blocks(targets, num_destinations, f"{name}.destination_block_ids")
        if len(set(targets)) != len(targets):
            reason = pb.STEP_ERROR_REASON_BLOCK_OVERLAP
            raise Refusal(reason, f"{name}.destination_block_ids", f"{targets}")
        return list(zip(sources, targets, strict=True))

    def _work(self, work: pb.Work, rows: Mapping[int, Row]) -> list[WorkRow]:
        row_ids = read_i32(work.row_ids, "work.row_ids")
        count = len(row_ids)
        starts = read_i32(work.num_computed_tokens, "work.num_computed_tokens")
        lengths = read_i32(work.num_new_tokens, "work.num_new_tokens")
        backs = read_i32(work.sampled_steps_back, "work.sampled_steps_back") or [0] * count
        samples = list(work.samples) or [1] * count
        token_ids = read_i32(work.token_ids, "work.token_ids")
        check_length(starts, count, "work.num_computed_tokens")
        check_length(lengths, count, "work.num_new_tokens")
        check_length(backs, count, "work.sampled_steps_back")
        check_length(samples, count, "work.samples")
        runs, drafts = self._several(work, samples)
        self._check_work_values(row_ids, lengths, backs, samples)
        self._check_tokens(token_ids, "work.token_ids")
        literal = sum(n for n, back in zip(lengths, backs, strict=True) if back == 0)
        check_length(token_ids, literal, "work.token_ids")
        planned: list[WorkRow] = []
        remaining = iter(token_ids)
        for i, row_id in enumerate(row_ids):
            row = _take(rows, row_id, "work.row_ids")
            self._check_covered(row, starts[i], lengths[i] + runs[i] + len(drafts[i]))
            tokens = None if backs[i] else [next(remaining) for _ in range(lengths[i])]
            planned.append(
                WorkRow(row_id, starts[i], tokens, backs[i], bool(samples[i]), runs[i], drafts[i])
            )
        return planned

    def _several(self, work: pb.Work, samples: list[int]) -> tuple[list[int], list[list[int]]]:
        """How far each row runs on, and its drafts."""
        count = len(samples)
        is_used = bool(work.num_run_on_tokens or work.draft_offsets or work.draft_token_ids)
        if is_used and pb.FEATURE_SEVERAL_TOKENS not in self._info.features:
            reason = pb.STEP_ERROR_REASON_FEATURE_UNSUPPORTED
            raise Refusal(reason, "work.num_run_on_tokens", "not announced")
        if work.reports_parts and pb.FEATURE_PARTIAL_RESULTS not in self._info.features:
            reason = pb.STEP_ERROR_REASON_FEATURE_UNSUPPORTED
            raise Refusal(reason, "work.reports_parts", "not announced")
        name = "work.num_run_on_tokens"
        runs = check_length(read_i32(work.num_run_on_tokens, name) or [0] * count, count, name)
        data = read_i32(work.draft_token_ids, "work.draft_token_ids")
        self._check_tokens(data, "work.draft_token_ids")
        drafts: list[list[int]] = [[] for _ in range(count)]
        if data and not work.draft_offsets:
            raise malformed("work.draft_token_ids", "drafts without offsets")
        if work.draft_offsets:
            drafts = read_groups(work.draft_offsets, data, count, "work.draft_offsets")
        for run, of_row, flag in zip(runs, drafts, samples, strict=True):
            if run < 0 or (not flag and (run or of_row)):
                raise malformed(name, f"{run} and {len(of_row)} drafts, samples {flag}")
        return runs, drafts

    def _check_work_values(
        self, row_ids: list[int], lengths: list[int], backs: list[int], samples: list[int]
    ) -> None:
        check_distinct(row_ids, "work.row_ids")
        if any(length < 1 for length in lengths):
            raise malformed("work.num_new_tokens", f"{lengths}; allowed is >= 1")
        if any(flag not in (0, 1) for flag in samples):
            raise malformed("work.samples", f"{samples}; allowed are 0 and 1")
        for length, back in zip(lengths, backs, strict=True):
            if back < 0 or (back and length != 1):
                raise malformed("work.sampled_steps_back", f"{back} with {length} tokens")
        limits = self._limits
        if len(row_ids) > limits.max_num_rows or sum(lengths) > limits.max_num_batched_tokens:
            reason = pb.STEP_ERROR_REASON_LIMIT_EXCEEDED
            raise Refusal(reason, "work", f"{len(row_ids)} rows, {sum(lengths)} tokens")

    def _check_covered(self, row: Row, start: int, length: int) -> None:
        end = len(row.block_table) * self._block_size
        if start < 0 or start + length > end:
            reason = pb.STEP_ERROR_REASON_POSITION_OUT_OF_RANGE
            raise Refusal(reason, "work.num_computed_tokens", f"{start} + {length} > {end}")

    def _check_blocks(self, values: Sequence[int], end: int, name: str) -> None:
        check_range(values, end, pb.STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE, name)

    def _check_tokens(self, values: Sequence[int], name: str) -> None:
        check_range(values, self._vocab_size, pb.STEP_ERROR_REASON_TOKEN_OUT_OF_RANGE, name)
