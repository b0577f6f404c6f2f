"""Values of the client's interface."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

_MAX_COMPLETIONS = 128
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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop parameters; None stands for the server's default.

    Meanings and ranges: `SamplingParams` in scheduler.proto. The server checks them. Its defaults
    are neutral for every model; `Model.default_sampling_params` holds the recommendation of the
    model's authors. `allowed_token_ids`: None allows all.
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
    n: int | None = None
    best_of: int | None = None
    beam_search: BeamSearch | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

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
        return min(max(self.n or 1, 1), _MAX_COMPLETIONS)

    @property
    def has_several_sequences(self) -> bool:
        """Whether more than one plain sequence is computed."""
        return max(self.num_completions, self.best_of or 1) > 1 or self.beam_search is not None

    @property
    def is_streamed(self) -> bool:
        """Whether tokens are streamed; False if the best sequences are chosen at the end."""
        return (self.best_of or 1) <= self.num_completions and self.beam_search is None


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """Parameters for the scheduler rather than for the model.

    Meanings and ranges: `GenerateRequest` in scheduler.proto. `priority`: smaller is more urgent.
    `deadline_s`: seconds from the first submission until the last token is wanted; a resubmission
    sends the remaining time.
    """

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    adapter: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    num_public_prefix_tokens: int = 0


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
    """End of a request; with several sequences, `reason` and stop token are those of the first."""

    reason: FinishReason
    stop_token_id: int | None
    usage: Usage


class Readiness(enum.Enum):
    """Readiness states of a scheduler, with reasons for not serving.

    UNKNOWN: not reported, or a newer reason.
    """

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    NO_EXECUTOR = "NO_EXECUTOR"
    NO_PROGRESS = "NO_PROGRESS"
    DRAINING = "DRAINING"
    EXECUTORS_FAILING = "EXECUTORS_FAILING"


@dataclass(frozen=True, slots=True)
class Model:
    """Served model. Token ids are 0 .. vocab_size-1.

    `default_sampling_params`: recommendation of the model's authors, if any. Requests do not use it
    by default: pass `replace(model.default_sampling_params, max_tokens=100)` or
    `params.with_defaults(model.default_sampling_params)`. `readiness`: of the scheduler, at the
    time of the call.
    """

    name: str
    digest: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    readiness: Readiness = field(default=Readiness.UNKNOWN, compare=False)


@dataclass(frozen=True, slots=True)
class Executor:
    """Executor as the scheduler sees it. `is_draining`: the executor is leaving.

    `compute`: implementation that computes, empty if not reported; `slow_compute_reason`: why it is
    not the fastest for the model, empty if it is. `is_failing`: steps or rows of the executor fail,
    whatever it is given; `is_withdrawn`: it gets no requests for that reason.
    """

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
    num_swapped_requests: int
    num_free_host_blocks: int
    num_cached_device_blocks: int
    is_draining: bool
    model_digest: str = ""
    software_version: str = ""
    contract_version: tuple[int, int] = (0, 0)
    block_bytes: int = 0
    compute: str = ""
    slow_compute_reason: str = ""
    is_failing: bool = False
    is_withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class DrainedExecutor:
    """Result of draining an executor; `is_lost`: the executor was lost before it had finished.

    `num_moved_requests`: requests that continue on, or wait for, other executors.
    """

    num_moved_requests: int
    is_lost: bool


@dataclass(frozen=True, slots=True)
class Identity:
    """Owner of a credential.

    `knows_callers`: whether the server asks for credentials at all; the other fields describe this
    credential. `may_use_model`: whether its tenant may use the served model.
    """

    knows_callers: bool
    caller: str
    tenant: str
    scopes: frozenset[str]
    may_use_model: bool


@dataclass(frozen=True, slots=True)
class ExecutorList:
    """Executors in order of registration, and requests that no executor can be given.

    `num_unfitting_requests`: requests that no available executor could ever run. `now_s`: clock of
    the scheduler, seconds since 1970; earlier versions report neither clock nor version.
    """

    executors: tuple[Executor, ...]
    num_unassigned_requests: int
    num_unfitting_requests: int = 0
    now_s: float | None = None
    software_version: str = ""
    contract_version: tuple[int, int] | None = None
