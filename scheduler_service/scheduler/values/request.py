"""Requests and sequences with their states, and the sampling parameters that requests share."""

from __future__ import annotations

import struct
from collections.abc import Hashable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from hashlib import blake2b
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from scheduler_service.scheduler.values.beam_search import BeamSearch
from scheduler_service.scheduler.values.config import HashKind, SchedulerConfig
from scheduler_service.scheduler.values.sampling_params import ID_BYTES, SamplingParams

FEATURE_BYTES = 4

# -- Shared sampling parameters --------------------------------------------------------------------

_STAY_HERE = frozenset({"max_tokens", "ignore_eos", "n", "best_of"})
_COMPARED_OTHERWISE = frozenset({"logit_bias", "beam", "min_tokens", "stop_token_ids"})
_compared = attrgetter(
    *sorted({f.name for f in fields(SamplingParams)} - _STAY_HERE - _COMPARED_OTHERWISE)
)


class ParamsSet:
    """Sampling parameters of rows, shared by all requests of an engine with equal ones.

    A set travels once in a batch and counts once. `stop_token_ids`: all tokens that end a sequence,
    if the executor needs them. `num_bytes` (of both) and `needs_history` are computed once, since
    that may take long. `num_requests`: unfinished requests with this set; `num_running`: running
    ones among them. `encoded`: encoding cached by a codec; None before. A set that no engine has
    yet belongs to a single waiting request.
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
        """Hashable key, equal for parameters that executors are told alike."""
        if self._key is None:
            self._key = _key(self.params, self.stop_token_ids)
        return self._key

    def __reduce__(self) -> tuple[type[ParamsSet], tuple[SamplingParams, frozenset[int], int, int]]:
        values = (self.params, self.stop_token_ids, self.num_requests, self.num_running)
        return ParamsSet, values


# Placeholder of a request that no engine has.
OF_NO_CORE = ParamsSet(SamplingParams())


class ParamsSets:
    """Parameter sets of all unfinished requests of an engine.

    `num_running_bytes`: bytes of the sets with running requests.
    """

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
        """Counts a request of a set as ended; drops a set without requests."""
        params_set.num_requests -= 1
        if params_set.num_requests == 0:
            del self._sets[params_set.key]

    def start(self, params_set: ParamsSet) -> None:
        """Counts a request of a set as running."""
        if params_set.num_running == 0:
            self.num_running_bytes += params_set.num_bytes
        params_set.num_running += 1

    def stop(self, params_set: ParamsSet) -> None:
        """Counts a request of a set as no longer running."""
        params_set.num_running -= 1
        if params_set.num_running == 0:
            self.num_running_bytes -= params_set.num_bytes


def _key(params: SamplingParams, stop_token_ids: frozenset[int]) -> Hashable:
    """Returns a key that is equal for parameters that executors are told alike."""
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
    """Token with logprob and rank, and its best alternatives as (token, logprob), best first."""

    position: int
    token_id: int
    logprob: float
    rank: int
    top: Tokens[tuple[int, float]]


class SequenceStatus(Enum):
    """State of a sequence: WAITING -> RUNNING <-> SWAPPED, back by recompute, any -> FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class RequestStatus(Enum):
    """State of a request.

    ABSENT: neither in the waiting queue nor with an engine. WAITING: in the waiting queue. RUNNING:
    some sequence of it has a row of an engine. SWAPPED, PREEMPTED: with an engine and without a
    row; its KV is in the host pool, or must be recomputed.
    """

    ABSENT = "absent"
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"


class FinishReason(Enum):
    """Reason for the end of a request or a sequence."""

    STOP = "stop"
    LENGTH = "length"
    MODEL_LENGTH = "model_length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """Scheduling parameters of a request; ranges and meaning as in `scheduler.proto`.

    `priority`: smaller is more urgent. `deadline_ns`: wanted time of the last token, by the core's
    clock. `adapter`: of a registered adapter, name and digest with an @ between them; else a name
    that only executors know. `cache_salt` separates prefix caches, as `adapter` and the model do;
    tenants share blocks of the first `num_public_prefix_tokens` of a prompt. `target_itl_ms`:
    wanted time between tokens while prompts are computed; None for no target.
    """

    priority: int = 0
    tenant: str = ""
    deadline_ns: int | None = None
    adapter: str = ""
    cache_salt: str = ""
    uses_prefix_cache: bool = True
    num_public_prefix_tokens: int = 0
    target_itl_ms: int | None = None

    @property
    def has_registered_adapter(self) -> bool:
        """Whether executors have to load the adapter."""
        return "@" in self.adapter


DEFAULT_SCHEDULING = SchedulingParams()


@dataclass(frozen=True, slots=True)
class Completion:
    """Selected completion of a best_of or beam request, which is not streamed.

    `score`: score of a beam search. `scored`: scores of the tokens, if the request asked for them.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    stop_token_id: int | None
    cumulative_logprob: float
    score: float | None = None
    scored: Tokens[ScoredToken] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """Token sequence of a request.

    `token_ids`: [T] int32, every known token, prompt first; while RUNNING, the row has the tokens
    instead. `num_promised`: further tokens that steps in flight are sampling. `settles_at_step`:
    until this step is answered, steps in flight may concern the sequence. `block_hashes`: hash
    chain of its full blocks, as far as it was needed. `chains`: the same for a sequence that no
    engine has, by hash kind. `num_computed` and `host_table` are set while SWAPPED: number of
    tokens whose KV is in the host pool, and its blocks. `candidates`: most probable next tokens of
    a beam as (token, logprob); None until they are known.
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
        """Number of known output tokens, resumed ones included; not valid while RUNNING.

        0 for a vector, which takes the place of a token.
        """
        if self.request.params.pooling is not None:
            return 0
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended for good."""
        return self.status is SequenceStatus.FINISHED


@dataclass(frozen=True, slots=True)
class EncoderFeatures:
    """Features of audio, the input of an encoder.

    `data`: float32, little-endian. `num_positions`: encoder tokens that they become.
    """

    data: bytes
    num_positions: int

    @property
    def num_features(self) -> int:
        """Number of features."""
        return len(self.data) // FEATURE_BYTES

    @property
    def digest(self) -> bytes:
        """Digest of the features."""
        return blake2b(self.data, person=b"features").digest()

    @classmethod
    def silence(cls, config: SchedulerConfig) -> EncoderFeatures | None:
        """Returns features of zeros; None if models of `config` take no audio."""
        num_features, num_positions = config.num_encoder_features, config.max_encoder_tokens
        if num_features is None or num_positions is None:
            return None
        return cls(bytes(FEATURE_BYTES * num_features), num_positions)


@dataclass(slots=True, eq=False)
class Request:
    """Request of a client, with its sequences and its scheduling state.

    Identity: `arrival` orders requests, smaller is older. `client_key`: name of the request at its
    owner, returned with its tokens. `submitted_ns`: when the owner accepted the request, by the
    core's clock; decides nothing, None if unknown.

    Preparation for an engine of configuration `prepared_for` sets three fields. `stop_len`: number
    of tokens at which its sequences end. `stop_token_ids`: tokens that end a sequence.
    `params_set`: sampling parameters of its rows.

    Losses and trials: `num_fruitless_losses` counts the steps and engines lost since the request
    had `num_tokens_at_loss` tokens. `trial_size`: for a suspect, most requests that may share a
    step with it, itself included; else 0 (see `engine/suspects.py`). `num_trials_left`: for a
    quarantined request, trials that must still bring it a token. `was_in_flight`: some step with
    the request had no result when the latest executor of the request was lost.

    Order: `num_bypasses` counts requests admitted while this one was first in the queue but could
    not run. `is_protected`: the request was admitted out of order because it had waited longest,
    and is preempted last. `rank`: place among the requests of its engine, smaller first.
    `step_class`: smaller classes get the tokens of a step first. `queued_at_ns`,
    `num_queued_tokens`: time at which the request began to wait, and its number of tokens then.

    Encoder: at most one of `encoder_token_ids` and `encoder_features` is given. `cross_blocks`:
    device blocks of the encoder's keys and values; `host_cross_blocks`: their host blocks while
    SWAPPED. `is_encoded`: they were found in the prefix cache, or a step that writes them was
    planned: `encoded_in_step`, if the request brought the input for it. `encoder_hashes`: of the
    blocks, as soon as they were needed.

    Results: `search`, `num_forks` and `num_candidates` (logprobs asked for in each row) belong to a
    beam search. `completions`: the result of a request that is not streamed. `vector`: that of a
    request with `pooling`, float32, little-endian.
    """

    request_id: str
    params: SamplingParams
    arrival: int
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    client_key: int = 0
    encoder_token_ids: Int32Array | None = None
    encoder_features: EncoderFeatures | None = None
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
    encoded_in_step: int = 0
    encoder_hashes: list[bytes] = field(default_factory=list)
    status: RequestStatus = RequestStatus.ABSENT
    search: BeamSearch | None = None
    num_candidates: int = 0
    num_forks: int = 0
    completions: list[Completion] = field(default_factory=list)
    vector: bytes = b""
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
        encoder_features: EncoderFeatures | None = None,
    ) -> Request:
        """Creates a request, ABSENT, with all its sequences of one prompt; one for a beam search.

        Sequence i begins with the output tokens `resume_token_ids[i]`, if given. Raises ValueError
        if a token does not fit 32 bits.
        """
        request = cls(request_id, params, arrival, scheduling)
        if encoder_token_ids is not None and len(encoder_token_ids):
            request.encoder_token_ids = token_array(encoder_token_ids)
        request.encoder_features = encoder_features
        prompt = token_array(prompt_token_ids)
        # Further beams are forks of the first.
        for index in range(1 if params.beam is not None else params.num_sequences):
            tokens = prompt
            if index < len(resume_token_ids) and len(resume_token_ids[index]):
                tokens = np.concatenate([prompt, token_array(resume_token_ids[index])])
                # A client with output tokens already has the prompt logprobs, which come before
                # them.
                request.num_prompt_logprobs_sent = len(prompt) - 1
            seed_of_sequence = sequence_seed(seed, index)
            request.sequences.append(
                Sequence(request, index, tokens, len(prompt), seed_of_sequence)
            )
        return request

    @property
    def num_encoder_tokens(self) -> int:
        """Number of encoder tokens, or of those that the features become; 0 without an encoder."""
        if self.encoder_features is not None:
            return self.encoder_features.num_positions
        return 0 if self.encoder_token_ids is None else len(self.encoder_token_ids)

    @property
    def sequence(self) -> Sequence:
        """First sequence; the only one unless `n`, `best_of` or beams ask for more."""
        return self.sequences[0]

    @property
    def num_row_logprobs(self) -> int | None:
        """Number of alternatives that rows ask for with each token; None for no logprobs.

        If the best completions are chosen, rows ask for logprobs even if the client did not.
        """
        params = self.params
        if params.beam is not None:
            return self.num_candidates
        return 0 if params.num_logprobs is None and not params.is_streamed else params.num_logprobs

    @property
    def row_params(self) -> SamplingParams:
        """Sampling parameters of the rows, as the executor gets them.

        With `min_tokens`, `stop_token_ids` holds all tokens that end a sequence, those of the model
        too.
        """
        params, num_logprobs = self.params, self.num_row_logprobs
        if params.beam is not None:
            # The search itself refuses tokens that would end a sequence too early.
            return SamplingParams(temperature=0.0, num_logprobs=num_logprobs, beam=params.beam)
        if num_logprobs == params.num_logprobs and not (
            params.min_tokens or params.bad_words_token_ids
        ):
            return params  # as for most requests; avoids a costly copy
        # A bad word of a single token does not forbid a token that ends a sequence.
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
        """Sequences that are not finished."""
        return [s for s in self.sequences if s.status is not SequenceStatus.FINISHED]

    @property
    def num_rows_wanted(self) -> int:
        """Number of rows that the request needs while it runs, beams not yet forked included."""
        beam = self.params.beam
        return beam.width if beam is not None else len(self.unfinished)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.finish_reason is not None

    def abort_unscheduled(self) -> None:
        """Ends a request that no engine has, as ABORTED."""
        self._end_unscheduled(FinishReason.ABORTED)

    def fail_unscheduled(self, reason: str, message: str) -> None:
        """Ends a request that no engine has, with an error."""
        self.error = (reason, message)
        self._end_unscheduled(FinishReason.ERROR)

    def _end_unscheduled(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        for sequence in self.sequences:
            sequence.status = SequenceStatus.FINISHED


def token_array(token_ids: Tokens[int] | Int32Array) -> Int32Array:
    """Returns `token_ids` as int32. Raises ValueError if a token is no integer or does not fit."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.int32, copy=False)
    try:  # takes half the time of numpy.array
        return np.frombuffer(struct.pack(f"={len(token_ids)}i", *token_ids), np.int32)
    except struct.error as error:
        raise ValueError(f"token_ids must be 32-bit integers: {error}") from error


def sequence_seed(seed: int, index: int) -> int:
    """Returns the seed of sequence `index` as signed 64 bits; index 0 has the request's seed."""
    word = (seed + index * _SEED_STRIDE) % _WORD
    return word - _WORD if word >= _WORD // 2 else word
