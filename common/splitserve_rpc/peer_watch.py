"""Watch over a peer: health checks that tell whether its event loop still answers.

HTTP/2 pings are no evidence: gRPC answers them from a thread of its own while the process hangs,
and by default waits a minute for an answer (docs/adr/0027-silent-peers.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve_rpc.errors import failure_of

TICK_S = 0.5
# A peer that is quiet for QUIET_S is asked once a second; after _ANEW_AFTER_S also over a new
# connection.
QUIET_S = 1.0
_AGAIN_S = 1.0
_ANEW_AFTER_S = 2.0
# Tolerates an event loop that is busy for 2 s, and a process that waits for a CPU.
SILENT_AFTER_S = 4.5
# A longer tick means that this process stood still and may have unread answers.
_MAX_TICK_S = 2 * TICK_S
_MAX_QUESTIONS = 8

_NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)

# Asks the peer. Returns whether it answered, with any content.
Ask = Callable[[], Awaitable[bool]]


class PeerState(Enum):
    """State of a peer. CUT: the peer answers over new connections only."""

    ANSWERS = "answers"
    CUT = "cut"
    SILENT = "silent"


class PeerWatch:
    """Watches one peer. The owner calls `await tick()` repeatedly.

    Silence is counted in ticks of this process, so that a pause of this process does not count as
    silence of the peer. Anything from the peer is a sign of life; it is only asked when quiet.
    """

    def __init__(
        self,
        ask: Ask,
        ask_anew: Ask | None = None,
        num_heard: Callable[[], int] = lambda: 0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`ask`: over the connection in use. `ask_anew`: over a new connection.

        `num_heard`: number of things received from the peer, not counting answers. `clock`: in
        seconds.
        """
        self._ask = ask
        self._ask_anew = ask_anew
        self._num_heard = num_heard
        self._sleep = sleep
        self._clock = clock or asyncio.get_running_loop().time
        self._last_num_heard = num_heard()
        self._quiet_s = self._quiet_anew_s = self._since_question_s = 0.0
        self._questions: dict[asyncio.Task[None], None] = {}

    async def tick(self) -> PeerState:
        """Waits for TICK_S, asks the peer if a question is due, and returns the state."""
        before_s = self._clock()
        await self._sleep(TICK_S)
        passed_s = min(self._clock() - before_s, _MAX_TICK_S)
        self._quiet_s += passed_s
        self._quiet_anew_s += passed_s
        self._since_question_s += passed_s
        if (num_heard := self._num_heard()) != self._last_num_heard:
            self._last_num_heard = num_heard
            self.heard()
        elif self._quiet_s >= QUIET_S and self._since_question_s >= _AGAIN_S:
            self._begin_questions()
        return self.state

    @property
    def state(self) -> PeerState:
        """Current state of the peer."""
        if self._quiet_s < SILENT_AFTER_S:
            return PeerState.ANSWERS
        return PeerState.CUT if self._quiet_anew_s < SILENT_AFTER_S else PeerState.SILENT

    @property
    def quiet_s(self) -> float:
        """Seconds since the last sign of life of the peer."""
        return min(self._quiet_s, self._quiet_anew_s)

    def heard(self) -> None:
        """Notes a sign of life of the peer."""
        self._quiet_s = self._quiet_anew_s = 0.0

    async def close(self) -> None:
        """Cancels the open questions."""
        questions = list(self._questions)
        for question in questions:
            question.cancel()
        await asyncio.gather(*questions, return_exceptions=True)

    def _begin_questions(self) -> None:
        self._since_question_s = 0.0
        self._begin(self._ask, self.heard)
        if self._ask_anew is not None and self._quiet_s >= _ANEW_AFTER_S:
            self._begin(self._ask_anew, self._heard_anew)

    def _heard_anew(self) -> None:
        self._quiet_anew_s = 0.0

    def _begin(self, ask: Ask, heard: Callable[[], None]) -> None:
        if len(self._questions) >= _MAX_QUESTIONS:
            next(iter(self._questions)).cancel()

        async def question() -> None:
            if await ask():
                heard()

        task = asyncio.create_task(question())
        self._questions[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, question: asyncio.Task[None]) -> None:
        del self._questions[question]
        with suppress(asyncio.CancelledError):
            question.result()


async def is_answering(channel: grpc.aio.Channel, timeout_s: float = SILENT_AFTER_S) -> bool:
    """Returns whether the peer of `channel` answers a health check within `timeout_s`.

    Any answer counts. The standard health service takes questions from everybody.
    """
    try:
        check = health_pb2_grpc.HealthStub(channel).Check
        await check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return is_answer(error)
    except grpc.aio.UsageError:  # the channel was closed
        return False
    return True


def is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether `error` came from the peer, not from gRPC or a proxy in between."""
    return error.code() not in _NO_ANSWER or bool(failure_of(error).reason)
