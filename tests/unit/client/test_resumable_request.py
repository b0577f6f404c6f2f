from __future__ import annotations

import pytest

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import (
    Finish,
    FinishReason,
    RequestFailed,
    ResumableRequest,
    SamplingParams,
    SchedulingParams,
    SequenceFinish,
    ServerUnreachable,
    Submission,
    Tokens,
)

LOST = ServerUnreachable("lost")


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def make(**params: int) -> ResumableRequest:
    return ResumableRequest(Submission([1, 2], SamplingParams(**params)), Clock())  # type: ignore[arg-type]


def tokens(index: int, *token_ids: int) -> api.GenerateResponse:
    return api.GenerateResponse(tokens=api.TokenChunk(token_ids=token_ids, index=index))


def sequence_finish(index: int, num_output_tokens: int) -> api.GenerateResponse:
    finish = api.SequenceFinish(
        index=index, reason=api.FINISH_REASON_LENGTH, num_output_tokens=num_output_tokens
    )
    return api.GenerateResponse(sequence_finish=finish)


def test_request_drops_tokens_of_finished_sequences_when_resumed() -> None:
    request = make(n=2)
    request.receive(tokens(0, 5))
    request.receive(tokens(1, 6))
    first = request.receive(sequence_finish(1, 1))

    assert request.can_resume(LOST)
    # A successor with a larger max_model_len goes on where its predecessor had ended.
    again = [*request.receive(tokens(1, 7)), *request.receive(sequence_finish(1, 2))]

    assert first == [
        Tokens((), index=1, finish=SequenceFinish(1, FinishReason.LENGTH, None, 1)),
    ]
    assert again == []
    resumed = {entry.index: list(entry.token_ids) for entry in request.message().resume_sequences}
    assert resumed == {0: [5], 1: [6]}


def test_request_returns_prompt_logprobs_once_when_stream_breaks() -> None:
    def scored(*token_ids: int) -> api.GenerateResponse:
        scores = [api.TokenLogprob(token_id=token_id, rank=1) for token_id in token_ids]
        return api.GenerateResponse(tokens=api.TokenChunk(prompt_logprobs=scores))

    request = make(num_prompt_logprobs=0)
    told = request.receive(scored(2, 3))
    assert request.can_resume(LOST)
    told += [*request.receive(scored(2)), *request.receive(scored(3, 4))]

    scores = [
        score for event in told if isinstance(event, Tokens) for score in event.prompt_logprobs
    ]
    assert [score.token_id for score in scores] == [2, 3, 4]


def test_request_returns_the_best_with_the_finish() -> None:
    request = make(best_of=2)
    assert request.receive(tokens(0, 5, 6)) == []
    assert request.can_resume(LOST)
    assert request.receive(tokens(0, 5, 6)) == []
    assert request.receive(sequence_finish(0, 2)) == []

    finish = api.Finish(reason=api.FINISH_REASON_LENGTH)
    events = request.receive(api.GenerateResponse(finish=finish))

    assert [type(event) for event in events] == [Tokens, Tokens, Finish]
    assert not request.message().resume_token_ids


def test_request_names_sequences_only_when_there_are_several() -> None:
    plain, several = make(), make(n=2)
    for request in (plain, several):
        request.receive(tokens(0, 5))

    assert list(plain.message().resume_token_ids) == [5]
    assert not plain.message().resume_sequences
    assert not several.message().resume_token_ids
    assert [entry.index for entry in several.message().resume_sequences] == [0]


def test_request_fails_when_finish_reason_is_unknown() -> None:
    unknown = api.SequenceFinish(reason=api.FINISH_REASON_UNSPECIFIED)

    with pytest.raises(RequestFailed, match="unknown reason"):
        make(n=2).receive(api.GenerateResponse(sequence_finish=unknown))


def test_request_sends_the_remaining_deadline_when_resubmitted() -> None:
    clock = Clock()
    scheduling = SchedulingParams(deadline_s=10.5)
    request = ResumableRequest(Submission([1], scheduling=scheduling), clock)

    def sent_s() -> float:
        return float(request.message().deadline.ToTimedelta().total_seconds())

    clock.now_s = 60.0  # counts from the first submission
    assert sent_s() == 10.5
    clock.now_s = 64.0
    assert sent_s() == 6.5
    clock.now_s = 1000.0
    assert sent_s() == pytest.approx(0.001)


def test_request_counts_tokens_of_all_sequences_when_aborted() -> None:
    request = make(n=2)
    request.receive(tokens(0, 5, 6))
    request.receive(tokens(1, 7))

    assert request.aborted().usage.num_output_tokens == 3
