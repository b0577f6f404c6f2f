"""What the scheduler knows of one executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler_service.core.admission_blocker import AdmissionBlocker
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.engine import Engine
from scheduler_service.core.request import Request

Life: TypeAlias = tuple[str, int]


@dataclass(slots=True, eq=False)
class ExecutorState:
    """State of one executor: its engine, and flags that decide whether it gets requests.

    `epoch` identifies the life of its process at `address`. `num_credits`: steps that may be in
    flight at once. `is_withdrawn`: its circuit breaker is open, so it gets probes only.
    `is_failing`: whatever it computes fails. `is_doubtful`: it is late, silent or cut off.
    `is_broken`: a call of its engine raised, and it is about to be removed. `has_lost_events`: that
    call was `apply`, whose events reached nobody. `has_answered`: any step of this engine was
    answered. `num_moved`: requests that left because it drains. `lacks`: what requests lacked that
    did not begin with its latest step.
    """

    address: str
    epoch: int
    config: SchedulerConfig
    engine: Engine
    num_credits: int
    is_connected: bool = False
    is_draining: bool = False
    is_withdrawn: bool = False
    is_failing: bool = False
    is_doubtful: bool = False
    is_broken: bool = False
    has_lost_events: bool = False
    has_answered: bool = False
    num_moved: int = 0
    lacks: Mapping[Request, AdmissionBlocker] = field(default_factory=dict)

    @property
    def life(self) -> Life:
        """Address and epoch."""
        return self.address, self.epoch

    @property
    def is_serving(self) -> bool:
        """Whether the executor is connected and to stay, and its results and engine are sound."""
        is_leaving = self.is_draining or self.is_withdrawn or self.is_broken
        return self.is_connected and not is_leaving

    @property
    def takes_requests(self) -> bool:
        """Whether the executor serves and answers in time."""
        return self.is_serving and not self.is_doubtful
