"""A tenant that asks for little is served as soon, whatever another asks for.

Time is virtual and counted in steps, of which each takes as long as any other. What the attack gets
done is what it asks for, politely, in the run that it is compared with: the same load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from scheduler_service.scheduler.values import PreemptionMode
from tests.support.core.driver import make_config
from tests.support.core.virtual_fleet import (
    Fate,
    StepCosts,
    VirtualFleet,
    even_arrivals,
    random_arrivals,
)

STEP_US = 1000
UNTIL_US = 500 * STEP_US
# By then every executor has served both tenants.
MEASURED_FROM_US = 200 * STEP_US
MOST_MOVED = 1.2
SMALL: dict[str, object] = {"max_num_seqs": 64, "num_device_blocks": 300}
FLEET: dict[str, object] = {
    "num_device_blocks": 320,
    "num_host_blocks": 640,
    "block_bytes": 4096,
    "preemption_mode": PreemptionMode.SWAP,
    "max_num_seqs": 16,
    "max_model_len": 1200,
}


@dataclass(frozen=True)
class Attack:
    """What another tenant asks for, how often in a second, and of which executors."""

    config: dict[str, object]
    num_executors: int = 1
    num_prompt_tokens: int = 40
    num_output_tokens: int = 60
    per_s: float = 1500.0
    n: int = 1
    policy: str = field(default="fair", kw_only=True)


ATTACKS = {
    "rows": Attack({"max_num_seqs": 16, "num_device_blocks": 1000}),
    "tokens": Attack({"max_num_seqs": 64, "num_device_blocks": 4000, "max_num_batched_tokens": 64}),
    "blocks": Attack(SMALL),
    "host blocks": Attack({**SMALL, "num_host_blocks": 300, "block_bytes": 4096}),
}
FLEET_ATTACKS = {
    "flood": Attack(FLEET, 3),
    "swapped": Attack(FLEET, 3, 4, 200, 600.0),
    "giants": Attack(FLEET, 3, 800, 20, 300.0),
    "many sequences": Attack(FLEET, 3, 8, 20, 300.0, n=16),
}


def fates(attack: Attack, per_s: float) -> list[Fate]:
    """What became of the requests of both tenants."""
    values: dict[str, object] = {
        "queue_policy": attack.policy,
        "max_num_batched_tokens": 128,
        "max_num_waiting": 64,
        "vocab_size": 2**20,
        "eos_token_ids": frozenset(),
    }
    fleet = VirtualFleet(
        make_config(**(values | attack.config)), [StepCosts(STEP_US, 0, 0)] * attack.num_executors
    )
    steady_per_s = 60.0 if attack.num_executors == 1 else 100.0
    steady = even_arrivals(
        "steady", steady_per_s, UNTIL_US, num_prompt_tokens=20, num_output_tokens=10
    )
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


def p99_of_steady(all_fates: list[Fate]) -> float:
    """In steps; a request without a token has waited without end."""
    times_us = [
        UNTIL_US if fate.ttft_us is None else fate.ttft_us
        for fate in all_fates
        if fate.arrival.tenant == "steady" and fate.arrival.at_us >= MEASURED_FROM_US
    ]
    return float(np.percentile(times_us, 99)) / STEP_US


def num_done(all_fates: list[Fate]) -> int:
    """Requests of the other tenant that ended."""
    return sum(f.finished_us is not None for f in all_fates if f.arrival.tenant == "other")


def check_isolation(attack: Attack) -> None:
    attacked = fates(attack, attack.per_s)
    politely = fates(attack, num_done(attacked) / (UNTIL_US / 1e6))

    assert num_done(attacked) > 10, "the attacker was served nothing"
    assert num_done(attacked) >= 0.9 * num_done(politely)
    moved, usual = p99_of_steady(attacked), p99_of_steady(politely)
    # Times are a few whole steps, and executors of a fleet are not in step with each other.
    grain_steps = int(attack.num_executors > 1)
    assert moved <= MOST_MOVED * usual + grain_steps, f"{moved} steps, and {usual} at the same load"


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ATTACKS)
def test_tenant_is_served_as_soon_when_another_floods_one_executor(name: str) -> None:
    check_isolation(ATTACKS[name])


@pytest.mark.thorough("two fleets under load for each; test_tenants has the parts")
@pytest.mark.parametrize("name", FLEET_ATTACKS)
def test_tenant_is_served_as_soon_when_another_attacks_a_fleet(name: str) -> None:
    check_isolation(FLEET_ATTACKS[name])


def test_fcfs_refuses_others_when_a_tenant_floods() -> None:
    flood = fates(Attack(ATTACKS["rows"].config, policy="fcfs"), 1500.0)
    steady = [fate for fate in flood if fate.arrival.tenant == "steady"]
    assert sum(fate.ttft_us is None for fate in steady) > len(steady) / 2
