"""Tells whoever began the run what a watcher is told, some times a second."""

from __future__ import annotations

import asyncio

from splitserve_bench.load.frames import Told, send
from splitserve_bench.load.outcome import Outcome
from splitserve_bench.load.watcher import GivenUp

_EVERY_S = 0.1


class Relay:
    """A Watcher. What cannot be sent yet is kept; answers do not wait for that."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._outcomes: list[Outcome] = []
        self._busy_ratios: list[float] = []
        self._given_up: list[GivenUp] = []

    def ended(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def worked(self, busy_ratio: float) -> None:
        self._busy_ratios.append(busy_ratio)

    def gave_up(self, given_up: GivenUp) -> None:
        self._given_up.append(given_up)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Everything so far."""
        if self._outcomes or self._busy_ratios or self._given_up:
            told = Told(self._outcomes, self._busy_ratios, self._given_up)
            self._outcomes, self._busy_ratios, self._given_up = [], [], []
            await send(self._writer, told)
