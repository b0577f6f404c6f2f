"""Checks of new rows, sampling parameters, block tables and single columns.

All functions raise BatchRefused and change nothing. Shape letters: N row ids (`max_num_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np
import numpy.ma  # np.unique would load it at its first call, in a step

from executor_service.steps.batch import BatchRefused, NewCross, NewRows, StepErrorReason
from executor_service.steps.executor_info import ExecutorInfo, Feature
from executor_service.steps.pooling import ModelVectors, PoolingTask
from executor_service.steps.sampling_params import (
    Grammar,
    SamplingParams,
    TranscriptionRules,
)
from executor_service.steps.step import BoolArray, Int32Array, Int64Array, UInt8Array
from splitserve_contract import PARAMETERS
from splitserve_grammars import MAX_CHOICES, MAX_GRAMMAR_BYTES

_MALFORMED = StepErrorReason.MALFORMED
_BLOCK = StepErrorReason.BLOCK_OUT_OF_RANGE
_POSITION = StepErrorReason.POSITION_OUT_OF_RANGE
_TOKEN = StepErrorReason.TOKEN_OUT_OF_RANGE
_RANGES = tuple((p.name, p.step_range) for p in PARAMETERS if p.step_range is not None)
# Fields, the neutral value of each, and the feature that any other value needs.
_FEATURE_OF_FIELD: tuple[tuple[str, object, Feature], ...] = (
    *((p.name, p.default, Feature[p.feature]) for p in PARAMETERS if p.feature),
    ("logit_bias", {}, Feature.LOGIT_BIAS),
    ("allowed_token_ids", (), Feature.TOKEN_CONSTRAINTS),
    ("bad_words_token_ids", (), Feature.TOKEN_CONSTRAINTS),
    ("grammar", None, Feature.GRAMMAR),
    ("stop_token_ids", frozenset(), Feature.SEVERAL_TOKENS),
    ("pooling", None, Feature.POOLING),
)


def check_new_rows(rows: NewRows, exists: BoolArray, info: ExecutorInfo) -> Int32Array:
    """Returns the lengths of the block tables of the new rows; `exists` [N]: ids that are taken."""
    num_rows = len(rows.row_ids)
    for name in ("sampling_params_indexes", "seeds", "num_prompt_tokens"):
        check_length(getattr(rows, name), num_rows, f"new_rows.{name}", "new_rows.row_ids")
    check_free_rows(rows.row_ids, exists, "new_rows.row_ids")
    check_below(
        rows.sampling_params_indexes,
        len(rows.sampling_params),
        _MALFORMED,
        "new_rows.sampling_params_indexes",
    )
    check_at_least(rows.num_prompt_tokens, 0, _MALFORMED, "new_rows.num_prompt_tokens")
    check_offsets(rows.block_offsets, num_rows, len(rows.block_ids), "new_rows.block_offsets")
    check_table_blocks(rows.block_ids, info, "new_rows.block_ids")
    num_blocks = np.diff(rows.block_offsets)
    check_table_lengths(num_blocks, info, "new_rows.block_offsets")
    if info.model.is_uncached:
        check_length(rows.block_ids, 0, "new_rows.block_ids", "rows of an uncached model have")
    for index, params in enumerate(rows.sampling_params):
        check_sampling_params(params, info, f"new_rows.sampling_params[{index}]")
    _check_histories(rows, info)
    _check_adapters(rows, info)
    if info.model.vectors is not None:
        _check_second_texts(rows)
    if rows.cross is not None:
        _check_cross(rows.cross, num_rows, info)
    return num_blocks


def _check_histories(rows: NewRows, info: ExecutorInfo) -> None:
    num_tokens = len(rows.history_token_ids)
    check_offsets(rows.history_offsets, len(rows.row_ids), num_tokens, "new_rows.history_offsets")
    lengths = np.diff(rows.history_offsets)
    params_need = np.array([params.needs_history for params in rows.sampling_params], np.bool_)
    needs_history = params_need[rows.sampling_params_indexes]
    is_right = np.where(needs_history, lengths >= rows.num_prompt_tokens, lengths == 0)
    if not is_right.all():
        index = int((~is_right).argmax())
        allowed = f"at least the {rows.num_prompt_tokens[index]} tokens of its prompt"
        raise BatchRefused(
            _MALFORMED,
            "new_rows.history_offsets",
            f"row {rows.row_ids[index]} has a history of {lengths[index]} tokens; allowed:"
            f" {allowed if needs_history[index] else 'none for its sampling params'}",
        )
    check_below(
        rows.history_token_ids,
        info.model.vocab_size,
        _TOKEN,
        "new_rows.history_token_ids",
    )


def _check_second_texts(rows: NewRows) -> None:
    poolings = [params.pooling for params in rows.sampling_params]
    starts_of_sets = [0 if each is None else each.second_text_start for each in poolings]
    starts = np.array(starts_of_sets, np.int32)[rows.sampling_params_indexes]
    is_right = (starts >= 0) & (starts < rows.num_prompt_tokens)
    path = "new_rows.sampling_params.pooling.second_text_start"
    check_all(is_right, starts, path, "allowed: 0 to the number of prompt tokens less 1")


def _check_adapters(rows: NewRows, info: ExecutorInfo) -> None:
    path = "new_rows.adapters"
    if rows.adapters:
        check_feature(Feature.ADAPTERS, info, path)
    for index, name in enumerate(rows.adapters):
        if not name or name in rows.adapters[:index]:
            problem = f"element {index} is {name!r}; allowed: distinct, non-empty names"
            raise BatchRefused(_MALFORMED, path, problem)
    if len(rows.adapter_indexes):
        path = "new_rows.adapter_indexes"
        check_length(rows.adapter_indexes, len(rows.row_ids), path, "new_rows.row_ids")
        check_below(rows.adapter_indexes, len(rows.adapters), _MALFORMED, path, low=-1)


def _check_cross(cross: NewCross, num_rows: int, info: ExecutorInfo) -> None:
    counts, path = cross.num_encoder_tokens, "new_rows.num_encoder_tokens"
    check_length(counts, num_rows, path, "new_rows.row_ids")
    check_at_least(counts, 0, _MALFORMED, path)
    if np.count_nonzero(counts):
        check_feature(Feature.CROSS_ATTENTION, info, path)
    path = "new_rows.cross_block_offsets"
    check_offsets(cross.block_offsets, num_rows, len(cross.block_ids), path)
    check_below(cross.block_ids, info.num_device_blocks, _BLOCK, "new_rows.cross_block_ids")
    num_blocks = np.diff(cross.block_offsets).astype(np.int64)
    _check_each(
        (num_blocks == 0) | (counts > 0),
        num_blocks,
        _MALFORMED,
        path,
        "none without encoder tokens",
    )
    enough = num_blocks * info.block_size >= counts
    _check_each(enough, num_blocks, _POSITION, path, "enough for the row's encoder tokens")
    path = "new_rows.encoder_offsets"
    check_offsets(cross.encoder_offsets, num_rows, len(cross.encoder_token_ids), path)
    lengths = np.diff(cross.encoder_offsets)
    all_or_none = (lengths == 0) | (lengths == counts)
    _check_each(all_or_none, lengths, _MALFORMED, path, "all of the row's encoder tokens, or none")
    check_below(
        cross.encoder_token_ids, info.model.vocab_size, _TOKEN, "new_rows.encoder_token_ids"
    )
    _check_features(cross, num_rows, info)


def _check_features(cross: NewCross, num_rows: int, info: ExecutorInfo) -> None:
    path = "new_rows.encoder_feature_offsets"
    check_offsets(cross.feature_offsets, num_rows, len(cross.features), path)
    lengths = np.diff(cross.feature_offsets)
    audio = None if info.model.encoder is None else info.model.encoder.audio
    if audio is None:
        _check_each(lengths == 0, lengths, _MALFORMED, path, "none for a model without audio")
        return
    num_features = audio.num_mel_bins * audio.num_frames
    all_or_none = (lengths == 0) | (lengths == num_features)
    _check_each(all_or_none, lengths, _MALFORMED, path, f"{num_features} features, or none")
    num_tokens = np.diff(cross.encoder_offsets)
    path = "new_rows.encoder_offsets"
    _check_each(num_tokens == 0, num_tokens, _MALFORMED, path, "none for a model with audio")
    path, counts = "new_rows.num_encoder_tokens", cross.num_encoder_tokens
    allowed = f"{audio.num_positions} encoder tokens"
    _check_each(counts == audio.num_positions, counts, _MALFORMED, path, allowed)


def _check_each(
    is_right: BoolArray,
    counts: Int32Array | Int64Array,
    reason: StepErrorReason,
    path: str,
    allowed: str,
) -> None:
    """Checks that `is_right` holds for each new row; `counts`: number of elements of each row."""
    if not is_right.all():
        index = int((~is_right).argmax())
        raise BatchRefused(
            reason, path, f"new row {index} has {counts[index]} elements; allowed: {allowed}"
        )


def check_table_blocks(block_ids: Int32Array, info: ExecutorInfo, path: str) -> None:
    """Checks that each entry is a device block; with a sliding window it may also be -1."""
    low = 0 if info.model.sliding_window is None else -1
    check_below(block_ids, info.num_device_blocks, _BLOCK, path, low=low)


def check_table_lengths(num_blocks: Int32Array, info: ExecutorInfo, path: str) -> None:
    """Checks that no table is longer than the device pool; this bounds the row table's memory.

    A longer table would name a block twice. With a sliding window a table may have up to
    `max_model_len` tokens, because entries behind the window no longer name a block.
    """
    limit = info.num_device_blocks
    if info.model.sliding_window is not None:
        limit = max(limit, -(-info.model.max_model_len // info.block_size))
    if len(num_blocks) and np.maximum.reduce(num_blocks) > limit:
        raise BatchRefused(
            _POSITION,
            path,
            f"a block table of {num_blocks.max()} blocks; allowed: at most {limit}",
        )


def check_sampling_params(params: SamplingParams, info: ExecutorInfo, path: str) -> None:
    """Raises BatchRefused for a value out of range, or a feature that `info` does not announce."""
    for name, allowed_range in _RANGES:
        value = getattr(params, name)
        if value is not None and not allowed_range.contains(value):
            # Only an infinite bound is excluded.
            in_words = "finite" if value == allowed_range.high else allowed_range.in_words
            _check_value(f"{path}.{name}", value, in_words, False)
    for token_id, bias in params.logit_bias.items():
        allowed = "below infinity and not NaN"
        _check_value(f"{path}.logit_bias[{token_id}]", bias, allowed, bias < math.inf)
    vocab_size = info.model.vocab_size
    _check_tokens(f"{path}.logit_bias", params.logit_bias, vocab_size)
    _check_tokens(f"{path}.suppressed_token_ids", params.suppressed_token_ids, vocab_size)
    _check_tokens(f"{path}.allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_tokens(f"{path}.stop_token_ids", params.stop_token_ids, vocab_size)
    for index, tokens in enumerate(params.bad_words_token_ids):
        bad_word = f"{path}.bad_words_token_ids[{index}]"
        _check_value(bad_word, len(tokens), "1 or more tokens", len(tokens) > 0)
        _check_tokens(bad_word, tokens, vocab_size)
    if params.grammar is not None:
        check_grammar(params.grammar, params, info, f"{path}.grammar")
    if params.transcription is not None:
        _check_transcription(params.transcription, info, f"{path}.transcription")
    for feature, field in _features_used(params):
        check_feature(feature, info, f"{path}.{field}")
    if info.model.vectors is not None:
        _check_pooling(params, info.model.vectors, f"{path}.pooling")


def _check_pooling(params: SamplingParams, vectors: ModelVectors, path: str) -> None:
    """Checks the vector that a row of a model without tokens asks for."""
    pooling = params.pooling
    if pooling is None:
        raise BatchRefused(_MALFORMED, path, "is absent; required: the model returns vectors")
    if params != SamplingParams(pooling=pooling):
        raise BatchRefused(_MALFORMED, path, "is set beside others; allowed: no other parameter")
    most = 0
    if pooling.task is PoolingTask.EMBEDDING:
        most = vectors.embedding_size
        _check_value(f"{path}.task", 1, "2, the model has no embeddings", most > 0)
    else:
        _check_value(f"{path}.task", 2, "1, the model has no labels", bool(vectors.labels))
    num_dimensions = pooling.num_dimensions
    is_right = 0 <= num_dimensions <= most
    _check_value(f"{path}.num_dimensions", num_dimensions, f"0 to {most}", is_right)


def _check_transcription(rules: TranscriptionRules, info: ExecutorInfo, path: str) -> None:
    if info.model.encoder is None or info.model.encoder.audio is None:
        raise BatchRefused(
            StepErrorReason.FEATURE_UNSUPPORTED, path, "needs a model whose encoder takes audio"
        )
    vocab_size = info.model.vocab_size
    suppressed, first = rules.first_suppressed_token_ids, rules.first_timestamp_token_id
    _check_tokens(f"{path}.first_suppressed_token_ids", suppressed, vocab_size)
    if first is None:
        return
    if not 1 <= first < vocab_size:
        raise BatchRefused(
            _TOKEN,
            f"{path}.first_timestamp_token_id",
            f"is {first}; allowed: 1 to {vocab_size - 1}",
        )
    special, most = rules.first_special_token_id, rules.max_first_timestamp
    allowed = f"0 to {first}, first_timestamp_token_id"
    _check_value(f"{path}.first_special_token_id", special, allowed, 0 <= special <= first)
    _check_value(f"{path}.max_first_timestamp", most, "0 or more", most is None or most >= 0)


def check_feature(feature: Feature, info: ExecutorInfo, path: str) -> None:
    """Raises BatchRefused if `info` does not announce `feature`, which the field `path` needs."""
    if feature not in info.features:
        raise BatchRefused(
            StepErrorReason.FEATURE_UNSUPPORTED,
            path,
            f"needs the feature {feature.name}, which this executor did not announce",
        )


def _check_value(path: str, value: float | None, allowed: str, is_right: bool) -> None:
    if not is_right:
        raise BatchRefused(StepErrorReason.MALFORMED, path, f"is {value}; allowed: {allowed}")


def _check_tokens(path: str, token_ids: Collection[int], vocab_size: int) -> None:
    # Nearly always all tokens are valid: the extremes show that without a loop.
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise BatchRefused(
                StepErrorReason.TOKEN_OUT_OF_RANGE,
                path,
                f"token {token_id}; allowed: 0 .. {vocab_size - 1}",
            )


def _features_used(params: SamplingParams) -> Iterable[tuple[Feature, str]]:
    """Yields pairs of a required feature and the parameter field that requires it."""
    for name, neutral, feature in _FEATURE_OF_FIELD:
        if getattr(params, name) != neutral:
            yield feature, name
    if -math.inf in params.logit_bias.values():
        yield Feature.TOKEN_CONSTRAINTS, "logit_bias"


# -- Checks of single columns ----------------------------------------------------------------------
#
# The error names the wrong element and the allowed values. `path` is the field as the contract
# names it.

_Column = Int32Array | Int64Array | UInt8Array


def check_below(
    column: Int32Array, limit: int, reason: StepErrorReason, path: str, *, low: int = 0
) -> None:
    """Checks that each element is in `low` .. limit-1; `low` is 0 or -1."""
    if len(column) == 0:
        return
    # Viewed as unsigned, negative numbers are the largest.
    unsigned = column.view(np.uint32)
    if np.maximum.reduce(unsigned) >= limit:
        is_wrong = (column < low) | (column >= limit)
        if low == 0 or np.count_nonzero(is_wrong):
            allowed = f"allowed: {low} .. {limit - 1}" if limit > low else "allowed: none"
            raise _refusal_of_first(is_wrong, column, reason, path, allowed)


def check_at_least(column: Int32Array, low: int, reason: StepErrorReason, path: str) -> None:
    """Checks that each element is `low` or more."""
    if len(column) and np.minimum.reduce(column) < low:
        raise _refusal_of_first(column < low, column, reason, path, f"allowed: {low} or more")


def check_not_above(
    column: Int32Array, limits: Int32Array, reason: StepErrorReason, path: str
) -> None:
    """Checks that element i is at most `limits[i]`."""
    is_wrong = column > limits
    if np.count_nonzero(is_wrong):
        index = int(is_wrong.argmax())
        raise BatchRefused(
            reason, path, f"element {index} is {column[index]}; allowed: at most {limits[index]}"
        )


def check_all(is_right: BoolArray, column: Int32Array, path: str, problem: str) -> None:
    """Checks that `is_right` holds for each element of `column`; refuses with MALFORMED."""
    if np.count_nonzero(is_right) != len(column):
        raise _refusal_of_first(~is_right, column, StepErrorReason.MALFORMED, path, problem)


def check_rows(column: Int32Array, exists: BoolArray, path: str) -> None:
    """Checks that the elements are distinct row ids in range, of rows that exist."""
    check_below(column, len(exists), StepErrorReason.LIMIT_EXCEEDED, path)
    others = exists.copy()
    # Assigning through 32-bit indexes is several times slower.
    others[column.astype(np.intp)] = False
    if np.count_nonzero(exists) - np.count_nonzero(others) == len(column):
        return
    if not exists[column].all():
        allowed = "allowed: rows in the row table"
        raise _refusal_of_first(~exists[column], column, StepErrorReason.ROW_UNKNOWN, path, allowed)
    _refuse_duplicate(column, StepErrorReason.MALFORMED, path)


def check_free_rows(column: Int32Array, exists: BoolArray, path: str) -> None:
    """Checks that the elements are distinct row ids in range, of rows that do not exist."""
    check_below(column, len(exists), StepErrorReason.LIMIT_EXCEEDED, path)
    if exists[column].any():
        allowed = "allowed: a row that is not in the row table, or that is removed"
        raise _refusal_of_first(exists[column], column, StepErrorReason.ROW_EXISTS, path, allowed)
    if len(np.unique(column)) != len(column):
        _refuse_duplicate(column, StepErrorReason.MALFORMED, path)


def check_distinct_blocks(column: Int32Array, path: str) -> None:
    """Checks that no block occurs twice; refuses with BLOCK_OVERLAP."""
    if len(column) > 1 and len(np.unique(column)) != len(column):
        _refuse_duplicate(column, StepErrorReason.BLOCK_OVERLAP, path)


def check_length(column: _Column, length: int, path: str, parallel: str) -> None:
    """Checks that the column has `length` elements, like the column named `parallel`."""
    if len(column) != length:
        raise BatchRefused(
            StepErrorReason.MALFORMED,
            path,
            f"{len(column)} elements; allowed: {length}, as many as {parallel}",
        )


def check_offsets(offsets: Int32Array, num_things: int, num_elements: int, path: str) -> None:
    """Checks that `offsets` delimit `num_elements` elements of `num_things` things."""
    if num_things == 0 and len(offsets) == 0:
        problem = "" if num_elements == 0 else f"empty for {num_elements} elements"
    elif len(offsets) != num_things + 1:
        problem = f"{len(offsets)} elements; allowed: {num_things + 1}"
    elif offsets[0] != 0:
        problem = f"element 0 is {offsets[0]}; allowed: 0"
    elif np.count_nonzero(offsets[1:] < offsets[:-1]):
        index = int((offsets[1:] < offsets[:-1]).argmax()) + 1
        problem = f"element {index} is {offsets[index]}; allowed: at least {offsets[index - 1]}"
    elif offsets[-1] != num_elements:
        problem = f"the last element is {offsets[-1]}; allowed: {num_elements}"
    else:
        return
    if problem:
        raise BatchRefused(StepErrorReason.MALFORMED, path, problem)


def _refusal_of_first(
    is_wrong: BoolArray, column: Int32Array, reason: StepErrorReason, path: str, allowed: str
) -> BatchRefused:
    index = int(is_wrong.argmax())
    return BatchRefused(reason, path, f"element {index} is {column[index]}; {allowed}")


def _refuse_duplicate(column: Int32Array, reason: StepErrorReason, path: str) -> None:
    seen: set[int] = set()
    for index, element in enumerate(column.tolist()):
        if element in seen:
            raise BatchRefused(
                reason, path, f"element {index} is {element}; allowed: each at most once"
            )
        seen.add(element)


# -- Checks of a grammar before it is compiled -----------------------------------------------------

_KINDS = ("json_schema", "regex", "lark", "choices")


def check_grammar(grammar: Grammar, params: SamplingParams, info: ExecutorInfo, path: str) -> None:
    """Checks kind, sizes and combination with other parameters against the contract."""
    if grammar.kind not in _KINDS:
        raise _malformed(path, f"has no kind; allowed: {', '.join(_KINDS)}")
    path = f"{path}.{grammar.kind}"
    num_texts = len(grammar.texts)
    if not 1 <= num_texts <= MAX_CHOICES:
        raise _malformed(path, f"has {num_texts} texts; allowed: 1 to {MAX_CHOICES}")
    num_bytes = [len(text.encode()) for text in grammar.texts]
    if min(num_bytes) == 0:
        raise _malformed(path, f"text {num_bytes.index(0)} is empty; allowed: 1 byte or more")
    if sum(num_bytes) > MAX_GRAMMAR_BYTES:
        raise _malformed(path, f"has {sum(num_bytes)} bytes; allowed: at most {MAX_GRAMMAR_BYTES}")
    if params.min_tokens > 0 or params.suppressed_token_ids:
        raise _malformed(path, "is set with min_tokens; allowed: one of them")
    if not info.model.eos_token_ids:
        raise _malformed(path, "is set; allowed only for a model with eos_token_ids")


def _malformed(path: str, message: str) -> BatchRefused:
    return BatchRefused(StepErrorReason.MALFORMED, path, message)
