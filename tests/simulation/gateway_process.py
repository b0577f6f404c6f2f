"""A simulated gateway: the real fleet of schedulers, with some requests of HTTP clients.

HTTP itself is left out: a request is what an endpoint makes of it, and its events are what an
endpoint turns into text.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from random import Random

from splitserve_client import (
    ClientConfig,
    Draining,
    Finish,
    ModelNotReady,
    QueueFull,
    ServerUnreachable,
    SplitserveError,
    Timing,
    Tokens,
    UnreadBudget,
)
from splitserve_common import Discovery
from splitserve_gateway.http import ApiError
from splitserve_gateway.upstreams import Fleet, UpstreamRequest
from tests.simulation.client_process import Outcome, Wrong, check_all, is_enough, note
from tests.simulation.virtual_loop import Process, VirtualLoop
from tests.simulation.workload import Wanted

# As clients of OpenAI's API do after a 503 or 429.
_ASK_AGAIN_S = 0.5
# What the gateway answers with 503 or 429.
_REFUSALS = (ServerUnreachable, Draining, ModelNotReady, QueueFull)


class SimulatedGateway:
    """One process, which asks for its requests as its clients do; see `SimulatedClient`."""

    def __init__(
        self,
        loop: VirtualLoop,
        random: Random,
        host: str,
        schedulers: Discovery,
        wanted: Sequence[Wanted],
    ) -> None:
        self.outcomes = [Outcome(each) for each in wanted]
        self.process = Process(loop, host)
        self._loop = loop
        timing = Timing(loop.time, asyncio.sleep, random.random)
        config = ClientConfig(timing=timing)
        self.fleet = self.process.call(Fleet, schedulers, UnreadBudget(), config, random.random)

    def start(self) -> asyncio.Task[None]:
        """The task ends with the last request."""
        return self.process.start(self._live())

    async def _live(self) -> None:
        async with self.fleet:
            await asyncio.gather(*map(self._answer, self.outcomes))

    async def _answer(self, outcome: Outcome) -> None:
        await asyncio.sleep(outcome.wanted.at_s)
        outcome.asked_at_s = self._loop.time()
        try:
            for pause_s in itertools.chain((0.0,), itertools.repeat(_ASK_AGAIN_S)):
                await asyncio.sleep(pause_s)
                if await self._ask(outcome):
                    break
            if not outcome.is_aborted:
                await check_all(outcome)
        except SplitserveError as error:
            outcome.error = error
        except Wrong as wrong:
            outcome.wrong = wrong
        outcome.is_over = True

    async def _ask(self, outcome: Outcome) -> bool:
        """Whether it was answered, and not refused."""
        wanted = outcome.wanted
        try:
            await self.fleet.wait_read(None)
            upstream, served = self.fleet.choose(None)
        except ApiError as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise Wrong(f"it was refused: {error.message}") from error
            return False
        request = UpstreamRequest(
            upstream,
            wanted.prompt,
            wanted.params,
            wanted.scheduling,
            served.model.digest,
            request_id=wanted.request_id,
        )
        if wanted.abort_after == 0:
            outcome.is_aborted = True
            request.abort()
        try:
            async with aclosing(request.events()) as events:
                await self._read(outcome, request, events)
        except _REFUSALS:
            if outcome.is_aborted:
                return True
            if outcome.events:
                raise
            return False
        return True

    async def _read(
        self,
        outcome: Outcome,
        request: UpstreamRequest,
        events: AsyncGenerator[Tokens | Finish, None],
    ) -> None:
        wanted = outcome.wanted
        async for event in events:
            note(outcome, event, self._loop.time())
            if is_enough(outcome):
                if not wanted.in_session:
                    return  # as a client that is gone
                request.abort()
            await asyncio.sleep(wanted.read_pause_s)
