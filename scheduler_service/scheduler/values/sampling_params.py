"""Sampling parameters, stop conditions and grammar of a request, with their validation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Literal

from scheduler_service.scheduler.values.config import VectorSizes
from splitserve_contract import (
    MAX_BEAM_WIDTH,
    MAX_SEQUENCES,
    PARAMETER_OF_NAME,
    PARAMETERS,
    DomainError,
    Range,
    SamplingValues,
)

MAX_BAD_WORD_TOKENS = 8192
MAX_FIRST_SUPPRESSED = 1024
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


class PoolingTask(Enum):
    """Kind of vector. DEFAULT: embedding if the model has embeddings, otherwise scores."""

    DEFAULT = "default"
    EMBEDDING = "embedding"
    SCORES = "scores"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Vector instead of tokens; meaning as in `scheduler.proto`."""

    task: PoolingTask = PoolingTask.DEFAULT
    num_dimensions: int = 0
    raw: bool = False
    second_text_start: int = 0

    def for_model(self, vectors: VectorSizes) -> PoolingParams:
        """Returns these parameters with the kind of vector that is meant by DEFAULT."""
        if self.task is not PoolingTask.DEFAULT:
            return self
        task = PoolingTask.EMBEDDING if vectors.embedding_size else PoolingTask.SCORES
        return replace(self, task=task)

    def num_numbers(self, vectors: VectorSizes) -> int:
        """Returns the size of the vector; 0 if the model has none of this kind."""
        if self.for_model(vectors).task is PoolingTask.SCORES:
            return vectors.num_labels
        return vectors.embedding_size and (self.num_dimensions or vectors.embedding_size)

    def check(self, vectors: VectorSizes, num_prompt_tokens: int) -> None:
        """Raises DomainError for a vector that the model does not have."""
        pooling = self.for_model(vectors)
        most = vectors.embedding_size if pooling.task is PoolingTask.EMBEDDING else 0
        if not pooling.num_numbers(vectors):
            has = "embeddings" if vectors.embedding_size else "scores"
            raise DomainError(
                "FEATURE_UNSUPPORTED", f"pooling.task is {self.task.value}; the model has {has}"
            )
        for name, value, limit in (
            ("num_dimensions", self.num_dimensions, most),
            ("second_text_start", self.second_text_start, num_prompt_tokens - 1),
        ):
            if not 0 <= value <= limit:
                raise _invalid(f"pooling.{name} is {value}; allowed: 0 to {limit}")


@dataclass(frozen=True, slots=True)
class TranscriptionRules:
    """Rules for the output of a speech model; meaning and ranges as in `scheduler.proto`."""

    first_suppressed_token_ids: tuple[int, ...] = ()
    first_timestamp_token_id: int | None = None
    first_special_token_id: int = 0
    max_first_timestamp: int | None = None

    def validate(self, vocab_size: int) -> None:
        """Raises DomainError(SAMPLING_PARAMS_INVALID) naming field, value and allowed range."""
        suppressed, first = self.first_suppressed_token_ids, self.first_timestamp_token_id
        if len(suppressed) > MAX_FIRST_SUPPRESSED:
            raise _invalid(
                f"transcription.first_suppressed_token_ids has {len(suppressed)} entries; allowed:"
                f" at most {MAX_FIRST_SUPPRESSED}"
            )
        _check_tokens("transcription.first_suppressed_token_ids element", suppressed, vocab_size)
        if first is None:
            return
        ranges = {
            "first_timestamp_token_id": (first, 1, vocab_size - 1),
            "first_special_token_id": (self.first_special_token_id, 0, first),
            "max_first_timestamp": (self.max_first_timestamp or 0, 0, vocab_size),
        }
        for name, (value, least, most) in ranges.items():
            if not least <= value <= most:
                raise _invalid(f"transcription.{name} is {value}; allowed: {least} to {most}")


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingValues):
    """Sampling parameters; meaning and ranges as in `scheduler.proto`, None for the neutral value.

    A `top_k` of 0 or -1 becomes None, so that "off" has one value everywhere else. `max_tokens`
    becomes 1 with `pooling`: the vector takes the place of the only token.
    """

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
    transcription: TranscriptionRules | None = None
    pooling: PoolingParams | None = None

    def __post_init__(self) -> None:
        """Normalizes `top_k`: values that mean "off" become None. Sets `max_tokens` of vectors."""
        if self.top_k in _TOP_K.off:
            object.__setattr__(self, "top_k", None)
        if self.pooling is not None and self.max_tokens is None:
            object.__setattr__(self, "max_tokens", 1)

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
    def needs_history(self) -> bool:
        """Whether the executor needs all tokens of the sequence."""
        has_phrases = any(len(tokens) > 1 for tokens in self.bad_words_token_ids)
        return (
            self.uses_penalties
            or self.num_prompt_logprobs is not None
            or has_phrases
            or self.grammar is not None
            or self.has_timestamps
        )

    @property
    def has_timestamps(self) -> bool:
        """Whether a speech model samples timestamps."""
        rules = self.transcription
        return rules is not None and rules.first_timestamp_token_id is not None

    @property
    def uses_constraints(self) -> bool:
        """Whether the parameters forbid tokens, always or at some positions."""
        return (
            bool(self.allowed_token_ids or self.bad_words_token_ids)
            or -math.inf in self.logit_bias.values()
        )

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
        if self.transcription is not None:
            num_bytes += ID_BYTES * (len(self.transcription.first_suppressed_token_ids) + 3)
        return num_bytes

    def stop_tokens(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Returns the tokens that end a sequence of a model with `eos_token_ids`."""
        is_endless = self.ignore_eos or self.pooling is not None
        return self.stop_token_ids | (frozenset() if is_endless else eos_token_ids)

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
            raise _invalid(
                "grammar is set; this model has no end-of-sequence token to end the output"
            )

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
        for name, default in _INDEPENDENT:
            # Most values are the default, which is always in range.
            if (value := getattr(self, name)) != default:
                PARAMETER_OF_NAME[name].check(value)
        most = math.inf if self.max_tokens is None else self.max_tokens
        _MIN_TOKENS.check(self.min_tokens, Range(0, most))
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
        if self.transcription is not None:
            self.transcription.validate(vocab_size)

    def check_pooling(self, vectors: VectorSizes | None, num_prompt_tokens: int) -> None:
        """Raises DomainError unless the request asks for what the model returns.

        `vectors`: None for a model that returns tokens.
        """
        if self.pooling is None:
            if vectors is not None:
                raise DomainError(
                    "FEATURE_UNSUPPORTED", "pooling is not set; the model returns vectors only"
                )
            return
        if vectors is None:
            raise DomainError(
                "FEATURE_UNSUPPORTED", "pooling is set; the model returns tokens, no vectors"
            )
        self.pooling.check(vectors, num_prompt_tokens)
        neutral = SamplingParams(pooling=self.pooling)
        for name in (item.name for item in fields(self)):
            if (value := getattr(self, name)) != getattr(neutral, name):
                shown = f"{value}"[:_MAX_SHOWN_CHARS]
                raise _invalid(f"{name} is {shown}; allowed with pooling: its default")

    def check_sequences(self) -> None:
        """Raises DomainError for n, best_of or beam_search out of range or in conflict."""
        _N.check(self.n)
        if self.best_of is not None:
            _BEST_OF.check(self.best_of, Range(self.n, MAX_SEQUENCES))
        if self.beam is None:
            return
        _BEAM_WIDTH.check(self.beam.width, Range(max(self.n, 1), MAX_BEAM_WIDTH))
        _LENGTH_PENALTY.check(self.beam.length_penalty)
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


_TOP_K = PARAMETER_OF_NAME["top_k"]
_MIN_TOKENS = PARAMETER_OF_NAME["min_tokens"]
_N = PARAMETER_OF_NAME["n"]
_BEST_OF = PARAMETER_OF_NAME["best_of"]
_BEAM_WIDTH = PARAMETER_OF_NAME["beam_search.width"]
_LENGTH_PENALTY = PARAMETER_OF_NAME["beam_search.length_penalty"]
# Parameters whose range no other parameter narrows, and their defaults.
_INDEPENDENT = tuple(
    (item.name, PARAMETER_OF_NAME[item.name].default)
    for item in fields(SamplingParams)
    if item.name in PARAMETER_OF_NAME and item.name not in ("min_tokens", "n", "best_of")
)
_NOT_WITH_BEAMS = (
    *(parameter.name for parameter in PARAMETERS if not parameter.allowed_with_beams),
    "logit_bias",
    "allowed_token_ids",
    "bad_words_token_ids",
    "grammar",
    "transcription",
)


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
