"""The step contract in protobuf on one side, the core's values on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from scheduler_service.core.config import Feature
from scheduler_service.core.plan import StepOutcome, StepPlan, StepStatus, TableWrites
from scheduler_service.core.request import Int32Array, ScoredToken
from scheduler_service.new_rows_codec import encode_new_rows
from scheduler_service.score_columns import ScoreColumns
from splitserve.executor.v1 import executor_pb2 as executor

_I32 = np.dtype("<i4")
_STATUSES: Mapping[int, StepStatus] = MappingProxyType(
    {
        executor.STEP_STATUS_OK: StepStatus.OK,
        executor.STEP_STATUS_NEED_SNAPSHOT: StepStatus.NEED_SNAPSHOT,
        executor.STEP_STATUS_REFUSED: StepStatus.REFUSED,
        executor.STEP_STATUS_FAILED: StepStatus.FAILED,
    }
)
_FEATURES: Mapping[int, Feature] = MappingProxyType(
    {
        executor.FEATURE_LOGPROBS: Feature.LOGPROBS,
        executor.FEATURE_PROMPT_LOGPROBS: Feature.PROMPT_LOGPROBS,
        executor.FEATURE_PENALTIES: Feature.PENALTIES,
        executor.FEATURE_LOGIT_BIAS: Feature.LOGIT_BIAS,
        executor.FEATURE_ADAPTERS: Feature.ADAPTERS,
        executor.FEATURE_CROSS_ATTENTION: Feature.CROSS_ATTENTION,
        executor.FEATURE_TOKEN_CONSTRAINTS: Feature.TOKEN_CONSTRAINTS,
        executor.FEATURE_GRAMMAR: Feature.GRAMMAR,
        executor.FEATURE_SEVERAL_TOKENS: Feature.SEVERAL_TOKENS,
    }
)
_NO_SCORES: Mapping[int, list[ScoredToken]] = MappingProxyType({})
_MAX_TEXT_CHARS = 500
_MAX_DURATION_US = 3_600_000_000
# Refusals that no other batch of ours would escape.
_FENCED = frozenset(
    {
        executor.STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH,
        executor.STEP_ERROR_REASON_WRONG_EXECUTOR_EPOCH,
        executor.STEP_ERROR_REASON_STALE_STEP,
        executor.STEP_ERROR_REASON_FUTURE_SCHEDULER_EPOCH,
    }
)


class ResultUnusable(Exception):
    """A StepResult that contradicts the contract, or fences us off: the executor is of no use."""


@dataclass(frozen=True, slots=True)
class Received:
    """The message that an outcome was decoded from, and how many rows its step has."""

    result: executor.StepResult
    num_rows: int


# -- to the executor ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A ScheduleBatch in the bytes of protobuf."""

    step_id: int
    data: bytes


def encode_plan(plan: StepPlan, *, scheduler_epoch: int, executor_epoch: int) -> EncodedBatch:
    """The batch of a step."""
    planned = plan.work
    drafts = planned.drafts
    batch = executor.ScheduleBatch(
        scheduler_epoch=scheduler_epoch,
        executor_epoch=executor_epoch,
        step_id=plan.step_id,
        base_step_id=plan.base_step_id,
        removed_row_ids=np.array(plan.removed_row_ids, _I32).tobytes()
        if plan.removed_row_ids
        else b"",
        work=executor.Work(
            row_ids=planned.row_ids.astype(_I32).tobytes(),
            num_computed_tokens=planned.num_computed_tokens.tobytes(),
            num_new_tokens=planned.num_new_tokens.tobytes(),
            sampled_steps_back=planned.sampled_steps_back.tobytes(),
            token_ids=planned.token_ids.tobytes(),
            samples=b"" if planned.samples is None else planned.samples.tobytes(),
            num_run_on_tokens=b""
            if planned.num_run_on_tokens is None
            else planned.num_run_on_tokens.tobytes(),
            draft_offsets=b"" if drafts is None else _offsets(drafts.counts),
            draft_token_ids=b"" if drafts is None else drafts.token_ids.tobytes(),
        ),
    )
    if plan.table_writes:
        batch.table_writes.CopyFrom(_encode_table_writes(plan.table_writes))
    if plan.moves:
        _encode_moves(plan.moves.swap_out, batch.swap_out)
        _encode_moves(plan.moves.swap_in, batch.swap_in)
        _encode_moves(plan.moves.copy, batch.copy)
    data = batch.SerializeToString()
    if plan.new_rows:
        data = b"".join([data, *encode_new_rows(plan.new_rows)])
    return EncodedBatch(plan.step_id, data)


def _encode_table_writes(writes: TableWrites) -> executor.TableWrites:
    return executor.TableWrites(
        row_ids=writes.row_ids.tobytes(),
        start_indexes=writes.start_indexes.tobytes(),
        block_offsets=_offsets(writes.counts),
        block_ids=writes.block_ids.tobytes(),
    )


def _offsets(counts: Int32Array) -> bytes:
    """Where the elements of each begin, and where the last end."""
    offsets = np.zeros(len(counts) + 1, _I32)
    offsets[1:] = counts.cumsum()
    return offsets.tobytes()


def _encode_moves(pairs: list[tuple[int, int]], message: executor.BlockMoves) -> None:
    if pairs:
        columns = np.array(pairs, _I32)
        message.source_block_ids = columns[:, 0].tobytes()
        message.destination_block_ids = columns[:, 1].tobytes()


# -- from the executor -------------------------------------------------------------------------


def decode_result(result: executor.StepResult, num_rows: int) -> StepOutcome:
    """A result of a step with `num_rows` rows, of which no more is read. Raises ResultUnusable.

    Columns are read where they lie; what they say is for the core to judge, which has the plan. A
    status that is not known may be of a later version: then nothing is known of the step, which
    counts as refused.
    """
    status = _STATUSES.get(result.status, StepStatus.REFUSED)
    if status is not StepStatus.OK:
        text = _describe_error(result)
        if result.error.reason in _FENCED:
            raise ResultUnusable(text)
        return StepOutcome(result.step_id, status, error=text)
    try:
        return _decode_ok(result, num_rows)
    except ValueError as error:
        raise ResultUnusable(f"columns of step {result.step_id}: {error}") from error


def _describe_error(result: executor.StepResult) -> str:
    error = result.error
    if result.status not in _STATUSES:
        return f"status is {result.status}, which this scheduler does not know"
    names = executor.StepErrorReason.values()
    reason = str(error.reason)
    if error.reason in names:
        reason = executor.StepErrorReason.Name(error.reason).removeprefix("STEP_ERROR_REASON_")
    return f"{reason} {error.field} {error.message}"[:_MAX_TEXT_CHARS]


def _decode_ok(result: executor.StepResult, num_rows: int) -> StepOutcome:
    timings = result.timings
    return StepOutcome(
        result.step_id,
        StepStatus.OK,
        np.frombuffer(result.sampled_token_ids, "<i4"),
        # One too many is enough to see that there are too many.
        list(result.row_statuses[: num_rows + 1]) or None,
        {e.row_index: e.message[:_MAX_TEXT_CHARS] for e in result.row_errors[:num_rows]},
        _decode_scores(result.logprobs),
        _decode_scores(result.prompt_logprobs),
        move_us=_duration(timings.move_us),
        compute_us=_duration(timings.forward_us) + _duration(timings.sample_us),
        token_counts=_decode_counts(result, num_rows) if result.sampled_offsets else None,
    )


def _decode_counts(result: executor.StepResult, num_rows: int) -> Int32Array:
    """How many tokens each row has. Raises ValueError if the column is none."""
    if len(result.sampled_offsets) > _I32.itemsize * (num_rows + 1):
        raise ValueError(f"sampled_offsets are {len(result.sampled_offsets)} bytes")
    offsets = np.frombuffer(result.sampled_offsets, "<i4")
    counts: Int32Array = np.diff(offsets)
    if offsets[0] != 0 or np.count_nonzero(counts < 0):
        raise ValueError("sampled_offsets do not rise from 0 on")
    return counts


def _decode_scores(columns: executor.Logprobs) -> Mapping[int, list[ScoredToken]]:
    """The scores of all rows; where they cannot be read, those who asked for them have none."""
    if not columns.row_indexes:
        return _NO_SCORES
    try:
        return ScoreColumns(columns)
    except ValueError:
        return _NO_SCORES


def _duration(us: int) -> int:
    """A duration as it may be true; it only feeds averages."""
    return min(max(us, 0), _MAX_DURATION_US)


def decode_features(features: Iterable[int]) -> frozenset[Feature]:
    """The features this scheduler knows; later ones are none of its business."""
    return frozenset(_FEATURES[feature] for feature in features if feature in _FEATURES)
