"""Signs of life of executors that have nothing to answer: they are asked whether they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from scheduler_service.executors.answer_watch import FleetPulse
from scheduler_service.executors.applicants import VERIFY_TIMEOUT_S
from scheduler_service.executors.engine_loop import EngineLoop
from scheduler_service.executors.executor_link import ExecutorLost
from scheduler_service.executors.tasks import Tasks


class IdleChecks:
    """Asks each of `engines()` once at a time, and shows `pulse` who answers."""

    def __init__(
        self,
        pulse: FleetPulse,
        now_ns: Callable[[], int],
        engines: Callable[[], Iterable[EngineLoop]],
    ) -> None:
        self._pulse = pulse
        self._now_ns = now_ns
        self._engines = engines
        self._asked: set[str] = set()
        self._tasks = Tasks()

    def begin(self, doubted: str) -> None:
        """Asks all that are idle, but for the executor at `doubted`."""
        for engine in self._engines():
            address = engine.link.info.address
            is_idle = engine.is_connected and engine.steps.watch.is_idle
            if address != doubted and is_idle and address not in self._asked:
                self._asked.add(address)
                self._tasks.begin(self._ask(engine))

    async def _ask(self, engine: EngineLoop) -> None:
        info = engine.link.info
        try:
            with suppress(ExecutorLost):  # its stream breaks, too, or it is only busy
                answer = await engine.link.get_info(VERIFY_TIMEOUT_S)
                if answer.executor_epoch == info.executor_epoch and engine in self._engines():
                    self._pulse.show(info.address, self._now_ns())
        finally:
            self._asked.discard(info.address)

    async def close(self) -> None:
        """Asks nobody any more."""
        await self._tasks.close()
