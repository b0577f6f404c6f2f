"""What watchers are shown is what the scheduler has at every step, by names that clients use."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, aclosing

import grpc.aio
import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.scheduler.effects import SendStep
from scheduler_service.scheduler.engine.engine import Engine
from scheduler_service.scheduler.events import RequestSubmitted
from scheduler_service.scheduler.values.config import PolicyConfig, PreemptionMode
from scheduler_service.scheduler.values.request import SequenceStatus
from scheduler_service.watching.live_history import POINT_NS
from scheduler_service.watching.live_moment import BlockState
from scheduler_service.watching.live_steps import RowKind
from scheduler_service.watching.live_view import MAX_WATCHERS, LiveView, LiveWatcher, Pace
from scheduler_service.watching.turn import Turn
from splitserve.scheduler.v1 import live_pb2 as live
from splitserve.scheduler.v1 import live_pb2_grpc
from splitserve_client import AsyncClient, SamplingParams, SplitserveError
from splitserve_live.state import LiveState
from splitserve_rpc.domain_error import DomainError
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import (
    UNIX_MS,
    scheduler_in_process,
)

SWAPS = ClusterConfig(
    reconnect_timeout_s=0.1,
    step_patience_s=300.0,
    policies=PolicyConfig(preemption_mode=PreemptionMode.SWAP),
)


class WatchesEachStep:
    """Takes a frame at each step that is sent or answered, and compares it with the cores."""

    def __init__(self) -> None:
        self.state = LiveState()
        self.frames: list[live.WatchSchedulerResponse] = []
        self._watched: tuple[Driver, LiveWatcher] | None = None

    def begin(self, cluster: Driver, watcher: LiveWatcher) -> None:
        self._watched = cluster, watcher

    def see(self, turn: Turn) -> None:
        if turn.answered or any(isinstance(effect, SendStep) for effect in turn.effects):
            self._look()

    def _look(self) -> None:
        if self._watched is None:
            return
        cluster, watcher = self._watched
        frame = live.WatchSchedulerResponse.FromString(watcher.frame().SerializeToString())
        self.frames.append(frame)
        self.state.take(frame)
        assert list(self.state.executors) == [e.address for e in cluster.executors]
        for engine in cluster.executors:
            self._compare(engine.address, engine.engine)

    def _compare(self, address: str, core: Engine) -> None:
        seen, rows = self.state.executors[address], core.placement.rows
        assert list(seen.told.running) == [s.request.arrival for s in rows.running]
        assert list(seen.told.num_tokens) == [
            len(rows.known_tokens(s.row_id)) for s in rows.running
        ]
        assert list(seen.told.swapped) == [r.arrival for r in core.placement.swapped]
        assert seen.told.num_waiting == core.num_waiting
        device, host = core.pools
        for pool, map_of in ((device, seen.device), (host, seen.host)):
            assert len(map_of.states) == pool.num_blocks
            for block, state in enumerate(map_of.states):
                assert_state(state, pool.reference_count(block))
        for sequence in rows.running:
            for block in rows.held_blocks(sequence.row_id):
                assert_holder(seen.device.holders[block], sequence.request.arrival, seen, block)
        for request in core.placement.swapped:
            for sequence in request.sequences:
                if sequence.status is SequenceStatus.SWAPPED:
                    holders = {seen.host.holders[block] for block in sequence.host_table}
                    assert holders == {request.arrival}


class Submissions:
    def __init__(self) -> None:
        self.several = asyncio.Event()
        self._num = 0

    def see(self, turn: Turn) -> None:
        self._num += isinstance(turn.event, RequestSubmitted)
        if self._num > 1:
            # When it has been given away, or waits.
            asyncio.get_running_loop().call_soon(self.several.set)


def assert_state(state: int, num_references: int) -> None:
    if num_references == 0:
        assert state in (BlockState.FREE, BlockState.CACHED, BlockState.ON_THE_MOVE)
    else:
        assert state in (
            BlockState.HELD if num_references == 1 else BlockState.SHARED,
            BlockState.GIVEN_BACK,
            BlockState.ON_THE_MOVE,
        )


def assert_holder(holder: int, arrival: int, seen: object, block: int) -> None:
    assert holder != 0, f"block {block} of {arrival} is nobody's in {seen}"


def states_seen(frames: Iterable[live.WatchSchedulerResponse]) -> set[int]:
    return {
        state
        for frame in frames
        for executor in frame.executors
        for state in executor.device.states
    }


def each_its_own() -> Callable[[int], int]:
    """Whoever asks for a frame has it made of that moment."""
    numbers = itertools.count()
    return lambda _: next(numbers)


def steps_of(frames: Iterable[live.WatchSchedulerResponse]) -> list[live.LiveStep]:
    return [step for frame in frames for executor in frame.executors for step in executor.steps]


async def complete_all(client: AsyncClient, num_requests: int) -> None:
    prompts = [[7, 7, 7, 7, 7, 7, 7, 7, number] for number in range(num_requests)]
    await asyncio.gather(
        *(
            client.complete(
                prompt, SamplingParams(seed=1, max_tokens=30), request_id=f"request-{prompt[-1]}"
            )
            for prompt in prompts
        )
    )


async def test_frames_say_what_cores_have_at_every_step_when_requests_are_swapped() -> None:
    looks, view = WatchesEachStep(), LiveView(lambda: UNIX_MS, each_its_own(), Pace(lambda: 0))
    executor = FakeExecutor(num_device_blocks=24, num_host_blocks=64)
    async with (
        scheduler_in_process(executor, config=SWAPS, watchers=[view, looks]) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        with view.watching(scheduler.cluster.scheduler, scheduler.cluster.submissions) as watcher:
            looks.begin(scheduler.cluster, watcher)
            await complete_all(client, 6)
            last = scheduler.cluster.executors[0].engine
            assert last.num_preemptions > 0
            steps = steps_of(looks.frames)
            assert sorted({step.step_id for step in steps}) == [step.step_id for step in steps]
            assert sum(step.num_swapped_out for step in steps) > 0
            assert sum(step.num_swapped_in for step in steps) > 0
            assert sum(step.num_sampled for step in steps) == 6 * 30
            kinds = {kind for step in steps for kind in step.kinds}
            assert kinds == {RowKind.PREFILL, RowKind.DECODE}
            assert states_seen(looks.frames) >= {
                BlockState.HELD, BlockState.SHARED, BlockState.CACHED, BlockState.ON_THE_MOVE
            }  # fmt: skip
            names = {request.request_id for f in looks.frames for request in f.new_requests}
            assert names == {f"request-{number}" for number in range(6)}
        assert view.is_idle


async def test_frames_tell_the_history_once_and_that_of_before_somebody_watched() -> None:
    ahead_ns = 0
    async with (
        scheduler_in_process(
            FakeExecutor(), now_ns=lambda: time.monotonic_ns() + ahead_ns
        ) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        await complete_all(client, 3)
        with scheduler.view.watching(
            scheduler.cluster.scheduler, scheduler.cluster.submissions
        ) as watcher:
            now = watcher.frame()
            assert now.time_to_first_token.count == 3
            assert 0 < now.time_to_first_token.p50_us <= now.time_to_first_token.p99_us
            ahead_ns += 4 * POINT_NS
            later = watcher.frame()
        with scheduler.view.watching(
            scheduler.cluster.scheduler, scheduler.cluster.submissions
        ) as watcher:
            all_at_once = watcher.frame()
        points = [*now.history, *later.history]
        assert sum(point.num_tokens for point in points) == 3 * 30
        assert sum(point.time_to_first_token.count for point in points) == 3
        times = [point.start_ms for point in points]
        assert times == list(range(times[0], times[-1] + 1, POINT_NS // 1_000_000))
        assert list(all_at_once.history)[: len(points)] == points


async def test_frame_says_whose_rows_steps_had_when_the_first_frame_was_late() -> None:
    watch = StepWatch()
    async with (
        scheduler_in_process(FakeExecutor(fault=watch)) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        watch.hold(after=3)
        params = SamplingParams(seed=1, max_tokens=8)
        completing = asyncio.create_task(client.complete([1] * 20, params, request_id="first"))
        await watch.wait_held()
        # Whoever comes soon after a long frame waits for the first of its own; steps do not.
        with scheduler.view.watching(
            scheduler.cluster.scheduler, scheduler.cluster.submissions
        ) as watcher:
            watch.release()
            await completing
            state, frame = LiveState(), watcher.frame()
            state.take(frame)
        rows = sorted({number for step in steps_of([frame]) for number in step.rows})
        assert [request.request_id for request in state.requests(rows)] == ["first"]


async def test_frame_says_what_the_first_that_waits_lacks_when_there_are_no_blocks() -> None:
    watch, submissions = StepWatch(), Submissions()
    executor = FakeExecutor(num_device_blocks=8, fault=watch)
    async with (
        scheduler_in_process(executor, watchers=[submissions]) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        watch.hold()
        params = SamplingParams(seed=1, max_tokens=4)
        first = asyncio.create_task(client.complete([1] * 20, params, request_id="first"))
        await watch.wait_held()
        second = asyncio.create_task(client.complete([2] * 20, params, request_id="second"))
        async with asyncio.timeout(PATIENCE_S):
            await submissions.several.wait()
        state = LiveState()
        with scheduler.view.watching(
            scheduler.cluster.scheduler, scheduler.cluster.submissions
        ) as watcher:
            state.take(watcher.frame())
        watch.release()
        frame, (told,) = state.frame, (each.told for each in state.executors.values())
        waiting = [*frame.waiting, *told.waiting]
        assert [request.request_id for request in state.requests(waiting)] == ["second"]
        (reason,) = [told.reason] if told.waiting else frame.reasons
        assert (reason.address, reason.lack) == (told.address, live.LIVE_LACK_BLOCKS)
        # The first has a block for its next token, too.
        assert (reason.num_needed, reason.num_free) == (5, 8 - 6)
        await asyncio.gather(first, second)


async def test_frame_says_that_others_go_first_when_some_are_swapped_out() -> None:
    watch = StepWatch()
    executor = FakeExecutor(num_device_blocks=24, num_host_blocks=64, fault=watch)
    async with (
        scheduler_in_process(executor, config=SWAPS) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        params = SamplingParams(seed=1, max_tokens=30)
        asking = [
            asyncio.create_task(client.complete([number] * 9, params)) for number in range(14)
        ]
        watch.hold(after=3)
        await watch.wait_held()
        while not scheduler.cluster.executors[0].engine.num_swapped:
            watch.hold(after=1)
            await watch.wait_held()
        with scheduler.view.watching(
            scheduler.cluster.scheduler, scheduler.cluster.submissions
        ) as watcher:

            async def look() -> tuple[bool, live.WatchSchedulerResponse]:
                frame = watcher.frame()
                return frame.num_waiting > 0, frame

            frame = await poll(look)
        watch.release()
        await asyncio.gather(*asking)
        assert [reason.lack for reason in frame.reasons] == [live.LIVE_LACK_OTHERS_FIRST]


async def test_frame_says_that_there_is_no_executor_when_a_request_waits_for_one() -> None:
    watch = StepWatch()
    executor = FakeExecutor(fault=watch)
    async with (
        scheduler_in_process(executor) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        watch.hold()
        running = asyncio.create_task(client.complete([1, 2], SamplingParams(max_tokens=4)))
        await watch.wait_held()
        killing = asyncio.create_task(executor.kill())
        async with asyncio.timeout(PATIENCE_S):
            while scheduler.cluster.executors:
                scheduler.changed.clear()
                await scheduler.changed.wait()
        with scheduler.view.watching(
            scheduler.cluster.scheduler, scheduler.cluster.submissions
        ) as watcher:
            frame = watcher.frame()
        watch.release()
        await killing
        await executor.start()
        await running
        assert [reason.lack for reason in frame.reasons] == [live.LIVE_LACK_EXECUTOR]
        assert (len(frame.executors), frame.num_waiting, len(frame.waiting)) == (0, 1, 1)


async def test_watch_scheduler_sends_frames_when_a_client_asks_for_them() -> None:
    async with (
        scheduler_in_process(FakeExecutor(), live_sleep=lambda _: asyncio.sleep(0)) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        state, num_frames = LiveState(), 0
        async with aclosing(client.watch(10)) as frames:
            async for frame in frames:
                state.take(frame)
                num_frames += 1
                if num_frames == 3:
                    break
        (executor,) = state.executors.values()
        assert state.frame.unix_ms == UNIX_MS
        assert executor.told.state == live.LIVE_STATE_SERVING
        assert len(executor.device.states) == 64


@pytest.mark.parametrize("rate", [0, 11, -1])
async def test_watch_scheduler_refuses_a_rate_that_is_not_allowed(rate: int) -> None:
    async with (
        scheduler_in_process(FakeExecutor()) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        with pytest.raises(SplitserveError, match=f"frames_per_second is {rate}; allowed: 1 to 10"):
            await anext(client.watch(rate))


async def test_live_view_refuses_a_ninth_watcher_until_one_has_left() -> None:
    view = LiveView()
    async with scheduler_in_process(FakeExecutor()) as scheduler:
        with ExitStack() as stack:
            for _ in range(MAX_WATCHERS - 1):
                stack.enter_context(
                    view.watching(scheduler.cluster.scheduler, scheduler.cluster.submissions)
                )
            with view.watching(scheduler.cluster.scheduler, scheduler.cluster.submissions):
                with pytest.raises(DomainError) as refused:
                    stack.enter_context(
                        view.watching(scheduler.cluster.scheduler, scheduler.cluster.submissions)
                    )
                assert refused.value.reason == "TOO_MANY_WATCHERS"
            stack.enter_context(
                view.watching(scheduler.cluster.scheduler, scheduler.cluster.submissions)
            )


async def test_watcher_that_does_not_read_loses_its_place_and_is_told_why() -> None:
    async with (
        scheduler_in_process(
            FakeExecutor(), live_sleep=lambda _: asyncio.sleep(0), live_unread_s=0.05
        ) as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        stub = live_pb2_grpc.LiveServiceStub(channel)
        unread = stub.WatchScheduler(live.WatchSchedulerRequest(frames_per_second=10))

        async def has_place() -> tuple[bool, None]:
            return not scheduler.view.is_idle, None

        async def has_none() -> tuple[bool, None]:
            return scheduler.view.is_idle, None

        await poll(has_place)
        # Nobody reads: what is on the way fills up, and then a frame is not taken.
        await poll(has_none)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                async for _ in unread:
                    pass
        assert ended.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "a frame was not read for 0.05 s" in str(ended.value.details())
