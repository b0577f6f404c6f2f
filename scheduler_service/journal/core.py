"""A core as an engine loop sees it, whether or not it is recorded."""

from __future__ import annotations

from typing import TypeAlias

from scheduler_service.core.scheduler import Scheduler
from scheduler_service.journal.journaled_core import JournaledCore
from scheduler_service.step_codec import PlainCodec, StepCodec

Core: TypeAlias = Scheduler | JournaledCore


def step_codec(core: Core, scheduler_epoch: int, executor_epoch: int) -> StepCodec:
    """What is to encode and decode the steps of `core`."""
    if isinstance(core, JournaledCore):
        return core
    return PlainCodec(scheduler_epoch, executor_epoch)


def look_into(core: Core) -> Scheduler:
    """What `core` holds. To change anything is for `core` itself, which may have to record it."""
    return core.scheduler if isinstance(core, JournaledCore) else core
