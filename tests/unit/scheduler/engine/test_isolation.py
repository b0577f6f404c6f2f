"""A tenant that asks for little is served as soon, whatever another asks for.

Time is counted in steps: each takes as long as any other. What the flood gets done is what it asks
for, politely, in the run that it is compared with: the same load.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.core.driver import make_config
from tests.support.core.virtual_load import Fate, StepCosts, VirtualLoad, even_arrivals

STEP_US = 1000
NUM_STEPS = 800
UNTIL_US = NUM_STEPS * STEP_US
MOST_MOVED = 1.2
# A time is a few whole steps. Where their tokens are scarce, those of one may be for prompts that
# run already, and one step is more than a fifth.
GRAIN_STEPS = {"tokens": 1}
SCARCE = {
    "rows": {"max_num_seqs": 16, "num_device_blocks": 1000},
    "tokens": {"max_num_seqs": 64, "num_device_blocks": 4000, "max_num_batched_tokens": 64},
    "blocks": {"max_num_seqs": 64, "num_device_blocks": 300},
    "host blocks": {
        "max_num_seqs": 64,
        "num_device_blocks": 300,
        "num_host_blocks": 300,
        "block_bytes": 4096,
    },
}


def fates(policy: str, per_1000_steps: float, **scarce: int) -> list[Fate]:
    """A tenant that asks for little and evenly, and another that asks so often."""
    values: dict[str, object] = {
        "max_num_batched_tokens": 128,
        "max_num_waiting": 64,
        "vocab_size": 2**20,
        "eos_token_ids": frozenset(),
    }
    config = make_config(queue_policy=policy, **(values | scarce))
    load = VirtualLoad(config, StepCosts(step_us=STEP_US, row_us=0, prompt_token_us=0))
    steady = even_arrivals("steady", 60.0, UNTIL_US, num_prompt_tokens=20, num_output_tokens=10)
    other = even_arrivals(
        "other", per_1000_steps, UNTIL_US, num_prompt_tokens=40, num_output_tokens=60
    )
    return load.run([*steady, *other], UNTIL_US)


def p99_of_steady(all_fates: Sequence[Fate]) -> float:
    """In steps; a request without a token has waited without end."""
    of_steady = [fate for fate in all_fates if fate.arrival.tenant == "steady"]
    num_refused = sum(fate.ttft_us is None for fate in of_steady)
    # Those that came last may still wait.
    assert num_refused <= 1, f"{num_refused} of {len(of_steady)} were refused"
    times_us = [fate.ttft_us for fate in of_steady if fate.ttft_us is not None]
    return float(np.percentile(times_us, 99)) / STEP_US


def num_done(all_fates: Sequence[Fate], tenant: str) -> int:
    return sum(f.finished_us is not None for f in all_fates if f.arrival.tenant == tenant)


@pytest.mark.parametrize("scarce", SCARCE)
def test_fair_keeps_the_time_to_first_token_when_another_tenant_floods(scarce: str) -> None:
    flood = fates("fair", 1500.0, **SCARCE[scarce])
    per_1000_steps = num_done(flood, "other") * 1000 / NUM_STEPS
    polite = fates("fair", per_1000_steps, **SCARCE[scarce])

    most = MOST_MOVED * p99_of_steady(polite) + GRAIN_STEPS.get(scarce, 0)
    assert p99_of_steady(flood) <= most
    assert num_done(flood, "other") >= 0.9 * num_done(polite, "other")


def test_fcfs_refuses_others_when_a_tenant_floods() -> None:
    flood = fates("fcfs", 1500.0, **SCARCE["rows"])
    steady = [fate for fate in flood if fate.arrival.tenant == "steady"]
    assert sum(fate.ttft_us is None for fate in steady) > len(steady) / 2
