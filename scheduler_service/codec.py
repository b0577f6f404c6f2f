"""Protobuf on one side, the core's values on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import accumulate, pairwise
from types import MappingProxyType

import numpy as np

from scheduler_service.core.config import Feature
from scheduler_service.core.plan import ScoredToken, StepOutcome, StepPlan, StepStatus, TableWrite
from scheduler_service.core.request import FinishReason, Request, Sequence
from scheduler_service.core.sampling_params import SamplingParams
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.errors import duration_from_s

_STATUSES: Mapping[int, StepStatus] = MappingProxyType(
    {
        executor.STEP_STATUS_OK: StepStatus.OK,
        executor.STEP_STATUS_NEED_SNAPSHOT: StepStatus.NEED_SNAPSHOT,
        executor.STEP_STATUS_REFUSED: StepStatus.REFUSED,
        executor.STEP_STATUS_FAILED: StepStatus.FAILED,
    }
)
_FINISH_REASONS: Mapping[FinishReason, api.FinishReason] = MappingProxyType(
    {
        FinishReason.STOP: api.FINISH_REASON_STOP,
        FinishReason.LENGTH: api.FINISH_REASON_LENGTH,
        FinishReason.MODEL_LENGTH: api.FINISH_REASON_MODEL_LENGTH,
        FinishReason.ABORTED: api.FINISH_REASON_ABORTED,
        FinishReason.ERROR: api.FINISH_REASON_ERROR,
    }
)
_FEATURES: Mapping[int, Feature] = MappingProxyType(
    {
        executor.FEATURE_LOGPROBS: Feature.LOGPROBS,
        executor.FEATURE_PROMPT_LOGPROBS: Feature.PROMPT_LOGPROBS,
        executor.FEATURE_PENALTIES: Feature.PENALTIES,
        executor.FEATURE_LOGIT_BIAS: Feature.LOGIT_BIAS,
    }
)
# The fields that mean the same to client and executor, and are passed on if they are set.
_SHARED_PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "num_logprobs",
    "num_prompt_logprobs",
)


# Refusals that no other batch of ours would escape.
_FENCED = frozenset(
    {
        executor.STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH,
        executor.STEP_ERROR_REASON_WRONG_EXECUTOR_EPOCH,
        executor.STEP_ERROR_REASON_STALE_STEP,
    }
)


class ResultUnusable(Exception):
    """A StepResult that contradicts the contract, or fences us off: the executor is of no use."""


# -- to the executor ---------------------------------------------------------------------------


def encode_plan(
    plan: StepPlan, *, scheduler_epoch: int, executor_epoch: int
) -> executor.ScheduleBatch:
    """The batch of a step; reads tables and tokens of `plan.new_sequences` as they are now."""
    batch = executor.ScheduleBatch(
        scheduler_epoch=scheduler_epoch,
        executor_epoch=executor_epoch,
        step_id=plan.step_id,
        base_step_id=plan.base_step_id,
        removed_row_ids=_i32(plan.removed_row_ids),
    )
    if plan.new_sequences:
        batch.new_rows.CopyFrom(_encode_new_rows(plan.new_sequences))
    if plan.table_writes:
        batch.table_writes.CopyFrom(_encode_table_writes(plan.table_writes))
    planned, work = plan.work, batch.work
    work.row_ids = planned.row_ids.tobytes()
    work.num_computed_tokens = planned.num_computed_tokens.tobytes()
    work.num_new_tokens = planned.num_new_tokens.tobytes()
    work.sampled_steps_back = planned.sampled_steps_back.tobytes()
    work.token_ids = _i32(planned.token_ids)
    if not planned.samples.all():
        work.samples = planned.samples.astype(np.uint8).tobytes()
    return batch


def _encode_new_rows(sequences: Items[Sequence]) -> executor.NewRows:
    distinct: dict[bytes, int] = {}
    indexes, histories = [], []
    for sequence in sequences:
        params = _executor_params(sequence.request).SerializeToString(deterministic=True)
        indexes.append(distinct.setdefault(params, len(distinct)))
        needs_history = sequence.request.params.needs_history
        histories.append(sequence.token_ids if needs_history else ())
    block_offsets, block_ids = _csr([sequence.block_table for sequence in sequences])
    history_offsets, history = _csr(histories)
    return executor.NewRows(
        row_ids=_i32([sequence.row_id for sequence in sequences]),
        sampling_params_indexes=_i32(indexes),
        seeds=np.array([sequence.seed for sequence in sequences], "<i8").tobytes(),
        num_prompt_tokens=_i32([sequence.num_prompt_tokens for sequence in sequences]),
        block_offsets=block_offsets,
        block_ids=block_ids,
        history_offsets=history_offsets,
        history_token_ids=history,
        sampling_params=[executor.SamplingParams.FromString(params) for params in distinct],
    )


def _encode_table_writes(writes: Items[TableWrite]) -> executor.TableWrites:
    offsets, block_ids = _csr([write.block_ids for write in writes])
    return executor.TableWrites(
        row_ids=_i32([write.row_id for write in writes]),
        start_indexes=_i32([write.start_index for write in writes]),
        block_offsets=offsets,
        block_ids=block_ids,
    )


def _executor_params(request: Request) -> executor.SamplingParams:
    params = request.params
    values = {name: getattr(params, name) for name in _SHARED_PARAMS}
    suppressed = sorted(request.stop_token_ids) if params.min_tokens > 0 else ()
    return executor.SamplingParams(
        **values, logit_bias=params.logit_bias, suppressed_token_ids=suppressed
    )


def _i32(values: Iterable[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def _csr(parts: Items[Items[int]]) -> tuple[bytes, bytes]:
    """The offsets and data columns of `parts`."""
    data = [element for part in parts for element in part]
    return _i32([0, *accumulate(map(len, parts))]), _i32(data)


# -- from the executor -------------------------------------------------------------------------


def decode_result(result: executor.StepResult, num_rows: int) -> StepOutcome:
    """A result of a step with `num_rows` rows. Raises ResultUnusable."""
    if result.status not in _STATUSES:
        raise ResultUnusable(f"status is {result.status}; allowed: 1 to 4")
    status = _STATUSES[result.status]
    if status is not StepStatus.OK:
        error = result.error
        reason = executor.StepErrorReason.Name(error.reason).removeprefix("STEP_ERROR_REASON_")
        text = f"{reason} {error.field} {error.message}"
        if error.reason in _FENCED:
            raise ResultUnusable(text)
        return StepOutcome(result.step_id, status, error=text)
    try:
        return _decode_ok(result, num_rows)
    except (ValueError, IndexError) as error:
        raise ResultUnusable(f"columns of step {result.step_id}: {error}") from error


def _decode_ok(result: executor.StepResult, num_rows: int) -> StepOutcome:
    token_ids = np.frombuffer(result.sampled_token_ids, "<i4").tolist()
    row_statuses = list(result.row_statuses) or None
    for name, column in (("sampled_token_ids", token_ids), ("row_statuses", row_statuses)):
        if column is not None and len(column) != num_rows:
            raise ValueError(f"{name} has {len(column)} elements for {num_rows} rows")
    scored = _decode_logprobs(result.logprobs)
    return StepOutcome(
        result.step_id,
        StepStatus.OK,
        token_ids,
        row_statuses,
        {error.row_index: error.message for error in result.row_errors},
        {row: tokens[0] for row, tokens in scored.items()},
        _decode_logprobs(result.prompt_logprobs),
    )


def _decode_logprobs(columns: executor.Logprobs) -> dict[int, list[ScoredToken]]:
    by_row: dict[int, list[ScoredToken]] = {}
    if not columns.row_indexes:
        return by_row
    offsets = np.frombuffer(columns.top_offsets, "<i4").tolist()
    top_ids = np.frombuffer(columns.top_token_ids, "<i4").tolist()
    top_logprobs = np.frombuffer(columns.top_logprobs, "<f4").tolist()
    each = zip(
        np.frombuffer(columns.row_indexes, "<i4").tolist(),
        np.frombuffer(columns.positions, "<i4").tolist(),
        np.frombuffer(columns.token_ids, "<i4").tolist(),
        np.frombuffer(columns.logprobs, "<f4").tolist(),
        np.frombuffer(columns.ranks, "<i4").tolist(),
        pairwise(offsets),
        strict=True,
    )
    for row, position, token_id, logprob, rank, (start, end) in each:
        top = list(zip(top_ids[start:end], top_logprobs[start:end], strict=True))
        by_row.setdefault(row, []).append(ScoredToken(position, token_id, logprob, rank, top))
    return by_row


def decode_features(features: Iterable[int]) -> frozenset[Feature]:
    """The features this scheduler knows; later ones are none of its business."""
    return frozenset(_FEATURES[feature] for feature in features if feature in _FEATURES)


# -- clients -----------------------------------------------------------------------------------


def decode_sampling_params(message: api.SamplingParams) -> SamplingParams:
    """The client's parameters, not validated yet."""
    values = {name: getattr(message, name) for name in _SHARED_PARAMS if message.HasField(name)}
    return SamplingParams(
        **values,
        logit_bias=dict(message.logit_bias),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def encode_scored(token: ScoredToken) -> api.TokenLogprob:
    """A token's logprob for a client."""
    top = [api.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top]
    return api.TokenLogprob(
        token_id=token.token_id, logprob=token.logprob, rank=token.rank, top=top
    )


def encode_finish(request: Request) -> api.Finish:
    """The end of a finished request."""
    assert request.finish_reason is not None
    sequence = request.sequence
    finish = api.Finish(
        reason=_FINISH_REASONS[request.finish_reason],
        stop_token_id=request.stop_token_id,
        usage=api.Usage(
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
        ),
    )
    if request.error is not None:
        finish.error.reason, finish.error.message = request.error
    return finish


def encode_rejection(error: DomainError) -> api.RequestError:
    """A refused request, in-band."""
    message = api.RequestError(reason=error.reason, message=error.message)
    if error.retry_delay_s is not None:
        message.retry_delay.CopyFrom(duration_from_s(error.retry_delay_s))
    return message
