"""What a request asks of sampling and stopping, validated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from splitserve_rpc.domain_error import DomainError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Meaning and ranges as in `scheduler.proto`; None stands for the neutral value."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def uses_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether the executor must be told all tokens of the sequence."""
        return self.uses_penalties or self.num_prompt_logprobs is not None

    def validate(self, vocab_size: int) -> None:
        """Raises DomainError(SAMPLING_PARAMS_INVALID) naming field, value and allowed range."""
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_at_least("top_k", self.top_k, 1)
        _check_at_least("max_tokens", self.max_tokens, 1)
        most = math.inf if self.max_tokens is None else self.max_tokens
        _check_range("min_tokens", self.min_tokens, 0, most)
        for name in ("num_logprobs", "num_prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKENS)
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
            _check_range("logit_bias key", token_id, 0, vocab_size - 1)
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids element", token_id, 0, vocab_size - 1)


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if (low < value if open_low else low <= value) and value <= high:
        return
    allowed = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    raise _invalid(f"{name} is {value:g}; allowed: {allowed}")


def _check_at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise _invalid(f"{name} is {value}; allowed: {low} or more, or absent")


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise _invalid(f"{name} has {count} entries; allowed: at most {most}")


def _invalid(message: str) -> DomainError:
    return DomainError("SAMPLING_PARAMS_INVALID", message)
