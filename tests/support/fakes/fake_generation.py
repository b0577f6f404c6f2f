"""Tokens of a fake scheduler: functions of prompt, seed and position."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_rpc.domain_error import DomainError

VOCAB_SIZE = 1000


def token_at(prompt: Sequence[int], seed: int, position: int) -> int:
    return (sum(prompt) * 31 + seed * 17 + position * 7) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], seed: int, max_tokens: int, index: int = 0) -> list[int]:
    """Of sequence `index` of a request with `seed`."""
    seed = sequence_seed(seed, index)
    return [token_at(prompt, seed, position) for position in range(max_tokens)]


def sequence_seed(seed: int, index: int) -> int:
    word = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    return word - 2**64 if word >= 2**63 else word


def logprob_of(token_id: int) -> float:
    return -(token_id % 8 + 1) / 8


def score_of(token_id: int) -> api.TokenLogprob:
    top = [api.TopLogprob(token_id=token_id, logprob=-0.5)]
    return api.TokenLogprob(token_id=token_id, logprob=-0.5, rank=1, top=top)


class FakeSequence:
    """One sequence; it ends with a stop token or when it is long enough."""

    def __init__(
        self, request: api.GenerateRequest, index: int, resume_token_ids: Sequence[int]
    ) -> None:
        self._request = request
        self._seed = sequence_seed(request.sampling_params.seed, index)
        self.index = index
        self.token_ids = list(resume_token_ids)

    @property
    def reason(self) -> api.FinishReason | None:
        params = self._request.sampling_params
        if self.token_ids and self.token_ids[-1] in params.stop_token_ids:
            return api.FINISH_REASON_STOP
        return api.FINISH_REASON_LENGTH if len(self.token_ids) >= params.max_tokens else None

    @property
    def cumulative_logprob(self) -> float:
        return sum(map(logprob_of, self.token_ids))

    @property
    def score(self) -> float:
        beams = self._request.sampling_params.beam_search
        penalty = beams.length_penalty if beams.HasField("length_penalty") else 1.0
        return float(self.cumulative_logprob / len(self.token_ids) ** penalty)

    def step(self) -> api.TokenChunk:
        prompt = self._request.prompt_token_ids
        self.token_ids.append(token_at(prompt, self._seed, len(self.token_ids)))
        return self.chunk(self.token_ids[-1:])

    def chunk(self, token_ids: Sequence[int]) -> api.TokenChunk:
        wants_logprobs = self._request.sampling_params.HasField("num_logprobs")
        logprobs = list(map(score_of, token_ids)) if wants_logprobs else []
        return api.TokenChunk(token_ids=token_ids, logprobs=logprobs, index=self.index)

    def finish(self) -> api.SequenceFinish:
        finish = api.SequenceFinish(
            index=self.index, reason=self.reason, num_output_tokens=len(self.token_ids)
        )
        if self.reason == api.FINISH_REASON_STOP:
            finish.stop_token_id = self.token_ids[-1]
        params = self._request.sampling_params
        if not is_streamed(params):
            finish.cumulative_logprob = self.cumulative_logprob
        if params.HasField("beam_search"):
            finish.score = self.score
        return finish


def make_sequences(request: api.GenerateRequest) -> list[FakeSequence]:
    """The sequences of `request`. Raises DomainError where it is resumed as it may not be."""
    params = request.sampling_params
    num_sequences = max(params.n or 1, params.best_of, params.beam_search.width)
    resumed = {entry.index: entry.token_ids for entry in request.resume_sequences}
    if (resumed and request.resume_token_ids) or (resumed and not is_streamed(params)):
        raise DomainError("SAMPLING_PARAMS_INVALID", "resume_sequences is not allowed here")
    if request.resume_token_ids:
        if has_several_sequences(params):
            raise DomainError("SAMPLING_PARAMS_INVALID", "resume_token_ids is not allowed here")
        resumed = {0: request.resume_token_ids}
    return [FakeSequence(request, i, resumed.get(i, ())) for i in range(num_sequences)]


def choose_best(
    sequences: Sequence[FakeSequence], params: api.SamplingParams
) -> list[FakeSequence]:
    """The n best, renumbered."""
    best = sorted(sequences, key=lambda sequence: -sequence.score)[: params.n or 1]
    for index, sequence in enumerate(best):
        sequence.index = index
    return best


def has_several_sequences(params: api.SamplingParams) -> bool:
    return max(params.n, params.best_of) > 1 or params.HasField("beam_search")


def is_streamed(params: api.SamplingParams) -> bool:
    return params.best_of <= (params.n or 1) and not params.HasField("beam_search")


def make_finish(request: api.GenerateRequest, sequences: Sequence[FakeSequence]) -> api.Finish:
    usage = api.Usage(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=sum(len(sequence.token_ids) for sequence in sequences),
    )
    return api.Finish(reason=sequences[0].reason, usage=usage)
