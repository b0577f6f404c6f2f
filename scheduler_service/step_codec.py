"""The step contract in protobuf on one side, the core's values on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import numpy as np

from scheduler_service.core.config import Feature
from scheduler_service.core.plan import NewRow, StepOutcome, StepPlan, StepStatus, TableWrites
from scheduler_service.core.request import Int32Array, Request, ScoredToken
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.grammar_codec import encode_grammar
from scheduler_service.score_columns import FirstScores, ScoreColumns
from splitserve.executor.v1 import executor_pb2 as executor

_I32 = np.dtype("<i4")
# The numbers among the parameters of sampling, which have the names of the core's; None is absent.
_NUMBERS = tuple(
    field.name
    for field in executor.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None
)

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


# -- to the executor ---------------------------------------------------------------------------


def encode_plan(
    plan: StepPlan, *, scheduler_epoch: int, executor_epoch: int
) -> executor.ScheduleBatch:
    """The batch of a step."""
    planned = plan.work
    batch = executor.ScheduleBatch(
        scheduler_epoch=scheduler_epoch,
        executor_epoch=executor_epoch,
        step_id=plan.step_id,
        base_step_id=plan.base_step_id,
        removed_row_ids=_i32(list(plan.removed_row_ids)) if plan.removed_row_ids else b"",
        work=executor.Work(
            row_ids=planned.row_ids.astype(_I32).tobytes(),
            num_computed_tokens=planned.num_computed_tokens.tobytes(),
            num_new_tokens=planned.num_new_tokens.tobytes(),
            sampled_steps_back=planned.sampled_steps_back.tobytes(),
            token_ids=planned.token_ids.tobytes(),
            samples=b"" if planned.samples is None else planned.samples.tobytes(),
        ),
    )
    if plan.new_rows:
        batch.new_rows.CopyFrom(_encode_new_rows(plan.new_rows))
    if plan.table_writes:
        batch.table_writes.CopyFrom(_encode_table_writes(plan.table_writes))
    if plan.moves:
        _encode_moves(plan.moves.swap_out, batch.swap_out)
        _encode_moves(plan.moves.swap_in, batch.swap_in)
        _encode_moves(plan.moves.copy, batch.copy)
    return batch


def _encode_new_rows(rows: Items[NewRow]) -> executor.NewRows:
    distinct: dict[bytes, int] = {}
    # The sequences of a request have the same, which may be long.
    of_request: dict[Request, int] = {}
    adapters: dict[str, int] = {"": -1}
    indexes, histories = [], []
    for row in rows:
        request = row.sequence.request
        if request not in of_request:
            params = _encode_params(request.row_params).SerializeToString(deterministic=True)
            of_request[request] = distinct.setdefault(params, len(distinct))
        indexes.append(of_request[request])
        histories.append(row.token_ids if request.params.needs_history else _NO_TOKENS)
        adapters.setdefault(request.scheduling.adapter, len(adapters) - 1)
    block_offsets, block_ids = _csr([row.block_table for row in rows])
    history_offsets, history = _csr(histories)
    message = executor.NewRows(
        row_ids=_i32([row.row_id for row in rows]),
        sampling_params_indexes=_i32(indexes),
        seeds=np.array([row.sequence.seed for row in rows], "<i8").tobytes(),
        num_prompt_tokens=_i32([row.sequence.num_prompt_tokens for row in rows]),
        block_offsets=block_offsets,
        block_ids=block_ids,
        history_offsets=history_offsets,
        history_token_ids=history,
        sampling_params=[executor.SamplingParams.FromString(params) for params in distinct],
    )
    if len(adapters) > 1:
        message.adapter_indexes = _i32(
            [adapters[row.sequence.request.scheduling.adapter] for row in rows]
        )
        message.adapters.extend(list(adapters)[1:])
    if any(row.cross_blocks for row in rows):
        _encode_cross_attention(rows, message)
    return message


def _encode_cross_attention(rows: Items[NewRow], message: executor.NewRows) -> None:
    encoders = [row.sequence.request.encoder_token_ids for row in rows]
    message.num_encoder_tokens = _i32([0 if e is None else len(e) for e in encoders])
    message.cross_block_offsets, message.cross_block_ids = _csr(
        [np.array(row.cross_blocks, np.int32) for row in rows]
    )
    message.encoder_offsets, message.encoder_token_ids = _csr(
        [_NO_TOKENS if row.encoder_token_ids is None else row.encoder_token_ids for row in rows]
    )


def _encode_table_writes(writes: TableWrites) -> executor.TableWrites:
    block_offsets = np.zeros(len(writes.counts) + 1, _I32)
    block_offsets[1:] = writes.counts.cumsum()
    return executor.TableWrites(
        row_ids=writes.row_ids.tobytes(),
        start_indexes=writes.start_indexes.tobytes(),
        block_offsets=block_offsets.tobytes(),
        block_ids=writes.block_ids.tobytes(),
    )


def _encode_moves(pairs: list[tuple[int, int]], message: executor.BlockMoves) -> None:
    if pairs:
        columns = np.array(pairs, _I32)
        message.source_block_ids = columns[:, 0].tobytes()
        message.destination_block_ids = columns[:, 1].tobytes()


def _encode_params(params: SamplingParams) -> executor.SamplingParams:
    # Most has no meaning in a beam search, and is left out.
    names = _NUMBERS if params.beam is None else ("temperature", "num_logprobs")
    message = executor.SamplingParams(
        **{name: getattr(params, name) for name in names},
        logit_bias=params.logit_bias,
        suppressed_token_ids=sorted(params.stop_token_ids) if params.min_tokens > 0 else (),
        allowed_token_ids=sorted(params.allowed_token_ids),
        bad_words_token_ids=[
            executor.TokenSequence(token_ids=tokens) for tokens in params.bad_words_token_ids
        ],
    )
    if params.grammar is not None:
        encode_grammar(params.grammar, message.grammar)
    return message


_NO_TOKENS = np.empty(0, np.int32)


def _i32(values: list[int]) -> bytes:
    return np.array(values, _I32).tobytes()


def _csr(parts: Items[Int32Array]) -> tuple[bytes, bytes]:
    """The offsets and data columns of `parts`."""
    offsets = _i32([0, *accumulate(map(len, parts))])
    return offsets, np.concatenate(parts).astype(_I32, copy=False).tobytes()


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
        FirstScores(_decode_scores(result.logprobs)),
        _decode_scores(result.prompt_logprobs),
        move_us=_duration(timings.move_us),
        compute_us=_duration(timings.forward_us) + _duration(timings.sample_us),
    )


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


class StepCodec(Protocol):
    """The messages of one core's steps."""

    @property
    def position(self) -> str:
        """Where the latest event of the core is in the journal, for people."""

    def encode(self, plan: StepPlan) -> executor.ScheduleBatch:
        """The batch of the latest plan."""

    def decode(self, result: executor.StepResult, num_rows: int) -> StepOutcome:
        """The outcome of a step with `num_rows` rows, to be applied next. Raises ResultUnusable."""


class PlainCodec:
    """The messages of a core that is not recorded."""

    position = "no journal"

    def __init__(self, scheduler_epoch: int, executor_epoch: int) -> None:
        self._scheduler_epoch = scheduler_epoch
        self._executor_epoch = executor_epoch

    def encode(self, plan: StepPlan) -> executor.ScheduleBatch:
        return encode_plan(
            plan, scheduler_epoch=self._scheduler_epoch, executor_epoch=self._executor_epoch
        )

    def decode(self, result: executor.StepResult, num_rows: int) -> StepOutcome:
        return decode_result(result, num_rows)
