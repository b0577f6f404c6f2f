"""Size limits of requests, and the names of requests.

Bytes are checked before a message is decoded, lengths before its tokens are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from scheduler_service.scheduler.engine.planning import check_encoder_length, check_prompt_length
from scheduler_service.scheduler.values import FEATURE_BYTES, SchedulerConfig
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import MAX_SEQUENCES, DomainError
from splitserve_rpc import MAX_MESSAGE_BYTES

# Enough for all of a request but the tokens of prompt and output.
_BASE_BYTES = 256 * 1024
# Bytes of a packed varint for a token id below 2^28.
_TOKEN_BYTES = 4
# A million tokens. Decoding them takes 25 ms, during which the event loop serves no other call.
_MAX_BYTES = 4 * 1024 * 1024


def most_message_bytes(max_model_len: int | None) -> int:
    """Returns the limit of message sizes in bytes, as known when the process starts.

    The limit is above 4 MiB only if --max-model-len needs more.
    """
    asked = _BASE_BYTES + _TOKEN_BYTES * (max_model_len or 0)
    return min(max(_MAX_BYTES, asked), MAX_MESSAGE_BYTES)


def message_bytes(config: SchedulerConfig, most_bytes: int) -> int:
    """Returns the bytes of the largest request that an executor with `config` can run.

    The result is at most `most_bytes`.
    """
    num_tokens = MAX_SEQUENCES * config.max_model_len
    if config.sliding_window is None:  # all tokens of all sequences need slots in the pool
        num_tokens = min(num_tokens, max(config.num_device_slots, config.max_model_len))
    num_bytes = _BASE_BYTES + _TOKEN_BYTES * num_tokens
    num_bytes += FEATURE_BYTES * (config.num_encoder_features or 0)
    return min(num_bytes, most_bytes)


def check_lengths(message: api.GenerateRequest, config: SchedulerConfig) -> None:
    """Checks the numbers of tokens of a request before any token is copied. Raises DomainError.

    The lengths of lists in the sampling parameters are checked where these are decoded.
    """
    _check_count("resume_sequences", len(message.resume_sequences), MAX_SEQUENCES)
    _check_count("resume_token_ids", len(message.resume_token_ids), config.max_model_len)
    for sequence in message.resume_sequences:
        _check_count("resume_sequences", len(sequence.token_ids), config.max_model_len)
    num_read = len(message.kept_output.num_read_tokens)
    _check_count("kept_output.num_read_tokens", num_read, MAX_SEQUENCES)
    check_prompt_length(len(message.prompt_token_ids), config)
    num_encoder_tokens = len(message.encoder_token_ids)
    if len(message.encoder_features) % FEATURE_BYTES:
        raise DomainError(
            "ENCODER_FEATURES_INVALID",
            f"encoder_features has {len(message.encoder_features)} bytes; allowed: multiples of"
            f" {FEATURE_BYTES}",
        )
    num_features = len(message.encoder_features) // FEATURE_BYTES
    check_encoder_length(num_encoder_tokens, num_features, config)
    if num_encoder_tokens > config.num_device_slots:
        raise DomainError(
            "NEVER_FITS_KV_CACHE",
            f"encoder_token_ids has {num_encoder_tokens} tokens; the KV cache holds "
            f"{config.num_device_slots} ({config.num_device_blocks} blocks of {config.block_size})",
        )


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise DomainError(
            "SAMPLING_PARAMS_INVALID", f"{name} has {count} entries; allowed: at most {most}"
        )


# -- Names of requests -----------------------------------------------------------------------------

# Id of a request inside the scheduler. Only `RequestName` makes one.
RequestKey = NewType("RequestKey", str)


@dataclass(frozen=True, slots=True)
class RequestName:
    """Id that the client gave a request, and the tenant in whose namespace the id is.

    `tenant` None: callers need no credential, and all share one namespace. Requests are only found
    by `key`, so a caller cannot reach a request of another tenant, whatever id the caller sends.
    """

    own_id: str
    tenant: str | None = None

    @classmethod
    def of_key(cls, key: str, tenant: str) -> RequestName:
        """Returns the name that has `key`, for a request of `tenant`."""
        prefix = f"{len(tenant)}:{tenant}:"
        if tenant and key.startswith(prefix):
            return cls(key.removeprefix(prefix), tenant)
        return cls(key)

    @property
    def key(self) -> RequestKey:
        """Key of the request inside the scheduler, unique for each pair of tenant and id."""
        if self.tenant is None:
            return RequestKey(self.own_id)
        return RequestKey(f"{len(self.tenant)}:{self.tenant}:{self.own_id}")
