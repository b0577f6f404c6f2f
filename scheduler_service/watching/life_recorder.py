"""Recorder of request lives: what happens to requests, and the reasons for which they wait.

`BoundedLives` bounds the number of lives that are kept; `LifeRecorder` fills them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, assert_never

from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler import (
    AcquittalReason,
    DeliverTokens,
    Effect,
    ExecutorGone,
    ExecutorServes,
    LossCause,
    MoveReason,
    RequestAcquitted,
    RequestAssigned,
    RequestFinished,
    RequestLocation,
    RequestMoved,
    RequestQuarantined,
    RequestSubmitted,
    SendStep,
    StepProgressed,
)
from scheduler_service.scheduler.values import (
    AssignedFor,
    Assignment,
    KvLost,
    Note,
    Preempted,
    PreemptionMode,
    Request,
    StartedRequest,
    StepOutcome,
    StepPlan,
    SwappedIn,
)
from scheduler_service.watching.life import (
    NO_NUMBERS,
    Life,
    LifeEvent,
    LifeKind,
    RequestPhase,
    StepRows,
)
from scheduler_service.watching.transition import RequestRefused, Submission, Transition, end_of


class BoundedLives:
    """Lives by key, in a bounded number of places that all tenants share.

    If more than `num_places` are needed, the tenant with most lives loses its oldest life with
    `gives_oldest`, else its youngest.
    """

    def __init__(self, num_places: int, *, gives_oldest: bool) -> None:
        self._num_places = num_places
        self._gives_oldest = gives_oldest
        self._lives: dict[str, Life] = {}
        self._by_tenant: dict[str, OrderedDict[str, Life]] = {}

    def __len__(self) -> int:
        return len(self._lives)

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def get(self, key: str) -> Life | None:
        """Returns the life with this key, or None."""
        return self._lives.get(key)

    def add(self, life: Life) -> None:
        """Adds a life, replacing one with the same key. Evicts a life if there are too many."""
        self.remove(life.key)
        self._lives[life.key] = life
        self._by_tenant.setdefault(life.tenant, OrderedDict())[life.key] = life
        if len(self._lives) > self._num_places:
            most = max(self._by_tenant.values(), key=len)
            self.remove(next(iter(most) if self._gives_oldest else reversed(most)))

    def remove(self, key: str) -> Life | None:
        """Removes and returns the life with this key, or None."""
        life = self._lives.pop(key, None)
        if life is not None:
            of_tenant = self._by_tenant[life.tenant]
            del of_tenant[key]
            if not of_tenant:
                del self._by_tenant[life.tenant]
        return life


Listener: TypeAlias = Callable[[Life, LifeEvent], None]
# A request of the waiting queue, and (address, reason) of each executor that cannot begin it.
Head: TypeAlias = tuple[Request, Sequence[tuple[str, str]]]

# Reasons of this module; all other reasons come from the scheduler.
BEHIND_OTHERS = "behind_others"
NO_EXECUTOR = "no_executor"
# Reason of a request that waited before the first event of a journal.
NOT_RECORDED = "not_recorded"
# Minimum time between two inspections of the head of the waiting queue.
_BETWEEN_HEADS_NS = 100_000_000
# Places for unfinished requests beyond `num_kept`.
_NUM_MORE_LIVING = 1024
# If executors have different reasons, the request waits for the first of these.
_NEAREST_FIRST = (
    "about_to_begin",
    "awaits_better",
    "budget",
    "others_wait_there",
    "blocks_on_their_way",
    "blocks",
)
_FARTHEST = "does_not_fit"
_WAITING = frozenset(
    {RequestPhase.ASSIGNED, RequestPhase.PREEMPTED, RequestPhase.SWAPPED, RequestPhase.RECOVERING}
)


class LifeRecorder:
    """Keeps the lives of unfinished requests, and of the last `num_kept` that ended.

    Implements `Watcher`. Numbers of events, of which zeros may be missing: RECEIVED num_waiting
    (requests that waited for an executor before this one), num_prompt_tokens, num_resumed_tokens;
    ASSIGNED the numbers of its `Assignment`; QUARANTINED num_trials (tokens that the request has to
    get alone); BEGAN num_tokens (known tokens), num_cached (of these, tokens that need not be
    computed), num_on_host (of the cached ones, tokens from the host pool); FIRST_TOKEN and RESUMED
    num_chunks, num_prompt_tokens; ENDED num_output_tokens, num_more_tokens, num_drafts,
    num_accepted. `num_kept_at_most`: same as `num_kept`. Rows that only decode cost nothing per
    step.
    """

    def __init__(self, num_kept: int, now_ns: Callable[[], int]) -> None:
        """Keeps `num_kept` ended lives and 1024 more of unfinished requests.

        `now_ns`: the clock of turns.
        """
        self.num_kept_at_most = num_kept
        self._clock_ns = now_ns
        # Time of the current turn, in nanoseconds.
        self._now_ns = 0
        self._next_heads_ns = 0
        self._living = BoundedLives(num_kept + _NUM_MORE_LIVING, gives_oldest=False)
        self._ended = BoundedLives(num_kept, gives_oldest=True)
        self._rows: dict[str, StepRows] = {}
        self._heads: dict[str, Life] = {}
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each later event, at once. Returns a function that ends the calls.

        `listener` must return soon and raise nothing.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @property
    def now_ns(self) -> int:
        """Present time in nanoseconds, by the clock of events."""
        return self._clock_ns()

    @property
    def living(self) -> Iterable[Life]:
        """Lives of unfinished requests, oldest first."""
        return self._living

    @property
    def ended(self) -> Iterable[Life]:
        """Lives of requests that ended or were refused, oldest first."""
        return self._ended

    @property
    def num_living(self) -> int:
        """Number of lives of unfinished requests."""
        return len(self._living)

    @property
    def num_ended(self) -> int:
        """Number of lives of requests that ended or were refused."""
        return len(self._ended)

    def settle(self, life: Life) -> None:
        """Moves the counts of a life's rows at its executor into the life."""
        rows = self._rows.get(life.executor)
        if rows is not None:
            rows.settle(life)

    # -- Turns ---------------------------------------------------------------------------------

    def see(self, turn: Transition) -> None:
        self._now_ns = turn.now_ns
        if (answered := turn.answered) is not None:
            self._step_answered(answered.address, answered.outcome)
        elif (progressed := turn.progressed) is not None:
            self._step_progressed(progressed)
        elif isinstance(event := turn.event, RequestSubmitted) and turn.submission is not None:
            self._submitted(event.request, turn.submission)
        elif isinstance(event, RequestRefused):
            self._refused(event)
        for effect in turn.effects:
            if isinstance(effect, SendStep):
                self._step_sent(effect.address, effect.plan)
            elif isinstance(effect, DeliverTokens):
                for request in effect.events.finished:
                    self._finished(request)
            else:
                self._see_change(effect)
        scheduler = turn.scheduler
        # If steps are about to be planned, these may take requests of the queue.
        is_due = turn.now_ns >= self._next_heads_ns and not scheduler.is_about_to_plan
        if is_due and scheduler.num_queued:
            self._next_heads_ns = turn.now_ns + _BETWEEN_HEADS_NS
            self._heads_wait(scheduler.heads())

    def _see_change(self, effect: Effect) -> None:
        match effect:
            case RequestAssigned(request, address, assignment):
                self._assigned(request, address, assignment)
            case RequestFinished(request):
                self._finished(request)
            case RequestMoved(request, _, reason):
                self._leave(request, LifeKind.TAKEN_BACK, reason.value)
            case RequestQuarantined(request):
                self._quarantined(request)
            case RequestAcquitted(request, why):
                self._acquitted(request, why)
            case ExecutorGone():
                self._executor_gone(effect)
            case ExecutorServes():
                self._next_heads_ns = 0  # the reasons may have changed

    def _refused(self, refused: RequestRefused) -> None:
        name = refused.name
        if not name.own_id or self._living.get(name.key) is not None:
            return  # no id, or the id of an unfinished request
        now_ns = self._now_ns
        life = self._ended.remove(name.key)
        if life is None or not _was_refused(life):
            life = Life(name.key, name.own_id, refused.tenant, now_ns)
        life.end(now_ns)
        self._ended.add(life)
        self._add(life, LifeKind.REFUSED, refused.reason, detail=refused.detail)

    def _submitted(self, request: Request, submission: Submission) -> None:
        numbers = {"num_waiting": submission.num_waiting}
        self._begin(request, submission.admission.name, BEHIND_OTHERS, numbers)

    def add_unfinished(self, place: RequestLocation, now_ns: int) -> None:
        """Records a request of a journal that was unfinished before the first recorded event."""
        request = place.request
        name = RequestName.of_key(request.request_id, request.scheduling.tenant)
        self._now_ns = now_ns if request.submitted_ns is None else request.submitted_ns
        self._begin(request, name, NOT_RECORDED, {})
        self._now_ns = now_ns
        if request.num_trials_left:
            self._quarantined(request)
        if place.executor is not None:
            assignment = Assignment(AssignedFor.TRIED_ALONE) if request.num_trials_left else None
            self._assigned(request, place.executor.address, assignment)

    def _begin(
        self, request: Request, name: RequestName, waits_for: str, numbers: dict[str, int]
    ) -> None:
        now_ns = self._now_ns
        life = Life(name.key, name.own_id, request.scheduling.tenant, now_ns)
        life.client_key = request.client_key
        before = self._ended.get(name.key)
        if before is not None and _was_refused(before):
            life.events = before.events
            self._ended.remove(name.key)
        self._living.add(life)
        life.enter(now_ns, RequestPhase.QUEUED, waits_for)
        numbers = {**numbers, "num_prompt_tokens": request.sequence.num_prompt_tokens}
        if num_resumed := sum(each.num_output_tokens for each in request.sequences):
            numbers["num_resumed_tokens"] = num_resumed
        self._add(life, LifeKind.RECEIVED, numbers=numbers)

    def _assigned(self, request: Request, address: str, assignment: Assignment | None) -> None:
        life = self._living.get(request.request_id)
        if life is None:
            return
        self._heads.pop(life.key, None)
        life.executor = address
        phase = (
            RequestPhase.RECOVERING
            if life.part.phase is RequestPhase.RECOVERING
            else RequestPhase.ASSIGNED
        )
        life.enter(self._now_ns, phase, "", address)
        if assignment is None:
            self._add(life, LifeKind.ASSIGNED)
        else:
            self._add(life, LifeKind.ASSIGNED, assignment.why.value, _numbers_of(assignment))

    def _quarantined(self, request: Request) -> None:
        life = self._living.get(request.request_id)
        if life is not None:
            life.enter(self._now_ns, life.part.phase, LifeKind.QUARANTINED.value, life.executor)
            self._add(life, LifeKind.QUARANTINED, "", {"num_trials": request.num_trials_left})

    def _acquitted(self, request: Request, why: AcquittalReason) -> None:
        life = self._living.get(request.request_id)
        if life is not None:
            if life.part.reason == LifeKind.QUARANTINED.value:
                life.enter(self._now_ns, life.part.phase, BEHIND_OTHERS)
            self._add(life, LifeKind.ACQUITTED, why.value)

    def _executor_gone(self, gone: ExecutorGone) -> None:
        if gone.cause is not LossCause.WITHDRAWN:  # `RequestMoved` came before for each request
            for request in gone.requests:
                if gone.cause is LossCause.BLAMELESS:
                    self._leave(request, LifeKind.TAKEN_BACK, MoveReason.DRAINED.value)
                else:
                    self._leave(request, LifeKind.EXECUTOR_LOST, "")
        self._rows.pop(gone.address, None)

    def _heads_wait(self, heads: Sequence[Head]) -> None:
        now_ns, before, self._heads = self._now_ns, self._heads, {}
        for request, reasons in heads:
            life = self._living.get(request.request_id)
            if life is not None:
                self._heads[life.key] = life
                reason, executor = _nearest(reasons)
                self._wait(life, now_ns, reason, executor)
        for key in before.keys() - self._heads.keys():
            if before[key].part.phase in (RequestPhase.QUEUED, RequestPhase.RECOVERING):
                self._wait(before[key], now_ns, BEHIND_OTHERS, "")

    def _step_sent(self, address: str, plan: StepPlan) -> None:
        for note in plan.notes:
            self._take_note(note)
        for request, blocker in plan.blockers.items():
            life = self._living.get(request.request_id)
            if life is not None and life.part.phase in _WAITING:
                self._wait(life, self._now_ns, blocker.value, address)
        rows = self._rows.get(address)
        if rows is None:
            rows = self._rows[address] = StepRows()
        rows.sent(plan, self._living.get)

    def _step_answered(self, address: str, outcome: StepOutcome) -> None:
        rows = self._rows.get(address)
        if rows is not None:
            self._got_tokens(rows.answered(outcome))

    def _step_progressed(self, progressed: StepProgressed) -> None:
        rows = self._rows.get(progressed.address)
        if rows is not None:
            self._got_tokens(rows.progressed(progressed.part))

    def _got_tokens(self, lives: Iterable[Life]) -> None:
        """Records that lives got the token that they awaited."""
        for life in lives:
            if life.ended_ns is not None:
                continue
            numbers = {"num_chunks": life.num_chunks, "num_prompt_tokens": life.num_prompt_tokens}
            if life.part.phase is RequestPhase.PROMPT:
                life.enter(self._now_ns, RequestPhase.TOKENS, "", life.executor)
            kind = LifeKind.RESUMED if life.has_token else LifeKind.FIRST_TOKEN
            life.has_token = True
            self._add(life, kind, numbers=numbers)

    def _finished(self, request: Request) -> None:
        life = self._living.remove(request.request_id)
        if life is None:
            return
        self._heads.pop(life.key, None)
        rows = self._rows.get(life.executor)
        if rows is not None:
            rows.forget(life)
        life.num_output_tokens = sum(each.num_output_tokens for each in request.sequences)
        life.end(self._now_ns)
        self._ended.add(life)
        detail = "" if request.error is None else request.error[1]
        self._add(life, LifeKind.ENDED, end_of(request), _end_numbers(life), detail)

    # -- Helpers -------------------------------------------------------------------------------

    def _take_note(self, note: Note) -> None:
        """Records a change that an engine made to a request while it planned a step."""
        life = self._living.get(note.request.request_id)
        if life is None:
            return
        now_ns = self._now_ns
        match note:
            case StartedRequest():
                life.awaits_token = life.has_begun = True
                reason = "again" if life.num_chunks else ""
                life.enter(now_ns, RequestPhase.PROMPT, reason, life.executor)
                numbers = {"num_tokens": note.num_tokens, "num_cached": note.num_cached}
                if note.num_on_host:
                    numbers["num_on_host"] = note.num_on_host
                self._add(life, LifeKind.BEGAN, numbers=numbers)
            case Preempted():
                is_swapped = note.mode is PreemptionMode.SWAP
                phase = RequestPhase.SWAPPED if is_swapped else RequestPhase.PREEMPTED
                life.enter(now_ns, phase, note.cause.value, life.executor)
                kind = LifeKind.SWAPPED_OUT if is_swapped else LifeKind.PREEMPTED
                self._add(life, kind, note.cause.value)
            case SwappedIn():
                phase = RequestPhase.PROMPT if life.awaits_token else RequestPhase.TOKENS
                life.enter(now_ns, phase, "", life.executor)
                self._add(life, LifeKind.SWAPPED_IN)
            case KvLost():
                if life.part.phase is not RequestPhase.RECOVERING:  # one event for all sequences
                    life.enter(now_ns, RequestPhase.RECOVERING, "step_failed", life.executor)
                    self._add(life, LifeKind.KV_LOST)
            case _:
                assert_never(note)

    def _leave(self, request: Request, kind: LifeKind, reason: str) -> None:
        """Records that a request left its executor, and releases its rows there."""
        life = self._living.get(request.request_id)
        if life is None:
            return
        rows = self._rows.get(life.executor)
        if rows is not None:
            rows.forget(life)
        phase = RequestPhase.RECOVERING if life.has_begun else RequestPhase.QUEUED
        life.enter(self._now_ns, phase, reason or kind.value, life.executor)
        self._add(life, kind, reason)

    def _wait(self, life: Life, now_ns: int, reason: str, executor: str) -> None:
        event = life.wait(now_ns, reason, executor)
        if event is not None:
            self._notify(life, event)

    def _add(
        self,
        life: Life,
        kind: LifeKind,
        reason: str = "",
        numbers: Mapping[str, int] = NO_NUMBERS,
        detail: str = "",
    ) -> None:
        self._notify(life, life.add(self._now_ns, kind, reason, numbers, detail))

    def _notify(self, life: Life, event: LifeEvent) -> None:
        for listener in self._listeners:
            listener(life, event)


def _was_refused(life: Life) -> bool:
    return all(event.kind is LifeKind.REFUSED for event in life.events)


def _nearest(reasons: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Returns the reason for which a request waits, and the address if one executor alone has it.

    Prefers reasons of _NEAREST_FIRST, then any reason but _FARTHEST. The address is empty if
    several executors have the reason. NO_EXECUTOR if `reasons` is empty.
    """
    names = Counter(reason for _, reason in reasons)
    if not names:
        return NO_EXECUTOR, ""
    found = next((name for name in _NEAREST_FIRST if name in names), None)
    found = found or next((name for name in names if name != _FARTHEST), _FARTHEST)
    about = [address for address, reason in reasons if reason == found]
    return found, about[0] if len(about) == 1 else ""


def _numbers_of(assignment: Assignment) -> dict[str, int]:
    """Returns the numbers of an assignment, without counts of zero and unknown costs."""
    numbers = {
        "num_cached": assignment.num_cached or None,
        "num_ahead": assignment.num_ahead or None,
        "num_running": assignment.num_running or None,
        "cost_us": assignment.cost_us,
        "num_cached_elsewhere": assignment.num_cached_elsewhere or None,
        "cost_elsewhere_us": assignment.cost_elsewhere_us,
    }
    return {name: number for name, number in numbers.items() if number is not None}


def _end_numbers(life: Life) -> dict[str, int]:
    numbers = {"num_output_tokens": life.num_output_tokens}
    if life.num_more_tokens:
        numbers["num_more_tokens"] = life.num_more_tokens
    if life.num_drafts:
        numbers["num_drafts"] = life.num_drafts
        numbers["num_accepted"] = life.num_accepted
    return numbers
