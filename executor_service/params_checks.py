"""Checks of sampling parameters, as far as the contract limits them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from executor_service.batch import BatchRefused, Feature, StepErrorReason
from executor_service.executor_info import ExecutorInfo
from executor_service.sampling_params import SamplingParams


def check_sampling_params(params: SamplingParams, info: ExecutorInfo, path: str) -> None:
    """Raises BatchRefused for a value out of range, or a feature that `info` does not announce."""
    _check_value(f"{path}.temperature", params.temperature, ">= 0", params.temperature >= 0)
    _check_value(f"{path}.top_k", params.top_k, ">= 1", params.top_k is None or params.top_k >= 1)
    _check_value(f"{path}.top_p", params.top_p, "in (0, 1]", 0 < params.top_p <= 1)
    _check_value(f"{path}.min_p", params.min_p, "in [0, 1]", 0 <= params.min_p <= 1)
    repetition = params.repetition_penalty
    _check_value(f"{path}.repetition_penalty", repetition, "> 0", repetition > 0)
    for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        _check_value(f"{path}.{name}", value, "finite", math.isfinite(value))
    for name in ("min_tokens", "num_logprobs", "num_prompt_logprobs"):
        value = getattr(params, name)
        _check_value(f"{path}.{name}", value, ">= 0", value is None or value >= 0)
    for token_id, bias in params.logit_bias.items():
        allowed = "below infinity and not NaN"
        _check_value(f"{path}.logit_bias[{token_id}]", bias, allowed, bias < math.inf)
    vocab_size = info.model.vocab_size
    _check_tokens(f"{path}.logit_bias", params.logit_bias, vocab_size)
    _check_tokens(f"{path}.suppressed_token_ids", params.suppressed_token_ids, vocab_size)
    _check_tokens(f"{path}.allowed_token_ids", params.allowed_token_ids, vocab_size)
    for index, tokens in enumerate(params.bad_words_token_ids):
        bad_word = f"{path}.bad_words_token_ids[{index}]"
        _check_value(bad_word, len(tokens), "1 or more tokens", len(tokens) > 0)
        _check_tokens(bad_word, tokens, vocab_size)
    for feature, field in _features_used(params):
        check_feature(feature, info, f"{path}.{field}")


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
    # Almost always all are right: the extremes tell, without a loop.
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
    """The features that these params need, each with the field that needs it."""
    if params.num_logprobs is not None:
        yield Feature.LOGPROBS, "num_logprobs"
    if params.num_prompt_logprobs is not None:
        yield Feature.PROMPT_LOGPROBS, "num_prompt_logprobs"
    for name, neutral in (
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
    ):
        if getattr(params, name) != neutral:
            yield Feature.PENALTIES, name
    if params.logit_bias:
        yield Feature.LOGIT_BIAS, "logit_bias"
    if params.min_tokens > 0:
        yield Feature.LOGIT_BIAS, "min_tokens"
    if -math.inf in params.logit_bias.values():
        yield Feature.TOKEN_CONSTRAINTS, "logit_bias"
    for name in ("allowed_token_ids", "bad_words_token_ids"):
        if getattr(params, name):
            yield Feature.TOKEN_CONSTRAINTS, name
