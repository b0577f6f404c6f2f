"""An engine loop with an executor in this process, its clients, and faults in its core."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from executor_service.service.decode_batch import decode_batch
from executor_service.service.encode_answer import encode_answer
from executor_service.steps.step_executor import StepExecutor
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepEvents
from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.executors.answer_watch import AnswerWatch, FleetPulse
from scheduler_service.executors.executor_link import ExecutorLost
from scheduler_service.executors.step_alarm import StepAlarm
from scheduler_service.executors.step_patience import StepPatience
from scheduler_service.journal.core import Core
from scheduler_service.observer import NoObserver
from scheduler_service.scheduler.executor_state import ExecutorState
from scheduler_service.step_codec import EncodedBatch
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import make_config
from tests.support.core.in_process import executor_info
from tests.support.fakes.fake_runner import FakeRunner

ADDRESS = "executor:1"
VOCAB_SIZE = 97
CONFIG = make_config(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
PATIENCE_S = 240.0


class LoopLink:
    """Stands for an `ExecutorLink`; answers every batch at once. `alter` may spoil a result."""

    def __init__(
        self, config: SchedulerConfig, epoch: int = 1, max_inflight_steps: int = 2
    ) -> None:
        runner = FakeRunner(
            block_size=config.block_size,
            num_device_blocks=config.num_device_blocks,
            vocab_size=config.vocab_size,
        )
        self._executor = StepExecutor(executor_info(config, epoch), runner)
        self._results: asyncio.Queue[pb.StepResult] = asyncio.Queue()
        self.alter: Callable[[pb.StepResult], None] = lambda _result: None
        limits = pb.ExecutorLimits(max_inflight_steps=max_inflight_steps, max_message_bytes=2**22)
        self.info = pb.ExecutorInfo(address=ADDRESS, executor_epoch=epoch, limits=limits)

    def send(self, batch: EncodedBatch) -> None:
        """See ExecutorLink."""
        result = encode_answer(
            self._executor.execute(decode_batch(pb.ScheduleBatch.FromString(batch.data)))
        )
        self.alter(result)
        self.answer(result)

    def answer(self, result: pb.StepResult) -> None:
        """Makes `result` come in."""
        self._results.put_nowait(result)

    async def results(self) -> AsyncGenerator[pb.StepResult, None]:
        """See ExecutorLink."""
        while True:
            yield await self._results.get()


class Clients:
    """What clients of a loop got."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.prompt_positions: dict[int, list[int]] = {}
        self.finished: list[str] = []
        self.has_changed = asyncio.Event()

    def deliver(self, events: StepEvents) -> None:
        for key, token_id in zip(
            events.client_keys.tolist(), events.token_ids.tolist(), strict=True
        ):
            self.tokens.setdefault(key, []).append(token_id)
        for request, scores in events.prompt_logprobs:
            positions = self.prompt_positions.setdefault(request.client_key, [])
            positions += [scored.position for scored in scores]
        self.finished += [request.request_id for request in events.finished]
        self.has_changed.set()


class Broken:
    """Something in a core that fails at its `at_call`-th call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.at_call = 1
        self.error = AssertionError("block 3 freed twice")
        original, calls = getattr(owner, name), itertools.count(1)

        def call(part: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            if next(calls) == self.at_call:
                raise self.error
            return original(part, *arguments, **named)

        monkeypatch.setattr(owner, name, call)


def a_request(number: int, **params: object) -> Request:
    """Asks for 10 tokens after [number, 2, 3]."""
    values: dict[str, object] = {"max_tokens": 10} | params
    request = Request.create(
        f"r{number}",
        [number, 2, 3],
        SamplingParams(**values),  # type: ignore[arg-type]
        arrival=number,
        seed=number,
    )
    request.client_key = number
    return request


def a_step_alarm(now_ns: Callable[[], int]) -> StepAlarm:
    """Of the only executor there is."""
    watch = AnswerWatch(ADDRESS, StepPatience(PATIENCE_S, PATIENCE_S), FleetPulse())
    return StepAlarm(
        watch, now_ns, block_size=CONFIG.block_size, ask_others=nothing, recovered=nothing
    )


def nothing() -> None:
    """Is done."""


def a_loop(
    clients: Clients,
    core: Core | None = None,
    link: LoopLink | None = None,
    now_ns: Callable[[], int] = lambda: 0,
    steps: StepAlarm | None = None,
) -> ExecutorState:
    """A loop with an executor; `core` may be recorded."""
    return ExecutorState(
        Scheduler(CONFIG) if core is None else core,
        link or LoopLink(CONFIG),  # type: ignore[arg-type]
        clients.deliver,
        lambda _loop: None,
        lambda _loop, _outcome: None,
        steps or a_step_alarm(now_ns),
        NoObserver(),
        scheduler_epoch=1,
        pipeline_depth=2,
        now_ns=now_ns,
    )


async def run_until_lost(loop: ExecutorState) -> ExecutorLost:
    """Runs a loop that is going to end."""
    with pytest.raises(ExecutorLost) as caught:
        await asyncio.wait_for(loop.run(), PATIENCE_S)
    return caught.value


async def finish_elsewhere(requests: list[Request], clients: Clients) -> None:
    """Another executor gets all of them, and brings them to their ends."""
    loop = a_loop(clients)
    for request in requests:
        loop.scheduler.readmit(request)
    running = asyncio.ensure_future(loop.run())
    async with asyncio.timeout(PATIENCE_S):
        while loop.scheduler.num_waiting or loop.scheduler.num_running:
            clients.has_changed.clear()
            await clients.has_changed.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
