"""What a step takes at least, and so when a request may end at the earliest."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.planning.lateness import earliest_finish_ns
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("params", "num_uncached_tokens", "num_steps"),
    [
        (SamplingParams(max_tokens=10), 1, 1),
        (SamplingParams(max_tokens=10), 0, 1),
        (SamplingParams(max_tokens=10), 16, 2),
        (SamplingParams(max_tokens=10), 17, 3),
        (SamplingParams(max_tokens=10, min_tokens=4), 8, 4),
        (SamplingParams(max_tokens=10, ignore_eos=True), 8, 10),
        (SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=frozenset({3})), 8, 1),
        (SamplingParams(min_tokens=3, ignore_eos=True), 9, 4),
    ],
)
def test_earliest_finish_counts_the_least_number_of_steps_when_prompts_are_chunked(
    params: SamplingParams, num_uncached_tokens: int, num_steps: int
) -> None:
    request = Request.create("r", [1] * 20, params, arrival=1, seed=0)
    finish_ns = earliest_finish_ns(request, 1000, 7, num_uncached_tokens, tokens_per_step=8)
    assert finish_ns == 1000 + 7 * num_steps


def test_earliest_finish_counts_only_what_is_missing_when_resumed() -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True, n=2)
    request = Request.create("r", [1], params, arrival=1, seed=0, resume_token_ids=[[5] * 6, [5]])
    assert earliest_finish_ns(request, 0, 1, 4, tokens_per_step=8) == 9
    request.sequences[1].num_promised = 2
    assert earliest_finish_ns(request, 0, 1, 4, tokens_per_step=8) == 7


def test_earliest_finish_stops_at_the_length_of_the_model_when_more_is_asked_for() -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    request = Request.create("r", [1] * 4, params, arrival=1, seed=0)
    request.stop_len = 7
    assert earliest_finish_ns(request, 0, 1, 4, tokens_per_step=8) == 3
