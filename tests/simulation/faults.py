"""What goes wrong in a history: each fault happens, lasts, and is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

from executor_service.errors import ExecutorError
from executor_service.steps import RowStatus, StepInput
from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_contract import DomainError
from tests.simulation.client_process import SimulatedClient
from tests.simulation.executor_process import SimulatedExecutor
from tests.simulation.gateway_process import SimulatedGateway
from tests.simulation.network import Delays, Network
from tests.simulation.scheduler_process import SimulatedScheduler
from tests.simulation.virtual_worker import Mood
from tests.support.core import result_mutations as mutations
from tests.support.fakes.fake_runner import StepFault

# Changes of results that a scheduler can notice; a wrong token that is one is believed.
_NOTICED = (
    mutations.status_of_the_step,
    mutations.status_of_a_row,
    mutations.sampled_token_out_of_range,
    mutations.number_of_tokens,
    mutations.missing_scores,
    mutations.timings,
    mutations.row_error,
    mutations.number_of_the_step,
)


@dataclass(slots=True)
class World:
    """Everything there is. `spoiled_seeds`: of rows that may fail by name.

    `has_failed_steps`: what rows were to write is not there. `has_stopped_schedulers`: some were
    stopped as by SIGTERM. `sick`: hosts of executors that fail whatever they are given, or did;
    `has_other_faults`: something else goes wrong, too.
    """

    network: Network
    random: Random
    schedulers: Sequence[SimulatedScheduler]
    executors: list[SimulatedExecutor]
    clients: Sequence[SimulatedClient | SimulatedGateway]
    log: Callable[[str], None]
    spoiled_seeds: set[int] = field(default_factory=set)
    has_failed_steps: bool = False
    has_stopped_schedulers: bool = False
    has_other_faults: bool = False
    sick: set[str] = field(default_factory=set)

    @property
    def may_be_helpless(self) -> bool:
        """Whether there may be a moment at which no executor is there that is well."""
        is_one_well = len(self.sick) < len(self.executors) and len(self.schedulers) == 1
        return bool(self.sick) and (self.has_other_faults or not is_one_well)

    @property
    def config(self) -> ClusterConfig:
        """Of all schedulers."""
        return self.schedulers[0].config

    @property
    def hosts(self) -> list[tuple[str, str]]:
        """Pairs of hosts that speak to each other."""
        others = [executor.host for executor in self.executors]
        others += [client.process.host for client in self.clients]
        return [(here.host, other) for here in self.schedulers for other in others]

    def calm(self) -> None:
        """All faults are over, and who died lives again."""
        self.log("all is well again")
        self.network.heal_all()
        for executor in self.executors:
            executor.mood = Mood()
            if executor.process is not None:
                executor.process.resume()
            executor.start()
        for scheduler in self.schedulers:
            if scheduler.process is not None:
                scheduler.process.resume()
            scheduler.start()


Fault = Callable[[World, Random, float], Awaitable[None]]


async def kill_executor(world: World, random: Random, lasting_s: float) -> None:
    executor, is_silent = random.choice(world.executors), random.random() < 0.3
    world.log(f"kill {executor.host} is_silent={is_silent}")
    executor.kill(is_silent=is_silent)
    await asyncio.sleep(lasting_s)
    world.log(f"start {executor.host}")
    executor.start()


async def stop_executor(world: World, random: Random, lasting_s: float) -> None:
    executor = random.choice(world.executors)
    world.log(f"stop {executor.host}, as by SIGTERM")
    executor.stop()
    await asyncio.sleep(lasting_s)
    world.log(f"start {executor.host}")
    executor.start()


async def pause_executor(world: World, random: Random, lasting_s: float) -> None:
    executor = random.choice(world.executors)
    process = executor.process
    if process is not None:
        world.log(f"pause {executor.host}")
        process.pause()
        await asyncio.sleep(lasting_s)
        world.log(f"resume {executor.host}")
        process.resume()


async def crawl(world: World, random: Random, lasting_s: float) -> None:
    executor = random.choice(world.executors)
    mood, slowness = executor.mood, random.choice([10.0, 100.0, 1000.0])
    world.log(f"slow {executor.host} by {slowness:g}")
    mood.slowness = slowness
    await asyncio.sleep(lasting_s)
    world.log(f"fast {executor.host}")
    mood.slowness = 1.0


async def spoil_results(world: World, random: Random, lasting_s: float) -> None:
    executor = random.choice(world.executors)
    mood, mutation, ratio = executor.mood, random.choice(_NOTICED), random.choice([0.1, 1.0])
    world.log(f"{executor.host} spoils results: {mutation.__name__}, {ratio:g} of them")

    def spoil(result: pb.StepResult, seeds: list[int]) -> None:
        if random.random() < ratio:
            world.spoiled_seeds.update(seeds)
            mutation(random, result)

    mood.spoil = spoil
    await asyncio.sleep(lasting_s / 4)
    world.log(f"{executor.host} spoils no more")
    mood.spoil = lambda _result, _seeds: None


async def fail_rows(world: World, random: Random, lasting_s: float) -> None:
    executor, status = (
        random.choice(world.executors),
        random.choice([RowStatus.FAILED, RowStatus.INVALID_LOGITS]),
    )
    mood, is_whole_step = executor.mood, random.random() < 0.3
    # Those of a step whose rows run on are told apart, so it may fail in its middle.
    num_passes_left = random.choice([0, 0, 1, 2, 5])
    world.log(f"{executor.host}: a {'step' if is_whole_step else 'row'} fails, {status.name}")
    world.has_failed_steps = True

    def fault(step: StepInput) -> StepFault:
        nonlocal num_passes_left
        if not step.num_rows:
            return StepFault()
        num_passes_left -= 1
        if num_passes_left >= 0:
            return StepFault()
        mood.fault = lambda _step: StepFault()
        if is_whole_step:
            return StepFault(error=ExecutorError("the simulation asked for it"))
        row = random.randrange(step.num_rows)
        world.spoiled_seeds.add(int(step.seeds[row]))
        return StepFault(rows={int(step.row_ids[row]): status})

    mood.fault = fault
    await asyncio.sleep(lasting_s)


async def sicken(world: World, random: Random, lasting_s: float) -> None:
    """Every step of an executor fails, or all of its rows, until it is well again or restarts."""
    executor, is_step = random.choice(world.executors), random.random() < 0.5
    mood = executor.mood
    world.log(f"{executor.host}: every {'step fails' if is_step else 'row is not a number'}")
    world.has_failed_steps = True
    world.sick.add(executor.host)

    def fault(step: StepInput) -> StepFault:
        if is_step:
            return StepFault(error=ExecutorError("the simulation asked for it"))
        if world.may_be_helpless:
            world.spoiled_seeds.update(step.seeds.tolist())
        rows = step.row_ids[step.samples].tolist()
        return StepFault(rows=dict.fromkeys(rows, RowStatus.INVALID_LOGITS))

    mood.fault = fault
    await asyncio.sleep(lasting_s)
    world.log(f"{executor.host} is well again")
    mood.fault = lambda _step: StepFault()


async def cut(world: World, random: Random, lasting_s: float) -> None:
    here, other = random.choice(world.hosts)
    ways = random.choice([[(here, other)], [(other, here)], [(here, other), (other, here)]])
    world.log(f"cut {' and '.join(f'{sender} -> {receiver}' for sender, receiver in ways)}")
    for sender, receiver in ways:
        world.network.cut(sender, receiver)
    await asyncio.sleep(lasting_s)
    world.log(f"heal {here} {other}")
    for sender, receiver in ways:
        world.network.heal(sender, receiver)


async def delay(world: World, random: Random, lasting_s: float) -> None:
    here, other = random.choice(world.hosts)
    delays = Delays(random.choice([0.01, 0.3]), random.choice([0.0, 0.05, 1.0]))
    world.log(f"delay between {here} and {other}: {delays.least_s:g} to +{delays.jitter_s:g} s")
    for way in ((here, other), (other, here)):
        world.network.delays[way] = delays
    await asyncio.sleep(lasting_s)
    for way in ((here, other), (other, here)):
        world.network.delays.pop(way, None)


async def reset(world: World, random: Random, lasting_s: float) -> None:
    here, other = random.choice(world.hosts)
    if random.random() < 0.5:
        here, other = other, here
    is_told = random.random() < 0.5
    count = world.network.reset(here, other, is_told=is_told)
    world.log(f"reset {count} connections of {here} with {other}, is_told={is_told}")


async def break_off(world: World, random: Random, lasting_s: float) -> None:
    """In the midst of what is said: a step is half heard, or an answer."""
    way = random.choice(world.hosts)
    sender, receiver = way if random.random() < 0.7 else way[::-1]
    num_frames = random.randint(1, 40)
    world.log(f"{sender} -> {receiver} breaks after {num_frames} frames")
    world.network.reset_after(sender, receiver, num_frames)


async def half_open(world: World, random: Random, lasting_s: float) -> None:
    """A connection is gone, and one end or both know nothing of it: what they say vanishes."""
    here, other = random.choice(world.hosts)
    ways = random.choice([[(here, other)], [(other, here)], [(here, other), (other, here)]])
    for sender, receiver in ways:
        count = world.network.swallow(sender, receiver)
        world.log(f"what {sender} says to {receiver} over {count} connections vanishes")


async def drain_executor(world: World, random: Random, lasting_s: float) -> None:
    """An operator sends one away, and has it started anew a while later."""
    scheduler, executor = random.choice(world.schedulers), random.choice(world.executors)
    if scheduler.process is None or scheduler.cluster is None:
        return
    timeout_s = random.choice([0.0, 0.5, 5.0])
    world.log(f"drain {executor.host} at {scheduler.host}, timeout_s={timeout_s:g}")

    async def drain(cluster: Driver) -> None:
        with suppress(DomainError):  # it is not there
            await cluster.drain_executor(executor.address, timeout_s)

    scheduler.process.start(drain(scheduler.cluster))
    await asyncio.sleep(lasting_s)
    world.log(f"{executor.host} is started anew")
    executor.stop()
    executor.start()


async def kill_scheduler(world: World, random: Random, lasting_s: float) -> None:
    scheduler, is_silent = random.choice(world.schedulers), random.random() < 0.2
    world.log(f"kill {scheduler.host}, is_silent={is_silent}")
    scheduler.kill(is_silent=is_silent)
    await asyncio.sleep(lasting_s)
    world.log(f"start {scheduler.host}")
    scheduler.start()


async def stop_scheduler(world: World, random: Random, lasting_s: float) -> None:
    scheduler = random.choice(world.schedulers)
    world.log(f"stop {scheduler.host}, as by SIGTERM")
    world.has_stopped_schedulers = True
    scheduler.stop()
    await asyncio.sleep(lasting_s)
    world.log(f"start {scheduler.host}")
    scheduler.start()


async def pause_scheduler(world: World, random: Random, lasting_s: float) -> None:
    scheduler = random.choice(world.schedulers)
    process = scheduler.process
    if process is not None:
        world.log(f"pause {scheduler.host}")
        process.pause()
        await asyncio.sleep(lasting_s)
        world.log(f"resume {scheduler.host}")
        process.resume()


# How often each is drawn.
FAULTS: Mapping[Fault, int] = MappingProxyType(
    {
        kill_executor: 5,
        stop_executor: 2,
        pause_executor: 3,
        crawl: 2,
        spoil_results: 2,
        fail_rows: 2,
        sicken: 2,
        cut: 4,
        delay: 2,
        reset: 3,
        break_off: 3,
        half_open: 3,
        drain_executor: 3,
        kill_scheduler: 2,
        stop_scheduler: 2,
        pause_scheduler: 1,
    }
)


def random_fault(random: Random) -> Fault:
    """One of them."""
    return random.choices(list(FAULTS), list(FAULTS.values()))[0]
