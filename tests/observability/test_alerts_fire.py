"""Each alert is made to fire by what it is about: real processes, and a real Prometheus.

The rules are ours without `for`, so that what they wait for may be short. That they do not fire
without a fault is shown by the alerts that no slow machine can set off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import yaml  # type: ignore[import-untyped]

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_client import SamplingParams
from tests.support.observability.observed import Observed, observed
from tests.support.observability.prometheus import (
    LOOK_S,
    OBSERVABILITY,
    Prometheus,
    needs_prometheus,
    prometheus,
    quick_rules,
)
from tests.support.processes.light_executor import DEADLY_REQUEST, SICKNESS
from tests.support.processes.patience import PATIENCE_S

pytestmark = needs_prometheus

DEADLY_SEED = 41
TWO_TOKENS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
HELD = {"SplitserveStepHangs", "SplitserveFirstTokensLate", "SplitserveTokensSlow"}
DEAD = {"SplitserveProcessDown", "SplitserveNotReady"}
# A machine with much other work sets these off, too.
SET_OFF_BY_SLOWNESS = HELD | DEAD
LOST = {"SplitserveExecutorsLost", "SplitserveFaults"}
MADE_TO_FIRE = HELD | DEAD | LOST | {
    "SplitserveQueueFull",
    "SplitservePreemptions",
    "SplitserveClientsDoNotRead",
    "SplitserveGatewayErrors",
    "SplitserveExecutorWithdrawn",
}  # fmt: skip


def test_every_alert_has_its_fault_here() -> None:
    rules = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"][0]["rules"]

    assert {rule["alert"] for rule in rules} == MADE_TO_FIRE


@asynccontextmanager
async def reading(folder: Path, running: Observed, **replaced: str) -> AsyncIterator[Prometheus]:
    """One that has read all processes, and has nothing to say that slowness alone may cause."""
    rules = quick_rules(folder, **replaced)
    async with prometheus(folder, running.metrics, rules) as found:
        await found.wait_read(sum(map(len, running.metrics.values())))
        assert await found.firing() <= SET_OFF_BY_SLOWNESS
        yield found


async def nothing() -> None:
    await asyncio.sleep(LOOK_S)


async def fired(
    found: Prometheus, names: set[str], again: Callable[[], Awaitable[object]] = nothing
) -> set[str]:
    """All that fired until each of `names` had; meanwhile it happens `again`."""
    seen: set[str] = set()
    deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
    while not names <= seen:
        assert asyncio.get_running_loop().time() < deadline_s, names - seen
        await again()
        seen |= await found.firing()
    return seen


async def test_alerts_fire_when_a_request_kills_executors(
    tmp_path: Path,
) -> None:
    deadly = {DEADLY_REQUEST: f"die:{DEADLY_SEED}:4"}
    options = ("--max-executor-losses", "1", "--reconnect-timeout-s", "0.1")
    async with (
        observed(tmp_path, scheduler=options, environment=deadly) as running,
        reading(tmp_path, running) as found,
    ):
        params = SamplingParams(seed=DEADLY_SEED, max_tokens=20)
        asking = asyncio.create_task(running.complete([1, 2, 3], params=params))
        while not asking.done():
            running.start_missing()
            await asyncio.wait([asking], timeout=LOOK_S)
        reasons = asking.result()
        for address in list(running.processes.executors):
            running.processes.kill_executor(address)
        seen = await fired(found, LOST | DEAD)

    assert reasons == ["EXECUTOR_LOST_REPEATEDLY"]
    assert seen - SET_OFF_BY_SLOWNESS == LOST


async def test_alerts_fire_when_steps_hang_and_queues_fill(tmp_path: Path) -> None:
    options = ("--max-num-seqs", "2", "--max-num-waiting", "1")
    async with (
        observed(tmp_path, num_executors=1, scheduler=options) as running,
        reading(tmp_path, running) as found,
    ):
        # One at least has a token and waits for the next, and one waits for its turn.
        running.gate.hold(num_tokens=1)
        held = [
            asyncio.create_task(running.complete([number, 2, 3], params=TWO_TOKENS))
            for number in range(1, 4)
        ]
        await found.wait_for("sum(splitserve_time_to_first_token_seconds_count) >= bool 1", 1)
        await found.wait_for("sum(splitserve_num_requests_unassigned)", 1)

        async def refuse() -> None:
            reasons = await running.complete([9, 9])
            assert reasons == ["QUEUE_FULL"]

        # It hangs for longer than 10 s; so the first token of who waits is as late.
        seen = await fired(found, {"SplitserveStepHangs", "SplitserveQueueFull"}, refuse)
        running.gate.release()
        assert await asyncio.gather(*held) == [[], [], []]
        seen |= await fired(found, HELD)

    assert seen - SET_OFF_BY_SLOWNESS == {"SplitserveQueueFull"}


async def test_alert_fires_when_an_executor_fails_whatever_it_is_given(tmp_path: Path) -> None:
    sickness = tmp_path / "sickness"
    async with (
        observed(
            tmp_path, num_executors=1, environment={SICKNESS: f"not_a_number:{sickness}"}
        ) as running,
        reading(tmp_path, running) as found,
    ):
        sickness.touch()

        async def ask() -> None:
            assert await running.complete([1, 2, 3]) == ["INVALID_LOGITS"]

        seen = await fired(found, {"SplitserveExecutorWithdrawn"}, ask)

    assert seen - SET_OFF_BY_SLOWNESS - LOST == {"SplitserveExecutorWithdrawn"}


async def test_alert_fires_when_blocks_are_scarce(tmp_path: Path) -> None:
    scarce = ("--num-device-blocks", "16")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    async with (
        observed(tmp_path, num_executors=1, executor=scarce) as running,
        reading(tmp_path, running) as found,
    ):

        async def crowd() -> None:
            prompts = [[number, 2, 3] for number in range(6)]
            assert await running.complete(*prompts, params=params) == []

        seen = await fired(found, {"SplitservePreemptions"}, crowd)

    assert seen - SET_OFF_BY_SLOWNESS == {"SplitservePreemptions"}


async def test_alert_fires_when_a_client_does_not_read(tmp_path: Path) -> None:
    # To have 64 MiB unread takes as long as to compute them.
    alert = {"SplitserveClientsDoNotRead": "splitserve_unread_bytes > 64 * 1024"}
    params = api.SamplingParams(max_tokens=8, num_prompt_logprobs=20, ignore_eos=True)
    chatty = api.GenerateRequest(prompt_token_ids=[7] * 900, sampling_params=params)
    # The network takes what HTTP/2 allows it from the beginning, and no more.
    options = [("grpc.http2.bdp_probe", 0)]
    async with (
        observed(tmp_path, num_executors=1) as running,
        reading(tmp_path, running, **alert) as found,
    ):
        address = running.processes.address
        async with grpc.aio.insecure_channel(address, options) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            calls = [stub.Generate(chatty) for _ in range(4)]
            seen = await fired(found, set(alert))
            assert not any(call.done() for call in calls)

    assert seen - SET_OFF_BY_SLOWNESS == set(alert)


async def test_alerts_fire_when_the_scheduler_is_gone(tmp_path: Path) -> None:
    # Requests wait for a scheduler that may come back.
    gateway = ("--request-timeout-s", "2")
    async with (
        observed(tmp_path, num_executors=1, gateway=gateway) as running,
        reading(tmp_path, running) as found,
    ):
        running.processes.kill_scheduler()
        await running.wait_ready(503)

        async def ask() -> None:
            assert await running.ask_gateway() in (503, 504)

        seen = await fired(found, {"SplitserveGatewayErrors", "SplitserveProcessDown"}, ask)

    assert seen - SET_OFF_BY_SLOWNESS == {"SplitserveGatewayErrors"}
