"""Requests and sequences, and the states they go through."""

from __future__ import annotations

import struct
from collections.abc import Hashable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from scheduler_service.scheduler.values.beam_search import BeamSearch
from scheduler_service.scheduler.values.config import HashKind, SchedulerConfig
from scheduler_service.scheduler.values.sampling_params import ID_BYTES, SamplingParams

# -- Equal parameters of sampling are one set, which travels once in a batch and counts once -------

_STAY_HERE = frozenset({"max_tokens", "ignore_eos", "n", "best_of"})
_COMPARED_OTHERWISE = frozenset({"logit_bias", "beam", "min_tokens", "stop_token_ids"})
_compared = attrgetter(
    *sorted({f.name for f in fields(SamplingParams)} - _STAY_HERE - _COMPARED_OTHERWISE)
)


class ParamsSet:
    """What executors are told of sampling, for all requests of a core that ask for the same.

    `stop_token_ids`: all that ends a sequence, if they are told that. `num_bytes` of both, and
    `needs_history`, may take long to find. `num_requests`: unfinished
    ones that have it; `num_running`: those of them that run. `encoded`: what a codec made of it;
    None before. A set that no engine has yet is that of a single waiting request.
    """

    __slots__ = (
        "_key",
        "encoded",
        "needs_history",
        "num_bytes",
        "num_requests",
        "num_running",
        "params",
        "stop_token_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: frozenset[int] = frozenset(),
        num_requests: int = 0,
        num_running: int = 0,
    ) -> None:
        self.params = params
        self.stop_token_ids = stop_token_ids
        self.num_bytes = params.num_bytes + ID_BYTES * len(stop_token_ids)
        self.needs_history = params.needs_history
        self.num_requests = num_requests
        self.num_running = num_running
        self.encoded: bytes | None = None
        self._key: Hashable = None

    @property
    def key(self) -> Hashable:
        """Equal for parameters that executors are told alike."""
        if self._key is None:
            self._key = _key(self.params, self.stop_token_ids)
        return self._key

    def __reduce__(self) -> tuple[type[ParamsSet], tuple[SamplingParams, frozenset[int], int, int]]:
        values = (self.params, self.stop_token_ids, self.num_requests, self.num_running)
        return ParamsSet, values


# Of a request that no core has.
OF_NO_CORE = ParamsSet(SamplingParams())


class ParamsSets:
    """The sets of all unfinished requests. `num_running_bytes`: of those in which some run."""

    def __init__(self) -> None:
        self._sets: dict[Hashable, ParamsSet] = {}
        self.num_running_bytes = 0

    def __getstate__(self) -> list[ParamsSet]:
        return list(self._sets.values())

    def __setstate__(self, sets: list[ParamsSet]) -> None:
        self._sets = {each.key: each for each in sets}
        self.num_running_bytes = sum(each.num_bytes for each in sets if each.num_running)

    def find(self, params_set: ParamsSet) -> ParamsSet | None:
        """Returns the known set that equals `params_set`; None if there is none."""
        return self._sets.get(params_set.key)

    def take(self, params_set: ParamsSet) -> ParamsSet:
        """Counts one more request of a set; returns the known equal set, or this one."""
        found = self._sets.setdefault(params_set.key, params_set)
        found.num_requests += 1
        return found

    def give_back(self, params_set: ParamsSet) -> None:
        """A request of a set has ended."""
        params_set.num_requests -= 1
        if params_set.num_requests == 0:
            del self._sets[params_set.key]

    def start(self, params_set: ParamsSet) -> None:
        """A request of a set runs from now on."""
        if params_set.num_running == 0:
            self.num_running_bytes += params_set.num_bytes
        params_set.num_running += 1

    def stop(self, params_set: ParamsSet) -> None:
        """A request of a set does not run any more."""
        params_set.num_running -= 1
        if params_set.num_running == 0:
            self.num_running_bytes -= params_set.num_bytes


def _key(params: SamplingParams, stop_token_ids: frozenset[int]) -> Hashable:
    """The same for parameters that are told the same."""
    told_stops = params.stop_token_ids if params.min_tokens else None
    bias = frozenset(params.logit_bias.items()) if params.logit_bias else None
    is_beam = params.beam is not None
    return _compared(params), params.min_tokens, told_stops, bias, is_beam, stop_token_ids


# -- Requests and sequences ------------------------------------------------------------------------

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NO_ROW = -1
_SEED_STRIDE = 0x9E3779B97F4A7C15
_WORD = 2**64


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's logprob and rank, and the best alternatives as (token, logprob), best first."""

    position: int
    token_id: int
    logprob: float
    rank: int
    top: Tokens[tuple[int, float]]


class SequenceStatus(Enum):
    """Where a sequence is: WAITING -> RUNNING <-> SWAPPED, back by recompute, any -> FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class RequestStatus(Enum):
    """Where a request is.

    ABSENT: neither in a queue nor with an engine. WAITING: in the waiting queue. RUNNING: some
    sequence of it has a row of an engine. SWAPPED, PREEMPTED: with an engine and without a row; its
    KV is in the host pool, or has to be computed again.
    """

    ABSENT = "absent"
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"


class FinishReason(Enum):
    """Why a request or a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    MODEL_LENGTH = "model_length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """What a request asks of the scheduler; ranges and meaning as in `scheduler.proto`.

    `priority`: smaller is more urgent. `deadline_ns`: when the last token is wanted, by the core's
    clock. `cache_salt` separates prefix caches, as `adapter` and the model do; tenants share blocks
    of the first `num_public_prefix_tokens` of a prompt.
    """

    priority: int = 0
    tenant: str = ""
    deadline_ns: int | None = None
    adapter: str = ""
    cache_salt: str = ""
    uses_prefix_cache: bool = True
    num_public_prefix_tokens: int = 0


DEFAULT_SCHEDULING = SchedulingParams()


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the best completions of a request that is not streamed.

    `score` is that of a beam search. `scored`: the tokens' scores, if the request asked for them.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    stop_token_id: int | None
    cumulative_logprob: float
    score: float | None = None
    scored: Tokens[ScoredToken] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of tokens of a request.

    `token_ids`: [T] int32, every token known, prompt first, except while RUNNING, when its row has
    them. `num_promised` tokens more are being sampled by steps in flight, and until step
    `settles_at_step` is answered some step in flight may concern it. `block_hashes`: the chain of
    its full blocks, as far as it was needed; `chains`: of a sequence that no core has, the same by
    what names blocks where it was looked for. `num_computed` and `host_table` are set while
    SWAPPED: tokens whose KV is in the host pool, and where. `candidates`: of a beam, the most
    probable next tokens as (token, logprob), once they are known.
    """

    request: Request
    index: int
    token_ids: Int32Array
    num_prompt_tokens: int
    seed: int
    status: SequenceStatus = SequenceStatus.WAITING
    row_id: int = NO_ROW
    num_promised: int = 0
    settles_at_step: int = 0
    num_computed: int = 0
    host_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    chains: dict[HashKind, list[bytes]] = field(default_factory=dict)
    candidates: Tokens[tuple[int, float]] | None = None
    cumulative_logprob: float = 0.0
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known, resumed ones included; not while RUNNING."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it will never run again."""
        return self.status is SequenceStatus.FINISHED


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked for. `arrival` orders requests: smaller is older.

    `client_key` is the owner's own name for it, returned with its tokens. `stop_len` is the number
    of tokens at which its sequences end and `stop_token_ids` what else ends them; both are set when
    it is prepared for an engine of the configuration `prepared_for`, as is `params_set`: what its
    rows are sampled with. `num_fruitless_losses`
    counts the steps and cores it lost since it had `num_tokens_at_loss` tokens. `trial_size`:
    of a suspect, how many may share a step with it; else 0 (see `suspects.py`). `num_trials_left`:
    of one from quarantine, trials that must yet bring it a token. `was_in_flight`: when the latest
    executor that it ran on was lost, some step with it had no result. `num_bypasses`
    counts the requests that were admitted while it was the first in line but could not run.
    `is_protected`: it was admitted out of turn because it had waited longest, and is preempted
    last. `rank` orders it among those of its engine, smaller first, and of a step with too few
    tokens, smaller `step_class`es get them first. `queued_at_ns` and
    `num_queued_tokens`: since when it waits, and its size then. `cross_blocks`: device blocks of
    the encoder's keys and values, `host_cross_blocks` the same while it is swapped; `is_encoded`: a
    step was planned that writes them. `search`, `num_forks` and `num_candidates` (logprobs asked
    for in each row) belong to a beam search.
    `completions`: the result, where tokens are not streamed. `submitted_ns`: when its owner took
    it, by the core's clock, which decides nothing; None if that is not known.
    """

    request_id: str
    params: SamplingParams
    arrival: int
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    client_key: int = 0
    encoder_token_ids: Int32Array | None = None
    sequences: list[Sequence] = field(default_factory=list)
    stop_len: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    params_set: ParamsSet = OF_NO_CORE
    prepared_for: SchedulerConfig | None = None
    finish_reason: FinishReason | None = None
    error: tuple[str, str] | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_fruitless_losses: int = 0
    num_tokens_at_loss: int = -1
    trial_size: int = 0
    num_trials_left: int = 0
    was_in_flight: bool = False
    num_prompt_logprobs_sent: int = 0
    num_bypasses: int = 0
    is_protected: bool = False
    rank: tuple[int, ...] = ()
    step_class: tuple[int, ...] = ()
    queued_at_ns: int = 0
    num_queued_tokens: int = 0
    cross_blocks: list[int] = field(default_factory=list)
    host_cross_blocks: list[int] = field(default_factory=list)
    is_encoded: bool = False
    status: RequestStatus = RequestStatus.ABSENT
    search: BeamSearch | None = None
    num_candidates: int = 0
    num_forks: int = 0
    completions: list[Completion] = field(default_factory=list)
    submitted_ns: int | None = None

    @classmethod
    def create(
        cls,
        request_id: str,
        prompt_token_ids: Tokens[int] | Int32Array,
        params: SamplingParams,
        *,
        arrival: int,
        seed: int,
        resume_token_ids: Tokens[Tokens[int] | Int32Array] = (),
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        encoder_token_ids: Tokens[int] | Int32Array | None = None,
    ) -> Request:
        """A waiting request with all its sequences of the same prompt; one for a beam search.

        Sequence i has the output tokens `resume_token_ids[i]` already, if there are that many.
        Raises ValueError if a token does not fit 32 bits.
        """
        request = cls(request_id, params, arrival, scheduling)
        if encoder_token_ids is not None and len(encoder_token_ids):
            request.encoder_token_ids = token_array(encoder_token_ids)
        prompt = token_array(prompt_token_ids)
        # Beams after the first come from it.
        for index in range(1 if params.beam is not None else params.num_sequences):
            tokens = prompt
            if index < len(resume_token_ids) and len(resume_token_ids[index]):
                tokens = np.concatenate([prompt, token_array(resume_token_ids[index])])
                # Whoever has output tokens has the prompt logprobs, which come before them.
                request.num_prompt_logprobs_sent = len(prompt) - 1
            seed_of_sequence = sequence_seed(seed, index)
            request.sequences.append(
                Sequence(request, index, tokens, len(prompt), seed_of_sequence)
            )
        return request

    @property
    def sequence(self) -> Sequence:
        """The first sequence; the only one unless `n`, `best_of` or beams ask for more."""
        return self.sequences[0]

    @property
    def num_row_logprobs(self) -> int | None:
        """How many alternatives its rows ask for with each token; None if they ask for no logprobs.

        Where the best are chosen, they are asked for though the client did not.
        """
        params = self.params
        if params.beam is not None:
            return self.num_candidates
        return 0 if params.num_logprobs is None and not params.is_streamed else params.num_logprobs

    @property
    def row_params(self) -> SamplingParams:
        """What the executor is to sample its rows with.

        With `min_tokens`, `stop_token_ids` are all that end a sequence, those of the model too.
        """
        params, num_logprobs = self.params, self.num_row_logprobs
        if params.beam is not None:
            # The search itself refuses what would end a sequence too early.
            return SamplingParams(temperature=0.0, num_logprobs=num_logprobs, beam=params.beam)
        if num_logprobs == params.num_logprobs and not (
            params.min_tokens or params.bad_words_token_ids
        ):
            return params  # as for most; a copy costs more than all else here
        # No bad word takes away a single token that ends a sequence.
        bad_words = (
            tokens
            for tokens in params.bad_words_token_ids
            if len(tokens) > 1 or tokens[0] not in self.stop_token_ids
        )
        return replace(
            params,
            num_logprobs=num_logprobs,
            stop_token_ids=self.stop_token_ids,
            bad_words_token_ids=tuple(bad_words),
        )

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that go on."""
        return [s for s in self.sequences if s.status is not SequenceStatus.FINISHED]

    @property
    def num_rows_wanted(self) -> int:
        """Rows that it has or is going to need where it runs."""
        beam = self.params.beam
        return beam.width if beam is not None else len(self.unfinished)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    def abort_unscheduled(self) -> None:
        """Ends a request that no core has."""
        self._end_unscheduled(FinishReason.ABORTED)

    def fail_unscheduled(self, reason: str, message: str) -> None:
        """Ends a request that no core has, with an error."""
        self.error = (reason, message)
        self._end_unscheduled(FinishReason.ERROR)

    def _end_unscheduled(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        for sequence in self.sequences:
            sequence.status = SequenceStatus.FINISHED


def token_array(token_ids: Tokens[int] | Int32Array) -> Int32Array:
    """`token_ids` as int32. Raises ValueError if one is no integer or does not fit."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.int32, copy=False)
    try:  # in half the time of numpy.array
        return np.frombuffer(struct.pack(f"={len(token_ids)}i", *token_ids), np.int32)
    except struct.error as error:
        raise ValueError(f"token_ids must be 32-bit integers: {error}") from error


def sequence_seed(seed: int, index: int) -> int:
    """The seed of sequence `index`, as a signed 64-bit number: index 0 has the request's own."""
    word = (seed + index * _SEED_STRIDE) % _WORD
    return word - _WORD if word >= _WORD // 2 else word
