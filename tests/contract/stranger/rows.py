"""Rows as the executor knows them, and what NewRows may say of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.stranger.columns import (
    Refusal,
    check_length,
    malformed,
    read_groups,
    read_i32,
    read_i64,
)
from tests.contract.stranger.constraints import has_phrases, uses_constraints


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence as the executor sees it.

    `history` and `sampled` grow as the row samples. `waited`: positions that were not sampled, as
    the grammar was not compiled.
    """

    sampling_params: pb.SamplingParams
    seed: int
    num_prompt_tokens: int
    block_table: tuple[int, ...]
    history: list[int]
    # step id -> token
    sampled: dict[int, int] = field(default_factory=dict)
    # step id -> where that token is, the last of its step
    sampled_at: dict[int, int] = field(default_factory=dict)
    waited: list[int] = field(default_factory=list)

    @property
    def temperature(self) -> float:
        """Absent means 1."""
        params = self.sampling_params
        return params.temperature if params.HasField("temperature") else 1.0


def uses_penalties(params: pb.SamplingParams) -> bool:
    """Whether a row with `params` needs FEATURE_PENALTIES and its history."""
    repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
    return repetition != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def check_range(values: Sequence[int], end: int, reason: pb.StepErrorReason, name: str) -> None:
    """All of 0 .. `end` - 1. Raises `Refusal`."""
    for value in values:
        if not 0 <= value < end:
            raise Refusal(reason, name, f"{value}; allowed are 0 .. {end - 1}")


def check_distinct(values: Sequence[int], name: str) -> None:
    """Raises `Refusal` (MALFORMED) if one occurs twice."""
    if len(set(values)) != len(values):
        raise malformed(name, f"{list(values)} are not distinct")


class NewRowsReader:
    """Knows what one executor allows of new rows."""

    def __init__(self, info: pb.ExecutorInfo) -> None:
        self._info = info
        self._features = set(info.features)

    def read(self, new: pb.NewRows, taken: Mapping[int, Row]) -> dict[int, Row]:
        """The rows of `new`. Raises `Refusal`."""
        row_ids = self._ids(new, taken)
        count = len(row_ids)
        indexes = self._column(new, "sampling_params_indexes", count)
        prompts = self._column(new, "num_prompt_tokens", count)
        seeds = check_length(read_i64(new.seeds, "new_rows.seeds"), count, "new_rows.seeds")
        blocks = read_i32(new.block_ids, "new_rows.block_ids")
        reason = pb.STEP_ERROR_REASON_BLOCK_OUT_OF_RANGE
        check_range(blocks, self._info.num_device_blocks, reason, "new_rows.block_ids")
        tables = read_groups(new.block_offsets, blocks, count, "new_rows.block_offsets")
        history = read_i32(new.history_token_ids, "new_rows.history_token_ids")
        self._check_tokens(history, "new_rows.history_token_ids")
        histories = read_groups(new.history_offsets, history, count, "new_rows.history_offsets")
        if new.adapters or new.cross_block_ids or new.encoder_token_ids:
            self._need(pb.FEATURE_ADAPTERS, "new_rows")
        rows: dict[int, Row] = {}
        for i, row_id in enumerate(row_ids):
            if not 0 <= indexes[i] < len(new.sampling_params):
                raise malformed("new_rows.sampling_params_indexes", f"{indexes[i]}")
            params = new.sampling_params[indexes[i]]
            self._check_params(params)
            self._check_history(params, histories[i], prompts[i])
            rows[row_id] = Row(params, seeds[i], prompts[i], tuple(tables[i]), histories[i])
        return rows

    def _ids(self, new: pb.NewRows, taken: Mapping[int, Row]) -> list[int]:
        name = "new_rows.row_ids"
        row_ids = read_i32(new.row_ids, name)
        limit = self._info.limits.max_num_rows
        check_range(row_ids, limit, pb.STEP_ERROR_REASON_LIMIT_EXCEEDED, name)
        check_distinct(row_ids, name)
        for row_id in row_ids:
            if row_id in taken:
                raise Refusal(pb.STEP_ERROR_REASON_ROW_EXISTS, name, f"row {row_id} is taken")
        return row_ids

    def _column(self, new: pb.NewRows, name: str, count: int) -> list[int]:
        path = f"new_rows.{name}"
        return check_length(read_i32(getattr(new, name), path), count, path)

    def _check_params(self, params: pb.SamplingParams) -> None:
        needed = {
            pb.FEATURE_LOGPROBS: params.HasField("num_logprobs"),
            pb.FEATURE_PROMPT_LOGPROBS: params.HasField("num_prompt_logprobs"),
            pb.FEATURE_PENALTIES: uses_penalties(params),
            pb.FEATURE_LOGIT_BIAS: bool(params.logit_bias) or params.min_tokens > 0,
            pb.FEATURE_TOKEN_CONSTRAINTS: uses_constraints(params),
            pb.FEATURE_GRAMMAR: params.HasField("grammar"),
            pb.FEATURE_SEVERAL_TOKENS: bool(params.stop_token_ids),
        }
        for feature, is_needed in needed.items():
            if is_needed:
                self._need(feature, "new_rows.sampling_params")
        if params.temperature < 0:
            raise malformed("new_rows.sampling_params.temperature", f"{params.temperature}")
        self._check_tokens(params.allowed_token_ids, "new_rows.sampling_params.allowed_token_ids")
        self._check_tokens(params.stop_token_ids, "new_rows.sampling_params.stop_token_ids")
        for word in params.bad_words_token_ids:
            path = "new_rows.sampling_params.bad_words_token_ids"
            self._check_tokens(word.token_ids, path)
            if not word.token_ids:
                raise malformed(path, "an empty one")

    def _check_history(
        self, params: pb.SamplingParams, history: list[int], num_prompt_tokens: int
    ) -> None:
        if num_prompt_tokens < 0:
            raise malformed("new_rows.num_prompt_tokens", f"{num_prompt_tokens}")
        is_due = uses_penalties(params) or params.HasField("num_prompt_logprobs")
        is_due = is_due or has_phrases(params) or params.HasField("grammar")
        if is_due != bool(history) or (is_due and len(history) < num_prompt_tokens):
            raise malformed("new_rows.history_token_ids", f"{len(history)} tokens")

    def _need(self, feature: pb.Feature, name: str) -> None:
        if feature not in self._features:
            reason = pb.STEP_ERROR_REASON_FEATURE_UNSUPPORTED
            raise Refusal(reason, name, pb.Feature.Name(feature))

    def _check_tokens(self, values: Sequence[int], name: str) -> None:
        reason = pb.STEP_ERROR_REASON_TOKEN_OUT_OF_RANGE
        check_range(values, self._info.model.vocab_size, reason, name)
