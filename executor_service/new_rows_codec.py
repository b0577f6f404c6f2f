"""NewRows of the contract as columns; no column is copied, and none is judged."""

from __future__ import annotations

from typing import Any

import numpy as np

from executor_service.batch import NewCross, NewRows
from executor_service.sampling_params import SamplingParams
from executor_service.wire_columns import (
    read_int32,
    read_int64,
    read_offsets,
    read_optional_offsets,
)
from splitserve.executor.v1 import executor_pb2 as pb

# Fields that are absent where they have their neutral value.
_OPTIONAL_PARAMS = (
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


def decode_new_rows(rows: pb.NewRows) -> NewRows:
    """Columns of `rows`. Raises BatchRefused for one that cannot be read."""
    row_ids = read_int32(rows.row_ids, "new_rows.row_ids")
    return NewRows(
        row_ids=row_ids,
        sampling_params_indexes=read_int32(
            rows.sampling_params_indexes, "new_rows.sampling_params_indexes"
        ),
        seeds=read_int64(rows.seeds, "new_rows.seeds"),
        num_prompt_tokens=read_int32(rows.num_prompt_tokens, "new_rows.num_prompt_tokens"),
        block_offsets=read_offsets(rows.block_offsets, "new_rows.block_offsets"),
        block_ids=read_int32(rows.block_ids, "new_rows.block_ids"),
        history_offsets=read_offsets(rows.history_offsets, "new_rows.history_offsets"),
        history_token_ids=read_int32(rows.history_token_ids, "new_rows.history_token_ids"),
        sampling_params=tuple(_decode_params(params) for params in rows.sampling_params),
        adapter_indexes=read_int32(rows.adapter_indexes, "new_rows.adapter_indexes"),
        adapters=tuple(rows.adapters),
        cross=_decode_cross(rows, len(row_ids)),
    )


def _decode_cross(rows: pb.NewRows, num_rows: int) -> NewCross | None:
    columns = (
        rows.cross_block_offsets,
        rows.cross_block_ids,
        rows.encoder_offsets,
        rows.encoder_token_ids,
        rows.num_encoder_tokens,
    )
    if not any(columns):
        return None
    lengths = read_int32(rows.num_encoder_tokens, "new_rows.num_encoder_tokens")
    return NewCross(
        block_offsets=read_optional_offsets(
            rows.cross_block_offsets, num_rows, "new_rows.cross_block_offsets"
        ),
        block_ids=read_int32(rows.cross_block_ids, "new_rows.cross_block_ids"),
        encoder_offsets=read_optional_offsets(
            rows.encoder_offsets, num_rows, "new_rows.encoder_offsets"
        ),
        encoder_token_ids=read_int32(rows.encoder_token_ids, "new_rows.encoder_token_ids"),
        num_encoder_tokens=lengths if len(lengths) else np.zeros(num_rows, np.int32),
    )


def _decode_params(params: pb.SamplingParams) -> SamplingParams:
    given: dict[str, Any] = {
        name: getattr(params, name) for name in _OPTIONAL_PARAMS if params.HasField(name)
    }
    return SamplingParams(
        **given,
        logit_bias=dict(params.logit_bias),
        suppressed_token_ids=tuple(params.suppressed_token_ids),
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words_token_ids=tuple(tuple(t.token_ids) for t in params.bad_words_token_ids),
    )
