"""Fleets whose behaviour is frozen: what each begins with follows from its name alone.

Nothing is drawn by `scenario` or `workload`, which may change at any time. Whoever changes a fleet
here records it anew, with a scheduler whose rules are the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import MappingProxyType

from scheduler_service.config import ClusterConfig
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    PolicyConfig,
    PreemptionMode,
    Speculation,
)
from splitserve_client import BeamSearch, Choices, SamplingParams, SchedulingParams
from tests.simulation import faults
from tests.simulation.executor_process import ExecutorShape
from tests.simulation.faults import Fault
from tests.simulation.scenario import Scenario
from tests.simulation.workload import Wanted
from tests.support.fakes.fake_model import VOCAB_SIZE

# Times that a fleet is run for its record; see `Fleet.varied`.
NUM_VARIANTS = 3

_BEGIN_S = 1.0
_EOS = (0,)
_PLAIN = SamplingParams(ignore_eos=True)
_SHAPE = ExecutorShape(
    block_size=4,
    num_device_blocks=128,
    num_host_blocks=0,
    step_s=0.1,
    byte_s=0.0,
    compile_s=0.0,
    max_inflight_steps=4,
    eos_token_ids=_EOS,
)
_POLICIES = ("fcfs", "priority", "deadline", "fair")
_KINDS = (
    _PLAIN,
    replace(_PLAIN, temperature=0.0),
    replace(_PLAIN, num_logprobs=2),
    replace(_PLAIN, frequency_penalty=0.5, repetition_penalty=1.2),
    replace(_PLAIN, stop_token_ids=(7, 9, 60, 61, 62)),
    replace(_PLAIN, n=2),
    replace(_PLAIN, n=3, stop_token_ids=(7, 9, 60, 61)),
    replace(_PLAIN, n=1, best_of=3),
    replace(_PLAIN, n=2, beam_search=BeamSearch(3)),
    SamplingParams(grammar=Choices(("5 9 12 13 14 5 5 5 5 5 5 5", "5 9", "30 31 32 33"))),
)
_BEAM_TOKENS = 10
# Faults after which no request may fail, as long as there is no bound on losses.
_FAULTS: Sequence[Fault] = (
    faults.kill_executor,
    faults.kill_executor,
    faults.stop_executor,
    faults.pause_executor,
    faults.crawl,
    faults.cut,
    faults.delay,
    faults.reset,
    faults.break_off,
    faults.half_open,
    faults.drain_executor,
    faults.kill_scheduler,
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """One fleet, and what of its behaviour is certain.

    `class_of`: the class within which requests begin in the order of their arrival. `has_begins`:
    whether the record has when the classes begin, compared with each other; `has_order`: and that
    order; `has_ends`: and when the classes end.
    """

    name: str
    scenario: Scenario
    class_of: Callable[[Wanted], str] = lambda _wanted: "all"
    has_begins: bool = False
    has_order: bool = False
    has_ends: bool = False

    def varied(self, variant: int) -> tuple[Scenario, int]:
        """The same fleet in another hurry, and the seed of its network. 0 is the fleet itself.

        What executors compute, for whom and in which order does not depend on what is changed.
        """
        number = int(self.name.rpartition("-")[2])
        if variant == 0:
            return self.scenario, number
        factor = (0.6, 1.7)[variant - 1]
        shapes = [replace(shape, step_s=factor * shape.step_s) for shape in self.scenario.shapes]
        wanted = [
            [
                replace(each, at_s=_BEGIN_S + factor * (each.at_s - _BEGIN_S))
                if self.has_begins
                else each
                for each in some
            ]
            for some in self.scenario.wanted
        ]
        depth = 1 + self.scenario.config.pipeline_depth % 3
        config = replace(self.scenario.config, pipeline_depth=depth)
        varied = replace(self.scenario, shapes=shapes[::-1], wanted=wanted, config=config)
        return varied, number + 1000 * variant


# -- who is next ------------------------------------------------------------------------------


def _queue(policy: str, random: Random, name: str) -> Fleet:
    """More requests than can run; those of a class are alike, and rows are all that lacks."""
    num_requests, num_executors = 24, random.choice([1, 1, 2])
    wanted = []
    for number in range(num_requests):
        # All are there before the second has begun, or they come one after the other.
        at_s = _BEGIN_S + 0.001 * number + (0.04 * number if name.endswith(("1", "3", "7")) else 0)
        tenant = random.choice(["brief", "brief", "heavy", "talker"])
        num_prompt, num_tokens = {"brief": (12, 2), "heavy": (6, 4), "talker": (4, 9)}[tenant]
        if policy != "fair":
            num_prompt, num_tokens = 6, 4
        scheduling = SchedulingParams(
            priority=random.choice([-1, 0, 0, 1]),
            tenant=tenant,
            deadline_s=random.choice([300.0, 600.0, 900.0]),
        )
        prompt = _words(random, num_prompt, None)
        wanted.append(_wanted(number, at_s, prompt, num_tokens, scheduling))
    config = ClusterConfig(
        max_num_seqs=random.choice([1, 2]),
        max_num_batched_tokens=64,
        pipeline_depth=random.choice([1, 2]),
        policies=PolicyConfig(
            prefix_caching=False,
            queue_policy=policy,
            tenant_weights={"heavy": 3.0},
            batch_policy=random.choice(list(BatchPolicyName)),
        ),
    )
    is_by_urgency = policy in ("priority", "deadline")
    if is_by_urgency:
        wanted = _behind_blockers(wanted, config.max_num_seqs * num_executors)
    return Fleet(
        name,
        Scenario(1, config, [_SHAPE] * num_executors, [wanted], ()),
        partial(_class_of, policy),
        has_begins=True,
        # Several executors may each begin a request that another one would have begun later.
        has_order=num_executors == 1 or not is_by_urgency,
    )


def _behind_blockers(wanted: Sequence[Wanted], num_blockers: int) -> list[Wanted]:
    """The same requests; the first few occupy all rows while the others come.

    So no request that has begun is preempted by a more urgent one before its first token.
    """
    scheduling = SchedulingParams(priority=-2, deadline_s=100.0)
    blockers = [
        replace(each, scheduling=scheduling, params=replace(each.params, max_tokens=8))
        for each in wanted[:num_blockers]
    ]
    others = [
        replace(each, at_s=_BEGIN_S + 0.05 + 0.001 * each.number) for each in wanted[num_blockers:]
    ]
    blockers = [replace(each, at_s=_BEGIN_S + 0.001 * each.number) for each in blockers]
    return [*blockers, *others]


def _class_of(policy: str, wanted: Wanted) -> str:
    scheduling = wanted.scheduling
    match policy:
        case "priority":
            return f"priority {scheduling.priority}"
        case "deadline":
            return f"priority {scheduling.priority}, deadline {scheduling.deadline_s}"
        case "fair":
            return f"tenant {scheduling.tenant}"
    return "all"


def _room(policy: str, random: Random, name: str) -> Fleet:
    """Long answers that fill the rows and the blocks; urgent requests come while they run."""
    num_words, block_size = random.choice([None, None, 2]), random.choice([1, 4, 16])
    wanted = []
    for number in range(9):
        is_urgent = number >= 5
        at_s = _BEGIN_S + 0.001 * number + (0.6 * (number - 4) if is_urgent else 0.0)
        scheduling = SchedulingParams(
            priority=-1 if is_urgent else 1,
            tenant="late" if is_urgent else "early",
            deadline_s=400.0 if is_urgent else 800.0,
        )
        prompt = _words(random, 8, num_words)
        num_tokens = 6 if is_urgent else 64
        request = _wanted(number, at_s, prompt, num_tokens, scheduling)
        wanted.append(replace(request, num_words=num_words))
    num_blocks = random.choice([160, 192]) // block_size
    shape = replace(
        _SHAPE,
        block_size=block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=random.choice([0, num_blocks, 2 * num_blocks]),
        num_words=num_words,
        pass_s=0.01,
        brings_several=random.random() < 0.7,
        cuts_short=random.random() < 0.3,
    )
    config = ClusterConfig(
        max_num_seqs=random.choice([3, 4]),
        max_num_batched_tokens=64,
        policies=PolicyConfig(
            queue_policy=policy,
            preemption_mode=random.choice(list(PreemptionMode)),
            max_run_ahead=random.choice([1, 3]),
            max_run_ahead_ms=400,
            speculation=random.choice(list(Speculation)),
        ),
    )
    return Fleet(
        name,
        Scenario(1, config, [shape], [wanted], ()),
        # Whatever the policy, the two classes are told apart.
        lambda wanted: f"tenant {wanted.scheduling.tenant}",
        has_begins=True,
        has_order=True,
        has_ends=True,
    )


# -- who is refused ---------------------------------------------------------------------------


def _late(random: Random, name: str) -> Fleet:
    """Rows are full for long; some deadlines are past before anybody of that class begins."""
    wanted = []
    for number in range(12):
        is_early = number < 4
        is_hopeless = not is_early and random.random() < 0.5
        at_s = _BEGIN_S + 0.001 * number + (0.0 if is_early else 0.5 + 0.1 * number)
        scheduling = SchedulingParams(deadline_s=0.3 if is_hopeless else 900.0)
        num_tokens = 48 if is_early else 4
        prompt = _words(random, 6, None)
        wanted.append(_wanted(number, at_s, prompt, num_tokens, scheduling))
    policies = PolicyConfig(queue_policy="deadline", prefix_caching=False)
    config = ClusterConfig(max_num_seqs=2, max_num_batched_tokens=64, policies=policies)
    shapes = [_SHAPE] * random.choice([1, 2])
    return Fleet(name, Scenario(1, config, shapes, [wanted], ()))


def _full(random: Random, name: str) -> Fleet:
    """One tenant fills the queue at one moment; another one comes before that, and afterwards."""
    policy = random.choice([*_POLICIES, "fair", "fair"])
    wanted = []
    for number in range(96):
        tenant = "early" if 2 <= number < 88 else "late"
        prompt = _words(random, 6, None)
        at_s = _BEGIN_S + 0.0002 * number
        wanted.append(_wanted(number, at_s, prompt, 2, SchedulingParams(tenant=tenant)))
    policies = PolicyConfig(queue_policy=policy, prefix_caching=False)
    config = ClusterConfig(
        max_num_seqs=random.choice([1, 2]),
        max_num_batched_tokens=64,
        max_num_waiting=random.choice([64, 72]),
        policies=policies,
    )
    return Fleet(
        name,
        Scenario(1, config, [_SHAPE], [wanted], ()),
        lambda wanted: f"tenant {wanted.scheduling.tenant}",
    )


# -- what is answered -------------------------------------------------------------------------


def _answers(random: Random, name: str, *, num_faults: Sequence[int]) -> Fleet:
    """Requests of all kinds, few blocks, several tokens a step; `num_faults`: that go wrong."""
    num_words = random.choice([None, None, 1, 2])
    num_clients = random.choice([1, 2])
    wanted = [_any_wanted(random, number, num_words) for number in range(random.choice([4, 6, 8]))]
    config = ClusterConfig(
        max_num_seqs=random.choice([4, 8, 256]),
        max_num_batched_tokens=random.choice([16, 64, 256]),
        pipeline_depth=random.choice([1, 2, 4]),
        reconnect_timeout_s=random.choice([0.2, 2.0]),
        step_timeout_s=random.choice([1.0, 5.0]),
        max_executor_losses=1000,
        policies=PolicyConfig(
            prefix_caching=random.random() < 0.8,
            max_run_ahead=random.choice([1, 2, 8]),
            max_run_ahead_ms=400,
            speculation=random.choice(list(Speculation)),
            preemption_mode=random.choice(list(PreemptionMode)),
            batch_policy=random.choice(list(BatchPolicyName)),
            queue_policy=random.choice(_POLICIES),
        ),
    )
    block_size = random.choice([1, 3, 4, 16])
    num_blocks = random.choice([240, 320]) // block_size
    shape = replace(
        _SHAPE,
        block_size=block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=random.choice([0, num_blocks, 2 * num_blocks]),
        step_s=random.choice([0.02, 0.1]),
        num_words=num_words,
        pass_s=0.01,
        brings_several=random.random() < 0.9,
        cuts_short=random.random() < 0.3,
    )
    scenario = Scenario(
        random.choice([1, 1, 2]),
        config,
        [shape] * random.choice([1, 2, 3]),
        [wanted[client::num_clients] for client in range(num_clients)],
        [random.choice(_FAULTS) for _ in range(random.choice(num_faults))],
    )
    return Fleet(name, scenario)


def _any_wanted(random: Random, number: int, num_words: int | None) -> Wanted:
    params = random.choice(_KINDS)
    num_tokens = random.choice([8, 16, 32, 48])
    if params.has_several_sequences:
        num_tokens = min(num_tokens, 24)
    if params.beam_search is not None:
        num_tokens = min(num_tokens, _BEAM_TOKENS)
    if num_words is not None and params.stop_token_ids:
        params = replace(params, stop_token_ids=(num_words, 60))
    scheduling = SchedulingParams(
        priority=random.choice([-1, 0, 1]), tenant=random.choice(["", "heavy"])
    )
    # Prompts share prefixes.
    stem = Random(random.choice([1, 2])).choices(range(1, VOCAB_SIZE), k=random.choice([4, 17]))
    prompt = (*stem, *_words(random, random.choice([1, 5, 12]), num_words))
    request = _wanted(number, random.random() * 2.0, prompt, num_tokens, scheduling)
    params = replace(params, max_tokens=num_tokens, seed=request.params.seed)
    return replace(request, params=params, num_words=num_words)


def _wanted(
    number: int,
    at_s: float,
    prompt: tuple[int, ...],
    num_tokens: int,
    scheduling: SchedulingParams,
) -> Wanted:
    params = replace(_PLAIN, max_tokens=num_tokens, seed=1000 * (number + 1))
    return Wanted(number, at_s, prompt, params, scheduling, in_session=True)


def _words(random: Random, count: int, num_words: int | None) -> tuple[int, ...]:
    words = range(1, VOCAB_SIZE if num_words is None else 1 + num_words)
    return tuple(random.choices(words, k=count))


# The number of fleets of each family, and what draws one of them.
_FAMILIES: Mapping[str, tuple[int, Callable[[Random, str], Fleet]]] = MappingProxyType(
    {
        **{f"queue-{policy}": (20, partial(_queue, policy)) for policy in _POLICIES},
        **{f"room-{policy}": (10, partial(_room, policy)) for policy in _POLICIES},
        "late": (10, _late),
        "full": (10, _full),
        "calm": (30, partial(_answers, num_faults=[0])),
        "losses": (90, partial(_answers, num_faults=[1, 2, 4, 6])),
    }
)
FAMILIES = tuple(_FAMILIES)


def fleets(family: str) -> list[Fleet]:
    """All fleets of a family, in a fixed order."""
    count, draw = _FAMILIES[family]
    names = [f"{family}-{number}" for number in range(count)]
    return [draw(Random(name), name) for name in names]
