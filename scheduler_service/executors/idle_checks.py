"""Signs of life of executors that have nothing to answer: they are asked whether they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from scheduler_service.executors.answer_watch import FleetPulse
from scheduler_service.executors.applicants import VERIFY_TIMEOUT_S
from scheduler_service.executors.executor_link import ExecutorLost
from scheduler_service.executors.executor_session import ExecutorSession
from scheduler_service.executors.tasks import Tasks


class IdleChecks:
    """Asks each of `sessions()` once at a time, and shows `pulse` who answers."""

    def __init__(
        self,
        pulse: FleetPulse,
        now_ns: Callable[[], int],
        sessions: Callable[[], Iterable[ExecutorSession]],
    ) -> None:
        self._pulse = pulse
        self._now_ns = now_ns
        self._sessions = sessions
        self._asked: set[str] = set()
        self._tasks = Tasks()

    def begin(self, doubted: str) -> None:
        """Asks all that are idle, but for the executor at `doubted`."""
        for session in self._sessions():
            address = session.address
            is_idle = session.is_connected and session.steps.watch.is_idle
            if address != doubted and is_idle and address not in self._asked:
                self._asked.add(address)
                self._tasks.begin(self._ask(session))

    async def _ask(self, session: ExecutorSession) -> None:
        info = session.info
        try:
            with suppress(ExecutorLost):  # its stream breaks, too, or it is only busy
                answer = await session.link.get_info(VERIFY_TIMEOUT_S)
                if answer.executor_epoch == info.executor_epoch and session in self._sessions():
                    self._pulse.show(info.address, self._now_ns())
        finally:
            self._asked.discard(info.address)

    async def close(self) -> None:
        """Asks nobody any more."""
        await self._tasks.close()
