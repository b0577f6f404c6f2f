"""Rows that join, and what their sequences ask for, as the step contract has them."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from itertools import accumulate

import numpy as np

from scheduler_service.core.params_sets import ParamsSet
from scheduler_service.core.plan import NewRow
from scheduler_service.core.request import Int32Array
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.grammar_codec import encode_grammar
from splitserve.executor.v1 import executor_pb2 as executor

# The numbers among the parameters of sampling, which have the names of the core's; None is absent.
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
    """The field `new_rows` of a batch, in parts.

    Parameters were encoded before, and are long: they are put where protobuf has them, not copied
    from message to message.
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
    """What precedes the bytes of a message that is field `number` of another."""
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(num_bytes)


def _varint(value: int) -> bytes:
    """7 bits to a byte, the lowest first; all bytes but the last have bit 7."""
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _encode_cross_attention(rows: Items[NewRow], message: executor.NewRows) -> None:
    encoders = [row.sequence.request.encoder_token_ids for row in rows]
    message.num_encoder_tokens = _i32([0 if e is None else len(e) for e in encoders])
    message.cross_block_offsets, message.cross_block_ids = _csr(
        [np.array(row.cross_blocks, np.int32) for row in rows]
    )
    message.encoder_offsets, message.encoder_token_ids = _csr(
        [_NO_TOKENS if row.encoder_token_ids is None else row.encoder_token_ids for row in rows]
    )


def encode_once(params_set: ParamsSet) -> bytes:
    """What executors are told of a set, encoded when it is first asked for."""
    if params_set.encoded is None:
        params_set.encoded = encode_params(params_set.params, params_set.stop_token_ids)
    return params_set.encoded


def encode_params(params: SamplingParams, stop_token_ids: Collection[int] = ()) -> bytes:
    """A message SamplingParams; equal maps give equal bytes. `stop_token_ids`: if they are told."""
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
        stop_token_ids=sorted(stop_token_ids),
    )
    if params.grammar is not None:
        encode_grammar(params.grammar, message.grammar)
    return message.SerializeToString(deterministic=True)


def _i32(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def _csr(parts: Items[Int32Array]) -> tuple[bytes, bytes]:
    """The offsets and data columns of `parts`."""
    offsets = _i32([0, *accumulate(map(len, parts))])
    return offsets, np.concatenate(parts).astype("<i4", copy=False).tobytes()
