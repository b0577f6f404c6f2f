"""Handshake with an executor: checks of its ExecutorInfo, and the configuration of its core.

The checks raise DomainError, naming field and values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import reduce
from types import MappingProxyType
from typing import Any

from scheduler_service.config import ClusterConfig
from scheduler_service.executors.answer_watch import MeasuredStep, StepSize
from scheduler_service.scheduler.values import (
    FEATURE_BYTES,
    Feature,
    SchedulerConfig,
    VectorSizes,
)
from scheduler_service.step_codec import decode_features
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_common import is_reachable_address
from splitserve_contract import CONTRACT_MAJOR, SAMPLING_VERSION, DomainError

# Shares of a step in the largest message. A token travels as input, as history and, with blocks of
# one token, as block id. A row has a dozen columns. The rest, or half of the message, is for lists
# and texts in the sampling parameters. A batch that still does not fit (with the history of a long
# sequence) is caught when it is encoded.
MIN_MESSAGE_BYTES = 64 * 1024
_MESSAGE_BYTES_PER_TOKEN = 32
_MESSAGE_BYTES_PER_ROW = 128
# Joining the encoded parameters of a snapshot blocks the event loop for 2 ms a MiB.
_MAX_PARAMS_BYTES = 4 * 1024 * 1024

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
# Limits far above real executors, but low enough that a core with these values costs little memory:
# one byte for each token of the vocabulary, and address space for the longest rows.
_RANGES = MappingProxyType(
    {
        "executor_epoch": (1, _INT64_MAX),
        # Leaves room for newer epochs.
        "newest_scheduler_epoch": (0, _INT64_MAX // 2),
        "step_running_ms": (0, _INT64_MAX),
        "block_size_tokens": (1, 2**16),
        "num_device_blocks": (1, 2**24),
        "num_host_blocks": (0, 2**24),
        "block_bytes": (0, 2**40),
        "model.vocab_size": (1, 2**24),
        "model.max_model_len_tokens": (2, 2**24),
        "limits.max_num_rows": (1, _INT32_MAX),
        "limits.max_num_batched_tokens": (1, _INT32_MAX),
        "limits.max_message_bytes": (MIN_MESSAGE_BYTES, _INT32_MAX),
        "limits.max_inflight_steps": (1, _INT32_MAX),
    }
)
_TRIAL_STEP_RANGES = MappingProxyType(
    {"num_tokens": _INT32_MAX, "num_attended": 2**50, "took_us": 2**50}
)
_MAX_LENGTHS = MappingProxyType(
    {
        "address": 300,
        "model.name": 1024,
        "model.quantization": 64,
        "software_version": 1024,
        "compute": 1024,
        "slow_compute_reason": 1024,
        "model.eos_token_ids": 4096,
        "features": 1024,
    }
)
_DTYPES = "float32|bfloat16|float16"
_KV_DTYPES = f"{_DTYPES}|float8_e4m3fn|int8"
_TEXTS = MappingProxyType(
    {
        "model.name": (r"(?s).+", "a non-empty string"),
        "model.digest": (r"[0-9a-f]{64}", "64 lower-case hexadecimal digits"),
        "model.dtype": (_DTYPES, _DTYPES),
        "model.kv_cache_dtype": (_KV_DTYPES, _KV_DTYPES),
    }
)
_MAX_ADAPTER_SLOTS = 65536
_MAX_ENCODER_TOKENS = 2**24
_MAX_DECODER_TOKENS = 64
_MAX_FEATURES = 2**22
_AUDIO_RANGES = MappingProxyType(
    {
        "num_mel_bins": 1024,
        "num_frames": 2**20,
        "num_positions": 2**20,
        "sampling_rate": 192_000,
        "hop_length": 2**14,
        "fft_length": 2**14,
    }
)
_MAX_NUMBERS = 65536
_MAX_LABEL_CHARS = 2**20
_SHOWN_CHARS = 100
# Executors of this contract minor and later have sampling version 2 unless they say otherwise.
_FIRST_MINOR_OF_SAMPLING_2 = 2
# Fields that may differ between Register and GetInfo: one executor may have several addresses, and
# other fields may change at any time.
_NOT_COMPARED = frozenset(
    {
        "address",
        "software_version",
        "compute",
        "slow_compute_reason",
        "newest_scheduler_epoch",
        "step_running_ms",
    }
)

_log = logging.getLogger(__name__)


def check_executor_info(info: executor.ExecutorInfo) -> None:
    """Checks that every field is in its range. Raises DomainError."""
    _check_versions(info)
    for path, most in _MAX_LENGTHS.items():
        if (length := len(_get(info, path))) > most:
            raise _invalid(path, f"{length} long", f"{most} at most")
    for path, (least, most) in _RANGES.items():
        if not least <= (number := _get(info, path)) <= most:
            raise _invalid(path, number, f"{least} to {most}")
    for path, (pattern, allowed) in _TEXTS.items():
        if not re.fullmatch(pattern, text := _get(info, path)):
            raise _invalid(path, repr(text[:_SHOWN_CHARS]), allowed)
    check_address(info.address)
    for token_id in info.model.eos_token_ids:
        if not 0 <= token_id < info.model.vocab_size:
            raise _invalid("model.eos_token_ids", token_id, f"0 to {info.model.vocab_size - 1}")
    _check_optional(info)


def _check_versions(info: executor.ExecutorInfo) -> None:
    major = info.contract_version.major
    if major != CONTRACT_MAJOR:
        raise DomainError(
            "CONTRACT_VERSION_MISMATCH",
            f"contract_version.major is {major}; this scheduler speaks {CONTRACT_MAJOR}",
        )
    if (version := _sampling_version(info)) > SAMPLING_VERSION:
        raise DomainError(
            "CONTRACT_VERSION_MISMATCH",
            f"sampling_version is {version}; this scheduler knows 1 to {SAMPLING_VERSION}",
        )
    if version < 1:
        raise _invalid("sampling_version", version, "1 or more, or absent")


def _sampling_version(info: executor.ExecutorInfo) -> int:
    """Returns the version of the sampling arithmetic (SamplingParams) that an executor uses."""
    if info.HasField("sampling_version"):
        return info.sampling_version
    return 1 if info.contract_version.minor < _FIRST_MINOR_OF_SAMPLING_2 else 2


def check_address(address: str) -> None:
    """Checks that `address` is `host:port`, short and printable. Raises DomainError."""
    if (length := len(address)) > (most := _MAX_LENGTHS["address"]):
        raise _invalid("address", f"{length} long", f"{most} at most")
    # No spaces: the address is logged without quotes.
    if not (address.isascii() and address.isprintable() and is_reachable_address(address)):
        allowed = "host:port with a port from 1 to 65535"
        raise _invalid("address", repr(address[:_SHOWN_CHARS]), allowed)


def check_model(info: executor.ExecutorInfo, model: executor.ModelInfo | None) -> None:
    """Checks that the executor has the model that is already served, if any.

    Raises DomainError(MODEL_MISMATCH).
    """
    for path in ("digest", "dtype", "kv_cache_dtype"):
        if model is not None and getattr(model, path) != getattr(info.model, path):
            raise DomainError(
                "MODEL_MISMATCH",
                f"model.{path} is {getattr(info.model, path)!r}; the executors here serve "
                f"{getattr(model, path)!r}",
            )


def check_same(info: executor.ExecutorInfo, answer: executor.ExecutorInfo) -> None:
    """Checks that `answer`, which came from the address of `info`, is of the same executor.

    Raises DomainError(EXECUTOR_MISMATCH).
    """
    if info.executor_epoch != answer.executor_epoch:
        raise DomainError(
            "EXECUTOR_MISMATCH",
            f"executor_epoch is {info.executor_epoch}; GetInfo at {info.address} reports "
            f"{answer.executor_epoch}: another executor answers there",
        )
    for path, registered, reported in _differences(info, answer):
        shown = f"{reported!r}"[:_SHOWN_CHARS]
        raise DomainError(
            "EXECUTOR_MISMATCH",
            f"{path} is {f'{registered!r}'[:_SHOWN_CHARS]}; GetInfo at {info.address} reports "
            f"{shown}",
        )


def _differences(one: Any, other: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:  # noqa: ANN401
    """Yields path and both values of each field that differs, except fields not to be compared."""
    for field in one.DESCRIPTOR.fields:
        path, values = (
            f"{prefix}{field.name}",
            (getattr(one, field.name), getattr(other, field.name)),
        )
        if path in _NOT_COMPARED or values[0] == values[1]:
            continue
        if hasattr(values[0], "DESCRIPTOR"):
            yield from _differences(*values, f"{path}.")
        else:
            yield path, *values


def _check_optional(info: executor.ExecutorInfo) -> None:
    """Checks the optional fields, and limits that depend on a feature. Raises DomainError."""
    window = info.model.sliding_window_tokens
    if info.model.HasField("sliding_window_tokens") and window < 1:
        raise _invalid("model.sliding_window_tokens", window, "1 or more, or absent")
    if info.model.HasField("encoder"):
        _check_encoder(info)
    _check_pooling(info)
    most = info.limits.max_adapters_per_step
    if (executor.FEATURE_ADAPTERS in info.features) != (most >= 1):
        allowed = "1 or more with FEATURE_ADAPTERS, absent without"
        raise _invalid("limits.max_adapters_per_step", most, allowed)
    if info.HasField("adapter_support"):
        support, least = info.adapter_support, max(most, 1)
        if not least <= support.max_num_loaded <= _MAX_ADAPTER_SLOTS:
            allowed = f"limits.max_adapters_per_step, {least}, to {_MAX_ADAPTER_SLOTS}"
            raise _invalid("adapter_support.max_num_loaded", support.max_num_loaded, allowed)
        if support.max_rank < 1:
            raise _invalid("adapter_support.max_rank", support.max_rank, "1 or more")
    for name, most in _TRIAL_STEP_RANGES.items() if info.HasField("trial_step") else ():
        if not 1 <= (number := getattr(info.trial_step, name)) <= most:
            raise _invalid(f"trial_step.{name}", number, f"1 to {most}")


def _check_encoder(info: executor.ExecutorInfo) -> None:
    encoder, vocab_size = info.model.encoder, info.model.vocab_size
    if executor.FEATURE_CROSS_ATTENTION not in info.features:
        raise _invalid("model.encoder", "present", "absent without FEATURE_CROSS_ATTENTION")
    if not 0 <= encoder.max_tokens <= _MAX_ENCODER_TOKENS:
        raise _invalid(
            "model.encoder.max_tokens", encoder.max_tokens, f"0 to {_MAX_ENCODER_TOKENS}"
        )
    if encoder.HasField("audio"):
        _check_audio(info)
    token_ids = encoder.decoder_token_ids
    if len(token_ids) > _MAX_DECODER_TOKENS:
        allowed = f"{_MAX_DECODER_TOKENS} at most"
        raise _invalid("model.encoder.decoder_token_ids", f"{len(token_ids)} long", allowed)
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            allowed = f"0 to {vocab_size - 1}"
            raise _invalid("model.encoder.decoder_token_ids", token_id, allowed)


def _check_audio(info: executor.ExecutorInfo) -> None:
    audio = info.model.encoder.audio
    for name, most in _AUDIO_RANGES.items():
        if not 1 <= (number := getattr(audio, name)) <= most:
            raise _invalid(f"model.encoder.audio.{name}", number, f"1 to {most}")
    num_features = audio.num_mel_bins * audio.num_frames
    if num_features > _MAX_FEATURES:
        allowed = f"at most {_MAX_FEATURES} with num_mel_bins {audio.num_mel_bins}"
        raise _invalid("model.encoder.audio.num_frames x num_mel_bins", num_features, allowed)
    most = info.model.encoder.max_tokens
    if audio.num_positions != most:
        allowed = f"{most}, model.encoder.max_tokens"
        raise _invalid("model.encoder.audio.num_positions", audio.num_positions, allowed)
    least = 2 * FEATURE_BYTES * num_features
    if info.limits.max_message_bytes < least:
        allowed = f"{least} or more, for the features of a request"
        raise _invalid("limits.max_message_bytes", info.limits.max_message_bytes, allowed)


def _check_pooling(info: executor.ExecutorInfo) -> None:
    pooling, has_pooling = info.model.pooling, info.model.HasField("pooling")
    if (executor.FEATURE_POOLING in info.features) != has_pooling:
        allowed = "present with FEATURE_POOLING, absent without"
        raise _invalid("model.pooling", "present" if has_pooling else "absent", allowed)
    if not has_pooling:
        return
    size, labels = pooling.embedding_size, pooling.labels
    if not 0 <= size <= _MAX_NUMBERS:
        raise _invalid("model.pooling.embedding_size", size, f"0 to {_MAX_NUMBERS}")
    if len(labels) > _MAX_NUMBERS:
        raise _invalid("model.pooling.labels", f"{len(labels)} long", f"{_MAX_NUMBERS} at most")
    if (length := sum(map(len, labels))) > _MAX_LABEL_CHARS:
        allowed = f"{_MAX_LABEL_CHARS} characters at most"
        raise _invalid("model.pooling.labels", f"{length} characters", allowed)
    if not size and not labels:
        raise _invalid("model.pooling.embedding_size", 0, "1 or more without labels")
    if pooling.uncached and info.num_host_blocks:
        raise _invalid("num_host_blocks", info.num_host_blocks, "0 if model.pooling.uncached")


def _invalid(path: str, value: object, allowed: str) -> DomainError:
    return DomainError("EXECUTOR_INFO_INVALID", f"{path} is {value}; allowed: {allowed}")


def _get(info: executor.ExecutorInfo, path: str) -> Any:  # noqa: ANN401
    return reduce(getattr, path.split("."), info)


def epoch_for(answer: executor.ExecutorInfo, own_epoch: int) -> int:
    """Returns the scheduler epoch for an executor, not older than any epoch it has seen.

    That is `own_epoch`, unless the clock was set back before this scheduler started. Raises
    DomainError if the executor's newest epoch is out of range.
    """
    newest, (least, most) = answer.newest_scheduler_epoch, _RANGES["newest_scheduler_epoch"]
    if not least <= newest <= most:
        raise _invalid("newest_scheduler_epoch", newest, f"{least} to {most}")
    return own_epoch if newest <= own_epoch else newest + 1


def measured_step(info: executor.ExecutorInfo) -> MeasuredStep | None:
    """Returns the step that the executor measured before it registered; None if it has not."""
    if not info.HasField("trial_step"):
        return None
    trial = info.trial_step
    return MeasuredStep(StepSize(trial.num_tokens, trial.num_attended), trial.took_us / 1e6)


def core_config(info: executor.ExecutorInfo, config: ClusterConfig) -> SchedulerConfig:
    """Returns the configuration of the core for the executor that `info` describes.

    Each limit is the smaller one of executor and options.
    """
    limits, model = info.limits, info.model
    max_rows = min(limits.max_num_rows, limits.max_message_bytes // _MESSAGE_BYTES_PER_ROW)
    max_tokens = min(
        limits.max_num_batched_tokens, limits.max_message_bytes // _MESSAGE_BYTES_PER_TOKEN
    )
    max_num_batched_tokens = min(config.max_num_batched_tokens, max_tokens)
    max_num_seqs = min(config.max_num_seqs, max_rows)
    if max_num_seqs > max_num_batched_tokens:
        _log.warning(
            "rows_limited_by_tokens address=%s max_num_seqs=%d max_num_batched_tokens=%d:"
            " a sequence without a token in the step would hold blocks unused",
            info.address,
            max_num_seqs,
            max_num_batched_tokens,
        )
        max_num_seqs = max_num_batched_tokens
    has_window = model.HasField("sliding_window_tokens")
    max_model_len = min(
        config.max_model_len or model.max_model_len_tokens, model.max_model_len_tokens
    )
    vectors, pool = _vectors(model), (info.block_size_tokens, info.num_device_blocks)
    if vectors is not None:
        if vectors.is_uncached:
            max_model_len = min(max_model_len, max_num_batched_tokens)
        max_model_len += 1  # the vector's place
        if vectors.is_uncached:
            # More than a block for each row, so that none ever waits for one.
            pool = max_model_len, 2 * max_num_seqs
    block_size, num_device_blocks = pool
    policies = asdict(config.policies)
    policies["max_num_encoder_tokens"] = _max_num_encoder_tokens(
        info, config.policies.max_num_encoder_tokens
    )
    return SchedulerConfig(
        block_size=block_size,
        num_device_blocks=num_device_blocks,
        num_host_blocks=info.num_host_blocks,
        block_bytes=info.block_bytes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_num_waiting=config.max_num_waiting,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        features=_features(info),
        sliding_window=model.sliding_window_tokens if has_window else None,
        max_encoder_tokens=_max_encoder_tokens(info),
        vectors=vectors,
        num_encoder_features=_num_features(info),
        max_adapters=min(config.max_adapters, limits.max_adapters_per_step),
        num_adapter_slots=info.adapter_support.max_num_loaded,
        model_digest=model.digest,
        max_params_bytes=_max_params_bytes(
            limits.max_message_bytes, max_num_seqs, max_num_batched_tokens
        ),
        **policies,
    )


def _num_features(info: executor.ExecutorInfo) -> int | None:
    """Returns the features of a request for a model that takes audio; None for others."""
    encoder = info.model.encoder
    if not encoder.HasField("audio"):
        return None
    return encoder.audio.num_mel_bins * encoder.audio.num_frames


def _max_num_encoder_tokens(info: executor.ExecutorInfo, most: int) -> int:
    """Returns how many encoder tokens, at most `most`, a step encodes.

    Features of audio take at most half of a message.
    """
    num_features = _num_features(info)
    if num_features is None:
        return most
    num_windows = info.limits.max_message_bytes // 2 // (FEATURE_BYTES * num_features)
    return min(most, num_windows * info.model.encoder.audio.num_positions)


def _vectors(model: executor.ModelInfo) -> VectorSizes | None:
    if not model.HasField("pooling"):
        return None
    pooling = model.pooling
    return VectorSizes(pooling.embedding_size, len(pooling.labels), pooling.uncached)


def _max_encoder_tokens(info: executor.ExecutorInfo) -> int | None:
    if not info.model.HasField("encoder"):
        return None
    if info.model.encoder.HasField("audio"):
        return info.model.encoder.audio.num_positions
    slots = info.num_device_blocks * info.block_size_tokens
    return min(info.model.encoder.max_tokens or slots, slots)


def _features(info: executor.ExecutorInfo) -> frozenset[Feature]:
    """Returns the executor's features, with those implied by its sampling version."""
    features = decode_features(info.features)
    has_min_p_last = _sampling_version(info) > 1
    if info.HasField("adapter_support"):
        # It has no adapters of its own, which requests name without a digest.
        features = features - {Feature.ADAPTERS} | {Feature.ADAPTER_LOADING}
    return features | {Feature.MIN_P_AFTER_TOP_P} if has_min_p_last else features


def _max_params_bytes(max_message_bytes: int, num_rows: int, num_tokens: int) -> int:
    others = _MESSAGE_BYTES_PER_ROW * num_rows + _MESSAGE_BYTES_PER_TOKEN * num_tokens
    return min(max(max_message_bytes - others, max_message_bytes // 2), _MAX_PARAMS_BYTES)
