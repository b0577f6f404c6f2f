"""Complete benchmark run: targets get ready, then take turns round by round; problems as text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from splitserve_bench.figures import Recorder, Slo
from splitserve_bench.load import LoadAbandoned, LoadProcessFailed, Pace, TargetUnusable, Watcher
from splitserve_bench.workloads import TraceUnreadable
from splitserve_common import FilesUnusable
from splitserve_rpc import SecurityUnusable
from splitserve_text import SplitserveError

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Configuration of a run.

    `prompt_seed`: seed of prompt texts, which also differ by round and by target.
    """

    pace: Pace
    slo: Slo = field(default_factory=Slo)
    warm_up_s: float = 0.0
    num_rounds: int = 1
    prompt_seed: int = 0


class Load(Protocol):
    """Load on targets, by this process or by several."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def get_ready(self) -> list[str]:
        """Sends a probe to each target; returns the model of each."""
        ...

    async def run(self, index: int, salt: int, begin_s: float, watcher: Watcher) -> None:
        """Runs one round with target number `index`.

        Cancelling interrupts running requests, and their outcomes still reach the watcher.
        """
        ...


async def run_load(
    load: Load,
    num_targets: int,
    config: RunConfig,
    progress: Callable[[int], None],
    stop: asyncio.Event | None = None,
    warn: Callable[[LoadAbandoned], None] = lambda _given_up: None,
) -> list[tuple[str, Recorder]]:
    """Runs all rounds; returns the model and the measurements of each target.

    `progress`: called with the output tokens of each request. `warn`: called for a round whose load
    cannot be generated in full. `stop`: ends the run when set; requests still open are not counted.
    All targets get the same load, one after another, and every second round in reverse order, so
    that drift affects all targets alike. Raises the exceptions of the load.
    """
    stop = stop or asyncio.Event()
    recorders = [Recorder(config.slo, config.warm_up_s, progress, warn) for _ in range(num_targets)]
    models = [""] * num_targets
    clock = asyncio.get_running_loop().time
    async with load:
        models = await _unless_stopped(load.get_ready(), stop) or models
        for number in range(config.num_rounds):
            order = range(num_targets) if number % 2 == 0 else reversed(range(num_targets))
            for index in order:
                if stop.is_set():
                    break
                salt = config.prompt_seed * 2**20 + number * num_targets + index
                begin_s = clock()
                recorders[index].begin_round(begin_s)
                await _unless_stopped(load.run(index, salt, begin_s, recorders[index]), stop)
                recorders[index].end_round()
    return list(zip(models, recorders, strict=True))


async def _unless_stopped(
    work: Coroutine[Any, Any, _Result], stop: asyncio.Event
) -> _Result | None:
    """Returns the result of `work`; None if stopped before."""
    running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.wait({running})


# -- Problems of a run, as one line for the user ---------------------------------------------------

# ValueError includes TargetRefused and errors of flags.
PROBLEMS = (
    TargetUnusable, LoadProcessFailed, TraceUnreadable, SplitserveError, SecurityUnusable,
    FilesUnusable, OSError, ValueError,
)  # fmt: skip


def problem_text(errors: BaseExceptionGroup[BaseException]) -> str:
    """Returns the first error as one line."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = error.message if isinstance(error, SplitserveError) else str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split())
