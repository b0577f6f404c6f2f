"""Executors, streams, steps and rows are lost while requests of several sequences run.

Whatever is lost, what clients get is what they would have got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from executor_service.steps.step import RowStatus, StepInput
from splitserve_client import (
    BeamSearch,
    Completion,
    Draining,
    Generation,
    RequestFailed,
    SamplingParams,
    ServerUnreachable,
)
from tests.contract.stranger.process import running_scheduler
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_runner import StepFault, no_fault
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service
from tests.support.processes.patience import PATIENCE_S

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

MAX_DEPTH = 3
# Whom executors are lost with so often in succession would be taken for the cause.
MANY_LOSSES = 64
STOPS = (0, 32, 64, 96)
THREE = SamplingParams(seed=2, max_tokens=50, n=3)
KINDS = (
    THREE,
    replace(THREE, stop_token_ids=STOPS, n=2, best_of=4),
    replace(THREE, max_tokens=30, beam_search=BeamSearch(4)),
    replace(THREE, max_tokens=30, stop_token_ids=STOPS, n=2, beam_search=BeamSearch(5)),
    replace(THREE, n=1),
    replace(THREE, n=2, num_logprobs=1),
)
REQUESTS = [([number, 5, 9, *range(number)], params) for number, params in enumerate(KINDS)]

Disturb: TypeAlias = Callable[[FakeService, FakeExecutor, StepWatch], Awaitable[None]]


async def kill_and_restart(service: FakeService, executor: FakeExecutor, watch: StepWatch) -> None:
    await service.kill(executor, watch)
    await executor.start()


async def cut_stream(service: FakeService, executor: FakeExecutor, watch: StepWatch) -> None:
    executor.cut()
    watch.release()


async def fail_step(service: FakeService, executor: FakeExecutor, watch: StepWatch) -> None:
    """The step that is held fails; those sent before that is known lean on what it was to write."""

    before = watch.fault

    def fail_once(step: StepInput) -> StepFault:
        before(step)
        watch.fault = forgive_for(executor, step.step_id, before)
        return StepFault(error=RuntimeError("the device is gone for a moment"))

    watch.fault = fail_once
    watch.release()


def forgive_for(
    executor: FakeExecutor, failed_step_id: int, before: Callable[[StepInput], StepFault]
) -> Callable[[StepInput], StepFault]:
    """A fault that is none: forgets what is read in vain by steps in flight with a failed one."""

    def forget(step: StepInput) -> StepFault:
        in_flight = range(failed_step_id + 1, min(step.step_id, failed_step_id + MAX_DEPTH))
        executor.violations[:] = [
            violation
            for violation in executor.violations
            if int(violation.removeprefix("step ").partition(":")[0]) not in in_flight
        ]
        return before(step)

    return forget


# The last one forgives by the number of a step, and each life counts its own.
DISTURBANCES: tuple[Disturb, ...] = (kill_and_restart, cut_stream, fail_step)


async def forget_prefixes(service: FakeService, executor: FakeExecutor, watch: StepWatch) -> None:
    """What is computed next is computed from the start, as if nothing had been before."""
    await kill_and_restart(service, executor, watch)
    await service.wait_connected(1)


def without_logprobs(completions: tuple[Completion, ...]) -> tuple[Completion, ...]:
    return tuple(replace(completion, logprobs=()) for completion in completions)


def start_all(service: FakeService) -> list[asyncio.Task[Generation]]:
    return [
        asyncio.create_task(service.client.complete(prompt, params)) for prompt, params in REQUESTS
    ]


async def start_all_at_once(
    service: FakeService, watch: StepWatch
) -> list[asyncio.Task[Generation]]:
    """Lets no step begin before the only executor has all of them."""
    watch.hold()
    generating = start_all(service)
    await service.wait_until_known(len(REQUESTS))
    return generating


async def check_all(generating: list[asyncio.Task[Generation]]) -> int:
    """Asserts that all got what they must get; returns the number of preemptions."""
    generations = await asyncio.gather(*generating)
    found = [without_logprobs(generation.completions) for generation in generations]
    assert found == [expected_completions(prompt, params) for prompt, params in REQUESTS]
    return sum(generation.usage.num_preemptions for generation in generations)


@pytest.mark.parametrize("pipeline_depth", [1, MAX_DEPTH])
async def test_all_kinds_go_on_when_something_is_lost_again_and_again(pipeline_depth: int) -> None:
    watch = StepWatch()
    executor = FakeExecutor(num_device_blocks=512, fault=watch)
    options = {"pipeline_depth": pipeline_depth, "max_executor_losses": MANY_LOSSES}
    async with fake_service(executor, **options) as service:
        for disturb in DISTURBANCES:
            generating = start_all(service)
            for num_steps in (0, 6, 1, 11):
                watch.hold(after=num_steps)
                await watch.wait_held()
                await disturb(service, executor, watch)
            assert not all(task.done() for task in generating)
            await check_all(generating)
            await service.wait_idle()
            await forget_prefixes(service, executor, watch)


async def test_all_kinds_go_on_when_something_is_lost_and_blocks_are_scarce() -> None:
    watch = StepWatch()
    executor = FakeExecutor(num_device_blocks=58, num_host_blocks=60, fault=watch)
    options = {"preemption_mode": "swap", "max_executor_losses": MANY_LOSSES}
    async with fake_service(executor, **options) as service:
        for disturb in DISTURBANCES:
            generating = start_all(service)
            for num_steps in (12, 9, 7):
                watch.hold(after=num_steps)
                await watch.wait_held()
                await disturb(service, executor, watch)
            assert await check_all(generating) > 0
            await service.wait_idle()
            await forget_prefixes(service, executor, watch)


async def test_all_kinds_move_when_one_of_two_executors_is_killed() -> None:
    watches = (StepWatch(), StepWatch())
    executors = [FakeExecutor(num_device_blocks=512, fault=watch) for watch in watches]
    async with fake_service(*executors) as service:
        for watch in watches:
            watch.hold(after=8)
        generating = start_all(service)
        for watch in watches:
            await watch.wait_held()
        await service.kill(executors[0], watches[0])
        watches[1].release()
        await check_all(generating)
        await service.wait_idle()


async def test_request_fails_alone_when_a_row_of_one_of_its_sequences_does() -> None:
    watch = StepWatch()
    async with fake_service(FakeExecutor(num_device_blocks=512, fault=watch)) as service:
        victim = replace(THREE, seed=1000)

        def spoil(step: StepInput) -> StepFault:
            rows = [r for r, seed in zip(step.row_ids, step.seeds, strict=True) if seed == 1000]
            return StepFault(rows=dict.fromkeys(map(int, rows), RowStatus.INVALID_LOGITS))

        generating = await start_all_at_once(service, watch)
        failing = asyncio.create_task(service.client.complete([1, 2, 3], victim))
        await service.wait_until_known(len(REQUESTS) + 1)
        # What fails is not the prompt, which the other sequences of the victim read.
        watch.hold(after=10)
        await watch.wait_held()
        watch.fault = spoil
        watch.release()
        with pytest.raises(RequestFailed) as caught:
            await failing
        assert caught.value.reason == "INVALID_LOGITS"
        await check_all(generating)
        await service.wait_idle()


async def test_request_ends_with_an_error_when_it_is_lost_without_end() -> None:
    watch = StepWatch()
    async with fake_service(FakeExecutor(num_device_blocks=512, fault=watch)) as service:
        for params in KINDS[:3]:
            watch.hold(after=10)
            generating = asyncio.create_task(service.client.complete([1, 2, 3], params))
            await watch.wait_held()
            watch.fault = lambda _step: StepFault(error=RuntimeError("never again"))
            watch.release()
            with pytest.raises(RequestFailed) as caught:
                await generating
            assert caught.value.reason == "EXECUTOR_LOST_REPEATEDLY"
            watch.fault = no_fault
            generation = await service.client.complete([1, 2, 3], params)
            assert generation.completions == expected_completions([1, 2, 3], params)
            await service.wait_idle()


async def submit_without_end(service: FakeService) -> None:
    """Submits requests that end at once, of which the executor holds the first token."""
    while True:
        submitted = service.client.complete([1], replace(THREE, max_tokens=1), timeout_s=PATIENCE_S)
        await submitted


async def test_all_kinds_end_as_they_must_when_the_scheduler_drains() -> None:
    watch = StepWatch()
    executor = FakeExecutor(num_device_blocks=512, fault=watch)
    async with fake_service(executor, drain_timeout_s=3600) as service:
        generating = await start_all_at_once(service, watch)
        watch.hold(after=8)
        await watch.wait_held()
        service.scheduler.terminate()
        # It refuses what is new while it lets the others finish.
        with pytest.raises((Draining, ServerUnreachable)):
            await submit_without_end(service)
        watch.release()
        await check_all(generating)
        assert await asyncio.to_thread(service.scheduler.process.wait, PATIENCE_S) == 0


async def test_streams_go_on_elsewhere_when_the_scheduler_gives_them_no_time() -> None:
    watch = StepWatch()
    executor = FakeExecutor(num_device_blocks=512, fault=watch)
    async with fake_service(executor, drain_timeout_s=0) as service:
        # A stream that had brought nothing would be refused, too.
        generating = await start_all_at_once(service, watch)
        watch.hold(after=8)
        await watch.wait_held()
        service.scheduler.terminate()
        assert await asyncio.to_thread(service.scheduler.process.wait, PATIENCE_S) == 0
        watch.release()
        async with running_scheduler(listen=service.scheduler.address):
            for task, (prompt, params) in zip(generating, REQUESTS, strict=True):
                if params.is_streamed:
                    found = without_logprobs((await task).completions)
                    assert found == expected_completions(prompt, params)
                else:
                    # It had brought nothing: to the client this is as if it had been refused.
                    with pytest.raises(Draining):
                        await task
