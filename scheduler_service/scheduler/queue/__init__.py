"""Waiting queue: the requests that no engine has, in the order of a queue policy."""

from scheduler_service.scheduler.queue.key_order import TURN_EVERY, expires
from scheduler_service.scheduler.queue.ordered_queue import Key, OpenLanes
from scheduler_service.scheduler.queue.queue_policy import (
    ACTIVE_NS,
    HELD_PER_LEFT,
    QUEUE_POLICIES,
    FairShare,
    QueuePolicy,
    TenantShares,
    make_queue_policy,
)
from scheduler_service.scheduler.queue.waiting_queue import Waiting, WaitingQueue

__all__ = [
    "ACTIVE_NS",
    "HELD_PER_LEFT",
    "QUEUE_POLICIES",
    "TURN_EVERY",
    "FairShare",
    "Key",
    "OpenLanes",
    "QueuePolicy",
    "TenantShares",
    "Waiting",
    "WaitingQueue",
    "expires",
    "make_queue_policy",
]
