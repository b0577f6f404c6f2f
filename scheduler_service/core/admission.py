"""Refusal at arrival of what can never run, by name and with the numbers."""

from __future__ import annotations

from scheduler_service.core.config import Feature, SchedulerConfig
from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import SamplingParams
from splitserve_rpc.domain_error import DomainError


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raises DomainError if `request` can never run under `config`."""
    sequence = request.sequence
    if sequence.num_prompt_tokens == 0:
        raise DomainError("PROMPT_EMPTY", "prompt_token_ids is empty; allowed: 1 or more tokens")
    _check_token_ids(sequence.token_ids, config.vocab_size)
    request.params.validate(config.vocab_size)
    _check_features(request.params, config.features)
    _check_length(request, config)


def _check_token_ids(token_ids: list[int], vocab_size: int) -> None:
    if min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise DomainError("TOKEN_OUT_OF_RANGE", f"token id is {bad}; allowed: 0 to {vocab_size - 1}")


def _check_features(params: SamplingParams, features: frozenset[Feature]) -> None:
    needed = {
        Feature.LOGPROBS: params.num_logprobs is not None,
        Feature.PROMPT_LOGPROBS: params.num_prompt_logprobs is not None,
        Feature.PENALTIES: params.uses_penalties,
        Feature.LOGIT_BIAS: bool(params.logit_bias) or params.min_tokens > 0,
    }
    for feature, is_needed in needed.items():
        if is_needed and feature not in features:
            raise DomainError("FEATURE_UNSUPPORTED", f"the executors cannot do {feature.value}")


def _check_length(request: Request, config: SchedulerConfig) -> None:
    num_prompt_tokens = request.sequence.num_prompt_tokens
    if num_prompt_tokens >= config.max_model_len:
        raise DomainError(
            "PROMPT_TOO_LONG",
            f"the prompt has {num_prompt_tokens} tokens; allowed: at most "
            f"{config.max_model_len - 1}, one less than max_model_len {config.max_model_len}",
        )
    most = len(request.sequence.token_ids) + 1
    if request.params.max_tokens is not None:
        most = max(most, num_prompt_tokens + request.params.max_tokens)
    most = min(most, config.max_model_len)
    if most > config.num_device_slots:
        raise DomainError(
            "NEVER_FITS_KV_CACHE",
            f"prompt and max_tokens make {most} tokens; the KV cache holds "
            f"{config.num_device_slots} ({config.num_device_blocks} blocks of {config.block_size})",
        )
