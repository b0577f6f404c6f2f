"""Routing of requests: each begins at the executor with the earliest estimated first token."""

from scheduler_service.scheduler.routing.prefix_index import CachedPrefix, Prefixes, PrefixIndex
from scheduler_service.scheduler.routing.router import (
    Choice,
    HostState,
    LeastLoaded,
    PrefixRouter,
    Router,
)
from scheduler_service.scheduler.routing.routing import MAX_PASSED, Routing, RoutingBlocker

__all__ = [
    "MAX_PASSED",
    "CachedPrefix",
    "Choice",
    "HostState",
    "LeastLoaded",
    "PrefixIndex",
    "PrefixRouter",
    "Prefixes",
    "Router",
    "Routing",
    "RoutingBlocker",
]
