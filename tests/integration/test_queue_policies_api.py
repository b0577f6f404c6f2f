"""Who is next, as clients see it: priorities, deadlines, fair shares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler.values.config import PolicyConfig
from splitserve_client import (
    AsyncClient,
    DeadlineUnreachable,
    Finish,
    SamplingParams,
    SchedulingParams,
    Session,
    Usage,
)
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service
from tests.support.processes.patience import PATIENT
from tests.support.processes.scheduler_in_process import PATIENCE_S, scheduler_in_process

PROMPT = [1, 2, 3, 4, 5]
SHORT = SamplingParams(seed=6, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(seed=7, max_tokens=80, ignore_eos=True)
FIRST = SchedulingParams(priority=-100, tenant="first")


@dataclass(slots=True)
class Line:
    """A service whose only place is taken until `watch` releases it; what is submitted queues up.

    `ended` has the names of requests in the order of their ends, `num_tokens` what names got.
    """

    service: FakeService
    session: Session
    watch: StepWatch
    ended: list[str] = field(default_factory=list)
    usages: dict[str, Usage] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def submit(
        self, name: str, scheduling: SchedulingParams, params: SamplingParams = SHORT
    ) -> None:
        """Submits a request, whose tokens must be what they are."""
        self._tasks.append(asyncio.create_task(self._read(name, scheduling, params)))

    async def _read(self, name: str, scheduling: SchedulingParams, params: SamplingParams) -> None:
        prompt = [*PROMPT, len(self.ended)]
        tokens: list[int] = []
        async for event in self.session.submit(prompt, params, scheduling=scheduling):
            if isinstance(event, Finish):
                self.usages[name] = event.usage
            else:
                tokens += event.token_ids
        self.ended.append(name)
        assert tuple(tokens) == expected_completions(prompt, params)[0].token_ids

    async def run(self) -> list[str]:
        """Lets all that was submitted, and waits by now, run; returns who ended when."""
        await self.service.wait_until_queued(len(self._tasks) - 1)
        self.watch.release()
        await asyncio.gather(*self._tasks)
        await self.service.wait_idle()
        return [name for name in self.ended if name != "first"]


@asynccontextmanager
async def line(policy: str, **options: object) -> AsyncIterator[Line]:
    """A line of requests for one place, at which a request "first" is served."""
    watch = StepWatch()
    executor = FakeExecutor(fault=watch)
    options = {"max_num_seqs": 1, **options}
    async with (
        fake_service(executor, queue_policy=policy, **options) as service,
        service.client.session() as session,
    ):
        opened = Line(service, session, watch)
        watch.hold(after=3)
        opened.submit("first", FIRST, LONG)
        await watch.wait_held()
        yield opened


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


async def test_requests_are_served_by_arrival_when_the_policy_is_fcfs() -> None:
    async with line("fcfs") as queue:
        for number, name in enumerate("abcd"):
            queue.submit(name, SchedulingParams(priority=-number, tenant=name, deadline_s=9.0))
        assert await queue.run() == list("abcd")


async def test_urgent_request_overtakes_when_the_policy_is_priority() -> None:
    async with line("priority") as queue:
        for name, priority in (("a", 5), ("b", 0), ("c", -5), ("d", 5), ("e", 0)):
            queue.submit(name, SchedulingParams(priority=priority))
        assert await queue.run() == ["c", "b", "e", "a", "d"]


async def test_less_urgent_request_has_its_turn_when_urgent_ones_do_not_end() -> None:
    async with line("priority") as queue:
        queue.submit("patient", SchedulingParams(priority=100))
        for name in names("urgent", 30):
            queue.submit(name, SchedulingParams(priority=-50))
        ended = await queue.run()
        assert ended.index("patient") <= 8


@pytest.mark.parametrize(("num_host_blocks", "mode"), [(0, "auto"), (64, "swap")])
async def test_running_request_yields_when_an_urgent_one_comes(
    num_host_blocks: int, mode: str
) -> None:
    watch = StepWatch()
    executor = FakeExecutor(num_host_blocks=num_host_blocks, fault=watch)
    async with fake_service(
        executor, queue_policy="priority", max_num_seqs=1, preemption_mode=mode
    ) as service:
        watch.hold(after=20)
        yielding = asyncio.create_task(
            service.client.complete(PROMPT, LONG, scheduling=SchedulingParams(priority=1))
        )
        await watch.wait_held()
        urgent = asyncio.create_task(service.client.complete(PROMPT, SHORT))
        # It waits, or the other one has yielded already, if a step could be planned.
        await service.wait_until_known(2)
        watch.release()
        first = await urgent
        assert not yielding.done()
        second = await yielding
        assert first.completions == expected_completions(PROMPT, SHORT)
        assert second.completions == expected_completions(PROMPT, LONG)
        assert (first.usage.num_preemptions, second.usage.num_preemptions) == (0, 1)
        (state,) = (await service.client.list_executors()).executors
        assert state.num_preemptions == 1
        assert any(len(step.swap_in.sources) for step in watch.steps) == (mode == "swap")
        await service.wait_idle()


async def test_earlier_deadline_is_served_first_when_the_policy_is_deadline() -> None:
    async with line("deadline") as queue:
        queue.submit("none", SchedulingParams())
        for name, deadline_s in (("late", 300.0), ("early", 60.0), ("middle", 100.0)):
            queue.submit(name, SchedulingParams(deadline_s=deadline_s))
        queue.submit("urgent", SchedulingParams(priority=-1))
        assert await queue.run() == ["urgent", "early", "middle", "late", "none"]


async def test_request_ends_early_when_it_cannot_meet_its_deadline() -> None:
    # A step takes 0.1 s per token, says this executor.
    executor = FakeExecutor(us_per_token=100_000)
    async with fake_service(executor, queue_policy="deadline") as service:
        client = service.client
        await client.complete(PROMPT, LONG)
        for n in (1, 3):
            params = SamplingParams(seed=7, max_tokens=60, ignore_eos=True, n=n)
            with pytest.raises(DeadlineUnreachable) as caught:
                await client.complete(PROMPT, params, scheduling=SchedulingParams(deadline_s=1.0))
            assert caught.value.reason == "DEADLINE_UNREACHABLE"
            async with client.session() as session:
                request = session.submit(
                    PROMPT, params, scheduling=SchedulingParams(deadline_s=1.0)
                )
                with pytest.raises(DeadlineUnreachable):
                    await anext(request)
            in_time = await client.complete(
                PROMPT, params, scheduling=SchedulingParams(deadline_s=600.0)
            )
            assert in_time.completions == expected_completions(PROMPT, params)
        await service.wait_idle()


async def test_request_goes_on_when_its_deadline_passes_among_its_tokens() -> None:
    watch = StepWatch()
    executor = FakeExecutor(us_per_token=1000, fault=watch)
    policies = PolicyConfig(queue_policy="deadline")
    config = ClusterConfig(step_patience_s=PATIENCE_S, policies=policies)
    now_ns = 10**18
    async with (
        scheduler_in_process(executor, config=config, now_ns=lambda: now_ns) as scheduler,
        AsyncClient(scheduler.address, PATIENT) as client,
    ):
        await client.complete(PROMPT, SHORT)
        watch.hold(after=5)
        completing = asyncio.create_task(
            client.complete(PROMPT, LONG, scheduling=SchedulingParams(deadline_s=2.0))
        )
        await watch.wait_held()
        now_ns += 3 * 10**9
        watch.release()
        assert (await completing).completions == expected_completions(PROMPT, LONG)


async def test_deadline_of_ten_thousand_years_is_met_when_it_is_asked_for() -> None:
    async with fake_service(FakeExecutor(), queue_policy="deadline") as service:
        scheduling = SchedulingParams(deadline_s=315_576_000_000.0)
        generation = await service.client.complete(PROMPT, SHORT, scheduling=scheduling)
        assert generation.completions == expected_completions(PROMPT, SHORT)


async def test_tenant_is_not_starved_when_another_floods_the_queue() -> None:
    async with line("fair") as queue:
        for name in names("flood", 30):
            queue.submit(name, SchedulingParams(tenant="a"))
        await queue.service.wait_until_queued(30)
        for name in names("few", 4):
            queue.submit(name, SchedulingParams(tenant="b"))
        ended = await queue.run()
        num_before = [ended.index(name) - number for number, name in enumerate(names("few", 4))]
        # As many of the flood as of the few, and one more.
        assert num_before == sorted(num_before)
        assert num_before[-1] <= 5


def shares(ended: Sequence[str], count: int) -> dict[str, int]:
    """How many of the first `count` ends each tenant, the first letter of names, had."""
    first = [name[0] for name in ended[:count]]
    return {tenant: first.count(tenant) for tenant in sorted(set(first))}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("a=3", {"a": 18, "b": 6}),
        ("a=1,b=1", {"a": 12, "b": 12}),
        ("b=2, a=0.5", {"a": 5, "b": 19}),
    ],
)
async def test_tenants_get_shares_by_their_weights_when_both_flood_the_queue(
    weights: str, expected: dict[str, int]
) -> None:
    async with line("fair", tenant_weights=weights) as queue:
        for tenant in "ab":
            for name in names(tenant, 24):
                queue.submit(name, SchedulingParams(tenant=tenant))
        served = shares(await queue.run(), 24)
        for tenant, count in expected.items():
            assert abs(served[tenant] - count) <= 1
