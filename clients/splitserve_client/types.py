"""The values of the client's interface."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

_MAX_COMPLETIONS = 128
# Output tokens of an earlier run; of several sequences a mapping from the index of each.
ResumeTokenIds = Sequence[int] | Mapping[int, Sequence[int]]


class EarlyStopping(enum.Enum):
    """When a beam search ends that has as many finished hypotheses as it is wide."""

    HEURISTIC = "heuristic"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search over `width` hypotheses; None leaves the server its default."""

    width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span that a request belongs to: the headers of W3C Trace Context.

    Servers that write traces go on with it; nobody is refused for it.
    """

    traceparent: str = ""
    tracestate: str = ""


NO_TRACE = TraceContext()


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The output is a JSON value that is valid for `schema`, which is JSON as well.

    `{"type": "object"}` is any JSON object.
    """

    schema: str


@dataclass(frozen=True, slots=True)
class Regex:
    """The output as a whole is a match of `pattern`, in the syntax of the Rust crate regex."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Lark:
    """The output is what `grammar` accepts, in the dialect of Lark that llguidance reads."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The output is one of `texts`."""

    texts: tuple[str, ...]


Grammar = JsonSchema | Regex | Lark | Choices


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; None leaves the server its default.

    Meanings and ranges: `SamplingParams` in scheduler.proto. The server checks them. Its defaults
    are neutral, whatever the model; what the model's authors recommend is in
    `Model.default_sampling_params`. `allowed_token_ids`: None for all.
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
        """These, with the values of `defaults` where they are None.

        A beam search stays as it is: nothing that shapes the distribution goes with it.
        """
        if self.beam_search is not None:
            return self
        missing = [item.name for item in fields(self) if getattr(self, item.name) is None]
        return replace(self, **{name: getattr(defaults, name) for name in missing})

    @property
    def num_completions(self) -> int:
        """How many completions come back; a server refuses an `n` that does not allow so many."""
        return min(max(self.n or 1, 1), _MAX_COMPLETIONS)

    @property
    def has_several_sequences(self) -> bool:
        """Whether more than one plain sequence is computed."""
        return max(self.num_completions, self.best_of or 1) > 1 or self.beam_search is not None

    @property
    def is_streamed(self) -> bool:
        """Whether tokens come as they are computed: not so where the best are chosen at the end."""
        return (self.best_of or 1) <= self.num_completions and self.beam_search is None


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """What a request asks of the scheduler, rather than of the model.

    Meanings and ranges: `GenerateRequest` in scheduler.proto. `priority`: smaller is more urgent.
    `deadline_s`: time from the first submission by which the last token is wanted; a request that
    is submitted again sends what is left of it.
    """

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    adapter: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    num_public_prefix_tokens: int = 0


class FinishReason(enum.Enum):
    """Why a request, or one of its sequences, ended; one that failed raises RequestFailed."""

    STOP = "stop"
    LENGTH = "length"
    MODEL_LENGTH = "model_length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative to a token."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The score of a token; `rank` 1 is the most probable; `top` has the best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class SequenceFinish:
    """The end of one of several sequences.

    `cumulative_logprob`: with `best_of` and beam search, the sum of its tokens' logprobs. `score`:
    with beam search, what decided.
    """

    index: int
    reason: FinishReason
    stop_token_id: int | None
    num_output_tokens: int
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output tokens, in order; `logprobs` is parallel to them or empty.

    `index`: which of several sequences. `finish`: how that sequence ended, if this is its end;
    there may be no tokens with it. A request with one plain sequence has it None throughout.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    finish: SequenceFinish | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    `num_output_tokens`: of all sequences returned, resumed ones included.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request; of several sequences, `reason` and stop token are the first one's."""

    reason: FinishReason
    stop_token_id: int | None
    usage: Usage


class Readiness(enum.Enum):
    """Whether a scheduler serves, and if not, why. UNKNOWN: it does not say, or a later reason."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    NO_EXECUTOR = "NO_EXECUTOR"
    NO_PROGRESS = "NO_PROGRESS"
    DRAINING = "DRAINING"
    EXECUTORS_FAILING = "EXECUTORS_FAILING"


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is served. Token ids are 0 .. vocab_size-1.

    `default_sampling_params`: what its authors recommend, as far as they do. Requests do not get
    them by themselves: `replace(model.default_sampling_params, max_tokens=100)` and
    `params.with_defaults(model.default_sampling_params)` do. `readiness`: of the scheduler, when it
    was asked.
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
    """One executor as the scheduler sees it. `is_draining`: it is on its way out.

    `compute`: which code computes, empty if it does not say; `slow_compute_reason`: why that is not
    the fastest for its model, empty if it is.
    `is_failing`: its steps or rows fail, whatever it is given; `is_withdrawn`: and so it gets no
    requests.
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
    """An executor that was sent away is gone; `is_lost`: before all was done.

    `num_moved_requests`: those that go on elsewhere, or wait for that.
    """

    num_moved_requests: int
    is_lost: bool


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose a credential is.

    `knows_callers`: whether the server asks for credentials at all; the rest is what it says of
    this one. `may_use_model`: whether its tenant may use what is served now.
    """

    knows_callers: bool
    caller: str
    tenant: str
    scopes: frozenset[str]
    may_use_model: bool


@dataclass(frozen=True, slots=True)
class ExecutorList:
    """All executors, in order of registration, and the requests that none of them can be given.

    `num_unfitting_requests`: those of them that none that takes requests could ever run. `now_s`:
    the clock of the scheduler, since 1970; earlier ones say neither that nor their version.
    """

    executors: tuple[Executor, ...]
    num_unassigned_requests: int
    num_unfitting_requests: int = 0
    now_s: float | None = None
    software_version: str = ""
    contract_version: tuple[int, int] | None = None
