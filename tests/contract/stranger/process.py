"""Starts scheduler processes and what belongs to them; ends all of it whatever happens."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import IO, TypeVar

import grpc

from splitserve.scheduler.v1 import admin_pb2, admin_pb2_grpc
from splitserve.scheduler.v1 import scheduler_pb2 as pb
from tests.contract.stranger.client import Completion, StrangerClient, request_of
from tests.contract.stranger.executor import StrangerExecutor
from tests.contract.stranger.truth import VOCAB_SIZE, expected_tokens
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ForkedProcess, start_process

T = TypeVar("T")
_PAUSE_S = 0.005
# As long as a machine may be busy with other things.
PATIENCE_S = 240.0
# Tests hold steps for as long as it takes to look at what others do meanwhile.
_PATIENT: dict[str, object] = {"step_patience_s": 300}


def _spawn(address: str, options: dict[str, object], log: int) -> ForkedProcess:
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in options.items()
    ]
    listen = (f"--listen={address}", f"--cluster-listen={address}")
    return start_process("scheduler_service", [*listen, *flags], stdout=log, stderr=log)


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A scheduler process."""

    address: str
    process: ForkedProcess

    def terminate(self) -> None:
        """Asks it to drain and end."""
        self.process.terminate()

    async def stop(self, timeout_s: float = PATIENCE_S) -> None:
        """Ends it, by force after `timeout_s`."""
        self.process.terminate()
        try:
            await asyncio.to_thread(self.process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@asynccontextmanager
async def running_scheduler(**options: object) -> AsyncIterator[Scheduler]:
    """A scheduler process that listens. Options are its long flags; True is one without a value."""
    address = str(options.pop("listen", None) or reserve_address())
    with tempfile.TemporaryFile() as log:
        process = _spawn(address, {"drain_timeout_s": 0, **_PATIENT, **options}, log.fileno())
        try:
            async with grpc.aio.insecure_channel(address, _FAST_RETRY) as channel:
                await _wait_ready(channel, log)
            yield Scheduler(address, process)
        finally:
            await Scheduler(address, process).stop()
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-20000:])


_FAST_RETRY = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
]


async def _wait_ready(channel: grpc.aio.Channel, log: IO[bytes]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await channel.channel_ready()
    except TimeoutError:
        log.seek(0)
        raise RuntimeError(f"no scheduler listens: {log.read().decode()}") from None


@dataclass(slots=True)
class Driver:
    """A scheduler process, its client, and executors in this process."""

    scheduler: Scheduler
    client: StrangerClient
    admin: admin_pb2_grpc.AdminServiceStub
    executors: Sequence[StrangerExecutor]

    async def states(self) -> list[admin_pb2.ExecutorState]:
        """What the scheduler says about its executors."""
        request = admin_pb2.ListExecutorsRequest()
        return list((await self.admin.ListExecutors(request, timeout=PATIENCE_S)).executors)

    async def wait_for_states(
        self,
        is_true: Callable[[list[admin_pb2.ExecutorState]], bool],
        timeout_s: float = PATIENCE_S,
    ) -> list[admin_pb2.ExecutorState]:
        """Asks until `is_true`. Raises TimeoutError with the last answer."""

        async def ask() -> tuple[bool, list[admin_pb2.ExecutorState]]:
            states = await self.states()
            return is_true(states), states

        return await poll(ask, timeout_s)

    async def wait_idle(self) -> None:
        """Waits until every device block of every connected executor is free."""
        await self.wait_for_states(
            lambda states: all(
                s.num_free_device_blocks == s.executor.num_device_blocks
                and s.num_running_requests == s.num_waiting_requests == 0
                for s in states
                if s.connected
            )
        )

    def check_contract(self) -> None:
        """Asserts that the scheduler sent nothing wrong to any executor."""
        for executor in self.executors:
            assert executor.violations == []

    async def check_exact(self, requests: Sequence[pb.GenerateRequest]) -> list[Completion]:
        """Asserts that `requests` get their tokens, and that nothing is left of them."""
        completions = await self.client.generate_all(requests)
        assert [c.tokens for c in completions] == [truth_of(request) for request in requests]
        assert {c.reason for c in completions} == {"LENGTH"}
        await self.wait_idle()
        self.check_contract()
        return completions


def make_requests(
    count: int = 5, max_tokens: int = 10, prompt_step: int = 5
) -> list[pb.GenerateRequest]:
    """Requests with distinct prompts; every third is greedy, the others have odd seeds."""
    seeds = [0, 7, -1, 2**63 - 1, -(2**63), 12345, 1]
    return [
        request_of(
            [(17 * number + 3 * i) % VOCAB_SIZE for i in range(1 + prompt_step * number)],
            seed=seeds[number % len(seeds)],
            temperature=0 if number % 3 == 0 else 0.5 + number,
            max_tokens=max_tokens,
        )
        for number in range(count)
    ]


def truth_of(request: pb.GenerateRequest, n: int | None = None) -> list[int]:
    """The first `n` tokens of `request`, None for `max_tokens`."""
    params = request.sampling_params
    num_tokens = params.max_tokens if n is None else n
    return expected_tokens(request.prompt_token_ids, params.seed, params.temperature, num_tokens)


async def poll(ask: Callable[[], Awaitable[tuple[bool, T]]], timeout_s: float = PATIENCE_S) -> T:
    """Asks until the answer's first part is true. Raises TimeoutError with the last answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_true, answer = await ask()
        if is_true:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"last answer: {answer}")
        # Who is asked without a pause has no time for what it is asked about.
        await asyncio.sleep(_PAUSE_S)


@asynccontextmanager
async def running_cluster(*executors: StrangerExecutor, **options: object) -> AsyncIterator[Driver]:
    """A scheduler with `executors` connected to it."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(running_scheduler(**options))
        address = scheduler.address
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        cluster = Driver(
            scheduler, StrangerClient(channel), admin_pb2_grpc.AdminServiceStub(channel), executors
        )
        for executor in executors:
            stack.push_async_callback(executor.close)
            stack.callback(executor.gate.set)
            await executor.start(address)
        for executor in executors:
            await executor.wait_for_stream()
        await cluster.wait_for_states(
            lambda states: len(states) == len(executors) and all(s.connected for s in states)
        )
        yield cluster
