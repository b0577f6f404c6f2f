"""Checks of a request at arrival, and its preparation for one engine's configuration.

A request that can never run is refused by name and with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from scheduler_service.scheduler.values import (
    ID_BYTES,
    BeamSearch,
    EncoderFeatures,
    Feature,
    Int32Array,
    ParamsSet,
    Request,
    SchedulerConfig,
    Sequence,
)
from splitserve_contract import DomainError

# Clients of OpenAI's API look for these words when a prompt is too long.
_CONTEXT = "This model's maximum context length is"


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raises DomainError if `request` can never run under `config`."""
    request.params.check_sequences()
    sequence = request.sequence
    if sequence.num_prompt_tokens == 0:
        raise DomainError("PROMPT_EMPTY", "prompt_token_ids is empty; allowed: 1 or more tokens")
    request.params.check_pooling(config.vectors, sequence.num_prompt_tokens)
    for resumed in request.sequences:
        _check_token_ids(resumed.token_ids, config.vocab_size)
    if request.params.pooling is not None and len(sequence.token_ids) > sequence.num_prompt_tokens:
        raise DomainError(
            "SAMPLING_PARAMS_INVALID", "resume_token_ids is set; allowed with pooling: no tokens"
        )
    if request.encoder_token_ids is not None:
        _check_token_ids(request.encoder_token_ids, config.vocab_size)
    if request.encoder_features is not None:
        _check_finite(request.encoder_features)
    request.params.validate(config.vocab_size)
    request.params.check_grammar(config.eos_token_ids)
    if request.params.beam is None:
        request.params.check_samplable(config.vocab_size, config.eos_token_ids)
    _check_features(request, config)
    _check_length(request, config)


def fits(request: Request, config: SchedulerConfig) -> bool:
    """Returns whether lengths and features allow `request` under `config`.

    Checks neither token ids nor parameter values, so that executors of one model can be compared
    without reading the prompt for each.
    """
    try:
        request.params.check_sequences()
        _check_features(request, config)
        _check_length(request, config)
    except DomainError:
        return False
    return True


def check_prompt_length(num_prompt_tokens: int, config: SchedulerConfig) -> None:
    """Raises DomainError if no request may have a prompt of `num_prompt_tokens` tokens."""
    most = config.max_model_len - 1
    if num_prompt_tokens > most and config.vectors is not None:
        raise DomainError(
            "PROMPT_TOO_LONG",
            f"the prompt has {num_prompt_tokens} tokens; allowed: at most max_model_len {most}."
            f" {_CONTEXT} {most} tokens",
        )
    if num_prompt_tokens > most:
        raise DomainError(
            "PROMPT_TOO_LONG",
            f"the prompt has {num_prompt_tokens} tokens; allowed: at most {most}, as the output has"
            f" one. {_CONTEXT} {config.max_model_len} tokens",
        )


def check_encoder_length(
    num_encoder_tokens: int, num_features: int, config: SchedulerConfig
) -> None:
    """Raises DomainError if no request may have so many encoder tokens or features."""
    most = config.max_encoder_tokens
    if config.num_encoder_features is not None:
        _check_num_features(num_encoder_tokens, num_features, config.num_encoder_features)
        return
    if num_features:
        raise DomainError(
            "FEATURE_UNSUPPORTED",
            f"encoder_features has {num_features} features; allowed: none, as the model's encoder"
            " does not take audio",
        )
    if most is None:
        return
    if num_encoder_tokens == 0:
        raise DomainError(
            "PROMPT_EMPTY",
            "encoder_token_ids is empty; allowed: 1 or more tokens, as the model has an encoder",
        )
    if num_encoder_tokens > most:
        raise DomainError(
            "PROMPT_TOO_LONG",
            f"encoder_token_ids has {num_encoder_tokens} tokens; allowed: at most {most}, the limit"
            f" of the model's encoder. {_CONTEXT} {most} tokens",
        )


def _check_num_features(num_encoder_tokens: int, num_features: int, needed: int) -> None:
    if num_encoder_tokens:
        raise DomainError(
            "ENCODER_FEATURES_INVALID",
            f"encoder_token_ids has {num_encoder_tokens} tokens; allowed: none, as the model takes"
            " encoder_features",
        )
    if num_features != needed:
        raise DomainError(
            "ENCODER_FEATURES_INVALID",
            f"encoder_features has {num_features} features; allowed: {needed}, a window of the"
            " model's audio",
        )


def _check_finite(features: EncoderFeatures) -> None:
    values = np.frombuffer(features.data, "<f4")
    is_finite = np.isfinite(values)
    if not is_finite.all():
        index = int((~is_finite).argmax())
        raise DomainError(
            "ENCODER_FEATURES_INVALID",
            f"encoder_features[{index}] is {values[index]}; allowed: finite numbers",
        )


def _check_token_ids(token_ids: Int32Array, vocab_size: int) -> None:
    # Read as unsigned, a negative id is larger than any vocabulary.
    if not np.count_nonzero(token_ids.view(np.uint32) >= vocab_size):
        return
    bad = next(token_id for token_id in token_ids.tolist() if not 0 <= token_id < vocab_size)
    raise DomainError("TOKEN_OUT_OF_RANGE", f"token id is {bad}; allowed: 0 to {vocab_size - 1}")


def _needed_features(request: Request) -> Iterator[Feature]:
    """Yields the features that an executor needs for a request."""
    params = request.params
    if params.num_logprobs is not None or not params.is_streamed:
        yield Feature.LOGPROBS
    if params.num_prompt_logprobs is not None:
        yield Feature.PROMPT_LOGPROBS
    if params.uses_penalties:
        yield Feature.PENALTIES
    if params.logit_bias or (params.min_tokens > 0 and params.beam is None):
        yield Feature.LOGIT_BIAS
    if params.uses_constraints:
        yield Feature.TOKEN_CONSTRAINTS
    if params.truncates_by_min_p_after_top_p:
        yield Feature.MIN_P_AFTER_TOP_P
    if params.grammar is not None:
        yield Feature.GRAMMAR
    if request.scheduling.adapter:
        is_loaded = request.scheduling.has_registered_adapter
        yield Feature.ADAPTER_LOADING if is_loaded else Feature.ADAPTERS
    if request.num_encoder_tokens:
        yield Feature.CROSS_ATTENTION


def _check_features(request: Request, config: SchedulerConfig) -> None:
    params = request.params
    if params.transcription is not None and config.num_encoder_features is None:
        raise DomainError(
            "FEATURE_UNSUPPORTED",
            "transcription is set; allowed: absent, as the model's encoder does not take audio",
        )
    for feature in _needed_features(request):
        if feature not in config.features:
            raise DomainError(
                "FEATURE_UNSUPPORTED", f"the executors do not support {feature.value}"
            )
    if params.min_tokens > 0:  # then all stop tokens are sent
        params = replace(params, stop_token_ids=params.stop_tokens(config.eos_token_ids))
    num_bytes, most = params.num_bytes, config.max_params_bytes
    if config.most_tokens > 1:
        num_bytes += ID_BYTES * len(params.stop_tokens(config.eos_token_ids))
    if most is not None and num_bytes > most:
        raise DomainError(
            "SAMPLING_PARAMS_INVALID",
            f"the sampling parameters take up to {num_bytes} bytes; allowed: at most {most}, the "
            "limit of an executor for one step",
        )
    if request.scheduling.adapter and config.max_adapters == 0:
        raise DomainError(
            "FEATURE_UNSUPPORTED", "adapter is set; max_adapters of the executors is 0"
        )


def _check_length(request: Request, config: SchedulerConfig) -> None:
    num_prompt_tokens = request.sequence.num_prompt_tokens
    check_prompt_length(num_prompt_tokens, config)
    encoder, features = request.encoder_token_ids, request.encoder_features
    check_encoder_length(
        0 if encoder is None else len(encoder),
        0 if features is None else features.num_features,
        config,
    )
    num_sequences = request.num_rows_wanted
    if num_sequences > config.max_num_seqs:
        raise DomainError(
            "SAMPLING_PARAMS_INVALID",
            f"n, best_of or beam_search.width asks for {num_sequences} sequences; allowed: at most "
            f"max_num_seqs {config.max_num_seqs}",
        )
    most = max((len(each.token_ids) for each in request.unfinished), default=0) + 1
    if request.params.max_tokens is not None:
        most = max(most, num_prompt_tokens + request.params.max_tokens)
    most = min(most, config.max_model_len)
    if most > _max_len_for(request, num_sequences, config):
        each = "" if num_sequences == 1 else f" for each of {num_sequences} sequences"
        raise DomainError(
            "NEVER_FITS_KV_CACHE",
            f"prompt and max_tokens make {most} tokens{each}; the KV cache holds "
            f"{config.num_device_slots} ({config.num_device_blocks} blocks of {config.block_size})",
        )


def max_len_of(request: Request, config: SchedulerConfig) -> int:
    """Returns the most tokens that a sequence of `request` may have under `config`.

    Counts those that have ended, so that the others end at the same length if they begin again.
    """
    has_beams = request.params.beam is not None
    num_sequences = request.num_rows_wanted if has_beams else len(request.sequences)
    return _max_len_for(request, num_sequences, config)


def _max_len_for(request: Request, num_sequences: int, config: SchedulerConfig) -> int:
    """Returns the most tokens of each of `num_sequences` of `request` that run together."""
    num_cross_blocks = config.num_blocks_for(request.num_encoder_tokens)
    num_prompt_tokens = request.sequence.num_prompt_tokens
    return config.max_len_for(num_prompt_tokens, max(1, num_sequences), num_cross_blocks)


# -- Preparation for an engine ---------------------------------------------------------------------


def prepare_request(request: Request, config: SchedulerConfig) -> None:
    """Sets the stop lengths, stop tokens, executor parameters and beam search of `request`.

    All of them depend on `config`. Mutates `request`, which no engine has yet. Preparing a request
    again for another engine is allowed.
    """
    sequence = request.sequence
    request.stop_token_ids = request.params.stop_tokens(config.eos_token_ids)
    if request.params.max_tokens is None:
        request.stop_len = max_len_of(request, config)
    else:
        # Sequences that have ended need no room: the others reach their length without it.
        by_length = sequence.num_prompt_tokens + request.params.max_tokens
        most = _max_len_for(request, request.num_rows_wanted, config)
        request.stop_len = min(by_length, most)
    if request.params.beam is not None:
        _prepare_search(request, config.vocab_size)
    if request.params.pooling is not None and config.vectors is not None:
        pooling = request.params.pooling.for_model(config.vectors)
        request.params = replace(request.params, pooling=pooling)
    stop_token_ids = request.stop_token_ids if config.most_tokens > 1 else frozenset[int]()
    request.params_set = ParamsSet(request.row_params, stop_token_ids)
    request.prepared_for = config


def _prepare_search(request: Request, vocab_size: int) -> None:
    """Creates the beam search of a request, or keeps a search begun on another executor.

    If sequences end at another length here than there, the search begins again from the prompt.
    """
    beam, sequence = request.params.beam, request.sequence
    assert beam is not None
    max_tokens = request.stop_len - sequence.num_prompt_tokens
    if request.search is not None and request.search.max_tokens == max_tokens:
        return
    request.search = search = BeamSearch(
        beam,
        n=request.params.n,
        max_tokens=max_tokens,
        min_tokens=request.params.min_tokens,
        stop_token_ids=request.stop_token_ids,
    )
    request.num_candidates = min(search.num_candidates, vocab_size)
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    request.sequences = [Sequence(request, 0, prompt, sequence.num_prompt_tokens, sequence.seed)]
