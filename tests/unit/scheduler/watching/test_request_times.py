"""What requests waited for, by a clock that stands still unless it is moved."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.scheduler.values.plan import StepEvents, TokenEvent
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from scheduler_service.watching.metrics import RequestTimes
from splitserve_metrics.instruments import Instruments, Page
from splitserve_metrics.scheduler_table import SCHEDULER_METRICS
from tests.support.metrics import Shown

FIRST = "splitserve_time_to_first_token_seconds"
BETWEEN = "splitserve_inter_token_latency_seconds"
BETWEEN_BUCKET = "splitserve_inter_token_latency_seconds_bucket"
RECOVERY = "splitserve_recovery_seconds"


class Watched:
    """RequestTimes, and the time that it is told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.made = Instruments(SCHEDULER_METRICS)
        self.times = RequestTimes(self.made)

    @property
    def now_ns(self) -> int:
        return int(self.now_s * 1e9)

    def submit(self, key: int, num_sequences: int = 1) -> Request:
        params = SamplingParams(max_tokens=10, n=num_sequences)
        request = Request.create(f"r{key}", [1, 2], params, arrival=key, seed=key)
        request.client_key = key
        self.times.submitted(request, self.now_ns)
        return request

    def plain(self, *keys: int) -> None:
        tokens = np.zeros(len(keys), np.int32)
        self.times.delivered(StepEvents(np.array(keys, np.int64), tokens), self.now_ns)

    def scored(self, request: Request, index: int, num_tokens: int = 1) -> None:
        event = TokenEvent(request.sequences[index], 5, None)
        self.times.delivered(StepEvents(tokens=[event] * num_tokens), self.now_ns)

    def said(self, name: str) -> tuple[float, float]:
        """How many, and their sum."""
        number, total = self.shown().histogram(name)
        return number, round(total, 6)

    def shown(self) -> Shown:
        return Shown(Page(self.made.registry, [self.times.between_tokens.family()]))


def test_times_are_of_each_request_when_steps_bring_tokens_of_some() -> None:
    watched = Watched()
    watched.submit(1)
    watched.now_s += 1
    watched.submit(2)
    watched.now_s += 2
    watched.plain(1, 2)  # after 3 and 2 seconds
    watched.now_s += 0.5
    watched.plain(2)
    watched.now_s += 0.25
    watched.plain(1, 2)  # 0.75 and 0.25 seconds later

    assert watched.said(FIRST) == (2, 5.0)
    assert watched.said(BETWEEN) == (3, 0.5 + 0.75 + 0.25)


def test_tokens_that_come_together_share_the_time_since_the_last_one() -> None:
    watched = Watched()
    watched.submit(1)
    watched.plain(1)
    watched.now_s += 1.2
    watched.plain(1, 1, 1)

    assert watched.said(BETWEEN) == (3, 1.2)


def test_tokens_after_a_first_one_in_the_same_step_say_nothing() -> None:
    watched = Watched()
    watched.submit(1)
    watched.now_s += 1
    watched.plain(1, 1)

    assert (watched.said(FIRST), watched.said(BETWEEN)) == ((1, 1.0), (0, 0.0))


def test_sequences_are_told_apart_when_there_are_several() -> None:
    watched = Watched()
    request = watched.submit(1, num_sequences=2)
    watched.now_s += 1
    watched.scored(request, 0)
    watched.now_s += 1
    watched.scored(request, 1)
    watched.now_s += 1
    watched.scored(request, 0)

    assert (watched.said(FIRST), watched.said(BETWEEN)) == ((1, 1.0), (1, 2.0))


def test_a_request_has_one_first_token_when_some_came_while_it_was_preempted() -> None:
    watched = Watched()
    preempted_later, preempted_first = watched.submit(1), watched.submit(2)
    watched.now_s += 1
    watched.plain(1)
    watched.scored(preempted_first, 0)
    watched.now_s += 2
    watched.scored(preempted_later, 0)
    watched.plain(2)
    watched.now_s += 4
    watched.plain(1, 2)

    assert watched.said(FIRST) == (2, 2.0)
    assert watched.said(BETWEEN) == (4, 12.0)


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_tokens_with_scores_share_the_time_too_when_they_come_together(num_sequences: int) -> None:
    watched = Watched()
    request = watched.submit(1, num_sequences)
    watched.scored(request, 0)
    watched.now_s += 1.2
    watched.scored(request, 0, num_tokens=3)

    assert watched.said(BETWEEN) == (3, 1.2)
    assert watched.shown().value(BETWEEN_BUCKET, le="0.5") == 3


@pytest.mark.parametrize("is_plain", [True, False])
def test_recovery_ends_with_the_next_token_when_an_executor_was_lost(is_plain: bool) -> None:
    watched = Watched()
    request = watched.submit(1)
    watched.plain(1)
    watched.times.lost([request], watched.now_ns)
    watched.now_s += 2
    for _ in range(2):
        watched.plain(1) if is_plain else watched.scored(request, 0)

    assert watched.said(RECOVERY) == (1, 2.0)


def test_nothing_is_remembered_of_requests_that_ended_even_if_a_token_comes_late() -> None:
    watched = Watched()
    requests = [watched.submit(key) for key in (1, 2)]
    watched.plain(1, 2)
    watched.times.lost(requests, watched.now_ns)
    for request in requests:
        watched.times.ended(request, watched.now_ns)
    watched.plain(1, 2)
    watched.scored(requests[0], 0)
    again = watched.submit(1)
    watched.now_s += 4
    watched.plain(1)

    assert watched.said(FIRST) == (3, 4.0)
    assert watched.said("splitserve_request_duration_seconds") == (2, 0.0)
    watched.times.ended(again, watched.now_ns)
    assert watched.times.num_remembered == 0
