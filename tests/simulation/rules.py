"""What must hold of any history, whatever went wrong in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from scheduler_service.driver import Driver
from scheduler_service.journal import replay
from scheduler_service.journal.__main__ import describe
from scheduler_service.watching import Life, LifeKind
from splitserve_client import (
    DeadlineUnreachable,
    Draining,
    ModelNotReady,
    QueueFull,
    RequestFailed,
    ServerUnreachable,
    SplitserveError,
)
from tests.simulation.client_process import Outcome
from tests.simulation.faults import World

_ENDS = frozenset({LifeKind.ENDED, LifeKind.REFUSED})
# What a request may be told before anything of it has come.
_REFUSALS = (QueueFull, ModelNotReady)
_OF_ROWS = frozenset({"ROW_FAILED", "INVALID_LOGITS", "RESULT_INVALID"})


def problems_of_outcomes(world: World) -> list[str]:
    """Every client got the truth, or was told by name why not, where that may be."""
    problems = []
    for outcome in (outcome for client in world.clients for outcome in client.outcomes):
        name = outcome.wanted.request_id
        if outcome.wrong is not None:
            problems.append(f"{name}: {outcome.wrong}")
        elif outcome.error is not None and not _is_allowed(outcome, outcome.error, world):
            problems.append(f"{name} failed: {outcome.error!r} {outcome.error.reason}")
    return problems


def _is_allowed(outcome: Outcome, error: SplitserveError, world: World) -> bool:
    wanted = outcome.wanted
    match error:
        case DeadlineUnreachable():
            is_asked_for = wanted.scheduling.deadline_s is not None
            return is_asked_for and world.config.policies.queue_policy == "deadline"
        case RequestFailed(reason=reason):
            is_spoiled = not wanted.seeds.isdisjoint(world.spoiled_seeds)
            if reason == "EXECUTOR_LOST_REPEATEDLY" and world.may_be_helpless:
                return True
            if reason == "EXECUTOR_LOST_REPEATEDLY":
                # Whoever is in flight each time may be failed for the last, however innocent.
                least = world.config.max_executor_losses + 1
                logs = [log for scheduler in world.schedulers for log in scheduler.loss_logs]
                return any(len(log.losses) >= least for log in logs)
            return is_spoiled and reason in _OF_ROWS
        case ServerUnreachable():
            # Who cannot connect at all is told at once, if it asks alone.
            return not wanted.in_session and not outcome.events
        case Draining() if len(world.schedulers) == 1:
            return world.has_stopped_schedulers
    return isinstance(error, _REFUSALS) and not outcome.events


def problems_of_rest(world: World) -> list[str]:
    """When nothing is to be done, nothing is held."""
    clusters = [s.cluster for s in world.schedulers if s.cluster is not None]
    engines = [engine for cluster in clusters for engine in cluster.executors]
    here = sorted(engine.address for engine in engines)
    expected = sorted(executor.address for executor in world.executors)
    problems = [] if here == expected else [f"{here} are connected; expected: {expected}"]
    held = dict[str, int]()
    for cluster in clusters:
        held |= _held(cluster)
    problems += [f"{count} {what} are held" for what, count in held.items() if count]
    if not world.has_failed_steps:  # after which steps that are under way read what is not there
        for executor in world.executors:
            problems += [f"{executor.host}: {violation}" for violation in executor.violations[:3]]
    return problems


def _held(cluster: Driver) -> dict[str, int]:
    held = {
        "requests": cluster.num_unfinished,
        "unassigned requests": cluster.scheduler.num_waiting,
        "streams": len(cluster.delivery.streams),
        "sinks": len(cluster.delivery.sinks),
        "unread bytes": cluster.delivery.unread.num_bytes,
    }
    # Who is withdrawn computes probes now and then.
    for engine in (engine for engine in cluster.executors if not engine.is_withdrawn):
        core, info = engine.engine, cluster.info_of(engine.address)
        held[f"blocks of {info.address}"] = info.num_device_blocks - core.num_free_blocks
        held[f"host blocks of {info.address}"] = info.num_host_blocks - core.num_free_host_blocks
        held[f"steps in flight of {info.address}"] = core.num_in_flight
    return held


def problems_of_lives(world: World) -> list[str]:
    """When nothing is to be done: all have ended, and their time is that of its parts."""
    problems: list[str] = []
    for scheduler in world.schedulers:
        if scheduler.cluster is not None and scheduler.recorder is not None:
            problems += [f"{life.key} goes on" for life in scheduler.recorder.living]
            for life in scheduler.recorder.ended:
                problems += [f"life of {life.key}: {problem}" for problem in _life_problems(life)]
    return problems


def _life_problems(life: Life) -> Iterator[str]:
    events = life.events
    kinds = [event.kind for event in events]
    if kinds[-1] not in _ENDS:
        yield f"it ends with {kinds[-1]}"
    if any(before.at_ns > after.at_ns for before, after in pairwise(events)):
        yield "it goes back in time"
    if LifeKind.RECEIVED not in kinds:
        return
    received = events[kinds.index(LifeKind.RECEIVED)]
    spent_ns = sum(life.parts(events[-1].at_ns).values())
    if spent_ns != events[-1].at_ns - received.at_ns:
        yield f"its parts are {spent_ns} ns of {events[-1].at_ns - received.at_ns}"
    if kinds.count(LifeKind.FIRST_TOKEN) > 1:
        yield "it has several first tokens"
    for kind, needed in (
        (LifeKind.BEGAN, LifeKind.ASSIGNED),
        (LifeKind.FIRST_TOKEN, LifeKind.BEGAN),
    ):
        if kind in kinds and needed not in kinds[: kinds.index(kind)]:
            yield f"{kind} comes before {needed}"


def problems_of_journals(folder: Path | None) -> list[str]:
    """A scheduler that handles the events of a journal again returns the same effects."""
    if folder is None:
        return []
    reports = [(path, replay(path)) for path in sorted(folder.iterdir())]
    problems = [describe(path, report) for path, report in reports if report.difference is not None]
    problems += [f"{path.name} ends in the middle" for path, report in reports if report.is_cut]
    return problems if reports else ["there is no journal"]


def problems_of_end(world: World) -> list[str]:
    """When all have ended, no task is left in any process there ever was."""
    processes = [client.process for client in world.clients]
    processes += [process for each in world.schedulers for process in each.processes]
    processes += [process for executor in world.executors for process in executor.processes]
    left = [(process, task) for process in processes for task in process.tasks]
    return [f"{process.host}: {task!r} is left" for process, task in left]
