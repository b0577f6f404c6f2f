"""State of a scheduler at one time, and the frames that bring watchers to it.

The parts are: reasons why requests wait, views of executors, snapshots, and maps of the blocks
of a pool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, islice
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from scheduler_service.scheduler import ExecutorGone, ExecutorState, Scheduler, SendStep
from scheduler_service.scheduler.engine import RELEASED, Engine, Placement
from scheduler_service.scheduler.engine.blocks import BlockPool
from scheduler_service.scheduler.routing import RoutingBlocker
from scheduler_service.scheduler.values import (
    AdmissionBlocker,
    Feature,
    Int64Array,
    Request,
    RequestStatus,
)
from scheduler_service.watching.live_history import History
from scheduler_service.watching.live_names import Names, NamesMark
from scheduler_service.watching.live_steps import LoggedStep, RowOwners, StepLog
from scheduler_service.watching.transition import Transition
from splitserve.scheduler.v1 import live_pb2 as live

# Maximum number of requests of a queue that a frame shows.
MAX_WAITING = 32
_MS = 1_000_000
_LACKS: Mapping[AdmissionBlocker | RoutingBlocker, live.LiveLack] = MappingProxyType(
    {
        RoutingBlocker.UNFIT: live.LIVE_LACK_FITTING_EXECUTOR,
        RoutingBlocker.OTHERS_WAIT_THERE: live.LIVE_LACK_OTHERS_FIRST,
        RoutingBlocker.NONE: live.LIVE_LACK_TURN,
        RoutingBlocker.BETTER_IS_BUSY: live.LIVE_LACK_TURN,
        AdmissionBlocker.ADAPTER_SLOT: live.LIVE_LACK_ADAPTER_SLOT,
        AdmissionBlocker.ADAPTER_LOAD: live.LIVE_LACK_ADAPTER_LOAD,
        AdmissionBlocker.ADAPTER_FAILED: live.LIVE_LACK_TURN,
        AdmissionBlocker.BLOCKS: live.LIVE_LACK_BLOCKS,
        AdmissionBlocker.ROWS: live.LIVE_LACK_ROWS,
        AdmissionBlocker.BYTES: live.LIVE_LACK_BYTES,
        AdmissionBlocker.SHARE: live.LIVE_LACK_SHARE,
        AdmissionBlocker.POOL: live.LIVE_LACK_FITTING_EXECUTOR,
        AdmissionBlocker.RESULTS: live.LIVE_LACK_RESULTS,
        AdmissionBlocker.BUDGET: live.LIVE_LACK_BUDGET,
        AdmissionBlocker.BLOCKS_ON_THEIR_WAY: live.LIVE_LACK_BLOCKS,
        AdmissionBlocker.OTHERS_FIRST: live.LIVE_LACK_OTHERS_FIRST,
    }
)


def why_unassigned(request: Request, scheduler: Scheduler) -> Iterator[live.LiveReason]:
    """Yields for each executor the reason why a request of the waiting queue does not begin there.

    Yields LIVE_LACK_EXECUTOR if there is no executor.
    """
    for executor in scheduler.executors.values():
        address = executor.address
        if executor.takes_requests:
            obstacle = scheduler.obstacle(request, executor)
            if obstacle is RoutingBlocker.NONE:
                # The next step of the executor decides, and waits for results.
                obstacle = executor.engine.find_blocker(request) or obstacle
            yield _reason(address, executor.engine, request, obstacle)
        else:
            yield live.LiveReason(address=address, lack=live.LIVE_LACK_OPEN_EXECUTOR)
    if not scheduler.executors:
        yield live.LiveReason(lack=live.LIVE_LACK_EXECUTOR)


def why_waiting(address: str, core: Engine) -> live.LiveReason | None:
    """Returns why the first preempted request of an engine has no row; None without one."""
    placement = core.placement
    request = next(iter(placement.preempted), None)
    if request is None:
        return None
    return _reason(address, core, request, core.find_blocker(request) or RoutingBlocker.NONE)


def _reason(
    address: str, core: Engine, request: Request, obstacle: AdmissionBlocker | RoutingBlocker
) -> live.LiveReason:
    reason = live.LiveReason(address=address, lack=_LACKS[obstacle])
    if reason.lack == live.LIVE_LACK_BLOCKS:
        reason.num_needed = _num_needed(core, request)
        reason.num_free = core.num_free_blocks
    return reason


def _num_needed(core: Engine, request: Request) -> int:
    """Returns the number of free blocks that a request needs, including the watermark.

    The watermark is the number of blocks that growing rows keep free; none if no row runs.
    """
    placement = core.placement
    blocks, others_run = placement.blocks, len(placement.rows) > 0
    if request.status is RequestStatus.SWAPPED:
        num_others = len(request.unfinished) + blocks.watermark if others_run else 0
        return blocks.num_swap_in_blocks(request) + num_others
    if not request.unfinished:
        return 0
    leader = request.unfinished[0]
    if request.status is RequestStatus.WAITING:
        # The number of cached blocks is unknown until the engine prepares the request.
        return core.config.num_blocks_for(len(leader.token_ids)) + blocks.watermark * others_run
    num_lacking = blocks.num_lacking(leader, blocks.prefixes.find(leader))
    return num_lacking + core.num_free_blocks + (blocks.watermark if others_run else 0)


@dataclass(frozen=True, slots=True, eq=False)
class ExecutorView:
    """Snapshot of an executor's life for the live view.

    `life`: address and epoch. `message`: the part that every frame has. `device`, `host`: blocks of
    its pools. `steps`: the latest answered steps. `num_steps`: number of all steps that were
    answered while the scheduler was watched.
    """

    life: tuple[str, int]
    message: live.LiveExecutor
    device: PoolMap
    host: PoolMap
    steps: Sequence[LoggedStep]
    num_steps: int

    def fill_changes(self, before: ExecutorView | None, message: live.LiveExecutor) -> None:
        """Adds to `message` the steps and blocks that differ from the view `before`; None: all."""
        num_told = 0 if before is None else before.num_steps
        for step in self.steps:
            if step.number > num_told:
                step.fill(message.steps.add())
        self.device.fill_changes(None if before is None else before.device, message.device)
        self.host.fill_changes(None if before is None else before.host, message.host)


def view_executor(
    engine: ExecutorState, names: Names, log: StepLog, before: ExecutorView | None
) -> ExecutorView:
    """Returns the present view of an executor. Must be called between turns.

    `before`: the view in the previous snapshot. Blocks that steps have moved since are shown as
    on the move.
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
    engine: ExecutorState, core: Engine, names: Names, running: list[int]
) -> live.LiveExecutor:
    message = live.LiveExecutor()
    rows, placement = core.placement.rows, core.placement
    message.address, message.life = engine.life
    message.state = _state_of(engine)
    order = rows.order
    message.running.extend(running)
    message.num_tokens.extend(rows.num_known[order].tolist())
    message.num_computed.extend(rows.num_computed[order].tolist())
    if placement.swapped:
        message.swapped.extend(names.numbers_of(placement.swapped))
    if core.num_waiting:
        message.waiting.extend(names.numbers_of(first_queued(core)))
        message.num_waiting = core.num_waiting
    reason = why_waiting(message.address, core)
    if reason is not None:
        message.reason.CopyFrom(reason)
    message.max_num_seqs = core.config.max_num_seqs
    message.num_in_flight = core.num_in_flight
    message.num_steps = core.num_steps
    message.num_preemptions = core.num_preemptions
    return message


def first_queued(core: Engine) -> list[Request]:
    """Returns the first preempted requests of an engine that frames show, at most MAX_WAITING."""
    waiting = (r for r in core.placement.preempted if r.status is RequestStatus.PREEMPTED)
    return list(islice(waiting, MAX_WAITING))


def _state_of(engine: ExecutorState) -> live.LiveState:
    if engine.is_draining:
        return live.LIVE_STATE_DRAINING
    if not engine.is_connected:
        return live.LIVE_STATE_DISCONNECTED
    if engine.is_withdrawn:
        return live.LIVE_STATE_WITHDRAWN
    return live.LIVE_STATE_SERVING if engine.takes_requests else live.LIVE_STATE_LATE


@dataclass(frozen=True, slots=True, eq=False)
class LiveSnapshot:
    """State of a scheduler at one time, and the frames that lead watchers to it.

    Watchers with the same earlier snapshot get the same frame. `message`: the part of every frame.
    `executors`: views by life (address, epoch). `last_point`: number of the latest completed point
    of `history`, -1 for none.
    """

    number: int
    message: live.WatchSchedulerResponse
    executors: Mapping[tuple[str, int], ExecutorView]
    names: Names
    mark: NamesMark
    history: History
    last_point: int
    # By the number of the earlier snapshot; None for a new watcher.
    frames: dict[int | None, live.WatchSchedulerResponse] = field(default_factory=dict)

    def frame_after(self, before: LiveSnapshot | None) -> live.WatchSchedulerResponse:
        """Returns the frame that leads from the snapshot `before` to this one; None: from no view.

        Frames are shared and must not be changed. Must be called before a later snapshot is made.
        """
        number = None if before is None else before.number
        frame = self.frames.get(number)
        if frame is None:
            frame = self.frames[number] = self._frame_after(before)
        return frame

    def _frame_after(self, before: LiveSnapshot | None) -> live.WatchSchedulerResponse:
        frame = live.WatchSchedulerResponse()
        frame.CopyFrom(self.message)
        self.names.fill(None if before is None else before.mark, self.mark, frame)
        for point in self.history.points_after(-1 if before is None else before.last_point):
            point.fill(frame.history.add())
        for view in self.executors.values():
            seen = None if before is None else before.executors.get(view.life)
            message = frame.executors.add()
            message.CopyFrom(view.message)
            view.fill_changes(seen, message)
        return frame


@dataclass(frozen=True, slots=True)
class WatchedState:
    """State kept of `scheduler` while it is watched. `logs`: logs of steps, by executor address."""

    scheduler: Scheduler
    names: Names
    history: History
    logs: dict[str, StepLog]

    def log_of(self, engine: ExecutorState) -> StepLog:
        """Returns the step log of an executor; begins one for a new life of the executor."""
        address, rows = engine.life[0], engine.engine.placement.rows
        log = self.logs.get(address)
        if log is None or log.owners.rows is not rows:
            log = self.logs[address] = StepLog(RowOwners(rows))
            self.names.see(log.owners.refresh())
        return log

    def see(self, turn: Transition) -> None:
        """Records steps that were sent and answered. Drops the logs of executors that are gone."""
        if (answered := turn.answered) is not None:
            log = self._log_at(answered.address)
            if log is not None:
                log.took(answered.outcome, turn.now_ns)
        for effect in turn.effects:
            if isinstance(effect, SendStep):
                log = self._log_at(effect.address)
                if log is not None:
                    log.sent(effect.plan, turn.sent_ns, self.names)
            elif isinstance(effect, ExecutorGone):
                self.logs.pop(effect.address, None)

    def _log_at(self, address: str) -> StepLog | None:
        """Returns the step log of the executor at `address`; None if the executor is gone."""
        log = self.logs.get(address)
        if log is None:
            executor = self.scheduler.executors.get(address)
            log = None if executor is None else self.log_of(executor)
        return log

    def snapshot(
        self, number: int, now_ns: int, unix_ms: int, before: LiveSnapshot | None
    ) -> LiveSnapshot:
        """Makes the current snapshot. To be called between turns. `before`: the previous snapshot.

        `now_ns`: by the clock of turns. `unix_ms`: milliseconds since 1970.
        """
        scheduler, names = self.scheduler, self.names
        message = live.WatchSchedulerResponse(
            unix_ms=unix_ms,
            now_ms=now_ns // _MS,
            num_waiting=scheduler.num_waiting,
            num_quarantined=scheduler.num_quarantined,
        )
        engines = list(scheduler.executors.values())
        waiting = scheduler.first_waiting(MAX_WAITING)
        message.waiting.extend(names.numbers_of(waiting))
        if waiting:
            message.reasons.extend(why_unassigned(waiting[0], scheduler))
        executors = {}
        for engine in engines:
            life = engine.life
            seen = None if before is None else before.executors.get(life)
            executors[life] = view_executor(engine, names, self.log_of(engine), seen)
        names.tidy(lambda: self._used(message, executors), lambda: chain(waiting, _shown(engines)))
        history = self.history
        history.fill_recent(message.time_to_first_token)
        last_point = history.points[-1].number if history.points else -1
        return LiveSnapshot(number, message, executors, names, names.mark, history, last_point)

    def _used(
        self,
        message: live.WatchSchedulerResponse,
        executors: Mapping[tuple[str, int], ExecutorView],
    ) -> set[int]:
        """Returns the numbers of requests that this frame and later ones may name."""
        views = [view.message for view in executors.values()]
        steps = [step for log in self.logs.values() for step in (*log.answered, *log.in_flight)]
        return {
            *message.waiting,
            *chain.from_iterable(chain(each.running, each.swapped, each.waiting) for each in views),
            *chain.from_iterable(step.request_numbers for step in steps),
        }


def _shown(engines: Iterable[ExecutorState]) -> Iterator[Request]:
    """Yields the requests that frames show of these executors."""
    for engine in engines:
        placement = engine.engine.placement
        yield from (sequence.request for sequence in placement.rows.running)
        yield from placement.swapped
        yield from first_queued(engine.engine)


# -- Map of a KV pool -----------------------------------------------------------------------------

ByteArray = npt.NDArray[np.uint8]


class BlockState(IntEnum):
    """States of a block, numbered as in `LivePool.states`."""

    FREE = 0
    HELD = 1
    SHARED = 2
    CACHED = 3
    GIVEN_BACK = 4
    ON_THE_MOVE = 5


_SHARED, _CACHED = np.uint8(BlockState.SHARED), np.uint8(BlockState.CACHED)
_NO_STATES, _NO_HOLDERS = np.empty(0, np.uint8), np.empty(0, np.int64)
# Maximum of a reference count of one byte.
_MANY = 255


def block_states(pool: BlockPool, given_back: Sequence[int], moved: Collection[int]) -> ByteArray:
    """Returns the `BlockState` of each block of `pool`, [num_blocks] uint8.

    `given_back`: one entry for each reference that ends with a step in flight. `moved`: blocks that
    steps copy from or to.
    """
    states = np.zeros(pool.num_blocks, np.uint8)
    counts = np.frombuffer(pool.reference_bytes, np.uint8)
    published = np.frombuffer(pool.published_bytes, np.uint8)
    used = states[: len(counts)]
    np.minimum(counts, _SHARED, out=used)
    used[published > counts] = _CACHED
    if given_back:
        blocks, references = np.unique(given_back, return_counts=True)
        last = (counts[blocks] == references) & (references < _MANY)
        states[blocks[last]] = BlockState.GIVEN_BACK
    if moved:
        states[list(moved)] = BlockState.ON_THE_MOVE
    return states


@dataclass(frozen=True, slots=True, eq=False)
class PoolMap:
    """Map of a KV pool: the state and the holder of each block.

    `states`: `BlockState` of each block, [num_blocks] uint8. `holders`: number of the request that
    holds the block, 0 for none, [num_blocks] int64. Both are never written to.
    """

    block_size: int
    states: ByteArray
    holders: Int64Array

    @classmethod
    def of_none(cls, block_size: int) -> PoolMap:
        """Returns the map of a pool without blocks."""
        return cls(block_size, _NO_STATES, _NO_HOLDERS)

    def fill_changes(self, before: PoolMap | None, message: live.LivePool) -> None:
        """Adds to `message` the blocks that differ from `before`; None: from free blocks."""
        message.num_blocks = len(self.states)
        message.block_size = self.block_size
        if before is None:
            differs = (self.states != 0) | (self.holders != 0)
        else:
            differs = (self.states != before.states) | (self.holders != before.holders)
        changed = differs.nonzero()[0]
        if len(changed) == 0:
            return
        message.changed.extend(changed.tolist())
        message.states = self.states[changed].tobytes()
        message.holders.extend(self.holders[changed].tolist())


def device_holders(core: Engine, numbers: Int64Array) -> Int64Array:
    """Returns for each device block the number of a request whose row has it, 0 for none.

    The result is [num_blocks] int64. `numbers`: request numbers of `placement.rows.order`. A shared
    block gets the most urgent of its requests.
    """
    placement, rows = core.placement, core.placement.rows
    holders = np.zeros(placement.blocks.device.num_blocks, np.int64)
    order = rows.order
    if len(order) == 0:
        return holders
    lengths = -(-rows.num_slots[order].astype(np.int64) // rows.block_size)
    starts = rows.num_released[order].astype(np.int64)
    counts = lengths - starts
    # Columns of the block table that are in use, for one row after the other.
    firsts = np.repeat(np.cumsum(counts) - counts - starts, counts)
    columns = np.arange(int(counts.sum())) - firsts
    blocks = rows.block_tables[np.repeat(order, counts), columns]
    # Reversed, so that the most urgent request of a shared block is written last.
    holders[blocks[::-1]] = np.repeat(numbers, counts)[::-1]
    if Feature.CROSS_ATTENTION in core.config.features:
        for request in placement.requests.values():
            if request.cross_blocks:
                holders[request.cross_blocks] = request.arrival
    return holders


def host_holders(placement: Placement) -> Int64Array:
    """Returns for each host block the number of the swapped request that has it, 0 for none.

    The result is [num_blocks] int64.
    """
    holders = np.zeros(placement.blocks.host.num_blocks, np.int64)
    for request in placement.swapped:
        for sequence in request.sequences:
            blocks = [block for block in sequence.host_table if block != RELEASED]
            holders[blocks] = request.arrival
        holders[request.host_cross_blocks] = request.arrival
    return holders
