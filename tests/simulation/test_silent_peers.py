"""How soon a silent peer is detected, in virtual time: on every hop, with default options.

A silent peer is dark (the network drops everything) or paused as by SIGSTOP (connections stay).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from unittest import mock

import grpc.aio
import pytest

from executor_service.service import encode_info, ranked
from executor_service.steps import ExecutorInfo
from scheduler_service.config import ClusterConfig
from splitserve.executor.v1 import executor_pb2
from splitserve_client import SamplingParams, SchedulingParams
from splitserve_common import Discovery, StaticDiscovery
from splitserve_rpc import KEEPALIVE_S, PING_TIMEOUT_S
from tests.simulation.calls import opener
from tests.simulation.client_process import SimulatedClient
from tests.simulation.executor_process import ExecutorShape, SimulatedExecutor
from tests.simulation.gateway_process import SimulatedGateway
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
        addresses = self.addresses
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
    def addresses(self) -> tuple[str, ...]:
        return tuple(scheduler.address for scheduler in self.schedulers)

    @property
    def losses(self) -> set[tuple[str, int, int]]:
        """Executors that schedulers lost."""
        return set().union(*(scheduler.loss_logs[-1].losses for scheduler in self.schedulers))

    @property
    def busy(self) -> SimulatedScheduler:
        """That with the most requests."""
        return max(self.schedulers, key=lambda each: each.cluster.num_unfinished)  # type: ignore[union-attr]

    def of(self, scheduler: SimulatedScheduler) -> set[str]:
        """The executors that it has."""
        assert scheduler.cluster is not None
        return {engine.address for engine in scheduler.cluster.executors}

    @property
    def busy_executor(self) -> str:
        """The host of one that computes for the first scheduler."""
        cluster = self.schedulers[0].cluster
        assert cluster is not None
        engines = [engine for engine in cluster.executors if engine.engine.num_in_flight]
        return engines[0].address.partition(":")[0]

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

    def forget(self, host: str, other: str) -> None:
        """What is said over their connections vanishes; new connections work."""
        assert self.network.swallow(host, other) == self.network.swallow(other, host) == 1

    async def pause(self, hosts: Sequence[str], lasting_s: float) -> None:
        """Pauses processes for a while."""
        paused = [process for process in self.processes if process.host in hosts]
        for process in paused:
            process.pause()
        await asyncio.sleep(lasting_s)
        for process in paused:
            process.resume()

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


def requests(
    num_tokens: int, times_s: Sequence[float] = (0.0,) * 4, first: int = 0
) -> list[Wanted]:
    """Requests that take so many steps, half of them over a session."""
    return [
        Wanted(
            number,
            at_s,
            (5, 6, 7 + number),
            SamplingParams(seed=number, max_tokens=num_tokens, ignore_eos=True),
            SchedulingParams(),
            in_session=number % 2 == 0,
        )
        for number, at_s in enumerate(times_s, first)
    ]


def longest_pause_s(client: SimulatedClient | SimulatedGateway) -> float:
    """Of the streams of `client`, which all ended well."""
    pauses_s = []
    for outcome in client.outcomes:
        assert (outcome.error, outcome.wrong) == (None, None), outcome.describe()
        assert outcome.num_tokens == outcome.wanted.params.max_tokens
        pauses_s += [after - before for before, after in pairwise(outcome.token_times_s)]
    return max(pauses_s)


# -- streams of the library ------------------------------------------------------------------------

LONG_STEPS = replace(SHAPE, step_s=20.0)


@dataclass(frozen=True, slots=True)
class Story:
    """What happens to streams, and how long they pause. `loses`: whether executors are lost."""

    name: str
    happens: Callable[[Cluster], Awaitable[None]]
    least_s: float
    most_s: float
    num_schedulers: int = 1
    shape: ExecutorShape = SHAPE
    num_tokens: int = 200
    loses: bool = True


def silent_scheduler(how: str) -> Callable[[Cluster], Awaitable[None]]:
    async def happens(cluster: Cluster) -> None:
        cluster.silence(cluster.busy.host, how)

    return happens


def briefly_busy_scheduler(busy_s: float) -> Callable[[Cluster], Awaitable[None]]:
    async def happens(cluster: Cluster) -> None:
        busy = cluster.busy
        before = cluster.of(busy)
        for _ in range(3):
            await cluster.pause([busy.host], busy_s)
            await asyncio.sleep(busy_s)
        assert cluster.of(busy) == before

    return happens


async def paused_only_scheduler(cluster: Cluster) -> None:
    await cluster.pause([cluster.schedulers[0].host], 8.0)


async def forgotten_client(cluster: Cluster) -> None:
    cluster.forget(CLIENT, cluster.schedulers[0].host)


async def forgotten_executor(cluster: Cluster) -> None:
    cluster.forget(cluster.busy_executor, cluster.schedulers[0].host)


def silent_executor(how: str) -> Callable[[Cluster], Awaitable[None]]:
    async def happens(cluster: Cluster) -> None:
        host, (scheduler,) = cluster.busy_executor, cluster.schedulers
        cluster.silence(host, how)
        took_s = await cluster.until(lambda: f"{host}:50052" not in cluster.of(scheduler))
        assert took_s <= DETECTION_S

    return happens


async def nothing(_cluster: Cluster) -> None:
    pass


STORIES = [
    *(
        Story(f"scheduler {how}", silent_scheduler(how), STEP_S, STREAMS_S, num_schedulers=2)
        for how in HOWS
    ),
    *(
        Story(
            f"scheduler busy for {busy_s:g} s",
            briefly_busy_scheduler(busy_s),
            busy_s,
            busy_s + 1.0,
            num_schedulers=2,
            loses=False,
        )
        for busy_s in (1.0, 2.0, 3.0)
    ),
    Story("only scheduler paused", paused_only_scheduler, 8.0, 9.0, loses=False),
    # The scheduler keeps the requests until it finds the old connection dead; the client may have
    # been refused just before, and tries again a second later.
    Story("client forgotten", forgotten_client, 1.0, KEEPALIVE_S + PING_TIMEOUT_S + 2.0),
    Story("executor forgotten", forgotten_executor, STEP_S, STREAMS_S),
    *(
        Story(f"executor {how} in a step", silent_executor(how), 1.0, 60.0, 1, LONG_STEPS, 2)
        for how in HOWS
    ),
    Story("long steps", nothing, 20.0, 21.0, 1, LONG_STEPS, 2, loses=False),
]


@pytest.mark.cases(5)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_streams_go_on_when_a_peer_is_silent(story: Story) -> None:
    async def main(cluster: Cluster) -> None:
        addresses = ",".join(cluster.addresses)
        wanted = requests(story.num_tokens)
        client = SimulatedClient(cluster.loop, cluster.random, CLIENT, addresses, wanted)
        ending = client.start()
        await asyncio.sleep(3.0)
        await story.happens(cluster)
        await ending
        assert story.least_s <= longest_pause_s(client) <= story.most_s
        assert story.loses or cluster.losses == set()

    run(main, story.num_schedulers, story.shape)


def test_executor_may_be_silent_when_it_announces_no_answers() -> None:
    def encode_as_stranger(info: ExecutorInfo) -> executor_pb2.ExecutorInfo:
        encoded = encode_info(info)
        encoded.ClearField("answers_while_computing")
        return encoded

    async def happens(cluster: Cluster) -> None:
        await cluster.pause([cluster.busy_executor], 8.0)

    with (
        mock.patch("executor_service.service.servicer.encode_info", encode_as_stranger),
        mock.patch("executor_service.service.registration.encode_info", encode_as_stranger),
    ):
        story = Story("", happens, 20.0, 30.0, 1, LONG_STEPS, 2, loses=False)
        test_streams_go_on_when_a_peer_is_silent(story)


# -- without streams -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
def test_executors_move_when_their_scheduler_is_silent(how: str) -> None:
    async def main(cluster: Cluster) -> None:
        silent, other = cluster.schedulers
        cluster.silence(silent.host, how)
        took_s = await cluster.until(lambda: len(cluster.of(other)) == len(cluster.executors))
        assert took_s <= EXECUTORS_S

    run(main)


@pytest.mark.parametrize("how", HOWS)
def test_scheduler_gives_up_an_idle_executor_when_it_is_silent(how: str) -> None:
    async def main(cluster: Cluster) -> None:
        (scheduler,), silent = cluster.schedulers, cluster.executors[0]
        cluster.silence(silent.host, how)
        took_s = await cluster.until(lambda: silent.address not in cluster.of(scheduler))
        assert took_s <= DETECTION_S

    run(main, num_schedulers=1)


def test_no_executor_is_lost_when_all_pause_briefly() -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.pause([executor.host for executor in cluster.executors], 8.0)
        await asyncio.sleep(20.0)
        assert cluster.losses == set()
        assert len(cluster.of(cluster.schedulers[0])) == len(cluster.executors)

    run(main, num_schedulers=1)


# -- streams of a gateway --------------------------------------------------------------------------


def gateway_of(cluster: Cluster, known: Discovery, wanted: list[Wanted]) -> SimulatedGateway:
    return SimulatedGateway(cluster.loop, cluster.random, CLIENT, known, wanted)


@pytest.mark.parametrize("how", HOWS)
def test_gateway_streams_move_when_their_scheduler_is_silent(how: str) -> None:
    async def main(cluster: Cluster) -> None:
        # Some in the middle of their answers, some once the other scheduler is known to be left.
        wanted = requests(200, [3.0] * 4) + requests(2, [6.0 + DETECTION_S] * 4, 4)
        gateway = gateway_of(cluster, StaticDiscovery(cluster.addresses), wanted)
        ending = gateway.start()
        await asyncio.sleep(6.0)
        cluster.silence(cluster.busy.host, how)
        await ending
        assert STEP_S < longest_pause_s(gateway) <= STREAMS_S
        waits_s = [each.first_token_at_s - each.asked_at_s for each in gateway.outcomes]
        assert max(waits_s) <= 1.0, "none is refused"

    run(main)


@dataclass
class ChangingDiscovery:
    """Schedulers that an operator names."""

    known: tuple[str, ...]
    host: str | None = None

    async def addresses(self) -> tuple[str, ...]:
        return self.known


@pytest.mark.parametrize("how", HOWS)
def test_gateway_and_executors_move_when_another_scheduler_is_named(how: str) -> None:
    async def main(cluster: Cluster) -> None:
        first, second = cluster.schedulers
        known = ChangingDiscovery((first.address,))
        wanted = requests(200, [3.0] * 4) + requests(2, [8.0 + n for n in range(8)], 4)
        gateway = gateway_of(cluster, known, wanted)
        ending = gateway.start()
        await asyncio.sleep(6.0)
        silent_s = cluster.loop.time()
        cluster.silence(first.host, how)
        await asyncio.sleep(2.0)
        known.known = (second.address,)
        await ending
        assert longest_pause_s(gateway) <= EXECUTORS_S
        starts_s = [each.first_token_at_s for each in gateway.outcomes]
        assert max(starts_s) <= silent_s + EXECUTORS_S + 1.0
        assert len(cluster.of(second)) == len(cluster.executors)

    run(main, all_prefer=0)


def test_gateway_reconnects_when_its_connection_is_forgotten() -> None:
    async def main(cluster: Cluster) -> None:
        gateway = gateway_of(cluster, StaticDiscovery(cluster.addresses), requests(2, [30.0]))
        ending = gateway.start()
        await cluster.until(lambda: gateway.fleet.is_ready)
        cluster.forget(CLIENT, cluster.schedulers[0].host)
        assert await cluster.until(lambda: not gateway.fleet.is_ready) <= DETECTION_S
        assert await cluster.until(lambda: gateway.fleet.is_ready) <= DETECTION_S
        await ending

    run(main, num_schedulers=1)
