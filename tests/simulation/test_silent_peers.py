"""How soon a peer that answers nothing is found, in virtual time: on every hop, with defaults.

The network cuts both ways without a word, or the process is paused as by SIGSTOP: connections stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from unittest import mock

import grpc.aio
import pytest

from executor_service.service.encode_answer import encode_info
from executor_service.service.scheduler_choice import ranked
from executor_service.steps.executor_info import ExecutorInfo
from scheduler_service.config import ClusterConfig
from splitserve.executor.v1 import executor_pb2
from splitserve_client import SamplingParams, SchedulingParams
from splitserve_rpc.server import KEEPALIVE_S, PING_TIMEOUT_S
from tests.simulation.calls import opener
from tests.simulation.client_process import SimulatedClient
from tests.simulation.executor_process import ExecutorShape, SimulatedExecutor
from tests.simulation.network import Network
from tests.simulation.scheduler_process import SimulatedScheduler
from tests.simulation.virtual_loop import Process, VirtualLoop, new_loop
from tests.simulation.workload import EOS, Wanted

CLIENT = "10.0.2.0"
HOWS = ("paused", "dark")
DETECTION_S = 5.0
STREAMS_S = 6.0
EXECUTORS_S = 10.0
STEP_S = 0.1
SHAPE = ExecutorShape(
    block_size=16,
    num_device_blocks=64,
    num_host_blocks=0,
    step_s=STEP_S,
    byte_s=0.0,
    compile_s=0.0,
    max_inflight_steps=2,
    eos_token_ids=EOS,
)


@dataclass
class Cluster:
    """One or two schedulers, and four executors."""

    loop: VirtualLoop
    num_schedulers: int = 2
    shape: ExecutorShape = SHAPE
    schedulers: list[SimulatedScheduler] = field(default_factory=list)
    executors: list[SimulatedExecutor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(1)
        self.network = Network(self.loop, self.random)
        hosts = [f"10.0.0.{number + 1}" for number in range(self.num_schedulers)]
        self.schedulers = [
            SimulatedScheduler(self.loop, self.network, host, ClusterConfig()) for host in hosts
        ]
        addresses = tuple(scheduler.address for scheduler in self.schedulers)
        for scheduler in self.schedulers:
            scheduler.peers = addresses
            scheduler.start()
        for host in executor_hosts(addresses):
            executor = SimulatedExecutor(
                self.loop, self.network, self.random, host, addresses, self.shape
            )
            self.executors.append(executor)
            executor.start()

    @property
    def processes(self) -> list[Process]:
        """Of all that live."""
        processes = [each.process for each in self.schedulers]
        processes += [each.process for each in self.executors]
        return [process for process in processes if process is not None]

    @property
    def addresses(self) -> str:
        return ",".join(scheduler.address for scheduler in self.schedulers)

    @property
    def busy(self) -> SimulatedScheduler:
        """That with the most requests."""
        return max(self.schedulers, key=lambda each: each.cluster.num_unfinished)  # type: ignore[union-attr]

    def of(self, scheduler: SimulatedScheduler) -> set[str]:
        """The executors that it has."""
        assert scheduler.cluster is not None
        return {engine.link.info.address for engine in scheduler.cluster.engines}

    def busy_executor(self, scheduler: SimulatedScheduler) -> str:
        """The address of one that computes."""
        assert scheduler.cluster is not None
        return next(
            engine.link.info.address
            for engine in scheduler.cluster.engines
            if engine.scheduler.num_in_flight
        )

    def silence(self, host: str, how: str) -> None:
        """`how`: paused, or dark."""
        for process in self.processes:
            if process.host == host and how == "paused":
                process.pause()
            elif process.host != host and how == "dark":
                self.cut(host, process.host)
        if how == "dark":
            self.cut(host, CLIENT)

    def cut(self, host: str, other: str) -> None:
        """Both ways."""
        self.network.cut(host, other)
        self.network.cut(other, host)

    async def until(self, is_so: Callable[[], bool]) -> float:
        """Seconds until it is so."""
        began_s = self.loop.time()
        while not is_so():
            assert self.loop.time() < began_s + 300
            await asyncio.sleep(0.05)
        return self.loop.time() - began_s

    async def end(self) -> None:
        self.network.heal_all()
        for each in self.processes:
            each.resume()
        for scheduler in self.schedulers:
            scheduler.stop()
        for executor in self.executors:
            executor.stop()
        await asyncio.sleep(30.0)


def executor_hosts(schedulers: tuple[str, ...]) -> list[str]:
    """Of four executors; each scheduler is preferred by as many."""
    hosts: dict[str, list[str]] = {scheduler: [] for scheduler in schedulers}
    for number in range(100):
        host = f"10.0.1.{number}"
        hosts[ranked(schedulers, f"{host}:50052")[0]].append(host)
    return [host for some in hosts.values() for host in some[: 4 // len(schedulers)]]


def run(
    story: Callable[[Cluster], Awaitable[None]],
    num_schedulers: int = 2,
    shape: ExecutorShape = SHAPE,
) -> None:
    """Has `story` happen in a cluster where each has found its place."""
    loop = new_loop()

    async def main() -> None:
        cluster = Cluster(loop, num_schedulers, shape)
        with mock.patch.object(grpc.aio, "insecure_channel", opener(cluster.network)):
            try:
                await asyncio.sleep(15.0)
                assert all(map(cluster.of, cluster.schedulers)), "each has some"
                await story(cluster)
            finally:
                await cluster.end()

    loop.run_until_complete(main())
    assert loop.errors == []


def request(number: int, num_tokens: int, *, in_session: bool) -> Wanted:
    params = SamplingParams(seed=number, max_tokens=num_tokens, ignore_eos=True)
    return Wanted(number, 0.0, (5, 6, 7 + number), params, SchedulingParams(), in_session)


def client_of(cluster: Cluster, schedulers: str, num_tokens: int = 200) -> SimulatedClient:
    """With requests that take so many steps, over a session and by themselves."""
    wanted = [request(number, num_tokens, in_session=number % 2 == 0) for number in range(4)]
    return SimulatedClient(cluster.loop, cluster.random, CLIENT, schedulers, wanted)


def longest_pause_s(client: SimulatedClient) -> float:
    """Of the streams of `client`, which all ended well."""
    pauses_s = []
    for outcome in client.outcomes:
        assert (outcome.error, outcome.wrong) == (None, None), outcome.describe()
        assert outcome.num_tokens == outcome.wanted.params.max_tokens
        pauses_s += [after - before for before, after in pairwise(outcome.token_times_s)]
    return max(pauses_s)


@pytest.mark.parametrize("how", HOWS)
def test_streams_of_the_library_go_on_elsewhere_when_their_scheduler_is_silent(how: str) -> None:
    async def story(cluster: Cluster) -> None:
        client = client_of(cluster, cluster.addresses)
        ending = client.start()
        await asyncio.sleep(3.0)
        cluster.silence(cluster.busy.host, how)
        await ending
        assert STEP_S < longest_pause_s(client) <= STREAMS_S

    run(story)


@pytest.mark.parametrize("how", HOWS)
def test_executors_go_to_another_scheduler_when_theirs_is_silent(how: str) -> None:
    async def story(cluster: Cluster) -> None:
        silent, other = cluster.schedulers
        cluster.silence(silent.host, how)
        took_s = await cluster.until(lambda: len(cluster.of(other)) == len(cluster.executors))
        assert took_s <= EXECUTORS_S

    run(story)


def test_streams_are_computed_once_when_their_only_scheduler_pauses() -> None:
    async def story(cluster: Cluster) -> None:
        client = client_of(cluster, cluster.addresses)
        ending = client.start()
        await asyncio.sleep(3.0)
        (scheduler,) = cluster.schedulers
        assert scheduler.process is not None
        scheduler.process.pause()
        await asyncio.sleep(8.0)
        scheduler.process.resume()
        await ending
        assert 8.0 <= longest_pause_s(client) <= 9.0
        assert scheduler.loss_logs[-1].losses == set()

    run(story, num_schedulers=1)


def test_streams_go_on_over_a_new_connection_when_theirs_is_forgotten_on_the_way() -> None:
    async def story(cluster: Cluster) -> None:
        client = client_of(cluster, cluster.addresses)
        ending = client.start()
        await asyncio.sleep(3.0)
        (scheduler,) = cluster.schedulers
        for way in ((CLIENT, scheduler.host), (scheduler.host, CLIENT)):
            assert cluster.network.swallow(*way) == 1
        await ending
        # The scheduler has the requests until it finds the old connection dead.
        assert longest_pause_s(client) <= KEEPALIVE_S + PING_TIMEOUT_S + 1.0

    run(story, num_schedulers=1)


@pytest.mark.parametrize("busy_s", [1.0, 2.0, 3.0])
def test_nobody_moves_when_a_scheduler_is_busy_for_a_moment(busy_s: float) -> None:
    async def story(cluster: Cluster) -> None:
        client = client_of(cluster, cluster.addresses)
        ending = client.start()
        await asyncio.sleep(3.0)
        busy = cluster.busy
        before = cluster.of(busy)
        for _ in range(3):
            assert busy.process is not None
            busy.process.pause()
            await asyncio.sleep(busy_s)
            busy.process.resume()
            await asyncio.sleep(busy_s)
        await ending
        assert cluster.of(busy) == before
        assert longest_pause_s(client) <= busy_s + 1.0

    run(story)


@pytest.mark.parametrize("how", HOWS)
def test_scheduler_gives_an_executor_up_when_it_is_silent_and_has_nothing_to_do(how: str) -> None:
    async def story(cluster: Cluster) -> None:
        (scheduler,) = cluster.schedulers
        silent = cluster.executors[0]
        cluster.silence(silent.host, how)
        took_s = await cluster.until(lambda: silent.address not in cluster.of(scheduler))
        assert took_s <= DETECTION_S

    run(story, num_schedulers=1)


@pytest.mark.parametrize("how", HOWS)
def test_streams_go_on_elsewhere_when_their_executor_is_silent_in_a_long_step(how: str) -> None:
    async def story(cluster: Cluster) -> None:
        client = client_of(cluster, cluster.addresses, num_tokens=2)
        ending = client.start()
        await asyncio.sleep(3.0)
        (scheduler,) = cluster.schedulers
        silent = cluster.busy_executor(scheduler)
        cluster.silence(silent.partition(":")[0], how)
        took_s = await cluster.until(lambda: silent not in cluster.of(scheduler))
        assert took_s <= DETECTION_S
        await ending
        assert {outcome.num_tokens for outcome in client.outcomes} == {2}

    run(story, num_schedulers=1, shape=replace(SHAPE, step_s=20.0))


def test_nobody_is_given_up_when_steps_are_long() -> None:
    async def story(cluster: Cluster) -> None:
        client = client_of(cluster, cluster.addresses, num_tokens=2)
        await client.start()
        assert {outcome.num_tokens for outcome in client.outcomes} == {2}
        assert cluster.schedulers[0].loss_logs[-1].losses == set()

    run(story, num_schedulers=1, shape=replace(SHAPE, step_s=20.0))


def test_executor_may_be_silent_in_a_step_when_it_does_not_say_that_it_answers() -> None:
    async def story(cluster: Cluster) -> None:
        client = client_of(cluster, cluster.addresses, num_tokens=2)
        ending = client.start()
        await asyncio.sleep(3.0)
        (scheduler,) = cluster.schedulers
        for executor in cluster.executors:
            assert executor.process is not None
            if executor.address == cluster.busy_executor(scheduler):
                executor.process.pause()
                await asyncio.sleep(8.0)
                executor.process.resume()
        await ending
        assert scheduler.loss_logs[-1].losses == set()

    def encode_as_stranger(info: ExecutorInfo) -> executor_pb2.ExecutorInfo:
        encoded = encode_info(info)
        encoded.ClearField("answers_while_computing")
        return encoded

    with (
        mock.patch("executor_service.service.servicer.encode_info", encode_as_stranger),
        mock.patch("executor_service.service.registration.encode_info", encode_as_stranger),
    ):
        run(story, num_schedulers=1, shape=replace(SHAPE, step_s=20.0))


def test_nobody_is_given_up_when_all_executors_are_silent_for_a_moment() -> None:
    async def story(cluster: Cluster) -> None:
        (scheduler,) = cluster.schedulers
        for executor in cluster.executors:
            assert executor.process is not None
            executor.process.pause()
        await asyncio.sleep(8.0)
        for executor in cluster.executors:
            assert executor.process is not None
            executor.process.resume()
        await asyncio.sleep(20.0)
        assert scheduler.loss_logs[-1].losses == set()
        assert len(cluster.of(scheduler)) == len(cluster.executors)

    run(story, num_schedulers=1)


def test_executor_is_reached_over_a_new_connection_when_the_former_is_forgotten() -> None:
    async def story(cluster: Cluster) -> None:
        client = client_of(cluster, cluster.addresses)
        ending = client.start()
        await asyncio.sleep(3.0)
        (scheduler,) = cluster.schedulers
        host = cluster.busy_executor(scheduler).partition(":")[0]
        for way in ((host, scheduler.host), (scheduler.host, host)):
            cluster.network.swallow(*way)
        await ending
        assert longest_pause_s(client) <= STREAMS_S

    run(story, num_schedulers=1)
