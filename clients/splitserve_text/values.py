"""Values of a generation: its parameters, its tokens and its end."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from splitserve_contract import MAX_SEQUENCES, GivenSamplingValues

# Output tokens of an earlier run; for several sequences a mapping by index.
ResumeTokenIds = Sequence[int] | Mapping[int, Sequence[int]]


class EarlyStopping(enum.Enum):
    """Rule that ends a beam search once it has as many finished hypotheses as its width."""

    HEURISTIC = "heuristic"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search over `width` hypotheses; None stands for the server's default."""

    width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Parent span of a request: the headers of W3C Trace Context.

    Servers that write traces continue it. An invalid value is no reason to refuse a request.
    """

    traceparent: str = ""
    tracestate: str = ""


NO_TRACE = TraceContext()


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """Output is a JSON value that is valid for `schema`, a JSON text.

    `{"type": "object"}` allows any JSON object.
    """

    schema: str


@dataclass(frozen=True, slots=True)
class Regex:
    """Output as a whole matches `pattern`, in the syntax of the Rust crate regex."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Lark:
    """Output is accepted by `grammar`, in the Lark dialect of llguidance."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Choices:
    """Output is one of `texts`."""

    texts: tuple[str, ...]


Grammar = JsonSchema | Regex | Lark | Choices


class PoolingTask(enum.Enum):
    """Kind of vector: the embedding of a text, or a classifier's score of each label."""

    EMBEDDING = "embedding"
    SCORES = "scores"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Vector that a request returns instead of tokens.

    Meanings and ranges: `PoolingParams` in scheduler.proto. `task`: None for embeddings, or scores
    of a model without embeddings. `num_dimensions`: 0 for all.
    """

    task: PoolingTask | None = None
    num_dimensions: int = 0
    raw: bool = False
    second_text_start: int = 0


@dataclass(frozen=True, slots=True)
class TranscriptionRules:
    """Rules for the output of a speech model; see `TranscriptionRules` in scheduler.proto."""

    first_suppressed_token_ids: tuple[int, ...] = ()
    first_timestamp_token_id: int | None = None
    first_special_token_id: int = 0
    max_first_timestamp: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams(GivenSamplingValues):
    """Sampling and stop parameters; None stands for the server's default.

    Meanings and ranges: `SamplingParams` in scheduler.proto. The server checks them. Its defaults
    are neutral for every model; `Model.default_sampling_params` holds the recommendation of the
    model's authors. `allowed_token_ids`: None allows all. `pooling`: for models of vectors,
    `transcription`: for models of speech.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_search: BeamSearch | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    pooling: PoolingParams | None = None
    transcription: TranscriptionRules | None = None

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Returns these parameters with `defaults` in place of None.

        A beam search is returned unchanged: parameters that shape the distribution do not apply to
        it.
        """
        if self.beam_search is not None:
            return self
        missing = [item.name for item in fields(self) if getattr(self, item.name) is None]
        return replace(self, **{name: getattr(defaults, name) for name in missing})

    @property
    def num_completions(self) -> int:
        """Number of completions returned; a server refuses an `n` beyond its limit."""
        return min(max(self.n or 1, 1), MAX_SEQUENCES)

    @property
    def has_several_sequences(self) -> bool:
        """Whether more than one plain sequence is computed."""
        return max(self.num_completions, self.best_of or 1) > 1 or self.beam_search is not None

    @property
    def is_streamed(self) -> bool:
        """Whether tokens are streamed; False if the best sequences are chosen at the end."""
        return (self.best_of or 1) <= self.num_completions and self.beam_search is None


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """Name under which the scheduler keeps output, for whoever resumes a broken stream.

    Meanings and ranges: `KeptOutput` in scheduler.proto. `duration_s`: time after the end of the
    request; None to keep nothing. `resumes`: the request goes on after the output kept under `key`.
    """

    key: str
    duration_s: float | None = None
    resumes: bool = False
    num_read_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """Parameters for the scheduler rather than for the model.

    Meanings and ranges: `GenerateRequest` in scheduler.proto. `priority`: smaller is more urgent.
    `deadline_s`: seconds from the first submission until the last token is wanted; a resubmission
    sends the remaining time. `target_itl_ms`: wanted time between tokens while the executor also
    computes prompts, in ms; None for no target.
    """

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    adapter: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    num_public_prefix_tokens: int = 0
    kept_output: KeptOutput | None = None
    target_itl_ms: int | None = None


class FinishReason(enum.Enum):
    """Reason why a request or a sequence ended; a failed request raises RequestFailed instead."""

    STOP = "stop"
    LENGTH = "length"
    MODEL_LENGTH = "model_length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """Alternative to a sampled token."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logprob of a token; `rank` 1 is the most probable token; `top`: alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class SequenceFinish:
    """End of one of several sequences.

    `cumulative_logprob`: with `best_of` and beam search, the sum of the logprobs of its tokens.
    `score`: with beam search, the value that ranked the hypothesis.
    """

    index: int
    reason: FinishReason
    stop_token_id: int | None
    num_output_tokens: int
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output tokens, in order; `logprobs` is parallel to `token_ids` or empty.

    `index`: number of the sequence. `finish`: set if the sequence ends here, possibly without
    tokens; always None for a request with one plain sequence.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    finish: SequenceFinish | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    `num_output_tokens`: of all returned sequences, including resumed tokens.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a request; with several sequences, `reason` and stop token are those of the first.

    `vector`: float32 numbers of a request with `SamplingParams.pooling`; None for others.
    """

    reason: FinishReason
    stop_token_id: int | None
    usage: Usage
    vector: array[float] | None = None
