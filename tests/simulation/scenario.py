"""What a history begins with: a cluster, what is asked of it, and what is to go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler.queue import QUEUE_POLICIES
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    PolicyConfig,
    PreemptionMode,
    Speculation,
)
from tests.simulation.executor_process import ExecutorShape
from tests.simulation.faults import (
    Fault,
    World,
    break_off,
    drain_executor,
    kill_executor,
    kill_scheduler,
    pause_scheduler,
    random_fault,
    reset,
    sicken,
    stop_executor,
    stop_scheduler,
)
from tests.simulation.order import problems_of_order
from tests.simulation.workload import (
    EOS,
    MOST_LONG_TOKENS,
    MOST_TOKENS,
    NUM_WORDS,
    Wanted,
    equal_requests,
    growing_requests,
    long_requests,
    random_burst,
    random_requests,
)

# Virtual seconds within which requests come, and faults happen.
REQUESTS_S = 2.0
FAULTS_S = 2 * REQUESTS_S
# Faults after which requests go on elsewhere.
_MOVES = (
    kill_executor,
    kill_executor,
    stop_executor,
    drain_executor,
    reset,
    reset,
    break_off,
    kill_scheduler,
)
# What happens to schedulers of gateways, in a third of the further faults.
_OF_SCHEDULERS = (kill_scheduler, kill_scheduler, stop_scheduler, pause_scheduler)
# Of histories: to record and replay one takes a third more.
_RECORDED_RATIO = 0.25


@dataclass(frozen=True)
class Scenario:
    """`shapes`: of the executors. `wanted`: by client. `faults`: each begins within FAULTS_S.

    `check`: what must not be of those that came to their end. `records`: whether schedulers record
    journals, which are replayed then. `is_through_gateways`: whether gateways ask, and not clients
    of the library.
    """

    num_schedulers: int

    config: ClusterConfig
    shapes: Sequence[ExecutorShape]
    wanted: Sequence[Sequence[Wanted]]
    faults: Sequence[Fault]
    check: Callable[[World], list[str]] = lambda _world: []
    records: bool = False
    is_through_gateways: bool = False


Draw = Callable[[Random], Scenario]


def random_scenario(random: Random) -> Scenario:
    """Mostly a few requests and some faults, sometimes many requests and nothing else."""
    draws = [disturbed, moving, growing, burst, contended, one_sick]
    (draw,) = random.choices(draws, [9, 4, 4, 3, 1, 1])
    records = random.random() < _RECORDED_RATIO
    return replace(draw(random), records=records)


def disturbed(random: Random, faults: Sequence[Fault] | None = None) -> Scenario:
    """A few requests that come one after the other. `faults`: None for some that are drawn."""
    num_words = random.choice(NUM_WORDS)
    wanted = random_requests(random, random.choice([2, 3, 4, 6, 8]), REQUESTS_S, num_words)
    num_tokens = MOST_TOKENS + random.choice([32, 64, 400])
    if faults is None:
        faults = [random_fault(random) for _ in range(random.choice([0, 1, 2, 3, 5, 8]))]
    return Scenario(
        random.choice([1, 1, 1, 2]),
        _random_config(random),
        _random_shapes(random, num_tokens, num_words),
        _of_clients(random, wanted),
        faults,
    )


def moving(random: Random) -> Scenario:
    """Long answers of one and several sequences that move between executors and schedulers.

    They are evacuated, resumed and swapped, with several tokens a step and blocks of all sizes.
    """
    num_words = random.choice(NUM_WORDS)
    wanted = long_requests(random, random.choice([2, 3, 4]), 0.5 * REQUESTS_S, num_words)
    return Scenario(
        random.choice([1, 1, 2]),
        _random_config(random),
        _random_shapes(random, MOST_LONG_TOKENS + random.choice([0, 32]), num_words),
        _of_clients(random, wanted),
        random.choices(_MOVES, k=random.choice([2, 4, 6])),
    )


def one_sick(random: Random) -> Scenario:
    """As `disturbed`, and nothing goes wrong but that one executor of several is sick."""
    scenario = disturbed(random, [sicken])
    shape = scenario.shapes[0]
    return replace(scenario, num_schedulers=1, shapes=[shape] * random.choice([2, 3]))


def growing(random: Random) -> Scenario:
    """Requests with long answers that run side by side until blocks become few; some faults."""
    num_words = random.choice(NUM_WORDS)
    wanted = growing_requests(random, random.choice([6, 8, 12]), 0.5 * REQUESTS_S, num_words)
    config = _random_config(random)
    config = replace(config, max_num_seqs=random.choice([8, 256]))
    return Scenario(
        random.choice([1, 1, 1, 2]),
        config,
        _random_shapes(random, random.choice([80, 96, 128]), num_words)[:2],
        _of_clients(random, wanted),
        [random_fault(random) for _ in range(random.choice([0, 0, 1, 3]))],
    )


def burst(random: Random) -> Scenario:
    """Many requests at one moment, and too few blocks for them: rows yield, and come back."""
    num_words = random.choice(NUM_WORDS)
    wanted = random_burst(random, random.choice([8, 12, 16, 24]), num_words)
    return Scenario(
        random.choice([1, 1, 1, 2]),
        _random_config(random),
        _random_shapes(random, MOST_TOKENS + random.choice([0, 16]), num_words),
        _of_clients(random, wanted),
        (),
    )


def contended(random: Random) -> Scenario:
    """More requests than can run, all alike but for who goes first, on executors that are alike."""
    config = _random_config(random)
    policies = replace(config.policies, prefix_caching=False)
    config = replace(config, max_num_seqs=2, max_num_batched_tokens=32, max_num_waiting=1024)
    config = replace(config, policies=policies)
    num_words = random.choice(NUM_WORDS)
    shape = _random_shape(random, MOST_TOKENS, num_words)
    shape = replace(shape, step_s=0.1, byte_s=0.0)
    # Whoever begins to wait later is put level with those who do; so all tenants begin at once.
    within_s = 0.0 if policies.queue_policy == "fair" else REQUESTS_S
    wanted = equal_requests(random, 40, within_s, num_words)
    shapes = [shape] * random.choice([1, 2, 2, 3])
    return Scenario(1, config, shapes, [wanted], (), problems_of_order)


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
            max_run_ahead=random.choice([1, 2, 8, 8, 16]),
            max_run_ahead_ms=random.choice([80, 400, 400]),
            speculation=random.choice(list(Speculation)),
            max_draft_tokens=random.choice([1, 4, 16]),
            preemption_mode=random.choice(list(PreemptionMode)),
            batch_policy=random.choice(list(BatchPolicyName)),
            queue_policy=random.choice(sorted(QUEUE_POLICIES)),
            tenant_weights={"heavy": 2.0},
        ),
    )


def _random_shapes(random: Random, num_tokens: int, num_words: int | None) -> list[ExecutorShape]:
    count = random.choice([1, 2, 2, 3])
    return [_random_shape(random, num_tokens, num_words) for _ in range(count)]


def _random_shape(random: Random, num_tokens: int, num_words: int | None) -> ExecutorShape:
    block_size = random.choice([1, 3, 4, 16])
    # A sequence may leave a part of a block empty, and the first of several are shared.
    num_blocks = num_tokens // block_size + 8
    step_s = random.choice([0.02, 0.02, 0.1, 0.3])
    return ExecutorShape(
        block_size=block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=random.choice([0, num_blocks // 2, num_blocks]),
        step_s=step_s,
        byte_s=random.choice([0.0, 1e-4]),
        compile_s=random.choice([0.0, 0.0, 0.01, 0.2, 2.0]),
        max_inflight_steps=random.choice([1, 2, 4]),
        eos_token_ids=EOS,
        num_words=num_words,
        pass_s=step_s * random.choice([0.02, 0.1, 0.5]),
        brings_several=(ability := random.random()) < 0.9,
        reports_parts=ability < 0.6,
        cuts_short=random.random() < 0.3,
    )
