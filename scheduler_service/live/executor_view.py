"""One executor at one moment, read off its core: what is said of it to whoever watches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from scheduler_service.core.request import Int64Array, Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.live import reasons
from scheduler_service.live.holders import device_holders, host_holders
from scheduler_service.live.names import Names
from scheduler_service.live.pool_map import PoolMap, block_states
from scheduler_service.live.step_log import LoggedStep, StepLog
from scheduler_service.scheduler.executor_state import ExecutorState
from splitserve.scheduler.v1 import live_pb2 as live

# Of a queue.
MAX_WAITING = 32


@dataclass(frozen=True, slots=True, eq=False)
class ExecutorView:
    """One life of an executor. `told`: all of it that every frame says.

    `steps`: the latest that were answered; `num_steps`: how many were, while somebody watched.
    """

    life: tuple[str, int]
    told: live.LiveExecutor
    device: PoolMap
    host: PoolMap
    steps: Sequence[LoggedStep]
    num_steps: int

    def tell_changes(self, before: ExecutorView | None, told: live.LiveExecutor) -> None:
        """Adds to `told` the steps and blocks that were not told at `before`."""
        num_told = 0 if before is None else before.num_steps
        for step in self.steps:
            if step.number > num_told:
                step.tell(told.steps.add())
        self.device.tell_changes(None if before is None else before.device, told.device)
        self.host.tell_changes(None if before is None else before.host, told.host)


def view_executor(
    engine: ExecutorState, names: Names, log: StepLog, before: ExecutorView | None
) -> ExecutorView:
    """What it is now; to be called in the event loop, between steps of the core.

    `before`: of the moment before. Blocks that steps moved since then are on the move.
    """
    core = engine.engine
    names.see(log.owners.refresh())
    numbers: Int64Array = log.owners.now[0, core.placement.rows.order]
    steps = tuple(log.answered)
    num_before = 0 if before is None else before.num_steps
    late = [step for step in steps if step.number > num_before]
    moving = [step for step in [*late, *log.in_flight] if step.moves]
    device, host = core.pools
    placement, block_size = core.placement, core.config.block_size
    given_back = [block for _, held in placement.blocks.deferred for block in held]
    moved = set[int]().union(*(step.device_blocks for step in moving))
    moved_on_host = set[int]().union(*(step.host_blocks for step in moving))
    return ExecutorView(
        engine.life,
        _tell(engine, core, names, numbers.tolist()),
        PoolMap(
            block_size,
            block_states(device, given_back, moved),
            device_holders(core, numbers),
        ),
        PoolMap(block_size, block_states(host, (), moved_on_host), host_holders(placement))
        if host.num_blocks
        else PoolMap.of_none(block_size),
        steps,
        log.num_answered,
    )


def _tell(
    engine: ExecutorState, core: Scheduler, names: Names, running: list[int]
) -> live.LiveExecutor:
    told = live.LiveExecutor()
    rows, placement = core.placement.rows, core.placement
    told.address, told.life = engine.life
    told.state = _state_of(engine)
    order = rows.order
    told.running.extend(running)
    told.num_tokens.extend(rows.num_known[order].tolist())
    told.num_computed.extend(rows.num_computed[order].tolist())
    if placement.swapped:
        told.swapped.extend(names.numbers_of(placement.swapped))
    if core.num_waiting:
        told.waiting.extend(names.numbers_of(first_queued(core)))
        told.num_waiting = core.num_waiting
    reason = reasons.of_core(told.address, core)
    if reason is not None:
        told.reason.CopyFrom(reason)
    told.max_num_seqs = core.config.max_num_seqs
    told.num_in_flight = core.num_in_flight
    told.num_steps = core.num_steps
    told.num_preemptions = core.num_preemptions
    return told


def first_queued(core: Scheduler) -> list[Request]:
    """Of those that wait there, the ones that are told."""
    return list(islice(core.queued, MAX_WAITING))


def _state_of(engine: ExecutorState) -> live.LiveState:
    if engine.is_draining:
        return live.LIVE_STATE_DRAINING
    if not engine.is_connected:
        return live.LIVE_STATE_DISCONNECTED
    if engine.is_withdrawn:
        return live.LIVE_STATE_WITHDRAWN
    return live.LIVE_STATE_SERVING if engine.takes_requests else live.LIVE_STATE_LATE
