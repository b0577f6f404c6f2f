"""What watchers know of requests' names by the marks up to which they were told them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.callers.caller import Admission
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values.request import Request
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from scheduler_service.watching.live_names import Names, NamesMark
from scheduler_service.watching.turn import Submission
from splitserve.scheduler.v1 import live_pb2 as live

MAX_NAMES = 32


def some_request(number: int) -> Request:
    return Request.create(f"request-{number}", [1, 2, 3], SamplingParams(), arrival=number, seed=1)


@dataclass(slots=True)
class Told:
    """What one watcher knows."""

    mark: NamesMark | None = None
    names: dict[int, live.LiveRequest] = field(default_factory=dict)

    def take(self, names: Names, now: NamesMark) -> None:
        frame = live.WatchSchedulerResponse()
        names.tell(self.mark, now, frame)
        assert not (frame.forgets_requests and self.mark is None)
        if frame.forgets_requests:
            self.names.clear()
        self.names.update((name.number, name) for name in frame.new_requests)
        self.mark = now


class Serving:
    """Requests that come, begin and end, and their names."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.num_seen = 0
        self.submissions: dict[str, Submission] = {}
        self.names = Names(self.submissions, MAX_NAMES)

    def go_on(self, num_new: int, num_ended: int, num_begun: int) -> NamesMark:
        """A moment; what is used in it are the requests that have not ended."""
        for request_id in list(self.requests)[:num_ended]:
            del self.requests[request_id], self.submissions[request_id]
        for request in list(self.requests.values())[:num_begun]:
            request.stop_len = 9
        for _ in range(num_new):
            self.num_seen += 1
            request = some_request(self.num_seen)
            self.requests[request.request_id] = request
            admission = Admission(RequestName(request.request_id))
            self.submissions[request.request_id] = Submission(admission, submitted_ns=0)
        numbers = self.names.numbers_of(self.requests.values())
        self.names.tidy(lambda: set(numbers), self.requests.values)
        return self.names.mark


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.sets(st.integers(0, 2))
        ),
        max_size=60,
    )
)
def test_names_are_known_to_whoever_looks_and_few_however_seldom_they_do(
    moments: list[tuple[int, int, int, set[int]]],
) -> None:
    serving, watchers = Serving(), [Told() for _ in range(3)]
    for num_new, num_ended, num_begun, looking in moments:
        # No more run than have names.
        num_ended = max(num_ended, len(serving.requests) + num_new - MAX_NAMES)
        now = serving.go_on(num_new, num_ended, num_begun)
        for watcher in [*(watchers[index] for index in sorted(looking)), Told()]:
            watcher.take(serving.names, now)
            assert len(watcher.names) <= MAX_NAMES
            for request in serving.requests.values():
                name = watcher.names[request.arrival]
                assert (name.request_id, name.stop_len) == (request.request_id, request.stop_len)


def test_names_are_told_once_while_nothing_changes() -> None:
    serving, watcher = Serving(), Told()
    watcher.take(serving.names, serving.go_on(3, 0, 0))
    frame = live.WatchSchedulerResponse()
    serving.names.tell(watcher.mark, serving.go_on(0, 0, 0), frame)
    assert not frame.new_requests


def test_names_of_those_who_run_are_kept_when_more_come_than_are_remembered() -> None:
    serving, watcher = Serving(), Told()
    serving.go_on(4, 0, 0)
    first = list(serving.requests.values())
    # Between two looks, more come and go than names are kept.
    for number in range(100, 100 + 2 * MAX_NAMES):
        gone = some_request(number)
        serving.requests[gone.request_id] = gone
        serving.names.see([gone])
        del serving.requests[gone.request_id]
    watcher.take(serving.names, serving.go_on(3, 0, 0))
    assert {*watcher.names} >= {request.arrival for request in [*first, *serving.requests.values()]}


def test_name_is_told_anew_when_it_is_known_where_the_request_ends() -> None:
    serving, watcher = Serving(), Told()
    watcher.take(serving.names, serving.go_on(2, 0, 0))
    watcher.take(serving.names, serving.go_on(0, 0, 1))
    assert [watcher.names[number].stop_len for number in (1, 2)] == [9, 0]
