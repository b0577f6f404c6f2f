"""Codec of the step contract: plans to ScheduleBatch, StepResult to outcomes, grammars, scores.

Protobuf is on one side, values of the scheduler's core on the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from scheduler_service.scheduler.values import (
    Feature,
    Grammar,
    Int32Array,
    NewRow,
    ParamsSet,
    PoolingParams,
    PoolingTask,
    RowWork,
    SamplingParams,
    ScoredToken,
    StepOutcome,
    StepPart,
    StepPlan,
    StepStatus,
    TableWrites,
    TranscriptionRules,
)
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api

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
        executor.FEATURE_PARTIAL_RESULTS: Feature.PARTIAL_RESULTS,
    }
)
_POOLING_TASKS: Mapping[PoolingTask, executor.PoolingTask] = MappingProxyType(
    {
        PoolingTask.EMBEDDING: executor.POOLING_TASK_EMBEDDING,
        PoolingTask.SCORES: executor.POOLING_TASK_SCORES,
    }
)
_FIRST_OFFSET = bytes(_I32.itemsize)
_NO_SCORES: Mapping[int, list[ScoredToken]] = MappingProxyType({})
_NO_VECTORS: Mapping[int, bytes] = MappingProxyType({})
_MAX_TEXT_CHARS = 500
_MAX_DURATION_US = 3_600_000_000
# Reasons for which the executor would refuse every batch of this scheduler.
_FENCED = frozenset(
    {
        executor.STEP_ERROR_REASON_STALE_SCHEDULER_EPOCH,
        executor.STEP_ERROR_REASON_WRONG_EXECUTOR_EPOCH,
        executor.STEP_ERROR_REASON_STALE_STEP,
        executor.STEP_ERROR_REASON_FUTURE_SCHEDULER_EPOCH,
    }
)


class ResultUnusable(Exception):
    """A StepResult contradicts the contract, or fences this scheduler off: the executor is lost."""


@dataclass(frozen=True, slots=True)
class ReceivedResult:
    """Message that an outcome was decoded from, and the number of rows of its step."""

    result: executor.StepResult
    num_rows: int


# -- to the executor ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Serialized ScheduleBatch of one step."""

    step_id: int
    data: bytes


def encode_plan(plan: StepPlan, *, scheduler_epoch: int, executor_epoch: int) -> EncodedBatch:
    """Encodes the plan of a step as a ScheduleBatch."""
    # Fields are set one by one: keywords of a message take twice as long.
    batch = executor.ScheduleBatch()
    batch.scheduler_epoch, batch.executor_epoch = scheduler_epoch, executor_epoch
    batch.step_id = plan.step_id
    if plan.base_step_id is not None:
        batch.base_step_id = plan.base_step_id
    if plan.removed_row_ids:
        batch.removed_row_ids = np.array(plan.removed_row_ids, _I32).tobytes()
    _encode_work(plan.work, batch.work)
    if plan.table_writes:
        _encode_table_writes(plan.table_writes, batch.table_writes)
    if plan.moves:
        _encode_moves(plan.moves.swap_out, batch.swap_out)
        _encode_moves(plan.moves.swap_in, batch.swap_in)
        _encode_moves(plan.moves.copy, batch.copy)
    data = batch.SerializeToString()
    if plan.new_rows:
        data = b"".join([data, *encode_new_rows(plan.new_rows)])
    return EncodedBatch(plan.step_id, data)


def _encode_work(planned: RowWork, work: executor.Work) -> None:
    work.row_ids = planned.row_ids.astype(_I32).tobytes()
    work.num_computed_tokens = planned.num_computed_tokens.tobytes()
    work.num_new_tokens = planned.num_new_tokens.tobytes()
    work.sampled_steps_back = planned.sampled_steps_back.tobytes()
    if len(planned.token_ids):
        work.token_ids = planned.token_ids.tobytes()
    if planned.samples is not None:
        work.samples = planned.samples.tobytes()
    if planned.num_run_on_tokens is not None:
        work.num_run_on_tokens = planned.num_run_on_tokens.tobytes()
        work.reports_parts = planned.reports_parts
    if planned.drafts is not None:
        work.draft_offsets = _offsets(planned.drafts.counts)
        work.draft_token_ids = planned.drafts.token_ids.tobytes()


def _encode_table_writes(writes: TableWrites, message: executor.TableWrites) -> None:
    message.row_ids = writes.row_ids.tobytes()
    message.start_indexes = writes.start_indexes.tobytes()
    is_one_each = len(writes.block_ids) == len(writes.row_ids)
    message.block_offsets = (
        np.arange(len(writes.row_ids) + 1, dtype=_I32).tobytes()
        if is_one_each
        else _offsets(writes.counts)
    )
    message.block_ids = writes.block_ids.tobytes()


def _offsets(counts: Int32Array) -> bytes:
    """Encodes the offsets of a CSR column: `len(counts) + 1` int32, from 0 to the total."""
    return _FIRST_OFFSET + counts.cumsum(dtype=_I32).tobytes()


def _encode_moves(pairs: list[tuple[int, int]], message: executor.BlockMoves) -> None:
    if pairs:
        columns = np.array(pairs, _I32)
        message.source_block_ids = columns[:, 0].tobytes()
        message.destination_block_ids = columns[:, 1].tobytes()


# -- Results from the executor -----------------------------------------------------------------


def decode_result(result: executor.StepResult, num_rows: int) -> StepOutcome:
    """Decodes the result of a step with `num_rows` rows. Raises ResultUnusable.

    Entries beyond `num_rows` are not read. Columns are not copied. The core has the plan, and
    checks the values in the columns. An unknown status may be of a later version of the contract:
    then the state of the step is unknown, and the step counts as refused.
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


def is_part(result: executor.StepResult) -> bool:
    """Returns whether a message brings a part of a result, for `decode_part`."""
    return bool(result.status == executor.STEP_STATUS_PARTIAL)


def decode_part(result: executor.StepResult, num_rows: int) -> StepPart:
    """Decodes a part of the result of a step with `num_rows` rows. Raises ResultUnusable.

    Columns are not copied, and the core checks their values, as of a result.
    """
    try:
        token_ids: Int32Array = np.frombuffer(result.sampled_token_ids, "<i4")
        if result.sampled_offsets:
            return StepPart(result.step_id, _decode_counts(result, num_rows), token_ids)
    except ValueError as error:
        raise ResultUnusable(f"columns of a part of step {result.step_id}: {error}") from error
    has_token = token_ids >= 0
    return StepPart(result.step_id, has_token.astype(np.int32), token_ids[has_token])


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
        # One entry too many is enough for the core to see the error.
        list(result.row_statuses[: num_rows + 1]) or None,
        {e.row_index: e.message[:_MAX_TEXT_CHARS] for e in result.row_errors[:num_rows]},
        _decode_scores(result.logprobs),
        _decode_scores(result.prompt_logprobs),
        move_us=_duration(timings.move_us),
        compute_us=_duration(timings.forward_us) + _duration(timings.sample_us),
        token_counts=_decode_counts(result, num_rows) if result.sampled_offsets else None,
        vectors=_decode_vectors(result, num_rows) if result.vector_offsets else _NO_VECTORS,
    )


def _decode_vectors(result: executor.StepResult, num_rows: int) -> Mapping[int, bytes]:
    """Returns the vectors by row index. Raises ValueError if the offsets do not delimit them."""
    num_numbers, rest = divmod(len(result.vectors), _I32.itemsize)
    offsets = np.frombuffer(result.vector_offsets, "<i4")
    if rest or len(offsets) != num_rows + 1 or offsets[0] != 0 or offsets[-1] != num_numbers:
        raise ValueError(
            f"vector_offsets has {len(offsets)} elements for {num_rows} rows and "
            f"{len(result.vectors)} bytes of vectors"
        )
    if np.count_nonzero(np.diff(offsets) < 0):
        raise ValueError("vector_offsets decreases")
    ends = (offsets.astype(np.int64) * _I32.itemsize).tolist()
    spans = enumerate(pairwise(ends))
    return {row: result.vectors[start:end] for row, (start, end) in spans if end > start}


def _decode_counts(result: executor.StepResult, num_rows: int) -> Int32Array:
    """Decodes the number of sampled tokens of each row.

    Raises ValueError if the column is no valid list of offsets.
    """
    if len(result.sampled_offsets) > _I32.itemsize * (num_rows + 1):
        raise ValueError(
            f"sampled_offsets has {len(result.sampled_offsets)} bytes for {num_rows} rows"
        )
    offsets = np.frombuffer(result.sampled_offsets, "<i4")
    counts: Int32Array = np.diff(offsets)
    if offsets[0] != 0 or np.count_nonzero(counts < 0):
        raise ValueError("sampled_offsets does not start at 0 or decreases")
    return counts


def _decode_scores(columns: executor.Logprobs) -> Mapping[int, list[ScoredToken]]:
    """Returns the scores of all rows; no scores if the columns contradict each other."""
    if not columns.row_indexes:
        return _NO_SCORES
    try:
        return ScoreColumns(columns)
    except ValueError:
        return _NO_SCORES


def _duration(us: int) -> int:
    """Clamps a duration to 0 to 1 hour, in microseconds; durations only feed averages."""
    return min(max(us, 0), _MAX_DURATION_US)


def decode_features(features: Iterable[int]) -> frozenset[Feature]:
    """Returns the features that this scheduler knows; unknown features are ignored."""
    return frozenset(_FEATURES[feature] for feature in features if feature in _FEATURES)


# -- New rows and their sampling parameters --------------------------------------------------------

# Numeric sampling parameters. Message and core use the same names; None is an absent field.
_NUMBERS = tuple(
    field.name
    for field in executor.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None
)
_NEW_ROWS = executor.ScheduleBatch.NEW_ROWS_FIELD_NUMBER
_SAMPLING_PARAMS = executor.NewRows.SAMPLING_PARAMS_FIELD_NUMBER
_LENGTH_DELIMITED = 2  # the wire type
_NO_TOKENS = np.empty(0, np.int32)


def encode_new_rows(rows: Items[NewRow]) -> list[bytes]:
    """Encodes the field `new_rows` of a batch, as byte strings to be joined.

    Sampling parameters are already encoded, and may be long: their bytes are inserted into the
    message instead of being copied from message to message.
    """
    distinct: dict[ParamsSet, int] = {}
    adapters: dict[str, int] = {"": -1}
    indexes, histories = [], []
    for row in rows:
        request = row.sequence.request
        indexes.append(distinct.setdefault(request.params_set, len(distinct)))
        histories.append(row.token_ids if request.params_set.needs_history else _NO_TOKENS)
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
    )
    if len(adapters) > 1:
        message.adapter_indexes = _i32(
            [adapters[row.sequence.request.scheduling.adapter] for row in rows]
        )
        message.adapters.extend(list(adapters)[1:])
    if any(row.cross_blocks for row in rows):
        _encode_cross_attention(rows, message)
    parts = [message.SerializeToString()]
    for params_set in distinct:
        params = encode_once(params_set)
        parts += _field_head(_SAMPLING_PARAMS, len(params)), params
    return [_field_head(_NEW_ROWS, sum(map(len, parts))), *parts]


def _field_head(number: int, num_bytes: int) -> bytes:
    """Encodes the tag and length that precede a submessage of `num_bytes` in field `number`."""
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(num_bytes)


def _varint(value: int) -> bytes:
    """Encodes a protobuf varint: 7 bits a byte, lowest first; bit 7 is set in all but the last."""
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _encode_cross_attention(rows: Items[NewRow], message: executor.NewRows) -> None:
    message.num_encoder_tokens = _i32([row.sequence.request.num_encoder_tokens for row in rows])
    message.cross_block_offsets, message.cross_block_ids = _csr(
        [np.array(row.cross_blocks, np.int32) for row in rows]
    )
    message.encoder_offsets, message.encoder_token_ids = _csr(
        [_NO_TOKENS if row.encoder_token_ids is None else row.encoder_token_ids for row in rows]
    )
    features = [row.encoder_features for row in rows]
    if any(features):
        counts = [0 if each is None else each.num_features for each in features]
        message.encoder_feature_offsets = _i32([0, *accumulate(counts)])
        message.encoder_features = b"".join(each.data for each in features if each is not None)


def encode_once(params_set: ParamsSet) -> bytes:
    """Returns the encoded SamplingParams of a set; encodes and keeps them at the first call."""
    if params_set.encoded is None:
        params_set.encoded = encode_params(params_set.params, params_set.stop_token_ids)
    return params_set.encoded


def encode_params(params: SamplingParams, stop_token_ids: Collection[int] = ()) -> bytes:
    """Encodes a message SamplingParams; equal parameters give equal bytes.

    `stop_token_ids`: token ids at which the executor itself stops; empty if it need not know them.
    """
    if params.pooling is not None:
        message = executor.SamplingParams(pooling=_encode_pooling(params.pooling))
        return message.SerializeToString(deterministic=True)
    # Most parameters have no meaning in a beam search, and are left out.
    names = _NUMBERS if params.beam is None else ("temperature", "num_logprobs")
    message = executor.SamplingParams(
        **{name: getattr(params, name) for name in names},
        logit_bias=params.logit_bias,
        suppressed_token_ids=sorted(params.stop_token_ids) if params.min_tokens > 0 else (),
        allowed_token_ids=sorted(params.allowed_token_ids),
        bad_words_token_ids=[
            executor.TokenSequence(token_ids=tokens) for tokens in params.bad_words_token_ids
        ],
        stop_token_ids=sorted(stop_token_ids),
    )
    if params.grammar is not None:
        encode_grammar(params.grammar, message.grammar)
    if params.transcription is not None:
        message.transcription.CopyFrom(executor.TranscriptionRules(**asdict(params.transcription)))
    return message.SerializeToString(deterministic=True)


def _encode_pooling(pooling: PoolingParams) -> executor.PoolingParams:
    """Encodes the vector that a row returns."""
    return executor.PoolingParams(
        task=_POOLING_TASKS[pooling.task],
        num_dimensions=pooling.num_dimensions,
        raw=pooling.raw,
        second_text_start=pooling.second_text_start,
    )


def _i32(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def _csr(parts: Items[Int32Array]) -> tuple[bytes, bytes]:
    """Encodes `parts` as two int32 columns: offsets and concatenated data."""
    offsets = _i32([0, *accumulate(map(len, parts))])
    return offsets, np.concatenate(parts).astype("<i4", copy=False).tobytes()


# -- Grammars in the step contract, the client API and the journal ---------------------------------


def decode_transcription(message: api.TranscriptionRules) -> TranscriptionRules:
    """Decodes rules for transcriptions."""
    has_first = message.HasField("first_timestamp_token_id")
    has_most = message.HasField("max_first_timestamp")
    return TranscriptionRules(
        tuple(message.first_suppressed_token_ids),
        message.first_timestamp_token_id if has_first else None,
        message.first_special_token_id,
        message.max_first_timestamp if has_most else None,
    )


def encode_grammar(grammar: Grammar, message: executor.Grammar | api.Grammar) -> None:
    """Writes `grammar` into `message`."""
    if grammar.kind == "choices":
        message.choices.texts.extend(grammar.texts)
    else:
        setattr(message, grammar.kind, grammar.texts[0])


def decode_grammar(message: api.Grammar) -> Grammar:
    """Decodes a grammar without validating its text. Raises ValueError if it has no kind."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ValueError("grammar has no kind; allowed: json_schema, regex, lark or choices")
    if kind == "choices":
        return Grammar(kind, tuple(message.choices.texts))
    return Grammar(kind, (getattr(message, kind),))


# -- Scores of a StepResult, decoded lazily --------------------------------------------------------

# Limit of scores and alternatives of one row; the largest valid step has fewer.
_MAX_OF_ROW = 2**20


class ScoreColumns(Mapping[int, list[ScoredToken]]):
    """Scores by row index, in the order of the message; a row is decoded when it is looked up.

    A row with more scores and alternatives than a valid step can have counts as absent. Raises
    ValueError if the columns contradict each other.
    """

    def __init__(self, columns: executor.Logprobs) -> None:
        rows = np.frombuffer(columns.row_indexes, "<i4")
        self._positions = np.frombuffer(columns.positions, "<i4")
        self._token_ids = np.frombuffer(columns.token_ids, "<i4")
        self._logprobs = np.frombuffer(columns.logprobs, "<f4")
        self._ranks = np.frombuffer(columns.ranks, "<i4")
        self._offsets = _checked_offsets(np.frombuffer(columns.top_offsets, "<i4"), len(rows))
        self._top_ids = np.frombuffer(columns.top_token_ids, "<i4")
        self._top_logprobs = np.frombuffer(columns.top_logprobs, "<f4")
        lengths = {len(self._positions), len(self._token_ids), len(self._logprobs), len(rows)}
        if lengths != {len(self._ranks)}:
            raise ValueError(f"columns of scores have different lengths: {sorted(lengths)}")
        if len(self._top_ids) != self._offsets[-1] or len(self._top_logprobs) != self._offsets[-1]:
            raise ValueError(
                f"{len(self._top_ids)} alternatives; top_offsets ends at {self._offsets[-1]}"
            )
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


def _checked_offsets(offsets: Int32Array, count: int) -> Int32Array:
    if count == 0 and len(offsets) == 0:
        return np.zeros(1, np.int32)
    if len(offsets) != count + 1 or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise ValueError(f"top_offsets does not delimit {count} scores")
    return offsets
