"""What one scheduler core must know of its executor and of the limits of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Feature(Enum):
    """An optional ability of an executor."""

    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The executor's pools, the limits of a step and of the queue, and the model's numbers."""

    block_size: int
    num_device_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_waiting: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    features: frozenset[Feature] = frozenset(Feature)

    @property
    def num_device_slots(self) -> int:
        """Tokens the device pool holds."""
        return self.num_device_blocks * self.block_size

    @property
    def max_len(self) -> int:
        """Most tokens a sequence may have here: the model's limit, or what the pool holds."""
        return min(self.max_model_len, self.num_device_slots)
