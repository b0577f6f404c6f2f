"""What an executor is: the handshake as plain values."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

# A file of the tokenizer: where it lies, or what it holds if it was converted.
TokenizerFile: TypeAlias = Path | bytes


def read_tokenizer_file(file: TokenizerFile) -> bytes:
    """The content of `file`. Raises OSError."""
    return file.read_bytes() if isinstance(file, Path) else file


class Feature(IntEnum):
    """An optional ability of an executor; the numbers are those of the contract."""

    LOGPROBS = 1
    PROMPT_LOGPROBS = 2
    PENALTIES = 3
    LOGIT_BIAS = 4
    ADAPTERS = 5
    CROSS_ATTENTION = 6
    TOKEN_CONSTRAINTS = 7
    GRAMMAR = 8
    SEVERAL_TOKENS = 9


# What every executor here can do, whatever the model.
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
class DefaultSampling:
    """What a model's authors recommend; None for nothing. Ranges as in scheduler.proto."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model as far as scheduling and clients need it; see `ModelInfo` in the proto.

    `sliding_window`: in tokens, None unless every layer has one.
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


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What one step may ask for; see `ExecutorLimits` in the proto.

    `max_adapters_per_step`: not None exactly if the feature ADAPTERS is announced.
    """

    max_num_rows: int = 256
    max_num_batched_tokens: int = 2048
    max_message_bytes: int = 64 * 1024 * 1024
    max_inflight_steps: int = 8
    max_adapters_per_step: int | None = None


@dataclass(frozen=True, slots=True)
class TrialStep:
    """How long a step took, and what there was to do; see `TrialStep` in the proto."""

    num_tokens: int
    num_attended: int
    took_us: int


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor registers with. `address` is empty until it is known.

    `trial_step`: None if steps may have to wait for something to be loaded or compiled.
    `compute`: which code computes, for people. `slow_compute_reason`: why that is not the fastest
    code there is for such a model; empty if it is.
    `newest_scheduler_epoch`, `step_running_ms`: what is so at the moment; see the proto.
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


# -- The time since 1970, as epochs are, by a clock that is never set back -------------------------

# Goes on while the machine is suspended, where there is such a clock.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _since_boot_ns() -> int:
    return time.clock_gettime_ns(_STEADY)


def steady_clock(
    wall_ns: Callable[[], int] = time.time_ns, steady_ns: Callable[[], int] = _since_boot_ns
) -> Callable[[], int]:
    """A clock in nanoseconds: what the wall clock says, or, if it was set back, would say.

    An epoch that was not from the future then does not become so.
    """
    offset_ns = wall_ns() - steady_ns()
    return lambda: max(wall_ns(), steady_ns() + offset_ns)
