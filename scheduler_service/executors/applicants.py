"""Applicants, registered executors that are not verified yet; and checks of idle executors.

The info in Register is not trusted until GetInfo at the executor's address has returned the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress

from scheduler_service.executors.answer_watch import SignsOfLife
from scheduler_service.executors.drains import Drains
from scheduler_service.executors.executor_link import ExecutorLost, Link
from scheduler_service.executors.executor_session import ExecutorSession, Life
from scheduler_service.executors.handshake import check_same
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve_contract import DomainError

# Timeout of GetInfo at the address of an applicant; executors wait 5 s for Register.
VERIFY_TIMEOUT_S = 3.0
MAX_PENDING_JOINS = 64
_BUSY_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class Applicants:
    """Verifies applicants by GetInfo: one at each address, and MAX_PENDING_JOINS in all."""

    def __init__(self, drains: Drains, step_patience_s: float) -> None:
        """`step_patience_s`: an applicant busy with a step for more seconds is not taken in."""
        self._drains = drains
        self._step_patience_s = step_patience_s
        self._pending: set[str] = set()

    @contextmanager
    def place(self, address: str) -> Iterator[None]:
        """Reserves `address` for one registration in the block.

        Raises DomainError(REGISTRY_BUSY).
        """
        if address in self._pending or len(self._pending) >= MAX_PENDING_JOINS:
            raise DomainError(
                "REGISTRY_BUSY",
                f"{len(self._pending)} registrations are pending; "
                f"allowed: {MAX_PENDING_JOINS}, one per address",
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
        """Asks the executor at `link` for its info, and returns it.

        Returns None if no executor answers, or if the executor is still busy with a step. A life
        that was lost before must have finished all its steps. Otherwise new steps would wait for
        old ones whose results are not needed, and a second loss would say nothing about the
        requests of the new steps. Raises DomainError if the answer differs from `info`, or if this
        life was drained.
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


# -- Checks of idle executors ----------------------------------------------------------------------
#
# An idle executor has no steps to answer, so GetInfo asks for its sign of life.


class IdleChecks:
    """Sends GetInfo to idle executors of `sessions()`, and notes answers in `pulse`.

    An executor gets one question at a time.
    """

    def __init__(
        self,
        pulse: SignsOfLife,
        now_ns: Callable[[], int],
        sessions: Callable[[], Iterable[ExecutorSession]],
    ) -> None:
        self._pulse = pulse
        self._now_ns = now_ns
        self._sessions = sessions
        self._asked: set[str] = set()
        self._tasks = Tasks()

    def begin(self, doubted: str) -> None:
        """Starts to ask all idle executors, except the executor at `doubted`."""
        for session in self._sessions():
            address = session.address
            is_idle = session.is_connected and session.steps.watch.is_idle
            if address != doubted and is_idle and address not in self._asked:
                self._asked.add(address)
                self._tasks.begin(self._ask(session))

    async def _ask(self, session: ExecutorSession) -> None:
        info = session.info
        try:
            # If the executor is lost, its stream breaks, too; or it is only busy.
            with suppress(ExecutorLost):
                answer = await session.link.get_info(VERIFY_TIMEOUT_S)
                if answer.executor_epoch == info.executor_epoch and session in self._sessions():
                    self._pulse.show(info.address, self._now_ns())
        finally:
            self._asked.discard(info.address)

    async def close(self) -> None:
        """Cancels the questions that are open."""
        await self._tasks.close()


# -- Set of tasks ----------------------------------------------------------------------------------


class Tasks:
    """Set of running tasks; an event loop alone keeps only weak references to them."""

    def __init__(self) -> None:
        # An ordered set, so that tasks are always cancelled in the same order.
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Starts and returns the task of `coroutine`; the caller may cancel it."""
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def close(self) -> None:
        """Cancels the remaining tasks, and waits for them; their exceptions are ignored."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
