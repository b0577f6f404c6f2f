"""Suspects: requests of a failed step, run in small trial steps until the faulty one is found.

When a step of several requests is refused or fails as a whole, the scheduler cannot tell which
request caused it. From then on these requests run only in *trials*: steps of a few suspects and no
other request, with no other step in flight, so that only these suspects can be the cause. When a
trial fails, its requests are tried again in smaller groups. A request that gets a token from a
trial is acquitted. A request from quarantine, during whose steps executors were lost, is tried
alone and may need tokens from several trials.

Suspects take turns token by token, and trials alternate with other steps. A trial may lack rows or
blocks that other requests hold. So after MAX_STEPS_OF_OTHERS steps of other requests no further
request begins before a trial was planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

from scheduler_service.scheduler.values import Request, RequestStatus

# Number of groups into which the requests of a failed step are divided.
_NUM_GROUPS = 4
# Number of steps without suspects after which no request begins before a trial was planned.
MAX_STEPS_OF_OTHERS = 8


class StepKind(Enum):
    """Kind of step to plan.

    TRIAL: the suspects that have waited longest. TRIAL_OF_RUNNING: suspects that already run.
    OTHERS: all requests that are not suspects.
    """

    TRIAL = "trial"
    TRIAL_OF_RUNNING = "trial_of_running"
    OTHERS = "others"

    @property
    def is_trial(self) -> bool:
        """Whether the step contains suspects and no other request."""
        return self is not StepKind.OTHERS


class Suspects:
    """Suspects of one engine, in the order in which they are tried.

    `request.trial_size` limits how many requests may share a trial with that request.
    """

    def __init__(self) -> None:
        # In the order in which they are tried.
        self._requests: dict[str, Request] = {}
        # Ids of the requests that the step being planned may run; None: all requests but suspects.
        self._on_trial: frozenset[str] | None = None
        self._trial_step_id: int | None = None
        # Steps of other requests since the last trial, counted only while there are suspects.
        self._num_others = 0

    def __len__(self) -> int:
        return len(self._requests)

    # -- membership ----------------------------------------------------------------------------

    @property
    def request_ids(self) -> frozenset[str]:
        """Ids of all suspects."""
        return frozenset(self._requests)

    def add(self, request: Request) -> None:
        """Adds a request that was a suspect elsewhere (`trial_size` > 0); ignores any other."""
        if request.trial_size:
            self._requests[request.request_id] = request

    def step_failed(self, requests: Iterable[Request]) -> None:
        """Makes suspects of the unfinished requests of a step that failed as a whole, if several.

        Mutates `request.trial_size`: a quarter of the group, rounded up, and never more than
        before.
        """
        unfinished = [request for request in requests if not request.is_finished]
        if len(unfinished) > 1:
            size = -(-len(unfinished) // _NUM_GROUPS)
            for request in unfinished:
                request.trial_size = min(size, request.trial_size or size)
                self.add(request)

    def survive(self, request: Request) -> bool:
        """Notes that a request got a token: acquits it, or moves it behind the other suspects.

        A request from quarantine is acquitted after `num_trials_left` tokens. Returns whether the
        request came from quarantine and is acquitted now.
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
        """Removes a request that is no longer a suspect or has ended; resets its trial counters."""
        if self._requests.pop(request.request_id, None) is not None:
            request.trial_size = request.num_trials_left = 0
            if not self._requests:
                self._num_others = 0

    # -- turns ---------------------------------------------------------------------------------

    @property
    def is_trial_in_flight(self) -> bool:
        """True while a trial step awaits its result; planning other steps must wait."""
        return self._trial_step_id is not None

    @property
    def turns(self) -> tuple[StepKind, ...]:
        """Kinds of step to try to plan, in this order. Needs at least one suspect."""
        first, *others = self._requests.values()
        is_choice = not _is_running(first) and any(map(_is_running, others))
        trials = (StepKind.TRIAL, StepKind.TRIAL_OF_RUNNING) if is_choice else (StepKind.TRIAL,)
        return (*trials, StepKind.OTHERS) if self._num_others > 0 else (StepKind.OTHERS, *trials)

    @contextmanager
    def turn(self, turn: StepKind) -> Iterator[None]:
        """Restricts `may_run` to requests of a step of kind `turn` while the context is open."""
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
        """Whether the step being planned is a trial."""
        return self._on_trial is not None

    def may_run(self, request: Request) -> bool:
        """Returns whether the step being planned may run the request."""
        if self._on_trial is not None:
            return request.request_id in self._on_trial
        if self._num_others >= MAX_STEPS_OF_OTHERS and request.status is not RequestStatus.RUNNING:
            return False
        return request.request_id not in self._requests

    def step_planned(self, step_id: int, *, is_trial: bool) -> None:
        """Notes that a step was planned, and whether it is a trial."""
        self._num_others = 0 if is_trial else self._num_others + 1
        self._trial_step_id = step_id if is_trial else None

    def step_answered(self, step_id: int) -> None:
        """Notes that a step has its result; if it was the trial, no trial is in flight any more."""
        if step_id == self._trial_step_id:
            self._trial_step_id = None

    def _choose(self, turn: StepKind) -> frozenset[str]:
        """Returns ids of the suspects of the next trial.

        Suspects that already run are tried until they get a token; only then further suspects
        begin.
        """
        suspects = list(self._requests.values())
        is_of_running = turn is StepKind.TRIAL_OF_RUNNING or _is_running(suspects[0])
        chosen: list[Request] = []
        for request in (r for r in suspects if _is_running(r) is is_of_running):
            if len(chosen) >= min(r.trial_size for r in (*chosen, request)):
                break
            chosen.append(request)
        return frozenset(request.request_id for request in chosen)


def _is_running(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING
