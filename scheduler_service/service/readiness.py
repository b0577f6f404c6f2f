"""Whether a scheduler serves, and if not, why: by progress, not by pulse.

Pure: time is what callers say it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Readiness(Enum):
    """Names of the contract (`Readiness` in scheduler.proto, which says what they mean)."""

    READY = "READY"
    NO_EXECUTOR = "NO_EXECUTOR"
    NO_PROGRESS = "NO_PROGRESS"
    EXECUTORS_FAILING = "EXECUTORS_FAILING"
    DRAINING = "DRAINING"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is the case. `num_steps`: how many were ever answered.

    `num_failing`, `has_work`: of those connected.

    `step_allowed_s`: how long it may be until the next one is, if there is something to do.
    """

    is_draining: bool
    num_connected: int
    num_failing: int
    has_work: bool
    num_steps: int
    step_allowed_s: float


class ReadinessJudge:
    """Remembers since when nothing goes on."""

    def __init__(self) -> None:
        self._num_steps = -1
        self._since_ns = 0

    def judge(self, facts: Facts, now_ns: int) -> Readiness:
        """What holds now; to be asked again and again."""
        if facts.num_steps != self._num_steps or not (facts.has_work and facts.num_connected):
            self._num_steps, self._since_ns = facts.num_steps, now_ns
        if facts.is_draining:
            return Readiness.DRAINING
        if not facts.num_connected:
            return Readiness.NO_EXECUTOR
        if facts.num_failing >= facts.num_connected:
            return Readiness.EXECUTORS_FAILING
        if now_ns - self._since_ns > facts.step_allowed_s * 1e9:
            return Readiness.NO_PROGRESS
        return Readiness.READY
