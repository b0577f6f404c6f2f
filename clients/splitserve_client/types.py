"""The values of the client's interface."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; None leaves the server its default.

    Meanings and ranges: `SamplingParams` in scheduler.proto. The server checks them.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


class FinishReason(enum.Enum):
    """Why a request ended; one that failed raises RequestFailed instead."""

    STOP = "stop"
    LENGTH = "length"
    MODEL_LENGTH = "model_length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative to a token."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The score of a token; `rank` 1 is the most probable; `top` has the best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output tokens, in order; `logprobs` is parallel to them or empty."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `num_output_tokens` has resumed ones included."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request."""

    reason: FinishReason
    stop_token_id: int | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is served. Token ids are 0 .. vocab_size-1."""

    name: str
    digest: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Executor:
    """One executor as the scheduler sees it."""

    address: str
    executor_epoch: int
    is_connected: bool
    model_name: str
    dtype: str
    block_size: int
    num_device_blocks: int
    num_free_device_blocks: int
    num_host_blocks: int
    num_waiting_requests: int
    num_running_requests: int
    num_steps: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class ExecutorList:
    """All executors, in order of registration, and the requests that none of them has."""

    executors: tuple[Executor, ...]
    num_unassigned_requests: int
