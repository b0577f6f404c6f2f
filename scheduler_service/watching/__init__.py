"""Watchers of the scheduler: metrics, logs, traces, request lives and the live view, for operators.

Each watcher is a fold over the turns of the scheduler.
"""

from scheduler_service.watching.explanation import (
    MAX_FOUND,
    explain,
    explain_queue,
    find_lives,
    near_ids,
)
from scheduler_service.watching.life import (
    Life,
    LifeEvent,
    LifeKind,
    PhaseSpan,
    RequestPhase,
    StepRows,
)
from scheduler_service.watching.life_recorder import BoundedLives, LifeRecorder
from scheduler_service.watching.live_history import NUM_POINTS, POINT_NS, Durations, History
from scheduler_service.watching.live_names import Names, NamesMark
from scheduler_service.watching.live_snapshot import BlockState, PoolMap, block_states
from scheduler_service.watching.live_steps import RowKind, RowOwners
from scheduler_service.watching.live_view import (
    MAX_SNAPSHOTS_PER_SECOND,
    MAX_WATCHERS,
    FramePacing,
    LiveView,
    LiveWatcher,
)
from scheduler_service.watching.metrics import CountedAudit, RequestTimes, RequestWatch, TokenGaps
from scheduler_service.watching.operator_log import OperatorLog
from scheduler_service.watching.transition import RequestRefused, Submission, Transition, Watcher

__all__ = [
    "MAX_FOUND",
    "MAX_SNAPSHOTS_PER_SECOND",
    "MAX_WATCHERS",
    "NUM_POINTS",
    "POINT_NS",
    "BlockState",
    "BoundedLives",
    "CountedAudit",
    "Durations",
    "FramePacing",
    "History",
    "Life",
    "LifeEvent",
    "LifeKind",
    "LifeRecorder",
    "LiveView",
    "LiveWatcher",
    "Names",
    "NamesMark",
    "OperatorLog",
    "PhaseSpan",
    "PoolMap",
    "RequestPhase",
    "RequestRefused",
    "RequestTimes",
    "RequestWatch",
    "RowKind",
    "RowOwners",
    "StepRows",
    "Submission",
    "TokenGaps",
    "Transition",
    "Watcher",
    "block_states",
    "explain",
    "explain_queue",
    "find_lives",
    "near_ids",
]
