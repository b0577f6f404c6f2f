"""How soon a peer that answers nothing is found, in virtual time: on every hop, with defaults.

The network cuts both ways without a word, or the process is paused as by SIGSTOP: connections stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from unittest import mock

import grpc.aio
import pytest

from executor_service.service.encode_answer import encode_info
from executor_service.service.registration import ranked
from executor_service.steps.executor_info import ExecutorInfo
from scheduler_service.config import ClusterConfig
from splitserve.executor.v1 import executor_pb2
from splitserve_client import SamplingParams, SchedulingParams, Tokens, UnreadBudget
from splitserve_gateway.http.errors import ApiError
from splitserve_gateway.upstreams.fleet import Fleet
from splitserve_gateway.upstreams.upstream_request import UpstreamRequest
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
    all_prefer: int | None = None
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
        for host in executor_hosts(addresses, self.all_prefer):
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
        return {engine.address for engine in scheduler.cluster.executors}

    def busy_executor(self, scheduler: SimulatedScheduler) -> str:
        """The address of one that computes."""
        assert scheduler.cluster is not None
        return next(
            engine.address for engine in scheduler.cluster.executors if engine.engine.num_in_flight
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


def executor_hosts(schedulers: tuple[str, ...], all_prefer: int | None) -> list[str]:
    """Of four executors; each scheduler is preferred by as many, or one by all."""
    hosts: dict[str, list[str]] = {scheduler: [] for scheduler in schedulers}
    for number in range(100):
        host = f"10.0.1.{number}"
        hosts[ranked(schedulers, f"{host}:50052")[0]].append(host)
    if all_prefer is not None:
        return hosts[schedulers[all_prefer]][:4]
    return [host for some in hosts.values() for host in some[: 4 // len(schedulers)]]


def run(
    story: Callable[[Cluster], Awaitable[None]],
    num_schedulers: int = 2,
    shape: ExecutorShape = SHAPE,
    all_prefer: int | None = None,
) -> None:
    """Has `story` happen in a cluster where each has found its place.

    `all_prefer`: the scheduler that has all executors; None: each has as many.
    """
    loop = new_loop()

    async def main() -> None:
        cluster = Cluster(loop, num_schedulers, shape, all_prefer)
        with mock.patch.object(grpc.aio, "insecure_channel", opener(cluster.network)):
            try:
                await asyncio.sleep(15.0)
                num_executors = [len(cluster.of(each)) for each in cluster.schedulers]
                assert sum(num_executors) == 4, num_executors
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
        # The scheduler has the requests until it finds the old connection dead; and the client may
        # have been refused just before, and tries again a second later.
        assert longest_pause_s(client) <= KEEPALIVE_S + PING_TIMEOUT_S + 2.0

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


class Known:
    """Tells which schedulers there are, as long as it is so."""

    host: str | None = None

    def __init__(self, addresses: str) -> None:
        self.known = tuple(addresses.split(","))

    async def addresses(self) -> tuple[str, ...]:
        return self.known


class Gateway:
    """The way of requests through a gateway: its fleet of schedulers, in a process of its own."""

    def __init__(self, cluster: Cluster, schedulers: Known) -> None:
        self.process = Process(cluster.loop, CLIENT)
        self._loop = cluster.loop
        self._schedulers = schedulers
        self._is_ended = asyncio.Event()
        # A list of times of tokens for each request.
        self.token_times_s: list[list[float]] = []
        # When requests were refused, as with 503.
        self.refused_at_s: list[float] = []
        self.asking: list[asyncio.Task[None]] = []
        self.fleet = self.process.call(Fleet, schedulers, UnreadBudget())

    def start(self) -> asyncio.Task[None]:
        return self.process.start(self._live())

    async def _live(self) -> None:
        async with self.fleet:
            await self._is_ended.wait()

    async def end(self) -> None:
        await asyncio.gather(*self.asking)
        self._is_ended.set()

    def ask(self, number: int, num_tokens: int = 200) -> None:
        self.asking.append(self.process.start(self._ask(number, num_tokens)))

    async def _ask(self, number: int, num_tokens: int) -> None:
        try:
            await self.fleet.wait_read(None)
            upstream, served = self.fleet.choose(None)
        except ApiError:
            self.refused_at_s.append(self._loop.time())
            return
        wanted = request(number, num_tokens, in_session=True)
        submitted = UpstreamRequest(
            upstream, wanted.prompt, wanted.params, wanted.scheduling, served.model.digest
        )
        times_s: list[float] = []
        self.token_times_s.append(times_s)
        token_ids: list[int] = []
        async with aclosing(submitted.events()) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    times_s += [self._loop.time()] * len(event.token_ids)
                    token_ids += event.token_ids
        assert token_ids == list(wanted.completions[0].token_ids)

    @property
    def longest_pause_s(self) -> float:
        return max(b - a for times_s in self.token_times_s for a, b in pairwise(times_s))


@pytest.mark.parametrize("how", HOWS)
def test_streams_of_a_gateway_go_on_elsewhere_when_their_scheduler_is_silent(how: str) -> None:
    async def story(cluster: Cluster) -> None:
        gateway = Gateway(cluster, Known(cluster.addresses))
        living = gateway.start()
        await asyncio.sleep(3.0)
        for number in range(4):
            gateway.ask(number)
        await asyncio.sleep(3.0)
        cluster.silence(cluster.busy.host, how)
        # New ones go to the other, from then on.
        await asyncio.sleep(DETECTION_S)
        for number in range(4, 8):
            gateway.ask(number, num_tokens=2)
        await gateway.end()
        await living
        assert STEP_S < gateway.longest_pause_s <= STREAMS_S
        assert gateway.refused_at_s == []
        assert len(gateway.token_times_s) == 8

    run(story)


@pytest.mark.parametrize("how", HOWS)
def test_gateway_and_executors_go_on_when_another_scheduler_is_named_after_the_only_one_is_silent(
    how: str,
) -> None:
    async def story(cluster: Cluster) -> None:
        first, second = cluster.schedulers
        known = Known(first.address)
        gateway = Gateway(cluster, known)
        living = gateway.start()
        await asyncio.sleep(3.0)
        for number in range(4):
            gateway.ask(number)
        await asyncio.sleep(3.0)
        began_s = cluster.loop.time()
        cluster.silence(first.host, how)
        await asyncio.sleep(2.0)
        known.known = (second.address,)
        for number in range(4, 12):
            gateway.ask(number, num_tokens=2)
            await asyncio.sleep(1.0)
        await gateway.end()
        await living
        assert gateway.longest_pause_s <= EXECUTORS_S
        assert all(at_s - began_s <= EXECUTORS_S for at_s in gateway.refused_at_s)
        assert len(cluster.of(second)) == len(cluster.executors)

    run(story, all_prefer=0)


def test_gateway_reaches_its_scheduler_over_a_new_connection_when_the_former_is_forgotten() -> None:
    async def story(cluster: Cluster) -> None:
        (scheduler,) = cluster.schedulers
        gateway = Gateway(cluster, Known(cluster.addresses))
        living = gateway.start()
        await cluster.until(lambda: gateway.fleet.is_ready)
        for way in ((CLIENT, scheduler.host), (scheduler.host, CLIENT)):
            assert cluster.network.swallow(*way) == 1
        assert await cluster.until(lambda: not gateway.fleet.is_ready) <= DETECTION_S
        assert await cluster.until(lambda: gateway.fleet.is_ready) <= DETECTION_S
        await gateway.end()
        await living

    run(story, num_schedulers=1)
