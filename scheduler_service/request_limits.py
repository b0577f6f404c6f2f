"""How large a request may be: in bytes before it is decoded, in lengths before it is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from scheduler_service.scheduler.engine.planning.arrival_checks import check_prompt_length
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.sampling_params import MAX_SEQUENCES
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError
from splitserve_rpc.server import MAX_MESSAGE_BYTES

# Everything but tokens of prompt and output fits in here.
_BASE_BYTES = 256 * 1024
# A token id below 2^28, packed.
_TOKEN_BYTES = 4
# A million tokens; decoding them takes 25 ms, in which nobody else is served.
_MAX_BYTES = 4 * 1024 * 1024


def most_message_bytes(max_model_len: int | None) -> int:
    """The limit known at start: more than usual only if --max-model-len asks for it."""
    asked = _BASE_BYTES + _TOKEN_BYTES * (max_model_len or 0)
    return min(max(_MAX_BYTES, asked), MAX_MESSAGE_BYTES)


def message_bytes(config: SchedulerConfig, most_bytes: int) -> int:
    """What the largest request takes that an executor with `config` could run."""
    num_tokens = MAX_SEQUENCES * config.max_model_len
    if config.sliding_window is None:  # then all of its sequences are in the pool
        num_tokens = min(num_tokens, max(config.num_device_slots, config.max_model_len))
    return min(_BASE_BYTES + _TOKEN_BYTES * num_tokens, most_bytes)


def check_lengths(message: api.GenerateRequest, config: SchedulerConfig) -> None:
    """Raises DomainError for tokens that are too many to be looked at, before any are copied.

    How long the lists of sampling parameters may be is checked where these are decoded.
    """
    _check_count("resume_sequences", len(message.resume_sequences), MAX_SEQUENCES)
    _check_count("resume_token_ids", len(message.resume_token_ids), config.max_model_len)
    for sequence in message.resume_sequences:
        _check_count("resume_sequences", len(sequence.token_ids), config.max_model_len)
    check_prompt_length(len(message.prompt_token_ids), config)
    num_encoder_tokens = len(message.encoder_token_ids)
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


# -- What a request is called: by its client, and inside -------------------------------------------

# Names a request in the cluster and its cores. Only `RequestName` makes one.
RequestKey = NewType("RequestKey", str)


@dataclass(frozen=True, slots=True)
class RequestName:
    """A client's own id of a request, and the tenant whose ids it is one of.

    `tenant`: None where nobody is told apart, and ids are everybody's. Whoever has an id comes to
    a request through this, so none of another tenant can be reached, whatever the id says.
    """

    own_id: str
    tenant: str | None = None

    @classmethod
    def of_key(cls, key: str, tenant: str) -> RequestName:
        """The name that has this key, if the request is for `tenant`."""
        prefix = f"{len(tenant)}:{tenant}:"
        if tenant and key.startswith(prefix):
            return cls(key.removeprefix(prefix), tenant)
        return cls(key)

    @property
    def key(self) -> RequestKey:
        """Another for each pair of tenant and id."""
        if self.tenant is None:
            return RequestKey(self.own_id)
        return RequestKey(f"{len(self.tenant)}:{self.tenant}:{self.own_id}")
