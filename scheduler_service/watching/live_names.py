"""Names of requests for the live view: which are known, and which a watcher has to be sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from scheduler_service.scheduler.values import Request
from scheduler_service.watching.transition import Submission
from splitserve.scheduler.v1 import live_pb2 as live

# Maximum number of names that the scheduler and each watcher remember.
MAX_NAMES = 8192
# Up to this part of the maximum, names are kept without checking whether they are still used.
_KEPT_PART = 16
_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class NamesMark:
    """Names that a watcher knows: those learned up to `num_learned` in a generation.

    A new generation begins when watchers have to forget all names.
    """

    generation: int
    num_learned: int


class Names:
    """Names of requests that were shown. Names outlive their requests for a while.

    The latest mark of a watcher says which names the watcher knows, so all watchers with the same
    mark are sent the same names.
    """

    def __init__(self, submissions: Mapping[str, Submission], max_names: int = MAX_NAMES) -> None:
        """`submissions`: those of unfinished requests, by request id."""
        self._submissions = submissions
        self._max_names = max_names
        # By request number: position in the order of learning, and name. The dict has the same
        # order.
        self._names: dict[int, tuple[int, live.LiveRequest]] = {}
        # Numbers of requests that were learned before an executor set their `stop_len`.
        self._without_end: set[int] = set()
        # True if a name found no room since the last `tidy`.
        self._lacks_some = False
        self._num_learned = 0
        self._generation = 0
        # Maximum number of names that a watcher of this generation knows.
        self._num_said = 0
        self._limit = max_names // _KEPT_PART

    @property
    def mark(self) -> NamesMark:
        """Mark of a watcher that was sent all names known now."""
        return NamesMark(self._generation, self._num_learned)

    def see(self, requests: Iterable[Request]) -> None:
        """Learns the names of unfinished requests that are not known yet."""
        names, without_end = self._names, self._without_end
        for request in requests:
            number = request.arrival
            if number not in names or (number in without_end and request.stop_len):
                self._learn(request)

    def numbers_of(self, requests: Collection[Request]) -> list[int]:
        """Returns the numbers of unfinished requests and learns their names."""
        self.see(requests)
        return [request.arrival for request in requests]

    def _learn(self, request: Request) -> None:
        submission = self._submissions.get(request.request_id)
        if submission is None:
            return
        names, number = self._names, request.arrival
        # A known name moves to the end, so that watchers are sent it again.
        names.pop(number, None)
        self._without_end.discard(number)
        if len(names) >= self._max_names:
            self._lacks_some = True
            return
        if not request.stop_len:
            self._without_end.add(number)
        self._num_learned += 1
        self._num_said += 1
        name = live.LiveRequest(
            number=number,
            request_id=submission.admission.name.own_id,
            tenant=request.scheduling.tenant,
            num_prompt_tokens=request.sequence.num_prompt_tokens,
            stop_len=request.stop_len,
            num_sequences=request.params.num_sequences,
            priority=request.scheduling.priority,
            submitted_ms=submission.submitted_ns // _MS,
        )
        names[number] = self._num_learned, name

    def tidy(self, used: Callable[[], Set[int]], shown: Callable[[], Iterable[Request]]) -> None:
        """Drops unused names if there are many, and learns names that found no room before.

        `used`: returns the numbers that may still be shown. A dropped name is learned again when
        its request is shown. `shown`: returns all requests whose names watchers have to know now.
        """
        is_forgotten = self._num_said > self._max_names
        lacks_some, self._lacks_some = self._lacks_some, False
        if len(self._names) <= self._limit and not is_forgotten and not lacks_some:
            return
        numbers = used()
        self._names = {number: named for number, named in self._names.items() if number in numbers}
        self._without_end &= self._names.keys()
        self._limit = min(self._max_names, max(self._max_names // _KEPT_PART, 2 * len(self._names)))
        if is_forgotten:
            self._generation += 1
            self._num_said = len(self._names)
        if lacks_some and len(self._names) < self._max_names:
            self.see(shown())

    def fill(
        self, before: NamesMark | None, now: NamesMark, frame: live.WatchSchedulerResponse
    ) -> None:
        """Adds to `frame` the names up to mark `now` that are unknown at mark `before`."""
        # Names learned after `now` are sent with the snapshot that shows them.
        is_forgotten = before is not None and before.generation != now.generation
        frame.forgets_requests = is_forgotten
        known = 0 if before is None or is_forgotten else before.num_learned
        new: list[live.LiveRequest] = []
        for place, name in reversed(self._names.values()):
            if place <= known:
                break
            if place <= now.num_learned:
                new.append(name)
        frame.new_requests.extend(reversed(new))
