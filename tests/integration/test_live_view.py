"""Tests that watchers are shown what the scheduler has, and that frames are made once for all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass

import grpc.aio
import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.scheduler import RequestSubmitted, SendStep
from scheduler_service.scheduler.engine import Engine
from scheduler_service.scheduler.values import PolicyConfig, PreemptionMode, SequenceStatus
from scheduler_service.watching import (
    MAX_WATCHERS,
    POINT_NS,
    BlockState,
    FramePacing,
    LiveView,
    LiveWatcher,
    RowKind,
    Transition,
)
from splitserve.scheduler.v1 import live_pb2 as live
from splitserve.scheduler.v1 import live_pb2_grpc
from splitserve_client import AsyncClient, ClientConfig, SamplingParams, SplitserveError
from splitserve_common import StaticDiscovery
from splitserve_contract import DomainError
from splitserve_live import Feeds, LiveState, SharedLines
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import StepWatch
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import (
    UNIX_MS,
    SchedulerInProcess,
    scheduler_in_process,
)

SWAPS = ClusterConfig(
    reconnect_timeout_s=0.1,
    step_patience_s=300.0,
    policies=PolicyConfig(preemption_mode=PreemptionMode.SWAP),
)


@dataclass(slots=True)
class Moments:
    """A clock that a test moves, and how many moments were made."""

    number: int = 0
    num_made: int = 0

    def number_of(self, _: int) -> int:
        return self.number

    def unix_ms(self) -> int:
        self.num_made += 1
        return self.num_made

    def view(self) -> LiveView:
        return LiveView(self.unix_ms, self.number_of, FramePacing(lambda: 0))


class Looks:
    """Watchers of whom some look at every step and some now and then, beside a newcomer.

    Whatever they look at is compared with the cores. `frames`: those of the first watcher.
    """

    def __init__(self, view: LiveView, moments: Moments) -> None:
        self.frames: list[live.WatchSchedulerResponse] = []
        self.num_looks = 0
        self._view = view
        self._moments = moments
        self._cluster: Driver | None = None
        self._seen: list[tuple[LiveWatcher, int, LiveState]] = []

    def begin(self, cluster: Driver, stack: ExitStack) -> None:
        self._cluster = cluster
        for every in (1, 1, 3, 3, 7):
            watching = self._view.watching(cluster.scheduler, cluster.submissions)
            self._seen.append((stack.enter_context(watching), every, LiveState()))

    def end(self) -> None:
        self._cluster = None

    def see(self, turn: Transition) -> None:
        num_sent = sum(isinstance(effect, SendStep) for effect in turn.effects)
        for _ in range((turn.answered is not None) + num_sent):
            if self._cluster is not None:
                self._look(self._cluster)

    def _look(self, cluster: Driver) -> None:
        self._moments.number += 1
        self.num_looks += 1
        looking = [each for each in self._seen if self.num_looks % each[1] == 0]
        for watcher, _, state in looking:
            frame = self._take(watcher, state, cluster)
            if watcher is self._seen[0][0]:
                self.frames.append(frame)
        with self._view.watching(cluster.scheduler, cluster.submissions) as newcomer:
            fresh = LiveState()
            self._take(newcomer, fresh, cluster)
        for _, _, state in looking:
            assert_same_steps(state, fresh)

    def _take(
        self, watcher: LiveWatcher, state: LiveState, cluster: Driver
    ) -> live.WatchSchedulerResponse:
        frame = live.WatchSchedulerResponse.FromString(watcher.frame().SerializeToString())
        state.take(frame)
        assert list(state.executors) == [e.address for e in cluster.executors]
        for engine in cluster.executors:
            self._compare(state, engine.address, engine.engine)
        assert all(state.request(number).request_id for number in state.frame.waiting)
        return frame

    def _compare(self, state: LiveState, address: str, core: Engine) -> None:
        seen, rows = state.executors[address], core.placement.rows
        assert list(seen.latest.running) == [s.request.arrival for s in rows.running]
        assert list(seen.latest.num_tokens) == [
            len(rows.known_tokens(s.row_id)) for s in rows.running
        ]
        assert list(seen.latest.swapped) == [r.arrival for r in core.placement.swapped]
        assert seen.latest.num_waiting == core.num_waiting
        device, host = core.pools
        for pool, map_of in ((device, seen.device), (host, seen.host)):
            assert len(map_of.states) == pool.num_blocks
            for block, found in enumerate(map_of.states):
                assert_state(found, pool.reference_count(block))
        for sequence in rows.running:
            for block in rows.held_blocks(sequence.row_id):
                assert_holder(seen.device.holders[block], sequence.request.arrival, seen, block)
        for request in core.placement.swapped:
            for sequence in request.sequences:
                if sequence.status is SequenceStatus.SWAPPED:
                    holders = {seen.host.holders[block] for block in sequence.host_table}
                    assert holders == {request.arrival}
        for number in (*seen.latest.running, *seen.latest.swapped, *seen.latest.waiting):
            assert state.request(number).request_id


def assert_same_steps(seen: LiveState, fresh: LiveState) -> None:
    """Asserts that a watcher knows the steps, and whose they were, that a newcomer is told."""
    for address, executor in fresh.executors.items():
        steps = list(executor.steps)
        assert list(seen.executors[address].steps)[-len(steps) :] == steps
        for number in {number for step in steps for number in step.rows}:
            assert seen.request(number) == fresh.request(number)
            assert seen.request(number).request_id


class Submissions:
    def __init__(self) -> None:
        self.several = asyncio.Event()
        self._num = 0

    def see(self, turn: Transition) -> None:
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


def steps_of(frames: Iterable[live.WatchSchedulerResponse]) -> list[live.LiveStep]:
    return [step for frame in frames for executor in frame.executors for step in executor.steps]


async def complete_all(client: AsyncClient, num_requests: int, max_tokens: int = 30) -> None:
    params = SamplingParams(seed=1, max_tokens=max_tokens)
    await asyncio.gather(
        *(
            client.complete([7] * 8 + [number], params, request_id=f"request-{number}")
            for number in range(num_requests)
        )
    )


def watching(
    scheduler: SchedulerInProcess, view: LiveView | None = None
) -> AbstractContextManager[LiveWatcher]:
    """Adds a watcher of the scheduler; `view`: None for its own."""
    cluster = scheduler.cluster
    return (view or scheduler.view).watching(cluster.scheduler, cluster.submissions)


async def test_frames_say_what_cores_have_however_often_watchers_look() -> None:
    moments = Moments()
    view = moments.view()
    looks = Looks(view, moments)
    executor = FakeExecutor(num_device_blocks=24, num_host_blocks=64)
    async with (
        scheduler_in_process(executor, config=SWAPS, watchers=[view, looks]) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        with ExitStack() as stack:
            looks.begin(scheduler.cluster, stack)
            await complete_all(client, 6)
            assert scheduler.cluster.executors[0].engine.num_preemptions > 0
            looks.end()
        assert view.is_idle
    # One moment for all who look at it.
    assert moments.num_made == looks.num_looks > 60
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


async def test_frames_tell_the_history_once() -> None:
    ahead_ns = 0
    async with (
        scheduler_in_process(
            FakeExecutor(), now_ns=lambda: time.monotonic_ns() + ahead_ns
        ) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        await complete_all(client, 3)
        with watching(scheduler) as watcher:
            now = watcher.frame()
            assert now.time_to_first_token.count == 3
            assert 0 < now.time_to_first_token.p50_us <= now.time_to_first_token.p99_us
            ahead_ns += 4 * POINT_NS
            later = watcher.frame()
        with watching(scheduler) as watcher:
            all_at_once = watcher.frame()
        points = [*now.history, *later.history]
        assert sum(point.num_tokens for point in points) == 3 * 30
        assert sum(point.time_to_first_token.count for point in points) == 3
        times = [point.start_ms for point in points]
        assert times == list(range(times[0], times[-1] + 1, POINT_NS // 1_000_000))
        assert list(all_at_once.history)[: len(points)] == points


async def test_frame_names_rows_of_steps_before_it() -> None:
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
        with watching(scheduler) as watcher:
            watch.release()
            await completing
            state, frame = LiveState(), watcher.frame()
            state.take(frame)
        rows = sorted({number for step in steps_of([frame]) for number in step.rows})
        assert [request.request_id for request in state.requests(rows)] == ["first"]


async def test_frame_says_what_is_lacking_when_blocks_are_short() -> None:
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
        with watching(scheduler) as watcher:
            state.take(watcher.frame())
        watch.release()
        frame, (told,) = state.frame, (each.latest for each in state.executors.values())
        waiting = [*frame.waiting, *told.waiting]
        assert [request.request_id for request in state.requests(waiting)] == ["second"]
        (reason,) = [told.reason] if told.waiting else frame.reasons
        assert (reason.address, reason.lack) == (told.address, live.LIVE_LACK_BLOCKS)
        # The first has a block for its next token, too.
        assert (reason.num_needed, reason.num_free) == (5, 8 - 6)
        await asyncio.gather(first, second)


async def test_frame_says_that_swapped_requests_go_first() -> None:
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
        with watching(scheduler) as watcher:

            async def look() -> tuple[bool, live.WatchSchedulerResponse]:
                frame = watcher.frame()
                return frame.num_waiting > 0, frame

            frame = await poll(look)
        watch.release()
        await asyncio.gather(*asking)
        assert [reason.lack for reason in frame.reasons] == [live.LIVE_LACK_OTHERS_FIRST]


async def test_frame_says_that_no_executor_is_there() -> None:
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
        with watching(scheduler) as watcher:
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
        assert executor.latest.state == live.LIVE_STATE_SERVING
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
                stack.enter_context(watching(scheduler, view))
            with watching(scheduler, view):
                with pytest.raises(DomainError) as refused:
                    stack.enter_context(watching(scheduler, view))
                assert refused.value.reason == "TOO_MANY_WATCHERS"
            stack.enter_context(watching(scheduler, view))


# Of a stream: few frames are on the way at once.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


async def test_watcher_that_does_not_read_loses_its_place() -> None:
    async with (
        scheduler_in_process(
            FakeExecutor(), live_sleep=lambda _: asyncio.sleep(0), live_unread_s=0.05
        ) as scheduler,
        grpc.aio.insecure_channel(scheduler.address, options=SMALL_WINDOW) as channel,
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


# -- several watchers ---------------------------------------------------------------------------


async def test_frames_are_made_once_for_all_watchers() -> None:
    moments = Moments()
    view = moments.view()
    async with scheduler_in_process(FakeExecutor(), watchers=[view]) as scheduler:
        with ExitStack() as stack:
            watchers = [stack.enter_context(watching(scheduler, view)) for _ in range(MAX_WATCHERS)]
            for _ in range(3):
                moments.number += 1
                frames = {id(frame): frame for frame in [each.frame() for each in watchers]}
                assert len(frames) == 1
            *many, slow = watchers
            moments.number += 1
            for watcher in many:
                watcher.frame()
            moments.number += 1
            told = [watcher.frame() for watcher in many]
            # Whoever missed a moment is told what the others were told in two.
            late = slow.frame()
            assert all(frame is told[0] for frame in told)
            assert late is not told[0]
            assert moments.num_made == 5


def test_line_of_a_frame_is_written_once() -> None:
    lines = SharedLines(num_lines=2)
    frames = [live.WatchSchedulerResponse(unix_ms=number) for number in range(3)]
    first = lines.line(frames[0])
    assert json.loads(first)["unix_ms"] == 0
    again = live.WatchSchedulerResponse.FromString(frames[0].SerializeToString())
    assert lines.line(again) is first
    for frame in frames[1:]:
        lines.line(frame)
    # The oldest is forgotten, so that there are never more.
    assert lines.line(frames[0]) is not first
    assert lines.line(frames[0]) == first


async def test_feeds_of_one_moment_are_one_line() -> None:
    # By this clock no moment ever ends.
    async with scheduler_in_process(FakeExecutor(), now_ns=lambda: 10**12) as scheduler:
        feeds = Feeds(StaticDiscovery([scheduler.address]), ClientConfig())
        async with AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(feeds.open("", "", 10)) for _ in range(MAX_WATCHERS)
            ]
            lines = [await anext(each) for each in opened]
        assert len({id(line) for line in lines}) == 1
        (executor,) = json.loads(lines[0])["executors"]
        assert executor["state"] == "serving"


@pytest.mark.parametrize(("rate", "period_ms"), [(10, 100), (4, 250)])
async def test_frames_are_sent_when_those_of_others_are(rate: int, period_ms: int) -> None:
    slept: list[float] = []

    async def sleep(duration_s: float) -> None:
        slept.append(duration_s)
        await asyncio.sleep(0)

    async with (
        scheduler_in_process(
            FakeExecutor(), now_ns=lambda: 10**12 + 30_000_000, live_sleep=sleep
        ) as scheduler,
        AsyncClient(scheduler.address) as client,
        aclosing(client.watch(rate)) as frames,
    ):
        await anext(frames)
        await anext(frames)
    # A millisecond late rather than a moment early.
    assert slept[0] == pytest.approx((period_ms - 30 + 1) / 1000)


@dataclass(slots=True)
class Working:
    """A loop whose clock goes on while frames are made, each of which takes 50 ms, and by sleep."""

    now_ns: int = 10**12
    made_ns: int = 0
    asked: int = 0

    def spent_ns(self) -> int:
        # Asked before and after each frame.
        self.asked += 1
        if self.asked % 2 == 0:
            self.made_ns += 50_000_000
            self.now_ns += 50_000_000
        return self.made_ns

    async def sleep(self, duration_s: float) -> None:
        self.now_ns += int(duration_s * 1e9)
        await asyncio.sleep(0)


async def test_frames_are_fewer_when_they_take_long() -> None:
    working = Working()
    begun_ns = working.now_ns
    async with (
        scheduler_in_process(
            FakeExecutor(),
            now_ns=lambda: working.now_ns,
            live_sleep=working.sleep,
            live_pace=FramePacing(working.spent_ns),
        ) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        # Nor does it help to come anew for each.
        for num_frames in (5, 1, 1, 1):
            async with aclosing(client.watch(10)) as frames:
                for _ in range(num_frames):
                    await anext(frames)
    elapsed_ns = max(working.now_ns, scheduler.view.pace.next_ns) - begun_ns
    assert working.made_ns >= 8 * 50_000_000
    assert working.made_ns * 20 <= elapsed_ns
    # And no fewer than that.
    assert elapsed_ns <= working.made_ns * 20 + (working.asked // 2) * 101_000_001


def test_pace_adds_up_what_watchers_of_a_moment_take() -> None:
    times = iter([0, 3, 3, 5])
    pace = FramePacing(lambda: next(times))
    assert [pace.make(lambda: "frame", lambda: 100) for _ in range(2)] == ["frame", "frame"]
    assert pace.next_ns == 100 + 19 * (3 + 2)
