"""Why requests do not begin, asked when somebody wants to know it: nothing is decided by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType

from scheduler_service.core.admission_blocker import AdmissionBlocker
from scheduler_service.core.planning.room import Room
from scheduler_service.core.request import Request, RequestStatus
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.fleet.hindrances import Hindrance, Obstacle, hindrance
from splitserve.scheduler.v1 import live_pb2 as live

_LACKS: Mapping[Hindrance, live.LiveLack] = MappingProxyType(
    {
        Obstacle.UNFIT: live.LIVE_LACK_FITTING_EXECUTOR,
        Obstacle.OTHERS_WAIT_THERE: live.LIVE_LACK_OTHERS_FIRST,
        Obstacle.NONE: live.LIVE_LACK_TURN,
        Obstacle.BETTER_IS_BUSY: live.LIVE_LACK_TURN,
        AdmissionBlocker.ADAPTER_SLOT: live.LIVE_LACK_ADAPTER_SLOT,
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


def of_fleet(request: Request, engines: Iterable[EngineLoop]) -> Iterator[live.LiveReason]:
    """Why a request that no executor has begins at none of `engines`, one reason for each."""
    is_any = False
    for engine in engines:
        is_any = True
        address = engine.link.info.address
        if not engine.takes_requests:
            yield live.LiveReason(address=address, lack=live.LIVE_LACK_OPEN_EXECUTOR)
            continue
        core = engine.scheduler
        yield _reason(address, core, request, hindrance(request, core))
    if not is_any:
        yield live.LiveReason(lack=live.LIVE_LACK_EXECUTOR)


def of_core(address: str, core: Scheduler) -> live.LiveReason | None:
    """Why the first that waits or is swapped out there has no row; None if nobody is."""
    placement = core.placement
    request = next(chain(placement.preempted, core.queue), None)
    if request is None:
        return None
    return _reason(address, core, request, _what_lacks(core, request) or Obstacle.NONE)


def _what_lacks(core: Scheduler, request: Request) -> AdmissionBlocker | None:
    placement = core.placement
    room = Room(core.config, placement)
    if not placement.is_settled(request):
        return AdmissionBlocker.RESULTS
    if not room.has_adapter_slot(request):
        return AdmissionBlocker.ADAPTER_SLOT
    if request.status is RequestStatus.SWAPPED:
        if room.exceeds_share(request):
            return AdmissionBlocker.SHARE
        return None if room.can_swap_in(request) else AdmissionBlocker.BLOCKS
    if not request.unfinished:
        return None
    leader = request.unfinished[0]
    return room.find_blocker(request, leader, placement.blocks.prefixes.find(leader))


def _reason(
    address: str, core: Scheduler, request: Request, hindered_by: Hindrance
) -> live.LiveReason:
    reason = live.LiveReason(address=address, lack=_LACKS[hindered_by])
    if reason.lack == live.LIVE_LACK_BLOCKS:
        reason.num_needed = _num_needed(core, request)
        reason.num_free = core.num_free_blocks
    return reason


def _num_needed(core: Scheduler, request: Request) -> int:
    """Free blocks that it takes, with those that are left to rows that grow."""
    placement = core.placement
    blocks, others_run = placement.blocks, len(placement.rows) > 0
    if request.status is RequestStatus.SWAPPED:
        num_others = len(request.unfinished) + blocks.watermark if others_run else 0
        return blocks.num_swap_in_blocks(request) + num_others
    if not request.unfinished:
        return 0
    leader = request.unfinished[0]
    num_lacking = blocks.num_lacking(leader, blocks.prefixes.find(leader))
    return num_lacking + core.num_free_blocks + (blocks.watermark if others_run else 0)
