"""Requests whose steps failed as a whole are tried apart, until the guilty one is alone.

When a step of several requests is refused or fails, or the executor is lost with it a second time,
nobody knows whose fault that was. From then on these requests run in *trials*: steps of a few of
them and nobody else, with no other step in flight, so that only they can be to blame. If a trial
fails, its requests are tried in smaller groups yet. Whoever gets a token out of a trial is a
suspect no longer. Trials and other steps take turns. A trial may lack what others hold; after a
number of their steps nobody else begins to run until there was a trial, so that it gets that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from scheduler_service.core.request import Request, RequestStatus

# Into so many groups the requests of a failed step are divided.
_NUM_GROUPS = 4
# Steps of others after which nobody else begins before there was a trial.
MAX_STEPS_OF_OTHERS = 8


class Suspects:
    """The suspects of a core; `request.trial_size` says how many may share a trial with each."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        # Those that may run in the step that is being planned; None: all but suspects.
        self._on_trial: frozenset[str] | None = None
        self._trial_step_id: int | None = None
        # Steps of others since the last trial, while there were suspects.
        self._num_others = 0

    def __bool__(self) -> bool:
        return bool(self._requests)

    # -- who is one ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes up a request that was a suspect elsewhere; others are left alone."""
        if request.trial_size:
            self._requests[request.request_id] = request

    def step_failed(self, requests: Iterable[Request]) -> None:
        """A step of these failed as a whole. Mutates those that go on."""
        unfinished = [request for request in requests if not request.is_finished]
        if len(unfinished) > 1:
            size = -(-len(unfinished) // _NUM_GROUPS)
            for request in unfinished:
                request.trial_size = min(size, request.trial_size or size)
                self.add(request)

    def acquit(self, request: Request) -> None:
        """The request got a token, or has ended."""
        if self._requests.pop(request.request_id, None) is not None:
            request.trial_size = 0
            if not self._requests:
                self._num_others = 0

    # -- whose turn it is ----------------------------------------------------------------------

    @property
    def is_trial_in_flight(self) -> bool:
        """Whether nothing may be planned until a trial has its result."""
        return self._trial_step_id is not None

    @property
    def turns(self) -> tuple[bool, bool]:
        """Kinds of step to try to plan, in this order; true for a trial."""
        is_trial_first = self._num_others > 0
        return is_trial_first, not is_trial_first

    @contextmanager
    def turn(self, *, is_trial: bool) -> Iterator[None]:
        """A step of this kind is planned; `may_run` says who may be in it."""
        self._on_trial = self._choose() if is_trial else None
        try:
            yield
        finally:
            self._on_trial = None

    @property
    def is_planning_trial(self) -> bool:
        """Whether the step that is being planned is a trial."""
        return self._on_trial is not None

    def may_run(self, request: Request) -> bool:
        """Whether the step that is being planned may have the request."""
        if self._on_trial is not None:
            return request.request_id in self._on_trial
        if self._num_others >= MAX_STEPS_OF_OTHERS and request.status is not RequestStatus.RUNNING:
            return False
        return request.request_id not in self._requests

    def step_planned(self, step_id: int, *, is_trial: bool) -> None:
        """A step was planned in its turn."""
        self._num_others = 0 if is_trial else self._num_others + 1
        self._trial_step_id = step_id if is_trial else None

    def step_answered(self, step_id: int) -> None:
        """A step has its result."""
        if step_id == self._trial_step_id:
            self._trial_step_id = None

    def _choose(self) -> frozenset[str]:
        """Those of the next trial: what is running goes on before others begin."""
        suspects = sorted(self._requests.values(), key=lambda request: request.arrival)
        begun = [request for request in suspects if request.status is RequestStatus.RUNNING]
        chosen: list[Request] = []
        for request in begun or suspects:
            if len(chosen) >= min(r.trial_size for r in (*chosen, request)):
                break
            chosen.append(request)
        return frozenset(request.request_id for request in chosen)
