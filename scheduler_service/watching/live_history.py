"""History of a scheduler: the last five minutes in points of two seconds, for the live view.

The history is recorded even if no client watches.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from scheduler_service.scheduler import DeliverTokens, RequestFinished, RequestSubmitted, SendStep
from scheduler_service.scheduler.values import Request, StepEvents, StepPlan
from scheduler_service.watching.transition import Transition
from splitserve.scheduler.v1 import live_pb2 as live

POINT_NS = 2_000_000_000
NUM_POINTS = 150
# Points of the last minute. Every frame has the times to first token of these.
_NUM_RECENT = 30
_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000
# Logarithm of the ratio between neighbouring bins.
_LOG_BIN = math.log(1.05)


class Durations:
    """Histogram of durations, exact to 2.5 % from one microsecond on."""

    def __init__(self) -> None:
        self._bins = Counter[int]()

    def add(self, duration_ns: int) -> None:
        """Counts a duration in nanoseconds."""
        self._bins[round(math.log(max(duration_ns, _NS_PER_US)) / _LOG_BIN)] += 1

    def merge(self, other: Durations) -> None:
        """Adds the counts of `other`."""
        self._bins.update(other._bins)

    def fill(self, message: live.LiveLatency) -> None:
        """Fills the blank message `message` with the count and, unless it is 0, the quantiles."""
        message.count = self._bins.total()
        if message.count:
            message.p50_us = self._quantile_us(0.5, message.count)
            message.p99_us = self._quantile_us(0.99, message.count)

    def _quantile_us(self, part: float, count: int) -> int:
        """Returns the shortest duration, in microseconds, that a share `part` does not exceed."""
        rank = math.ceil(part * count)
        for each in sorted(self._bins):
            rank -= self._bins[each]
            if rank <= 0:
                return round(math.exp(each * _LOG_BIN)) // _NS_PER_US
        raise AssertionError("the rank is at most the count")


@dataclass(slots=True)
class HistoryPoint:
    """Figures of two seconds.

    `number`: start of the point in units of POINT_NS. `num_waiting`: maximum number of requests
    that waited for a row at once. `first_tokens`: times to first token.
    """

    number: int
    num_waiting: int
    num_tokens: int = 0
    first_tokens: Durations = field(default_factory=Durations)

    def fill(self, message: live.LivePoint) -> None:
        """Fills the blank message `message`."""
        message.start_ms = self.number * POINT_NS // _NS_PER_MS
        message.num_tokens = self.num_tokens
        message.num_waiting = self.num_waiting
        self.first_tokens.fill(message.time_to_first_token)


class History:
    """Records the points of the last five minutes. Implements `Watcher`.

    `points`: completed points, oldest first.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        """`now_ns`: the clock of turns, read for questions between turns."""
        self.points = deque[HistoryPoint](maxlen=NUM_POINTS)
        self._now_ns = now_ns
        # Submission times by client key: of requests without a row, and of requests with a row but
        # without a token.
        self._without_row: dict[int, int] = {}
        self._without_token: dict[int, int] = {}
        self._point = HistoryPoint(now_ns() // POINT_NS, 0)
        # Times to first token of the last minute, without the current point.
        self._recent = Durations()

    @property
    def num_unanswered(self) -> int:
        """Number of remembered requests: those without a token."""
        return len(self._without_row) + len(self._without_token)

    def points_after(self, number: int) -> Iterator[HistoryPoint]:
        """Yields the completed points after point `number`."""
        return (point for point in self.points if point.number > number)

    def fill_recent(self, message: live.LiveLatency) -> None:
        """Fills the blank message `message` with the times to first token of the last minute."""
        point, recent = self._point_at(self._now_ns()), Durations()
        recent.merge(self._recent)
        recent.merge(point.first_tokens)
        recent.fill(message)

    def _point_at(self, now_ns: int) -> HistoryPoint:
        """Returns the current point, after completing all points before `now_ns`."""
        number = now_ns // POINT_NS
        if number > self._point.number:
            self.points.append(self._point)
            num_waiting = len(self._without_row)
            # Requests also wait in points without an event.
            first = max(self._point.number + 1, number - NUM_POINTS)
            self.points.extend(HistoryPoint(each, num_waiting) for each in range(first, number))
            self._point = HistoryPoint(number, num_waiting)
            self._recent = Durations()
            for point in list(self.points)[1 - _NUM_RECENT :]:
                self._recent.merge(point.first_tokens)
        return self._point

    # -- Turns ---------------------------------------------------------------------------------

    def see(self, turn: Transition) -> None:
        if isinstance(turn.event, RequestSubmitted):
            self._submitted(turn.event.request, turn.now_ns)
        for effect in turn.effects:
            if isinstance(effect, DeliverTokens):
                self._delivered(effect.events, turn.now_ns)
            elif isinstance(effect, SendStep):
                if effect.plan.new_rows:
                    self._begun(effect.plan)
            elif isinstance(effect, RequestFinished):
                self._ended(effect.request)

    def _submitted(self, request: Request, now_ns: int) -> None:
        point = self._point_at(now_ns)
        self._without_row[request.client_key] = now_ns
        point.num_waiting = max(point.num_waiting, len(self._without_row))

    def _ended(self, request: Request) -> None:
        self._without_row.pop(request.client_key, None)
        self._without_token.pop(request.client_key, None)

    def _begun(self, plan: StepPlan) -> None:
        for row in plan.new_rows:
            key = row.sequence.request.client_key
            submitted_ns = self._without_row.pop(key, None)
            if submitted_ns is not None:
                self._without_token[key] = submitted_ns

    def _delivered(self, events: StepEvents, now_ns: int) -> None:
        num_tokens = len(events.client_keys) + len(events.tokens)
        if num_tokens:
            point = self._point_at(now_ns)
            point.num_tokens += num_tokens
            if self._without_token:
                keys = events.client_keys.tolist()
                keys += [token.sequence.request.client_key for token in events.tokens]
                # Most deliveries have no first token. `isdisjoint` is cheaper than the
                # intersection.
                if not self._without_token.keys().isdisjoint(keys):
                    self._first_tokens(self._without_token.keys() & set(keys), point, now_ns)
        for request in events.finished:
            self._ended(request)

    def _first_tokens(self, keys: Iterable[int], point: HistoryPoint, now_ns: int) -> None:
        for key in keys:
            point.first_tokens.add(now_ns - self._without_token.pop(key))
