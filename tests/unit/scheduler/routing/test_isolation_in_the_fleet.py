"""A tenant that asks for little is served as soon, whatever another asks of several executors.

As `engine/test_isolation.py`, with the queue before the cores. What the attack gets done is what it
asks for, politely, in the run that it is compared with: the same load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from scheduler_service.scheduler.values.config import PreemptionMode
from tests.support.core.driver import make_config
from tests.support.core.virtual_fleet import VirtualFleet
from tests.support.core.virtual_load import Fate, StepCosts, even_arrivals, random_arrivals

NUM_EXECUTORS = 3
STEP_US = 1000
UNTIL_US = 500 * STEP_US
# By then every executor has served both tenants.
MEASURED_FROM_US = 200 * STEP_US
MOST_MOVED = 1.3
# A time is a few whole steps.
GRAIN_STEPS = 1


@dataclass(frozen=True)
class Attack:
    """What another tenant asks for, and how often in a second."""

    num_prompt_tokens: int
    num_output_tokens: int
    per_s: float
    n: int = 1


ATTACKS = {
    "flood": Attack(40, 60, 1500.0),
    "swapped": Attack(4, 200, 600.0),
    "giants": Attack(800, 20, 300.0),
    "many sequences": Attack(8, 20, 300.0, n=16),
}


def fates(attack: Attack, per_s: float) -> list[Fate]:
    """What became of the requests of both tenants."""
    config = make_config(
        queue_policy="fair",
        num_device_blocks=320,
        num_host_blocks=640,
        block_bytes=4096,
        preemption_mode=PreemptionMode.SWAP,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=1200,
        max_num_waiting=64,
        vocab_size=2**20,
        eos_token_ids=frozenset(),
    )
    fleet = VirtualFleet(config, [StepCosts(STEP_US, 0, 0)] * NUM_EXECUTORS)
    steady = even_arrivals("steady", 100.0, UNTIL_US, num_prompt_tokens=20, num_output_tokens=10)
    other = random_arrivals(
        "other",
        per_s,
        UNTIL_US,
        num_prompt_tokens=attack.num_prompt_tokens,
        num_output_tokens=attack.num_output_tokens,
        seed=1,
        num_sequences=attack.n,
    )
    return fleet.run([*steady, *other], UNTIL_US + 100 * STEP_US)


def p99_of_steady(all_fates: Sequence[Fate]) -> float:
    """In steps; a request without a token has waited without end."""
    times_us = [
        UNTIL_US if fate.ttft_us is None else fate.ttft_us
        for fate in all_fates
        if fate.arrival.tenant == "steady" and fate.arrival.at_us >= MEASURED_FROM_US
    ]
    return float(np.percentile(times_us, 99)) / STEP_US


@pytest.mark.thorough("two fleets under load for each; test_tenants_in_the_fleet has the parts")
@pytest.mark.parametrize("name", ATTACKS)
def test_tenant_is_served_as_soon_when_another_attacks_several_executors(name: str) -> None:
    attack = ATTACKS[name]
    under_attack = fates(attack, attack.per_s)
    num_done = sum(
        fate.finished_us is not None for fate in under_attack if fate.arrival.tenant == "other"
    )
    assert num_done > 10, "the attacker was served nothing"
    politely = fates(attack, num_done / (UNTIL_US / 1e6))

    moved, usual = p99_of_steady(under_attack), p99_of_steady(politely)
    assert moved <= MOST_MOVED * usual + GRAIN_STEPS, f"{moved} steps, and {usual} at the same load"
