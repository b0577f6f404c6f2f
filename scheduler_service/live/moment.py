"""A scheduler at one moment, and the frames that bring watchers there from moments before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from scheduler_service.core.request import Request
from scheduler_service.driver import Driver
from scheduler_service.live import reasons
from scheduler_service.live.executor_view import (
    MAX_WAITING,
    ExecutorView,
    first_queued,
    view_executor,
)
from scheduler_service.live.history import History
from scheduler_service.live.names import Names, NamesMark
from scheduler_service.live.row_owners import RowOwners
from scheduler_service.live.step_log import StepLog
from scheduler_service.scheduler.effects import ExecutorGone, SendStep
from scheduler_service.scheduler.executor_state import ExecutorState
from scheduler_service.scheduler.scheduler import Scheduler
from scheduler_service.watching.turn import Turn
from splitserve.scheduler.v1 import live_pb2 as live

_MS = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """All watchers who were at the same moment before are brought here by the same frame.

    `number`: which moment it is. `told`: what every frame says. `executors`: by their lives.
    `last_point`: number of the latest point of `history` that was over.
    """

    number: int
    told: live.WatchSchedulerResponse
    executors: Mapping[tuple[str, int], ExecutorView]
    names: Names
    mark: NamesMark
    history: History
    last_point: int
    # By the number of the moment before, None for none: no more of them than there are watchers.
    frames: dict[int | None, live.WatchSchedulerResponse] = field(default_factory=dict)

    def frame_after(self, before: Moment | None) -> live.WatchSchedulerResponse:
        """What somebody is told who was told all of `before`; None for nothing.

        It is shared, so nobody may change it. To be called before there is a later moment.
        """
        number = None if before is None else before.number
        frame = self.frames.get(number)
        if frame is None:
            frame = self.frames[number] = self._frame_after(before)
        return frame

    def _frame_after(self, before: Moment | None) -> live.WatchSchedulerResponse:
        frame = live.WatchSchedulerResponse()
        frame.CopyFrom(self.told)
        self.names.tell(None if before is None else before.mark, self.mark, frame)
        for point in self.history.points_after(-1 if before is None else before.last_point):
            point.tell(frame.history.add())
        for view in self.executors.values():
            seen = None if before is None else before.executors.get(view.life)
            told = frame.executors.add()
            told.CopyFrom(view.told)
            view.tell_changes(seen, told)
        return frame


@dataclass(frozen=True, slots=True)
class Watched:
    """What is remembered while somebody watches `cluster`. `logs`: of executors, by address."""

    cluster: Driver
    names: Names
    history: History
    logs: dict[str, StepLog]

    def log_of(self, engine: ExecutorState) -> StepLog:
        """Its steps from now on; whose rows are taken already is known."""
        address, rows = engine.life[0], engine.engine.placement.rows
        log = self.logs.get(address)
        if log is None or log.owners.rows is not rows:
            log = self.logs[address] = StepLog(RowOwners(rows))
            self.names.see(log.owners.refresh())
        return log

    def see(self, turn: Turn) -> None:
        """Takes note of steps that were sent and answered."""
        if (answered := turn.answered) is not None:
            log = self._log_at(answered.address, turn.scheduler)
            if log is not None:
                log.took(answered.outcome, turn.now_ns)
        for effect in turn.effects:
            if isinstance(effect, SendStep):
                log = self._log_at(effect.address, turn.scheduler)
                if log is not None:
                    log.sent(effect.plan, turn.sent_ns, self.names)
            elif isinstance(effect, ExecutorGone):
                self.logs.pop(effect.address, None)

    def _log_at(self, address: str, scheduler: Scheduler) -> StepLog | None:
        """Returns the steps of an executor; None for one that is gone."""
        log = self.logs.get(address)
        if log is None:
            executor = scheduler.executors.get(address)
            log = None if executor is None else self.log_of(executor)
        return log

    def moment(self, number: int, unix_ms: int, before: Moment | None) -> Moment:
        """Of now; to be called in the event loop, between steps of cores. `before`: the last."""
        cluster, names = self.cluster, self.names
        told = live.WatchSchedulerResponse(
            unix_ms=unix_ms,
            now_ms=cluster.now_ns() // _MS,
            num_waiting=cluster.scheduler.num_waiting,
            num_quarantined=cluster.scheduler.num_quarantined,
        )
        engines = cluster.executors
        waiting = cluster.scheduler.first_waiting(MAX_WAITING)
        told.waiting.extend(names.numbers_of(waiting))
        if waiting:
            told.reasons.extend(reasons.of_fleet(waiting[0], engines))
        executors = {}
        for engine in engines:
            life = engine.life
            seen = None if before is None else before.executors.get(life)
            executors[life] = view_executor(engine, names, self.log_of(engine), seen)
        names.tidy(lambda: self._used(told, executors), lambda: chain(waiting, _shown(engines)))
        history = self.history
        history.tell_recent(told.time_to_first_token)
        last_point = history.points[-1].number if history.points else -1
        return Moment(number, told, executors, names, names.mark, history, last_point)

    def _used(
        self,
        told: live.WatchSchedulerResponse,
        executors: Mapping[tuple[str, int], ExecutorView],
    ) -> set[int]:
        """Numbers of requests that frames of this moment, and steps of later ones, may name."""
        views = [view.told for view in executors.values()]
        steps = [step for log in self.logs.values() for step in (*log.answered, *log.in_flight)]
        return {
            *told.waiting,
            *chain.from_iterable(chain(each.running, each.swapped, each.waiting) for each in views),
            *chain.from_iterable(step.request_numbers for step in steps),
        }


def _shown(engines: Iterable[ExecutorState]) -> Iterator[Request]:
    """Requests that these have, as far as they are told."""
    for engine in engines:
        placement = engine.engine.placement
        yield from (sequence.request for sequence in placement.rows.running)
        yield from placement.swapped
        yield from first_queued(engine.engine)
