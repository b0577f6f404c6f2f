"""What engines are made of, and who hears of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_service.audit.audit import Audit
from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepEvents, StepOutcome
from scheduler_service.core.request import Request
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.executors.executor_link import Link, LinkConfig
from scheduler_service.executors.handshake import core_config
from scheduler_service.fleet.executor_losses import LossCause
from scheduler_service.journal.core import Core
from scheduler_service.journal.journal import Journal, NoJournal
from scheduler_service.observer import Observer
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError


@dataclass(frozen=True, slots=True)
class EngineOwner:
    """Who hears of engines. `lost`: the engine is closed, these were its requests, and why.

    `not_expected`: an executor that left is not expected back any more.
    `joined`: there is one that takes requests, be it new or one that was too slow for a while.
    `refill`: an engine is about to plan a step. `gave_back`: one that drains gave these away.
    `judge`: an engine has a result that its core does not know yet. `is_withdrawn`: whether a life
    that joins gets no requests yet.
    """

    deliver: Callable[[StepEvents], None]
    refill: Callable[[EngineLoop], None]
    not_expected: Callable[[], None]
    joined: Callable[[], None]
    lost: Callable[[EngineLoop, list[Request], LossCause], None]
    gave_back: Callable[[EngineLoop, list[Request]], None]
    judge: Callable[[EngineLoop, StepOutcome], None]
    is_withdrawn: Callable[[tuple[str, int]], bool]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What engines are made of."""

    config: ClusterConfig
    scheduler_epoch: int
    now_ns: Callable[[], int]
    journal: Journal | NoJournal
    audit: Audit
    observer: Observer
    connect: Callable[[executor.ExecutorInfo, LinkConfig], Link]

    def make_core(
        self, info: executor.ExecutorInfo, last_step_id: int, scheduler_epoch: int
    ) -> tuple[SchedulerConfig, Core]:
        """A core for an executor, whose steps are numbered on. Raises DomainError."""
        try:
            config = core_config(info, self.config)
            core = self.journal.core(
                config, last_step_id, info.address, info.executor_epoch, scheduler_epoch
            )
        except (ValueError, OverflowError, MemoryError, OSError) as error:
            message = f"no scheduler can be made for it: {error}"
            raise DomainError("EXECUTOR_INFO_INVALID", message) from error
        return config, core
