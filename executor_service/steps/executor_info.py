"""Description of an executor for the handshake: model, limits, features; and the epoch clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

from executor_service.steps.pooling import ModelVectors
from splitserve_contract import GivenSamplingValues

# Tokenizer file: its path, or its content if it was converted.
TokenizerFile: TypeAlias = Path | bytes


def read_tokenizer_file(file: TokenizerFile) -> bytes:
    """Returns the content of `file`. Raises OSError."""
    return file.read_bytes() if isinstance(file, Path) else file


class Feature(IntEnum):
    """Optional ability of an executor; the numbers are those of the contract."""

    LOGPROBS = 1
    PROMPT_LOGPROBS = 2
    PENALTIES = 3
    LOGIT_BIAS = 4
    ADAPTERS = 5
    CROSS_ATTENTION = 6
    TOKEN_CONSTRAINTS = 7
    GRAMMAR = 8
    SEVERAL_TOKENS = 9
    POOLING = 10
    PARTIAL_RESULTS = 11


# Features of every executor here, whatever the model.
SAMPLING_FEATURES = frozenset(
    {
        Feature.LOGPROBS,
        Feature.PROMPT_LOGPROBS,
        Feature.PENALTIES,
        Feature.LOGIT_BIAS,
        Feature.TOKEN_CONSTRAINTS,
    }
)


@dataclass(frozen=True, slots=True)
class DefaultSampling(GivenSamplingValues):
    """Sampling values recommended by the model's authors, None for none.

    Only `RECOMMENDED_PARAMETERS` have values. Ranges are as in scheduler.proto.
    """


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """Features that an encoder of audio takes; see `AudioInfo` in the proto."""

    num_mel_bins: int
    num_frames: int
    num_positions: int
    sampling_rate: int
    hop_length: int
    fft_length: int


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """Encoder of a model; see `EncoderInfo` in the proto.

    `max_tokens`: 0 for no own limit. `audio`: None for an encoder of tokens.
    """

    max_tokens: int
    decoder_token_ids: tuple[int, ...]
    audio: AudioInfo | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Model properties for scheduling and clients; see `ModelInfo` in the proto.

    `sliding_window`: in tokens, None unless every layer has one. `vectors`: None for a model that
    returns tokens.
    """

    name: str
    digest: str
    dtype: str
    kv_cache_dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None
    default_sampling: DefaultSampling = DefaultSampling()
    quantization: str = ""
    encoder: EncoderInfo | None = None
    vectors: ModelVectors | None = None

    @property
    def is_uncached(self) -> bool:
        """Whether rows have no blocks."""
        return self.vectors is not None and self.vectors.is_uncached


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """Limits of one step; see `ExecutorLimits` in the proto.

    `max_adapters_per_step`: not None exactly if the feature ADAPTERS is announced.
    """

    max_num_rows: int = 256
    max_num_batched_tokens: int = 2048
    max_message_bytes: int = 64 * 1024 * 1024
    max_inflight_steps: int = 8
    max_adapters_per_step: int | None = None


@dataclass(frozen=True, slots=True)
class TrialStep:
    """Work and duration of a measured step; see `TrialStep` in the proto."""

    num_tokens: int
    num_attended: int
    took_us: int


@dataclass(frozen=True, slots=True)
class AdapterSupport:
    """Adapters that the executor can load; see `AdapterSupport` in the proto."""

    max_num_loaded: int
    max_rank: int
    target_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Values that an executor registers with. `address` is empty until it is known.

    `trial_step`: None if steps may have to wait for something to be loaded or compiled. `compute`:
    the code that computes, as a text for people. `slow_compute_reason`: why that is not the fastest
    code for such a model; empty if it is. `newest_scheduler_epoch`, `step_running_ms`: values of
    the moment; see the proto. `adapter_support`: None if it loads no adapters.
    """

    executor_epoch: int
    model: ModelInfo
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int
    limits: ExecutorLimits = ExecutorLimits()
    features: frozenset[Feature] = SAMPLING_FEATURES
    software_version: str = ""
    address: str = ""
    newest_scheduler_epoch: int = 0
    step_running_ms: int = 0
    trial_step: TrialStep | None = None
    compute: str = ""
    slow_compute_reason: str = ""
    adapter_support: AdapterSupport | None = None


# -- Clock of epochs: nanoseconds since 1970, never set back ---------------------------------------

# CLOCK_BOOTTIME, where there is one, goes on while the machine is suspended.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _since_boot_ns() -> int:
    return time.clock_gettime_ns(_STEADY)


def steady_clock(
    wall_ns: Callable[[], int] = time.time_ns, steady_ns: Callable[[], int] = _since_boot_ns
) -> Callable[[], int]:
    """Returns a clock in nanoseconds that follows the wall clock but is never set back.

    While the wall clock is behind, the clock returns what the wall clock would say had it not been
    set back. So an epoch that was not from the future does not become so.
    """
    offset_ns = wall_ns() - steady_ns()
    return lambda: max(wall_ns(), steady_ns() + offset_ns)
