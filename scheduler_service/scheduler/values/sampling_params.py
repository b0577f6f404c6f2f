"""Sampling parameters, stop conditions and grammar of a request, with their validation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from splitserve_rpc.domain_error import DomainError

MAX_LOGPROBS = 20
MAX_BAD_WORD_TOKENS = 8192
MAX_SEQUENCES = 128
MAX_BEAM_WIDTH = 16
_MAX_SHOWN_CHARS = 80
MAX_ENTRIES = {
    "logit_bias": 1024,
    "stop_token_ids": 256,
    "allowed_token_ids": 16384,
    "bad_words_token_ids": 1024,
}
# Most bytes of a token id or of the head of a field, and of an entry of a map.
ID_BYTES = 5
_BIAS_BYTES = 16
# Values of top_k that turn it off, as in other engines.
_TOP_K_OFF = (0, -1)


class EarlyStopping(Enum):
    """Conditions for the end of a beam search with `width` finished hypotheses.

    HEURISTIC: the best live beam, at its present length, is worse than all hypotheses. ALWAYS: the
    search ends at once. NEVER: no live beam could become better than a hypothesis at any length.
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
    """Sampling parameters; meaning and ranges as in `scheduler.proto`, None for the neutral value.

    A `top_k` of 0 or -1 becomes None, so that "off" has one value everywhere else.
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
    allowed_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Normalizes `top_k`: values that mean "off" become None."""
        if self.top_k in _TOP_K_OFF:
            object.__setattr__(self, "top_k", None)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are computed side by side."""
        if self.beam is not None:
            return self.beam.width
        return self.n if self.best_of is None else self.best_of

    @property
    def is_streamed(self) -> bool:
        """Whether every sampled token is sent to the client: no best ones are selected."""
        return self.beam is None and self.num_sequences == self.n

    @property
    def uses_penalties(self) -> bool:
        """Whether the logits depend on earlier tokens by penalties."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether the executor needs all tokens of the sequence."""
        has_phrases = any(len(tokens) > 1 for tokens in self.bad_words_token_ids)
        return (
            self.uses_penalties
            or self.num_prompt_logprobs is not None
            or has_phrases
            or self.grammar is not None
        )

    @property
    def uses_constraints(self) -> bool:
        """Whether the parameters forbid tokens, always or at some positions."""
        return (
            bool(self.allowed_token_ids or self.bad_words_token_ids)
            or -math.inf in self.logit_bias.values()
        )

    @property
    def truncates_by_min_p_after_top_p(self) -> bool:
        """Whether version 1 of the sampling arithmetic could give other tokens (executor.proto)."""
        return self.temperature > 0 and self.min_p > 0 and self.top_p < 1 and self.beam is None

    @property
    def num_bytes(self) -> int:
        """Most bytes that the lists and texts take in a message."""
        num_ids = len(self.allowed_token_ids)
        if self.min_tokens > 0:
            num_ids += len(self.stop_token_ids)
        num_ids += sum(map(len, self.bad_words_token_ids)) + len(self.bad_words_token_ids)
        num_bytes = ID_BYTES * num_ids + _BIAS_BYTES * len(self.logit_bias)
        if self.grammar is not None:
            num_bytes += self.grammar.num_bytes + ID_BYTES * len(self.grammar.texts)
        return num_bytes

    def stop_tokens(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Returns the tokens that end a sequence of a model with `eos_token_ids`."""
        return self.stop_token_ids | (frozenset() if self.ignore_eos else eos_token_ids)

    def check_grammar(self, eos_token_ids: frozenset[int]) -> None:
        """Raises DomainError(SAMPLING_PARAMS_INVALID) for a grammar that no output can satisfy.

        A model with `eos_token_ids` samples one of them where the text is complete, and only there.
        """
        if self.grammar is None:
            return
        self.grammar.validate()
        if self.ignore_eos:
            raise _invalid("ignore_eos is true; allowed with a grammar: false")
        if self.min_tokens > 0:
            raise _invalid(f"min_tokens is {self.min_tokens}; allowed with a grammar: 0")
        if not eos_token_ids:
            raise _invalid("grammar is given; this model has no end-of-sequence token to end it")

    def check_samplable(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Raises DomainError(SAMPLING_PARAMS_INVALID) if no first token can be sampled."""
        if not (
            self.logit_bias or self.bad_words_token_ids or self.min_tokens or self.allowed_token_ids
        ):
            return
        stop_tokens = self.stop_tokens(eos_token_ids)
        forbidden = {token_id for token_id, bias in self.logit_bias.items() if bias == -math.inf}
        single = {tokens[0] for tokens in self.bad_words_token_ids if len(tokens) == 1}
        forbidden |= single - stop_tokens
        if self.min_tokens > 0:
            forbidden |= stop_tokens
        allowed = self.allowed_token_ids
        if allowed <= forbidden if allowed else len(forbidden) >= vocab_size:
            raise _invalid(
                f"allowed_token_ids has {len(allowed) or 'all'} tokens, and logit_bias, "
                "bad_words_token_ids and min_tokens forbid all of them; allowed: at least one "
                "token that can be sampled"
            )

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
        check_sizes(self)
        self.check_sequences()
        for token_id, bias in self.logit_bias.items():
            if not (-100.0 <= bias <= 100.0 or bias == -math.inf):
                raise _invalid(f"logit_bias[{token_id}] is {bias:g}; allowed: [-100, 100] or -inf")
        _check_tokens("logit_bias key", self.logit_bias, vocab_size)
        _check_tokens("stop_token_ids element", self.stop_token_ids, vocab_size)
        _check_tokens("allowed_token_ids element", self.allowed_token_ids, vocab_size)
        check_bad_words([len(tokens) for tokens in self.bad_words_token_ids])
        for tokens in self.bad_words_token_ids:
            _check_tokens("bad_words_token_ids element", tokens, vocab_size)

    def check_sequences(self) -> None:
        """Raises DomainError for n, best_of or beam_search out of range or in conflict."""
        _check_range("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            _check_range("best_of", self.best_of, self.n, MAX_SEQUENCES)
        if self.beam is None:
            return
        _check_range("beam_search.width", self.beam.width, max(self.n, 1), MAX_BEAM_WIDTH)
        _check_range("beam_search.length_penalty", self.beam.length_penalty, -10.0, 10.0)
        # Beam search does not sample: parameters that change the distribution have no meaning in
        # it.
        neutral = SamplingParams(beam=self.beam)
        for name in _NOT_WITH_BEAMS:
            value = getattr(self, name)
            if value != getattr(neutral, name):
                shown = f"{value}"[:_MAX_SHOWN_CHARS]
                raise _invalid(f"{name} is {shown}; allowed with beam_search: its default")
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
    "allowed_token_ids",
    "bad_words_token_ids",
    "grammar",
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


def _check_tokens(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    # Checks the extremes first, without a loop: almost always all tokens are valid.
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise _invalid(f"{name} is {bad}; allowed: 0 to {vocab_size - 1}")


def check_sizes(lists: object) -> None:
    """Raises DomainError if a list of `lists` is too long; reads and copies no elements.

    `lists`: SamplingParams, or the message from which they are decoded.
    """
    for name, most in MAX_ENTRIES.items():
        count = len(getattr(lists, name))
        if count > most:
            raise _invalid(f"{name} has {count} entries; allowed: at most {most}")


def check_bad_words(lengths: Sequence[int]) -> None:
    """Raises DomainError if one of these `lengths` is 0, or their sum is too large."""
    if 0 in lengths:
        raise _invalid(f"bad_words_token_ids[{lengths.index(0)}] is empty; allowed: 1 or more")
    if sum(lengths) > MAX_BAD_WORD_TOKENS:
        found = f"bad_words_token_ids has {sum(lengths)} tokens"
        raise _invalid(f"{found}; allowed: at most {MAX_BAD_WORD_TOKENS}")


def _invalid(message: str) -> DomainError:
    return DomainError("SAMPLING_PARAMS_INVALID", message)


# -- Grammar ---------------------------------------------------------------------------------------

GrammarKind = Literal["json_schema", "regex", "lark", "choices"]

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that the text of an output must satisfy; only executors can compile it.

    `kind`: as in the executor contract. `texts`: the grammar's text; for "choices", all texts to
    choose from.
    """

    kind: GrammarKind
    texts: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all texts in UTF-8, in bytes."""
        return sum(len(text.encode()) for text in self.texts)

    def validate(self) -> None:
        """Raises DomainError(SAMPLING_PARAMS_INVALID) that names an empty or too large text."""
        check_num_texts(len(self.texts))
        name = f"grammar.{self.kind}"
        if "" in self.texts:
            raise _invalid(f"{name} has an empty text; allowed: 1 byte or more")
        if (num_bytes := self.num_bytes) > MAX_GRAMMAR_BYTES:
            raise _invalid(f"{name} has {num_bytes} bytes; allowed: at most {MAX_GRAMMAR_BYTES}")


def check_num_texts(num_texts: int) -> None:
    """Raises DomainError unless 1 to MAX_CHOICES texts are given; other kinds have one."""
    if not 1 <= num_texts <= MAX_CHOICES:
        raise _invalid(f"grammar.choices has {num_texts} texts; allowed: 1 to {MAX_CHOICES}")
