"""What is counted by points of two seconds."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scheduler_service.scheduler.effects import DeliverTokens, Effect, RequestFinished, SendStep
from scheduler_service.scheduler.events import Event, RequestSubmitted
from scheduler_service.scheduler.values.plan import StepEvents
from scheduler_service.watching.live_history import NUM_POINTS, POINT_NS, Durations, History
from splitserve.scheduler.v1 import live_pb2 as live
from tests.support.core.some_turns import turn

_MS = 1_000_000
_POINT_S = POINT_NS / 1e9


class Told:
    """A history that is told by a clock that stands still between steps."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.history = History(lambda: self.now_ns)

    def submit(self, *keys: int) -> None:
        for key in keys:
            self.see(event=RequestSubmitted(_request(key)))

    def begin(self, *keys: int) -> None:
        """Gives each a row."""
        rows = [SimpleNamespace(sequence=SimpleNamespace(request=_request(key))) for key in keys]
        plan: Any = SimpleNamespace(new_rows=rows)
        self.see(SendStep("127.0.0.1:1", plan))

    def deliver(self, *keys: int, several: Iterable[int] = ()) -> None:
        """A token for each; of those of `several` as of requests with several sequences."""
        tokens: Any = [
            SimpleNamespace(sequence=SimpleNamespace(request=_request(key))) for key in several
        ]
        events = StepEvents(np.array(keys, np.int64), np.array(keys, np.int32), tokens)
        self.see(DeliverTokens(events))

    def end(self, key: int) -> None:
        self.see(RequestFinished(_request(key)))

    def see(self, *effects: Effect, event: Event | None = None) -> None:
        self.history.see(turn(*effects, event=event, now_ns=self.now_ns))

    def wait_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def points(self) -> list[live.LivePoint]:
        """Those that are over."""
        self.history.tell_recent(live.LiveLatency())
        found = []
        for point in self.history.points_after(-1):
            found.append(live.LivePoint())
            point.tell(found[-1])
        return found

    def recent(self) -> live.LiveLatency:
        told = live.LiveLatency()
        self.history.tell_recent(told)
        return told


def _request(key: int) -> Any:  # noqa: ANN401
    return SimpleNamespace(client_key=key)


def test_point_has_the_tokens_and_the_most_that_waited_within_it() -> None:
    told = Told()
    told.submit(1, 2, 3)
    told.begin(1)
    told.deliver(1)
    told.wait_s(_POINT_S)
    told.deliver(1, several=[1, 1])
    told.begin(2, 3)
    told.wait_s(_POINT_S)
    first, second = told.points()
    assert (first.start_ms, first.num_tokens, first.num_waiting) == (0, 1, 3)
    # Two of them waited when it began.
    assert (second.start_ms, second.num_tokens, second.num_waiting) == (2000, 3, 2)


def test_time_to_first_token_is_counted_once_and_from_when_a_request_came() -> None:
    told = Told()
    told.submit(1, 2)
    told.wait_s(0.5)
    told.begin(1, 2)
    told.wait_s(0.1)
    told.deliver(1)
    told.wait_s(0.1)
    told.deliver(1, several=[2])
    told.deliver(1, 2)
    latency = told.recent()
    assert latency.count == 2
    assert latency.p50_us == pytest.approx(600_000, rel=0.025)
    assert latency.p99_us == pytest.approx(700_000, rel=0.025)


def test_recent_is_the_last_minute() -> None:
    told = Told()
    for duration_s in (1.0, 0.1):
        told.submit(1)
        told.begin(1)
        told.wait_s(duration_s)
        told.deliver(1)
        told.wait_s(50)
    assert told.recent().count == 1
    assert told.recent().p99_us == pytest.approx(100_000, rel=0.025)
    told.wait_s(60)
    assert told.recent().count == 0


def test_points_go_on_while_nothing_happens_and_some_wait() -> None:
    told = Told()
    told.submit(1)
    told.wait_s(4 * _POINT_S)
    assert [point.num_waiting for point in told.points()] == [1, 1, 1, 1]
    assert [point.start_ms for point in told.points()] == [0, 2000, 4000, 6000]
    told.wait_s(1000 * _POINT_S)
    points = told.points()
    assert len(points) == NUM_POINTS
    assert points[-1].start_ms == 1003 * 2000


def test_nothing_is_remembered_of_requests_that_ended() -> None:
    told = Told()
    told.submit(1, 2, 3)
    told.begin(2, 3)
    told.deliver(3)
    for key in (1, 2, 3):
        told.end(key)
    assert told.history.num_unanswered == 0
    told.wait_s(_POINT_S)
    told.submit(4)
    told.wait_s(_POINT_S)
    assert [point.num_waiting for point in told.points()] == [3, 1]


@pytest.mark.parametrize("count", [1, 2, 100, 1000])
def test_quantiles_are_right_to_two_and_a_half_percent(count: int) -> None:
    durations, told = Durations(), live.LiveLatency()
    for each in range(1, count + 1):
        durations.add(each * _MS)
    durations.tell(told)
    assert told.count == count
    assert told.p50_us == pytest.approx(1000 * -(-count // 2), rel=0.026)
    assert told.p99_us == pytest.approx(1000 * -(-99 * count // 100), rel=0.026)
