"""A whole run: targets get ready, and take turns, round by round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from splitserve_bench.figures.recorder import Recorder, Slo
from splitserve_bench.load.generator import Pace, TargetUnusable
from splitserve_bench.load.outcome import GivenUp, Watcher
from splitserve_bench.load.process_load import LoadProcessFailed
from splitserve_bench.workloads.traces import TraceUnreadable
from splitserve_client.errors import SplitserveError
from splitserve_rpc.security import SecurityUnusable
from splitserve_rpc.watched_files import FilesUnusable

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """`prompt_seed`: of the texts of prompts, which differ from round to round and by target."""

    pace: Pace
    slo: Slo = field(default_factory=Slo)
    warm_up_s: float = 0.0
    num_rounds: int = 1
    prompt_seed: int = 0


class Load(Protocol):
    """Puts a load on targets, by this process or by several."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def get_ready(self) -> list[str]:
        """Asks each target once; returns their models."""
        ...

    async def run(self, index: int, salt: int, begin_s: float, watcher: Watcher) -> None:
        """One round with that target. Cancelling ends what runs, of which the watcher is told."""
        ...


async def run_load(
    load: Load,
    num_targets: int,
    config: RunConfig,
    progress: Callable[[int], None],
    stop: asyncio.Event | None = None,
    warn: Callable[[GivenUp], None] = lambda _given_up: None,
) -> list[tuple[str, Recorder]]:
    """Each target's model, and what was measured. `progress`: is told of each request's tokens.

    `warn`: of a round that cannot be put on as it is meant.
    `stop`: when it is set the run ends; what is not answered then is counted nowhere.
    All get the same load, one after another, in the other order every second round, so that what
    drifts meanwhile meets all alike. Raises what the load raises.
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
    """What it returns; None where it was stopped before."""
    running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.wait({running})


# -- What can be wrong with what was asked for, as a line for whoever asked ------------------------

# TargetRefused is a ValueError, as is what flags refuse.
PROBLEMS = (
    TargetUnusable, LoadProcessFailed, TraceUnreadable, SplitserveError, SecurityUnusable,
    FilesUnusable, OSError, ValueError,
)  # fmt: skip


def problem_text(errors: BaseExceptionGroup[BaseException]) -> str:
    """The first of them in a line."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = error.message if isinstance(error, SplitserveError) else str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split())
