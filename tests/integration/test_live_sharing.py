"""Several people who look are told the same, and what they are told is made once."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass, field

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.scheduler.effects import SendStep
from scheduler_service.scheduler.values.config import PolicyConfig, PreemptionMode
from scheduler_service.watching.live_view import MAX_WATCHERS, LiveView, LiveWatcher, Pace
from scheduler_service.watching.turn import Turn
from splitserve.scheduler.v1 import live_pb2 as live
from splitserve_client import AsyncClient, ClientConfig, SamplingParams
from splitserve_live.feeds import Feeds
from splitserve_live.frames import SharedLines
from splitserve_live.state import LiveState
from splitserve_rpc.discovery import Listed
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.scheduler_in_process import scheduler_in_process

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


@dataclass(slots=True)
class Looks:
    """Watchers of whom some look at every step, some now and then, beside one who just came."""

    view: LiveView
    moments: Moments
    num_looks: int = 0
    cluster: Driver | None = None
    seen: list[tuple[LiveWatcher, int, LiveState]] = field(default_factory=list)

    def begin(self, cluster: Driver, stack: ExitStack) -> None:
        self.cluster = cluster
        for every in (1, 1, 3, 3, 7):
            watcher = stack.enter_context(
                self.view.watching(cluster.scheduler, cluster.submissions)
            )
            self.seen.append((watcher, every, LiveState()))

    def see(self, turn: Turn) -> None:
        is_answered = turn.answered is not None
        num_sent = sum(isinstance(effect, SendStep) for effect in turn.effects)
        for _ in range(is_answered + num_sent):
            self._look()

    def _look(self) -> None:
        if self.cluster is None:
            return
        self.moments.number += 1
        self.num_looks += 1
        looking = [(each, state) for each, every, state in self.seen if not self.num_looks % every]
        for watcher, state in looking:
            state.take(watcher.frame())
        with self.view.watching(self.cluster.scheduler, self.cluster.submissions) as newcomer:
            fresh = LiveState()
            fresh.take(newcomer.frame())
        for _, state in looking:
            assert_same(state, fresh)


def assert_same(seen: LiveState, fresh: LiveState) -> None:
    """One who has watched for long knows what one knows who just came."""
    assert list(seen.executors) == list(fresh.executors)
    for address, executor in fresh.executors.items():
        same = seen.executors[address]
        assert (same.device, same.host) == (executor.device, executor.host)
        steps = list(executor.steps)
        assert list(same.steps)[-len(steps) :] == steps
        named = {*executor.told.running, *executor.told.swapped, *executor.told.waiting}
        for number in named.union(*(step.rows for step in steps)):
            assert seen.request(number) == fresh.request(number)
            assert seen.request(number).request_id
    for number in fresh.frame.waiting:
        assert seen.request(number).request_id


async def complete_all(client: AsyncClient, num_requests: int, max_tokens: int = 30) -> None:
    params = SamplingParams(seed=1, max_tokens=max_tokens)
    prompts = ([7] * 8 + [number] for number in range(num_requests))
    await asyncio.gather(*(client.complete(prompt, params) for prompt in prompts))


async def test_watchers_know_the_same_however_often_each_of_them_looks() -> None:
    moments = Moments()
    view = LiveView(moments.unix_ms, moments.number_of, Pace(lambda: 0))
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
            assert looks.num_looks > 60
            assert moments.num_made == looks.num_looks
            looks.cluster = None
        assert view.is_idle


async def test_watchers_know_names_when_those_of_others_were_dropped() -> None:
    moments = Moments()
    view = LiveView(moments.unix_ms, moments.number_of, Pace(lambda: 0))
    looks = Looks(view, moments)
    async with (
        scheduler_in_process(FakeExecutor(), watchers=[view, looks]) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        with ExitStack() as stack:
            looks.begin(scheduler.cluster, stack)
            # More than are kept without asking who uses them.
            for _ in range(12):
                await complete_all(client, 50, max_tokens=1)
            looks.cluster = None


async def test_frames_are_made_once_for_all_when_watchers_go_from_moment_to_moment() -> None:
    moments = Moments()
    view = LiveView(moments.unix_ms, moments.number_of, Pace(lambda: 0))
    async with scheduler_in_process(FakeExecutor(), watchers=[view]) as scheduler:
        with ExitStack() as stack:
            watchers = [
                stack.enter_context(
                    view.watching(scheduler.cluster.scheduler, scheduler.cluster.submissions)
                )
                for _ in range(MAX_WATCHERS)
            ]
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


def test_line_of_a_frame_is_written_once_when_several_are_sent_it() -> None:
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


async def test_feeds_of_all_who_look_at_a_moment_are_one_line() -> None:
    # By this clock no moment ever ends.
    async with scheduler_in_process(FakeExecutor(), now_ns=lambda: 10**12) as scheduler:
        feeds = Feeds(Listed([scheduler.address]), ClientConfig())
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
            live_pace=Pace(working.spent_ns),
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
    pace = Pace(lambda: next(times))
    assert [pace.make(lambda: "frame", lambda: 100) for _ in range(2)] == ["frame", "frame"]
    assert pace.next_ns == 100 + 19 * (3 + 2)
