"""Numeric sampling parameters: name, type, default, range and use of each, for all processes.

`PARAMETERS` is the only description of a parameter. Range checks and their error texts, columns of
a step's rows, flags of `splitserve generate` and request fields of the gateway follow from it.
Codecs go by the field names of the messages, which are the names here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from splitserve_contract.domain_error import DomainError

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Interval of numbers from `low` to `high`; `low` itself is excluded if `open_low`.

    Infinite bounds are excluded, and NaN is in no range.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    def contains(self, value: float) -> bool:
        """Returns whether `value` is finite and in the range."""
        # Comparisons are false for NaN.
        if self.low < value < self.high:
            return True
        is_low = value == self.low and not self.open_low
        return (is_low or value == self.high) and math.isfinite(value)

    def __str__(self) -> str:
        """Returns the range in the notation of mathematics, such as "(0, 1]"."""
        return f"{'(' if self.open_low else '['}{_shown(self.low)}, {_shown(self.high)}]"

    @property
    def in_words(self) -> str:
        """Condition in words for error texts, such as "in (0, 1]", "> 0" or "finite"."""
        if math.isfinite(self.high):
            return f"in {self}"
        if math.isfinite(self.low):
            return f"{'>' if self.open_low else '>='} {_shown(self.low)}"
        return "finite"


@dataclass(frozen=True, slots=True)
class NumericParameter:
    """Description of one sampling parameter whose value is a number.

    `default`: the neutral value; None if absence has no number. `allowed`: range in the client API.
    `allowed_text`: the range in error texts, if the interval does not say all. `off`: values beyond
    `allowed` that mean the default. `step_range`: range in the step contract; None if executors do
    not get the parameter. `feature`: executor feature that a value other than the default needs.
    `column`: numpy type of the column that the draw of a token reads; None if the draw does not
    read it. `example`: value of a limit on tokens that has an effect, for trials. `api_name`: field
    in the bodies of HTTP requests, empty for none. `flag`, `help`: flag of `splitserve generate`.
    `allowed_with_beams`: whether a beam search accepts other values than the default.
    `is_recommended`: whether the authors of a model may recommend a value.
    """

    name: str
    kind: type[int] | type[float]
    default: float | None
    allowed: Range
    flag: str
    help: str
    allowed_text: str = ""
    off: tuple[int, ...] = ()
    step_range: Range | None = None
    feature: str = ""
    column: str | None = None
    example: float | None = None
    allowed_with_beams: bool = False
    is_recommended: bool = False
    api_name: str = ""
    num_bits: int = 32

    def accepts(self, value: object) -> bool:
        """Returns whether the client API accepts `value`, which may have any type."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if self.kind is int and not (isinstance(value, int) and abs(value) <= _INT32_MAX):
            return False
        return value in self.off or self.allowed.contains(value)

    def check(self, value: float, narrowed: Range | None = None) -> None:
        """Raises DomainError(SAMPLING_PARAMS_INVALID) for a value that is out of range.

        `narrowed`: the range, where another parameter of the request narrows it.
        """
        if not (narrowed or self.allowed).contains(value) and value not in self.off:
            allowed = narrowed or self.describe_allowed()
            message = f"{self.name} is {_shown(value)}; allowed: {allowed}"
            raise DomainError("SAMPLING_PARAMS_INVALID", message)

    def describe_allowed(self) -> str:
        """Returns the allowed values for error texts."""
        return self.allowed_text or str(self.allowed)

    @property
    def json_schema(self) -> dict[str, float]:
        """Bounds of the values as keywords of JSON Schema."""
        low = min((self.allowed.low, *self.off))
        bounds = {
            "exclusiveMinimum" if self.allowed.open_low else "minimum": low,
            "maximum": self.allowed.high,
        }
        return {keyword: bound for keyword, bound in bounds.items() if math.isfinite(bound)}


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
MAX_BEAM_WIDTH = 16

PARAMETERS = (
    NumericParameter(
        "max_tokens",
        int,
        None,
        Range(1),
        "max-tokens",
        "maximum number of output tokens (default: the model's limit)",
        allowed_text="1 or more, or absent",
        allowed_with_beams=True,
        api_name="max_tokens",
    ),
    NumericParameter(
        "min_tokens",
        int,
        0,
        Range(0),
        "min-tokens",
        "minimum number of output tokens (default: 0)",
        step_range=Range(0),
        feature="LOGIT_BIAS",
        allowed_with_beams=True,
        api_name="min_tokens",
    ),
    NumericParameter(
        "temperature",
        float,
        1.0,
        Range(0, 100),
        "temperature",
        "0 is greedy (default: 1)",
        step_range=Range(0),
        column="float32",
        allowed_with_beams=True,
        is_recommended=True,
        api_name="temperature",
    ),
    NumericParameter(
        "top_k",
        int,
        None,
        Range(1),
        "top-k",
        "sample from the K most probable tokens (default, 0, -1: all)",
        allowed_text="1 or more, or 0, -1 or absent for all",
        off=(0, -1),
        step_range=Range(1),
        column="int32",
        example=5,
        is_recommended=True,
        api_name="top_k",
    ),
    NumericParameter(
        "top_p",
        float,
        1.0,
        Range(0, 1, open_low=True),
        "top-p",
        "sample from the most probable tokens up to this sum (default: 1)",
        step_range=Range(0, 1, open_low=True),
        column="float64",
        example=0.9,
        is_recommended=True,
        api_name="top_p",
    ),
    NumericParameter(
        "min_p",
        float,
        0.0,
        Range(0, 1),
        "min-p",
        "minimum probability relative to the best token (default: 0)",
        step_range=Range(0, 1),
        column="float32",
        example=0.1,
        is_recommended=True,
        api_name="min_p",
    ),
    NumericParameter(
        "repetition_penalty",
        float,
        1.0,
        Range(0, 100, open_low=True),
        "repetition-penalty",
        "above 1: fewer repetitions (default: 1)",
        step_range=Range(0, open_low=True),
        feature="PENALTIES",
        is_recommended=True,
        api_name="repetition_penalty",
    ),
    NumericParameter(
        "presence_penalty",
        float,
        0.0,
        Range(-2, 2),
        "presence-penalty",
        "penalty of tokens that occurred (default: 0)",
        step_range=Range(),
        feature="PENALTIES",
        api_name="presence_penalty",
    ),
    NumericParameter(
        "frequency_penalty",
        float,
        0.0,
        Range(-2, 2),
        "frequency-penalty",
        "penalty of tokens per occurrence (default: 0)",
        step_range=Range(),
        feature="PENALTIES",
        api_name="frequency_penalty",
    ),
    NumericParameter(
        "seed",
        int,
        None,
        Range(),
        "seed",
        "makes sampling reproducible (default: random)",
        allowed_with_beams=True,
        api_name="seed",
        num_bits=64,
    ),
    NumericParameter(
        "num_logprobs",
        int,
        None,
        Range(0, MAX_LOGPROBS),
        "logprobs",
        "with --json: logprobs, and those of the best N tokens",
        step_range=Range(0),
        feature="LOGPROBS",
    ),
    NumericParameter(
        "num_prompt_logprobs",
        int,
        None,
        Range(0, MAX_LOGPROBS),
        "prompt-logprobs",
        "the same for the prompt",
        step_range=Range(0),
        feature="PROMPT_LOGPROBS",
        api_name="prompt_logprobs",
    ),
    NumericParameter(
        "n",
        int,
        1,
        Range(1, MAX_SEQUENCES),
        "n",
        "number of completions (default: 1)",
        allowed_with_beams=True,
        api_name="n",
    ),
    NumericParameter(
        "best_of",
        int,
        None,
        Range(1, MAX_SEQUENCES),
        "best-of",
        "completions to compute; the best --n are returned",
        api_name="best_of",
    ),
    NumericParameter(
        "beam_search.width",
        int,
        None,
        Range(1, MAX_BEAM_WIDTH),
        "beam-width",
        "beam search with N beams instead of sampling",
        allowed_with_beams=True,
    ),
    NumericParameter(
        "beam_search.length_penalty",
        float,
        1.0,
        Range(-10, 10),
        "length-penalty",
        "above 0: prefers longer completions (default: 1)",
        allowed_with_beams=True,
        api_name="length_penalty",
    ),
)
PARAMETER_OF_NAME = MappingProxyType({parameter.name: parameter for parameter in PARAMETERS})
# Parameters that the draw of a token from logits reads, each a column of the rows of a step.
DRAW_PARAMETERS = tuple(parameter for parameter in PARAMETERS if parameter.column is not None)
# Values that limit the tokens of a draw.
EXAMPLES_OF_LIMITS: dict[str, Any] = {
    p.name: p.example for p in DRAW_PARAMETERS if p.example is not None
}
RECOMMENDED_PARAMETERS = tuple(p for p in PARAMETERS if p.is_recommended)


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """Values of the parameters that shape the distribution of a token; defaults are neutral.

    The sampling parameters of scheduler and executor extend this record, so that a parameter is
    a field of both.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def uses_penalties(self) -> bool:
        """Whether the logits depend on earlier tokens by penalties."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def truncates_by_min_p_after_top_p(self) -> bool:
        """Whether version 1 of the sampling arithmetic could give other tokens (executor.proto)."""
        return self.temperature > 0 and self.min_p > 0 and self.top_p < 1


@dataclass(frozen=True, slots=True)
class GivenSamplingValues:
    """Optional values of a client request or a recommendation; None keeps the default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
