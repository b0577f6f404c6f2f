"""What one watcher is told: the state, and what has changed since the last frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from scheduler_service.cluster import Cluster
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.live import reasons
from scheduler_service.live.holders import device_holders, host_holders
from scheduler_service.live.names import MAX_NAMES, Names
from scheduler_service.live.pool_map import PoolMap, block_states
from scheduler_service.live.step_log import LoggedStep, StepLog
from splitserve.scheduler.v1 import live_pb2 as live

# Of a queue.
MAX_WAITING = 32
_MS = 1_000_000
_US = 1_000


@dataclass(slots=True)
class _Told:
    """Of one life of an executor. `num_steps`: how many steps were answered by the last frame."""

    device: PoolMap
    host: PoolMap
    num_steps: int


class Watcher:
    """Makes frames, each when it is sent. `logs`: steps of executors, by address."""

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        log_of: Callable[[str], StepLog],
        unix_ms: Callable[[], int],
    ) -> None:
        self._cluster = cluster
        self._names = names
        self._log_of = log_of
        self._unix_ms = unix_ms
        self._told: dict[tuple[str, int], _Told] = {}
        self._known: set[int] = set()
        # Numbers of requests that the frame names.
        self._named: set[int] = set()

    def frame(self) -> live.WatchSchedulerResponse:
        """Of this moment; to be called in the event loop, between steps of cores."""
        cluster = self._cluster
        frame = live.WatchSchedulerResponse(
            unix_ms=self._unix_ms(),
            now_ms=cluster.now_ns() // _MS,
            num_waiting=cluster.num_unassigned,
            num_quarantined=cluster.num_quarantined,
        )
        self._named = set()
        engines = cluster.engines
        waiting = cluster.first_waiting(MAX_WAITING)
        frame.waiting.extend(self._name(waiting))
        if waiting:
            frame.reasons.extend(reasons.of_fleet(waiting[0], engines))
        for engine in engines:
            self._tell_executor(engine, frame.executors.add())
        self._told = {engine.life: self._told[engine.life] for engine in engines}
        self._tell_names(frame)
        return frame

    def _name(self, requests: list[Request]) -> list[int]:
        """Their numbers, of which the watcher is to know the names."""
        self._names.see(requests)
        numbers = [request.arrival for request in requests]
        self._named.update(numbers)
        return numbers

    def _tell_names(self, frame: live.WatchSchedulerResponse) -> None:
        new = self._named - self._known
        if len(self._known) + len(new) > MAX_NAMES:
            frame.forgets_requests = True
            self._known.clear()
            new = self._named
        frame.new_requests.extend(self._names.of(sorted(new)))
        self._known |= new

    # -- an executor ---------------------------------------------------------------------------

    def _tell_executor(self, engine: EngineLoop, told: live.LiveExecutor) -> None:
        core = engine.scheduler
        rows, placement = core.placement.rows, core.placement
        told.address, told.life = engine.life
        told.state = _state_of(engine)
        order = rows.order
        running = self._name([sequence.request for sequence in rows.running])
        told.running.extend(running)
        told.num_tokens.extend(rows.num_known[order].tolist())
        told.num_computed.extend(rows.num_computed[order].tolist())
        told.swapped.extend(self._name(placement.swapped))
        told.waiting.extend(self._name(list(islice(placement.queued, MAX_WAITING))))
        told.num_waiting = core.num_waiting
        reason = reasons.of_core(told.address, core)
        if reason is not None:
            told.reason.CopyFrom(reason)
        told.max_num_seqs = core.config.max_num_seqs
        told.num_in_flight = core.num_in_flight
        told.num_steps = core.num_steps
        told.num_preemptions = core.num_preemptions
        self._tell_changes(engine, core, np.array(running, np.int64), told)

    def _tell_changes(
        self,
        engine: EngineLoop,
        core: Scheduler,
        numbers: np.ndarray[tuple[int], np.dtype[np.int64]],
        told: live.LiveExecutor,
    ) -> None:
        """Steps and blocks. `numbers`: of the requests of rows, in their order."""
        log, placement = self._log_of(told.address), core.placement
        device, host = core.pools
        if engine.life not in self._told:
            block_size = core.config.block_size
            self._told[engine.life] = _Told(
                PoolMap(device.num_blocks, block_size),
                PoolMap(host.num_blocks, block_size),
                log.num_answered,
            )
        before = self._told[engine.life]
        steps = list(log.since(before.num_steps))
        before.num_steps = log.num_answered
        for step in steps:
            self._tell_step(step, told.steps.add())
        moving = [step for step in [*steps, *log.in_flight] if step.moves]
        blocks = placement.blocks
        given_back = [block for _, held in blocks.deferred for block in held]
        moved = set[int]().union(*(step.device_blocks for step in moving))
        states = block_states(device, given_back, moved)
        before.device.tell(states, device_holders(placement, numbers), told.device)
        told.host.block_size = core.config.block_size
        if host.num_blocks:
            moved = set[int]().union(*(step.host_blocks for step in moving))
            before.host.tell(block_states(host, (), moved), host_holders(placement), told.host)

    def _tell_step(self, step: LoggedStep, told: live.LiveStep) -> None:
        told.step_id = step.step_id
        told.sent_ms = step.sent_ns // _MS
        told.round_trip_us = step.round_trip_ns // _US
        told.compute_us = step.compute_us
        numbers = step.numbers
        self._named.update(numbers)
        told.rows.extend(numbers)
        told.kinds = step.kinds
        told.num_tokens.extend(step.num_tokens)
        told.num_rows = len(step.work.row_ids)
        told.num_sampled = step.num_sampled
        told.num_swapped_out = len(step.moves.swap_out)
        told.num_swapped_in = len(step.moves.swap_in)
        told.num_copied = len(step.moves.copy)
        told.failed = step.is_failed


def _state_of(engine: EngineLoop) -> live.LiveState:
    if engine.is_draining:
        return live.LIVE_STATE_DRAINING
    if not engine.is_connected:
        return live.LIVE_STATE_DISCONNECTED
    return live.LIVE_STATE_SERVING if engine.takes_requests else live.LIVE_STATE_LATE
