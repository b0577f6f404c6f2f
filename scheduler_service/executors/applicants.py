"""Executors that have registered and are not believed yet.

Nothing that Register says is believed before GetInfo at that address has said the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress

from scheduler_service.executors.answer_watch import FleetPulse
from scheduler_service.executors.drains import Drains
from scheduler_service.executors.executor_link import ExecutorLost, Link
from scheduler_service.executors.executor_session import ExecutorSession, Life
from scheduler_service.executors.handshake import check_same
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_rpc.domain_error import DomainError

# An address where nobody answers is waited for so long; executors wait 5 s for Register.
VERIFY_TIMEOUT_S = 3.0
MAX_PENDING_JOINS = 64
_BUSY_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class Applicants:
    """Asks them who they are, one at an address and a bounded number in all."""

    def __init__(self, drains: Drains, step_patience_s: float) -> None:
        """`step_patience_s`: who is still busy with a step for longer than that is not taken."""
        self._drains = drains
        self._step_patience_s = step_patience_s
        self._pending: set[str] = set()

    @contextmanager
    def place(self, address: str) -> Iterator[None]:
        """Nobody else registers for `address` within. Raises DomainError(REGISTRY_BUSY)."""
        if address in self._pending or len(self._pending) >= MAX_PENDING_JOINS:
            raise DomainError(
                "REGISTRY_BUSY",
                f"{len(self._pending)} registrations wait for an answer of their executors, "
                f"allowed: {MAX_PENDING_JOINS}, one for each address",
                retry_delay_s=_BUSY_RETRY_S,
            )
        self._pending.add(address)
        try:
            yield
        finally:
            self._pending.discard(address)

    async def ask(
        self, info: executor.ExecutorInfo, link: Link, life: Life
    ) -> executor.ExecutorInfo | None:
        """What answers at `link`; None if nobody does, or if it is not done with a step.

        A life that was lost has to be done with all: else what it is given waits for what nobody
        wants, and should it be lost again, that would say nothing of those who waited. Raises
        DomainError if that is not what `info` says, or a life that was sent away.
        """
        try:
            answer, says_drained = await link.introduce(VERIFY_TIMEOUT_S)
        except ExecutorLost as lost:
            _log.warning("executor_unreachable address=%s reason=%r", info.address, str(lost))
            return None
        check_same(info, answer)
        self._drains.check(info, says_drained=says_drained)
        was_lost = life.last_step_id > 0
        if answer.step_running_ms > (0 if was_lost else self._step_patience_s * 1000):
            _log.warning(
                "executor_still_busy address=%s step_running_ms=%d",
                info.address,
                answer.step_running_ms,
            )
            return None
        return answer


# --------------------------------------------------------------------------------------------------
# Signs of life of executors that have nothing to answer: they are asked whether they are there.


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


# -- Tasks that somebody began, and ends -----------------------------------------------------------


class Tasks:
    """Keeps each until it is done; a loop alone does not."""

    def __init__(self) -> None:
        # In order, so that the same happens each time that they are ended.
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Its task, which may be cancelled by whoever wants."""
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def close(self) -> None:
        """Ends those that are left; whatever they raise is nobody's any more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
