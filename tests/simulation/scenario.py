"""What a history begins with: a cluster, what is asked of it, and what is to go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from scheduler_service.config import ClusterConfig
from scheduler_service.core.config import BatchPolicyName, PolicyConfig, PreemptionMode
from scheduler_service.core.policies.queue_policy import QUEUE_POLICIES
from tests.simulation.executor_process import ExecutorShape
from tests.simulation.faults import Fault, random_fault
from tests.simulation.workload import EOS, MOST_TOKENS, Wanted, random_burst, random_requests

# Virtual seconds within which requests come, and faults happen.
REQUESTS_S = 2.0
FAULTS_S = 2 * REQUESTS_S


@dataclass(frozen=True)
class Scenario:
    """`shapes`: of the executors. `wanted`: by client. `faults`: each begins within FAULTS_S."""

    config: ClusterConfig
    shapes: Sequence[ExecutorShape]
    wanted: Sequence[Sequence[Wanted]]
    faults: Sequence[Fault]


Draw = Callable[[Random], Scenario]


def random_scenario(random: Random) -> Scenario:
    """Mostly a few requests and some faults, sometimes many requests at once and nothing else."""
    return burst(random) if random.random() < 0.2 else disturbed(random)


def disturbed(random: Random, faults: Sequence[Fault] | None = None) -> Scenario:
    """A few requests that come one after the other. `faults`: None for some that are drawn."""
    wanted = random_requests(random, random.choice([2, 3, 4, 6, 8]), REQUESTS_S)
    num_tokens = MOST_TOKENS + random.choice([32, 64, 400])
    if faults is None:
        faults = [random_fault(random) for _ in range(random.choice([0, 1, 2, 3, 5, 8]))]
    return Scenario(
        _random_config(random),
        _random_shapes(random, num_tokens),
        _of_clients(random, wanted),
        faults,
    )


def burst(random: Random) -> Scenario:
    """Many requests at one moment, and too few blocks for them: rows yield, and come back."""
    wanted = random_burst(random, random.choice([8, 12, 16, 24]))
    return Scenario(
        _random_config(random),
        _random_shapes(random, MOST_TOKENS + random.choice([0, 16])),
        _of_clients(random, wanted),
        (),
    )


def _of_clients(random: Random, wanted: Sequence[Wanted]) -> list[Sequence[Wanted]]:
    num_clients = random.choice([1, 2, 3])
    return [wanted[number::num_clients] for number in range(num_clients)]


def _random_config(random: Random) -> ClusterConfig:
    return ClusterConfig(
        max_num_seqs=random.choice([4, 8, 256]),
        max_num_batched_tokens=random.choice([8, 32, 256]),
        max_num_waiting=random.choice([4, 1024, 1024]),
        pipeline_depth=random.choice([1, 2, 2, 4]),
        reconnect_timeout_s=random.choice([0.2, 2.0]),
        step_timeout_s=random.choice([1.0, 5.0]),
        policies=PolicyConfig(
            prefix_caching=random.random() < 0.8,
            host_prefix_cache=random.random() < 0.5,
            num_lookahead_slots=random.choice([0, 0, 3]),
            preemption_mode=random.choice(list(PreemptionMode)),
            batch_policy=random.choice(list(BatchPolicyName)),
            queue_policy=random.choice(sorted(QUEUE_POLICIES)),
            tenant_weights={"heavy": 2.0},
        ),
    )


def _random_shapes(random: Random, num_tokens: int) -> list[ExecutorShape]:
    return [_random_shape(random, num_tokens) for _ in range(random.choice([1, 2, 2, 3]))]


def _random_shape(random: Random, num_tokens: int) -> ExecutorShape:
    block_size = random.choice([1, 3, 4, 16])
    # A sequence may leave a part of a block empty, and the first of several are shared.
    num_blocks = num_tokens // block_size + 8
    return ExecutorShape(
        block_size=block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=random.choice([0, num_blocks // 2, num_blocks]),
        step_s=random.choice([0.02, 0.1, 0.3]),
        byte_s=random.choice([0.0, 1e-4]),
        compile_s=random.choice([0.0, 0.0, 0.01, 0.2, 2.0]),
        max_inflight_steps=random.choice([1, 2, 4]),
        eos_token_ids=EOS,
    )
