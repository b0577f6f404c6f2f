"""Which completions best_of returns."""

from __future__ import annotations

from scheduler_service.scheduler.engine.sequences import rank_completions
from scheduler_service.scheduler.values.request import Request, Sequence
from scheduler_service.scheduler.values.sampling_params import SamplingParams


def make_sequences(*logprobs_and_lengths: tuple[float, int]) -> list[Sequence]:
    params = SamplingParams(best_of=len(logprobs_and_lengths))
    outputs = [[5] * length for _, length in logprobs_and_lengths]
    request = Request.create("r", [1, 2], params, arrival=0, seed=0, resume_token_ids=outputs)
    for sequence, (logprob, _) in zip(request.sequences, logprobs_and_lengths, strict=True):
        sequence.cumulative_logprob = logprob
    return request.sequences


def rank(sequences: list[Sequence], n: int) -> list[int]:
    return [sequence.index for sequence in rank_completions(sequences, n)]


def test_rank_completions_returns_the_best_n_when_there_are_more() -> None:
    assert rank(make_sequences((-4.0, 2), (-1.0, 2), (-2.0, 2)), 2) == [1, 2]


def test_rank_completions_compares_means_when_lengths_differ() -> None:
    assert rank(make_sequences((-2.0, 1), (-3.0, 3), (-3.0, 2)), 3) == [1, 2, 0]


def test_rank_completions_prefers_the_smaller_index_when_tied() -> None:
    sequences = make_sequences((-2.0, 2), (-1.0, 1), (-4.0, 4))
    assert rank(sequences[::-1], 2) == [0, 1]


def test_rank_completions_puts_a_sequence_last_when_it_has_no_output() -> None:
    assert rank(make_sequences((0.0, 0), (-90.0, 1)), 2) == [1, 0]
