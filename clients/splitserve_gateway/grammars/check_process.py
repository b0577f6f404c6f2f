"""Process that tries grammars, or checks answers, for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from splitserve_grammars import GrammarTrialResult, GrammarTrials, TrialKind, trial_command


class CheckProcess:
    """Tries one grammar at a time in a process, which the first trial starts."""

    def __init__(
        self, max_address_bytes: int, max_wall_s: float, kind: TrialKind = "grammar"
    ) -> None:
        """Prepares the process.

        `max_wall_s`: a trial is given up after this, even on a busy machine. `kind`: what it tries.
        """
        self._trials = GrammarTrials(trial_command(max_address_bytes, kind=kind), max_wall_s)
        self._thread = ThreadPoolExecutor(1, "grammar-check")

    async def ask(self, kind: str, texts: Sequence[str], max_cpu_s: float) -> GrammarTrialResult:
        """Tries a grammar and returns the verdict. `kind`: its dialect.

        Raises TrialTooSlow, and TrialUnavailable if two processes in a row failed.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._trials.ask, kind, texts, max_cpu_s)

    async def close(self) -> None:
        """Ends the process, if one runs; no trial can follow."""
        await asyncio.to_thread(self._trials.close)
        self._thread.shutdown(wait=False)
