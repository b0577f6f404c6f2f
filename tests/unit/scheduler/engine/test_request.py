"""Requests: their sequences, seeds and resumed tokens."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.values.request import (
    FinishReason,
    Request,
    SequenceStatus,
    sequence_seed,
    token_array,
)
from scheduler_service.scheduler.values.sampling_params import BeamParams, SamplingParams


def create(resume: list[list[int]] | None = None, **params: object) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request.create(
        "r", [1, 2, 3], sampling, arrival=1, seed=5, resume_token_ids=resume or ()
    )


@pytest.mark.parametrize(
    ("params", "num_sequences"),
    [({}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 4}, 4), ({"beam": BeamParams(4), "n": 2}, 1)],
)
def test_create_makes_a_sequence_for_each_completion_when_they_are_sampled(
    params: dict[str, object], num_sequences: int
) -> None:
    request = create(**params)  # type: ignore[arg-type]
    assert [sequence.index for sequence in request.sequences] == list(range(num_sequences))


def test_create_gives_the_resumed_tokens_to_their_sequences_when_some_have_none() -> None:
    request = create(n=3, resume=[[7], [], [8, 9]])
    tokens = [sequence.token_ids.tolist() for sequence in request.sequences]
    assert tokens == [[1, 2, 3, 7], [1, 2, 3], [1, 2, 3, 8, 9]]
    assert [sequence.num_output_tokens for sequence in request.sequences] == [1, 0, 2]


@pytest.mark.parametrize(("resume", "num_sent"), [([], 0), ([[]], 0), ([[7]], 2)])
def test_create_takes_prompt_logprobs_as_sent_when_there_are_output_tokens(
    resume: list[list[int]], num_sent: int
) -> None:
    assert create(resume=resume).num_prompt_logprobs_sent == num_sent


def test_create_gives_each_sequence_its_own_seed_when_there_are_several() -> None:
    seeds = [sequence.seed for sequence in create(n=4).sequences]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_sequence_seed_stays_a_signed_64_bit_number_when_it_wraps(seed: int) -> None:
    assert sequence_seed(seed, 0) == seed
    assert all(-(2**63) <= sequence_seed(seed, index) < 2**63 for index in range(20))


def test_token_array_refuses_when_a_token_does_not_fit_32_bits() -> None:
    with pytest.raises(ValueError, match="32-bit"):
        token_array([1, 2**31])


def test_unfinished_leaves_out_sequences_when_they_have_ended() -> None:
    request = create(n=3)
    request.sequences[1].status = SequenceStatus.FINISHED
    assert [sequence.index for sequence in request.unfinished] == [0, 2]


def test_abort_unscheduled_ends_all_sequences_when_there_are_several() -> None:
    request = create(n=2)
    request.abort_unscheduled()
    assert request.finish_reason is FinishReason.ABORTED
    assert request.unfinished == []


def test_row_params_are_those_of_the_request_when_tokens_are_streamed() -> None:
    request = create(temperature=0.5, num_logprobs=3, n=2)
    assert request.row_params is request.params


def test_row_params_ask_for_logprobs_when_the_best_are_chosen() -> None:
    request = create(temperature=0.5, n=1, best_of=2)
    assert request.row_params == SamplingParams(temperature=0.5, num_logprobs=0, n=1, best_of=2)


def test_row_params_ask_for_candidates_only_when_beams_are_searched() -> None:
    request = create(beam=BeamParams(2), min_tokens=4, max_tokens=9)
    request.num_candidates = 3
    expected = SamplingParams(temperature=0.0, num_logprobs=3, beam=BeamParams(2))
    assert request.row_params == expected


def test_row_params_name_all_that_ends_a_sequence_when_there_is_a_least_length() -> None:
    request = create(min_tokens=4, stop_token_ids=frozenset({7}))
    request.stop_token_ids = frozenset({2, 7})
    assert request.row_params.stop_token_ids == {2, 7}


def test_row_params_leave_out_a_bad_word_when_it_is_a_token_that_ends_a_sequence() -> None:
    request = create(bad_words_token_ids=((2,), (5,), (2, 5)))
    request.stop_token_ids = frozenset({2})
    assert request.row_params.bad_words_token_ids == ((5,), (2, 5))
