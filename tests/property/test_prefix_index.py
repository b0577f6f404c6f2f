"""The index of prefixes says of every executor what its core's own cache says, at any time.

Several cores of different configurations live through arrivals, preemption, swaps, evictions,
losses and lives that end and begin; whoever arrives was looked up first, so that cores go on with
hashes that the index made.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.routing import PrefixIndex
from scheduler_service.scheduler.values import SchedulerConfig
from tests.property.core_machine import CoreMachine, Mishap
from tests.property.core_workloads import configs, kin_of, random_spec
from tests.support.core.engine import CoreEngine, Delivery
from tests.support.fakes.expected_outputs import Spec, create_request

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "20"))
NUM_EVENTS = 60

pytestmark = pytest.mark.timeout(3600)


class IndexedMachine(CoreMachine):
    """A core whose pools an index listens to, and whose requests were looked up before."""

    def __init__(self, index: PrefixIndex, number: int) -> None:
        super().__init__()
        self.index = index
        self.number = number
        self.is_listened_to = False

    def connect(self) -> None:
        super().connect()
        self.listen()

    def listen(self) -> None:
        if self.is_listened_to:
            self.index.remove(self.number)
        blocks = self.running.scheduler.placement.blocks
        self.index.add(self.number, self.config, blocks.device, blocks.host)
        self.is_listened_to = True
        looked_up(self.running, self.index)

    def core_is_restored(self, index: int) -> None:
        super().core_is_restored(index)
        self.listen()

    def num_cached(self, spec: Spec) -> tuple[int, int]:
        """What the core's own cache says: tokens, and blocks from the host."""
        request = create_request(spec, 0)
        hit = self.running.scheduler.placement.blocks.prefixes.find(request.sequence)
        return hit.num_tokens, len(hit.host_blocks)


def looked_up(engine: CoreEngine[object], index: PrefixIndex) -> None:
    """Whoever comes to `engine` has been looked up before."""
    add, adopt = engine.add, engine.adopt

    def add_looked_up(request: object) -> Delivery:
        index.find(request)  # type: ignore[arg-type]
        return add(request)  # type: ignore[arg-type]

    def adopt_looked_up(delivery: Delivery) -> None:
        index.find(delivery.request)
        adopt(delivery)

    engine.add, engine.adopt = add_looked_up, adopt_looked_up  # type: ignore[method-assign]


class Fleet:
    """Machines with one index, and what happens to them, by a seed."""

    def __init__(self, several: list[SchedulerConfig], seed: int) -> None:
        self.rng = Random(seed)
        self.index = PrefixIndex()
        self.specs: list[Spec] = []
        self.machines = [IndexedMachine(self.index, number) for number in range(len(several))]
        for machine, config in zip(self.machines, several, strict=True):
            machine.start(config, self.rng.randint(1, 3), self.rng.choice([(0, 0), (1, 100)]))

    def happen(self) -> None:
        machine = self.rng.choice(self.machines)
        event = self.rng.choice([self.arrive, self.arrive, self.step, self.step, self.go_wrong])
        event(machine)

    def arrive(self, machine: IndexedMachine) -> None:
        spec = random_spec(self.rng)
        if self.specs and self.rng.random() < 0.7:
            spec = kin_of(self.rng.choice(self.specs[-8:]), spec)
        self.specs.append(spec)
        for each in {machine, self.rng.choice(self.machines)}:
            each.add(spec)

    def step(self, machine: IndexedMachine) -> None:
        machine.step(self.rng.randint(1, 12), 0)

    def go_wrong(self, machine: IndexedMachine) -> None:
        if machine.unfinished:
            machine.go_wrong([(self.rng.choice(list(Mishap)), self.rng.randint(0, 9))])

    def check(self) -> None:
        for spec in [*self.specs[-8:], random_spec(self.rng)]:
            cached = self.index.find(create_request(spec, 0)).cached
            expected = {machine.number: machine.num_cached(spec) for machine in self.machines}
            assert cached == {number: hit for number, hit in expected.items() if hit[0]}

    def forget(self) -> None:
        """Executors leave one after the other; of the others all is still known."""
        while self.machines:
            self.check()
            self.index.remove(self.machines.pop().number)
        assert self.index.num_hashes == 0


@given(several=st.lists(configs(), min_size=1, max_size=4), seed=st.integers(0, 2**32))
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_index_finds_what_each_cache_finds_when_anything_happens(
    several: list[SchedulerConfig], seed: int
) -> None:
    fleet = Fleet(several, seed)
    for _ in range(NUM_EVENTS):
        fleet.happen()
        fleet.check()
    for machine in fleet.machines:
        machine.core_is_consistent()
        machine.clients_get_what_is_true()
    fleet.forget()
