"""A whole run: targets get ready, and take turns, round by round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial

from splitserve_bench.figures.recorder import Recorder
from splitserve_bench.figures.slo import Slo
from splitserve_bench.load.generator import Generator, Pace
from splitserve_bench.targets.target import AskFailed, Target
from splitserve_bench.workloads.conversation import Conversation, Piece, Turn

_MOST_MESSAGE = 300
_PROBE = Turn((Piece(2**63 - 1, 8),), 2)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """`prompt_seed`: of the texts of prompts, which differ from round to round and by target."""

    pace: Pace
    slo: Slo = field(default_factory=Slo)
    warm_up_s: float = 0.0
    num_rounds: int = 1
    prompt_seed: int = 0


class TargetUnusable(Exception):
    """A target did not answer before the load began; the message says which, and why."""


async def run_load(
    targets: Sequence[tuple[str, Target]],
    workload: Callable[[], Iterator[Conversation]],
    config: RunConfig,
    progress: Callable[[int], None],
    stop: asyncio.Event | None = None,
) -> list[tuple[str, Recorder]]:
    """Each target's model, and what was measured. `progress`: is told of each request's tokens.

    `stop`: when it is set the run ends; what is not answered then is counted nowhere.
    All get the same load, one after another, in the other order every second round, so that what
    drifts meanwhile meets all alike. Raises TargetUnusable, and what `workload` raises.
    """
    stop = stop or asyncio.Event()
    recorders = [Recorder(config.slo, config.warm_up_s, progress) for _ in targets]
    async with AsyncExitStack() as stack:
        models = []
        for name, target in targets:
            await stack.enter_async_context(target)
            models.append(await _get_ready(name, target, config))
        for number in range(config.num_rounds):
            order = range(len(targets)) if number % 2 == 0 else reversed(range(len(targets)))
            for index in order:
                if stop.is_set():
                    break
                salt = _salt(config, number * len(targets) + index)
                begin = partial(targets[index][1].begin, salt)
                generator = Generator(begin, config.pace, recorders[index])
                await _run_round(generator.run(workload()), recorders[index], stop)
    return list(zip(models, recorders, strict=True))


def _salt(config: RunConfig, number: int) -> int:
    return config.prompt_seed * 2**20 + number


async def _run_round(
    load: Coroutine[None, None, None], recorder: Recorder, stop: asyncio.Event
) -> None:
    recorder.begin_round(asyncio.get_running_loop().time())
    running, stopping = asyncio.ensure_future(load), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.wait({running})
    recorder.end_round()


async def _get_ready(name: str, target: Target, config: RunConfig) -> str:
    """Asks once, so that what cannot work is known before the load, and connections are there."""
    try:
        async with asyncio.timeout(config.pace.timeout_s):
            model = await target.get_ready()
            exchange = target.begin(_salt(config, 2**20 - 1)).prepare(_PROBE)
            async with aclosing(exchange.send()) as parts:
                async for _ in parts:
                    pass
    except AskFailed as error:
        said = error.message[:_MOST_MESSAGE]
        raise TargetUnusable(f"{name}: {said} [{error.kind}]") from error
    except TimeoutError as error:
        raise TargetUnusable(f"{name}: no answer within {config.pace.timeout_s:g} s") from error
    return model
