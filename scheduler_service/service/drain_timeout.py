"""How long an executor that leaves may take, as a message says it."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from scheduler_service.executors.drains import MAX_TIMEOUT_S
from splitserve_rpc.domain_error import DomainError

_NS_PER_S = 1e9


def read_timeout_s(timeout: Duration) -> float:
    """Seconds. Raises DomainError(DRAIN_TIMEOUT_INVALID)."""
    timeout_s = timeout.seconds + timeout.nanos / _NS_PER_S
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        message = f"timeout is {timeout_s:g} s; allowed: 0 to {MAX_TIMEOUT_S:g}"
        raise DomainError("DRAIN_TIMEOUT_INVALID", message)
    return timeout_s
