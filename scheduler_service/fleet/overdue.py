"""Requests that no host has, and whose deadline is past."""

from __future__ import annotations

from scheduler_service.core.request import Request

# How many are ended in one go.
MAX_OVERDUE = 32


def end_overdue(request: Request, now_ns: int) -> Request:
    """Ends it, by name."""
    late_s = (now_ns - (request.scheduling.deadline_ns or 0)) / 1e9
    message = f"it waited for an executor until {late_s:.3f} s after its deadline"
    request.fail_unscheduled("DEADLINE_UNREACHABLE", message)
    return request
