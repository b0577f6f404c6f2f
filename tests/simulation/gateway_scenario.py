"""Histories of gateways whose schedulers are lost while long answers run: `through_gateways`."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulation.faults import (
    Fault,
    kill_scheduler,
    pause_scheduler,
    random_fault,
    stop_scheduler,
)
from tests.simulation.scenario import Scenario, disturbed, growing

# Of a fault in three a scheduler is the victim.
_OF_SCHEDULERS = (kill_scheduler, kill_scheduler, stop_scheduler, pause_scheduler)


def through_gateways(random: Random) -> Scenario:
    """Two schedulers, of which each history loses one at least while answers are on their way."""
    scenario = random.choice([growing, growing, disturbed])(random)
    shapes = [random.choice(scenario.shapes) for _ in range(random.choice([2, 3]))]
    faults: list[Fault] = [random.choice(_OF_SCHEDULERS)]
    for _ in range(random.choice([0, 1, 1, 3])):
        is_of_scheduler = random.random() < 0.3
        fault = random.choice(_OF_SCHEDULERS) if is_of_scheduler else random_fault(random)
        faults.append(fault)
    return replace(
        scenario, num_schedulers=2, shapes=shapes, faults=faults, is_through_gateways=True
    )
