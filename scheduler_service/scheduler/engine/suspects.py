"""Requests whose steps failed as a whole are tried apart, until the guilty one is alone.

When a step of several requests is refused or fails, nobody knows whose fault that was. From then on
these requests run in *trials*: steps of a few of them and nobody else, with no other step in
flight, so that only they can be to blame. If a trial fails, its requests are tried in smaller
groups yet. Whoever gets a token out of a trial is a suspect no longer; a request that comes from
quarantine, because executors were lost during its steps, is tried alone and may need more than one.
Suspects take turns by the token. Trials and other steps take turns, too. A trial may lack what
others hold; after a number of their steps nobody else begins to run until there was a trial, so
that it gets that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

from scheduler_service.scheduler.values.request import Request, RequestStatus

# Into so many groups the requests of a failed step are divided.
_NUM_GROUPS = 4
# Steps of others after which nobody else begins before there was a trial.
MAX_STEPS_OF_OTHERS = 8


class Turn(Enum):
    """A kind of step: a trial of whoever has waited longest, one of those that run, all others."""

    TRIAL = "trial"
    TRIAL_OF_RUNNING = "trial_of_running"
    OTHERS = "others"

    @property
    def is_trial(self) -> bool:
        """Whether suspects run in it, and nobody else."""
        return self is not Turn.OTHERS


class Suspects:
    """The suspects of a core; `request.trial_size` says how many may share a trial with each."""

    def __init__(self) -> None:
        # In the order in which they are tried.
        self._requests: dict[str, Request] = {}
        # Those that may run in the step that is being planned; None: all but suspects.
        self._on_trial: frozenset[str] | None = None
        self._trial_step_id: int | None = None
        # Steps of others since the last trial, while there were suspects.
        self._num_others = 0

    def __len__(self) -> int:
        return len(self._requests)

    # -- who is one ----------------------------------------------------------------------------

    @property
    def request_ids(self) -> frozenset[str]:
        """Ids of all suspects."""
        return frozenset(self._requests)

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

    def survive(self, request: Request) -> bool:
        """The request got a token: it is acquitted, or others are tried before it is again.

        Returns whether it came from quarantine and is acquitted.
        """
        if self._requests.get(request.request_id) is None:
            return False
        if request.num_trials_left <= 1:
            is_from_quarantine = request.num_trials_left == 1
            self.acquit(request)
            return is_from_quarantine
        request.num_trials_left -= 1
        self._requests[request.request_id] = self._requests.pop(request.request_id)
        return False

    def acquit(self, request: Request) -> None:
        """The request is a suspect no longer, or has ended."""
        if self._requests.pop(request.request_id, None) is not None:
            request.trial_size = request.num_trials_left = 0
            if not self._requests:
                self._num_others = 0

    # -- whose turn it is ----------------------------------------------------------------------

    @property
    def is_trial_in_flight(self) -> bool:
        """Whether nothing may be planned until a trial has its result."""
        return self._trial_step_id is not None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Kinds of step to try to plan, in this order."""
        first, *others = self._requests.values()
        is_choice = not _is_running(first) and any(map(_is_running, others))
        trials = (Turn.TRIAL, Turn.TRIAL_OF_RUNNING) if is_choice else (Turn.TRIAL,)
        return (*trials, Turn.OTHERS) if self._num_others > 0 else (Turn.OTHERS, *trials)

    @contextmanager
    def turn(self, turn: Turn) -> Iterator[None]:
        """A step of this kind is planned; `may_run` says who may be in it."""
        self._on_trial = self._choose(turn) if turn.is_trial else None
        try:
            yield
        finally:
            self._on_trial = None

    @property
    def running(self) -> list[Request]:
        """Suspects that run, in the order in which they are tried."""
        return [request for request in self._requests.values() if _is_running(request)]

    @contextmanager
    def trial_of(self, request: Request) -> Iterator[None]:
        """Restricts `may_run` to one suspect while the context is open."""
        self._on_trial = frozenset({request.request_id})
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

    def _choose(self, turn: Turn) -> frozenset[str]:
        """Those of the next trial: who began goes on until it has a token, then others begin."""
        suspects = list(self._requests.values())
        is_of_running = turn is Turn.TRIAL_OF_RUNNING or _is_running(suspects[0])
        chosen: list[Request] = []
        for request in (r for r in suspects if _is_running(r) is is_of_running):
            if len(chosen) >= min(r.trial_size for r in (*chosen, request)):
                break
            chosen.append(request)
        return frozenset(request.request_id for request in chosen)


def _is_running(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING
