"""Tests queue policies as clients see them: priorities, deadlines, fair shares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler.values import PolicyConfig
from splitserve_client import (
    AsyncClient,
    DeadlineUnreachable,
    Finish,
    SamplingParams,
    SchedulingParams,
    Session,
    Usage,
)
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
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


@pytest.mark.parametrize(
    ("policy", "wishes", "expected"),
    [
        (
            "fcfs",
            {name: SchedulingParams(priority=-i, tenant=name) for i, name in enumerate("abcd")},
            "abcd",
        ),
        (
            "priority",
            {
                name: SchedulingParams(priority=priority)
                for name, priority in {"a": 5, "b": 0, "c": -5, "d": 5, "e": 0}.items()
            },
            "cbead",
        ),
        (
            "deadline",
            {
                "n": SchedulingParams(),
                "l": SchedulingParams(deadline_s=300.0),
                "e": SchedulingParams(deadline_s=60.0),
                "m": SchedulingParams(deadline_s=100.0),
                "u": SchedulingParams(priority=-1),
            },
            "uemln",
        ),
    ],
)
async def test_requests_are_served_in_the_order_of_the_policy(
    policy: str, wishes: dict[str, SchedulingParams], expected: str
) -> None:
    async with line(policy) as queue:
        for name, scheduling in wishes.items():
            queue.submit(name, scheduling)
        assert await queue.run() == list(expected)


async def test_request_is_refused_when_its_deadline_is_hopeless() -> None:
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


async def test_request_goes_on_when_its_deadline_passes() -> None:
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


async def test_deadline_may_be_ten_thousand_years_away() -> None:
    async with fake_service(FakeExecutor(), queue_policy="deadline") as service:
        scheduling = SchedulingParams(deadline_s=315_576_000_000.0)
        generation = await service.client.complete(PROMPT, SHORT, scheduling=scheduling)
        assert generation.completions == expected_completions(PROMPT, SHORT)


async def test_tenants_get_shares_by_their_weights() -> None:
    async with line("fair", tenant_weights="b=2, a=0.5") as queue:
        for tenant in "ab":
            for number in range(24):
                queue.submit(f"{tenant}{number}", SchedulingParams(tenant=tenant))
        first = [name[0] for name in (await queue.run())[:24]]
        assert abs(first.count("a") - 5) <= 1
