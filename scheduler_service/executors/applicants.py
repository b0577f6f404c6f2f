"""Executors that have registered and are not believed yet.

Nothing that Register says is believed before GetInfo at that address has said the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler_service.executors.drains import Drains
from scheduler_service.executors.executor_link import ExecutorLost, Link
from scheduler_service.executors.handshake import check_same
from scheduler_service.executors.lives import Life
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
