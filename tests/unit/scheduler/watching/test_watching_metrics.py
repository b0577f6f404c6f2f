"""Tests what metrics say of requests, by a clock that a test moves."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.audit import (
    AuditEvent,
    CallerRefused,
    ExecutorLost,
    ExecutorRefused,
    RequestAdmitted,
    RequestEnded,
    RequestRefused,
)
from scheduler_service.scheduler.values import Request, SamplingParams, StepEvents, TokenEvent
from scheduler_service.watching import CountedAudit, RequestTimes, TokenGaps
from splitserve_metrics import SCHEDULER_METRICS, BulkValues, Instruments, Page
from tests.support.metrics import Shown
from tests.support.security.credentials import ListedAudit

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
        number, total = self.shown().histogram(name)
        return number, round(total, 6)

    def shown(self) -> Shown:
        return Shown(Page(self.made.registry, [self.times.between_tokens.family()]))


# Seconds pass; keys are of requests with a plain token, in a step; (key, index, number) of scores.
@pytest.mark.parametrize(
    ("num_sequences", "story", "first", "between"),
    [
        # Each request for itself: 3 and 2 seconds, then 0.5, 0.75 and 0.25.
        (
            {1: 1, 2: 1},
            ["submit 1", 1, "submit 2", 2, [1, 2], 0.5, [2], 0.25, [1, 2]],
            (2, 5.0),
            (3, 1.5),
        ),
        # Tokens that come together share the time since the last one.
        ({1: 1}, ["submit 1", [1], 1.2, [1, 1, 1]], (1, 0.0), (3, 1.2)),
        ({1: 1}, ["submit 1", (1, 0, 1), 1.2, (1, 0, 3)], (1, 0.0), (3, 1.2)),
        ({1: 2}, ["submit 1", (1, 0, 1), 1.2, (1, 0, 3)], (1, 0.0), (3, 1.2)),
        # Tokens after a first one in the same step have no time of their own.
        ({1: 1}, ["submit 1", 1, [1, 1]], (1, 1.0), (0, 0.0)),
        # Sequences are told apart.
        ({1: 2}, ["submit 1", 1, (1, 0, 1), 1, (1, 1, 1), 1, (1, 0, 1)], (1, 1.0), (1, 2.0)),
        # Plain tokens and scores are of one request, as when it was preempted in between.
        (
            {1: 1, 2: 1},
            ["submit 1", "submit 2", 1, [1], (2, 0, 1), 2, (1, 0, 1), [2], 4, [1, 2]],
            (2, 2.0),
            (4, 12.0),
        ),
    ],
)
def test_times_are_those_of_each_request(
    num_sequences: dict[int, int],
    story: list[str | float | list[int] | tuple[int, int, int]],
    first: tuple[int, float],
    between: tuple[int, float],
) -> None:
    watched, requests = Watched(), dict[int, Request]()
    for event in story:
        match event:
            case str():
                key = int(event.split()[1])
                requests[key] = watched.submit(key, num_sequences[key])
            case list():
                watched.plain(*event)
            case (key, index, number):
                watched.scored(requests[key], index, number)
            case _:
                watched.now_s += event

    assert (watched.said(FIRST), watched.said(BETWEEN)) == (first, between)
    if between == (3, 1.2):
        assert watched.shown().value(BETWEEN_BUCKET, le="0.5") == 3


@pytest.mark.parametrize("is_plain", [True, False])
def test_recovery_ends_with_the_next_token(is_plain: bool) -> None:
    watched = Watched()
    request = watched.submit(1)
    watched.plain(1)
    watched.times.lost([request], watched.now_ns)
    watched.now_s += 2
    for _ in range(2):
        watched.plain(1) if is_plain else watched.scored(request, 0)

    assert watched.said(RECOVERY) == (1, 2.0)


def test_nothing_is_remembered_of_ended_requests() -> None:
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


KEYS = range(5)
# Powers of two apart: each sum of gaps is of one set of them alone, as good as always.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)),
        st.tuples(st.just("again"), st.integers(1, 3)),
        st.tuples(st.just("ended"), st.sampled_from(KEYS)),
    ),
    max_size=30,
)
BOUNDS = tuple(float(2**exponent) for exponent in range(0, 40, 2))


class OneByOne:
    """The same by a number for each request."""

    def __init__(self) -> None:
        self.last_ns: dict[int, int] = {}
        self.gaps: list[float] = []

    def add(self, keys: list[int], now_ns: int, known: set[int]) -> list[int]:
        firsts = []
        for key, num_tokens in Counter(keys).items():
            if key in self.last_ns:
                self.gaps += [(now_ns - self.last_ns[key]) / num_tokens] * num_tokens
            elif key in known:
                firsts.append(key)
            if key in known:
                self.last_ns[key] = now_ns
        return firsts


@given(STEPS)
def test_gaps_are_those_of_each_request_alone(story: list[tuple[str, object]]) -> None:
    values, expected = BulkValues(BOUNDS, 1.0), OneByOne()
    gaps = TokenGaps(values)
    known, keys, now_ns = set(KEYS), [0], 0
    for number, (what, told) in enumerate(story):
        if what == "ended":
            assert isinstance(told, int)
            known.discard(told)
            expected.last_ns.pop(told, None)
            gaps.ended(told)
            continue
        if what == "step":
            assert isinstance(told, list)
            keys = told
        for _ in range(told if isinstance(told, int) else 1):
            now_ns += 2**number
            array = np.array(keys, np.int64)
            assert gaps.add(array, now_ns, known) == expected.add(keys, now_ns, known)
            assert gaps.num_remembered <= 2 * len(known)

    counts, total = values.totals()
    assert counts[-1] == len(expected.gaps)
    assert counts[:-1] == [sum(gap <= bound for gap in expected.gaps) for bound in BOUNDS]
    assert abs(total - sum(expected.gaps)) < 1e-6 * (1 + total)


def test_nothing_is_remembered_of_those_who_ended() -> None:
    gaps = TokenGaps(BulkValues(BOUNDS, 1.0))
    gaps.add(np.arange(4), 1, range(4))
    for key in range(4):
        gaps.ended(key)

    assert gaps.num_remembered == 0


def shown_of(*events: AuditEvent) -> Shown:
    made, audit = Instruments(SCHEDULER_METRICS), ListedAudit()
    counted = CountedAudit(audit, made, {"known"}.__contains__)
    for event in events:
        counted.record(event)
    assert audit.events == list(events)
    return Shown(Page(made.registry, []))


def test_tenants_are_labels_only_when_they_are_configured() -> None:
    tenants = ["known", *(f"made-up-{number}" for number in range(100)), ""]
    shown = shown_of(
        *(RequestAdmitted("c", tenant, "r", 10, None, 1, "m", "") for tenant in tenants),
        *(RequestEnded(tenant, "r", "stop", 3) for tenant in tenants),
    )

    assert shown.value("splitserve_tenant_prompt_tokens_total", tenant="known") == 10
    assert shown.value("splitserve_tenant_prompt_tokens_total", tenant="other") == 1010
    assert shown.value("splitserve_tenant_output_tokens_total", tenant="other") == 303
    assert shown.value("splitserve_prompt_tokens_total") == 1020
    assert shown.value("splitserve_requests_total", reason="stop") == 102


def test_refusals_and_losses_are_counted_by_what_they_are() -> None:
    shown = shown_of(
        RequestRefused("c", "t", "r", "QUEUE_FULL", ""),
        RequestRefused("c", "t", "r", "QUEUE_FULL", ""),
        CallerRefused("m", "ipv4:1", "CALLER_UNKNOWN"),
        ExecutorRefused("a:2", "ipv4:2", "MODEL_MISMATCH"),
        ExecutorLost("a:1", 1, 3),
    )

    assert shown.value("splitserve_requests_refused_total", reason="QUEUE_FULL") == 2
    assert shown.value("splitserve_requests_refused_total", reason="CALLER_UNKNOWN") == 1
    assert shown.value("splitserve_requests_refused_total", reason="MODEL_MISMATCH") == 1
    assert shown.value("splitserve_executor_changes_total", change="lost") == 1
