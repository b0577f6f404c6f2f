"""What a request asks of sampling and stopping, validated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from splitserve_rpc.domain_error import DomainError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 256
MAX_SEQUENCES = 128
MAX_BEAM_WIDTH = 16
# Both mean that top_k is off, as in other engines.
_TOP_K_OFF = (0, -1)


class EarlyStopping(Enum):
    """When a beam search with `width` finished hypotheses ends.

    HEURISTIC: when the best running beam, at its present length, is worse than all of them. ALWAYS:
    at once. NEVER: when no running beam could become better at any length.
    """

    HEURISTIC = "heuristic"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search over `width` beams. A hypothesis scores logprob / length ** length_penalty."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Meaning and ranges as in `scheduler.proto`; None stands for the neutral value.

    A `top_k` of 0 or -1 becomes None, so nobody else has to know that they mean it.
    """

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
    n: int = 1
    best_of: int | None = None
    beam: BeamParams | None = None

    def __post_init__(self) -> None:
        """Off has one spelling from here on."""
        if self.top_k in _TOP_K_OFF:
            object.__setattr__(self, "top_k", None)

    @property
    def num_sequences(self) -> int:
        """How many sequences are computed side by side."""
        if self.beam is not None:
            return self.beam.width
        return self.n if self.best_of is None else self.best_of

    @property
    def is_streamed(self) -> bool:
        """Whether every token that is sampled is the client's: not so if the best are chosen."""
        return self.beam is None and self.num_sequences == self.n

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
        if self.top_k is not None and self.top_k < 1:
            raise _invalid(f"top_k is {self.top_k}; allowed: 1 or more, or 0, -1 or absent for all")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _invalid(f"max_tokens is {self.max_tokens}; allowed: 1 or more, or absent")
        most = math.inf if self.max_tokens is None else self.max_tokens
        _check_range("min_tokens", self.min_tokens, 0, most)
        for name in ("num_logprobs", "num_prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKENS)
        self.check_sequences()
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
            _check_range("logit_bias key", token_id, 0, vocab_size - 1)
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids element", token_id, 0, vocab_size - 1)

    def check_sequences(self) -> None:
        """Raises DomainError if n, best_of or beam_search make no sense."""
        _check_range("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            _check_range("best_of", self.best_of, self.n, MAX_SEQUENCES)
        if self.beam is None:
            return
        _check_range("beam_search.width", self.beam.width, max(self.n, 1), MAX_BEAM_WIDTH)
        _check_range("beam_search.length_penalty", self.beam.length_penalty, -10.0, 10.0)
        # A beam search is no sampling: what would change the distribution has no meaning in it.
        neutral = SamplingParams(beam=self.beam)
        for name in _NOT_WITH_BEAMS:
            value = getattr(self, name)
            if value != getattr(neutral, name):
                raise _invalid(f"{name} is {value}; allowed with beam_search: its default")
        if self.temperature not in (0.0, 1.0):
            raise _invalid(f"temperature is {self.temperature:g}; allowed with beam_search: 0 or 1")


_NOT_WITH_BEAMS = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "num_logprobs",
    "num_prompt_logprobs",
    "best_of",
)


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if (low < value if open_low else low <= value) and value <= high:
        return
    allowed = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    raise _invalid(f"{name} is {value:g}; allowed: {allowed}")


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise _invalid(f"{name} has {count} entries; allowed: at most {most}")


def _invalid(message: str) -> DomainError:
    return DomainError("SAMPLING_PARAMS_INVALID", message)
