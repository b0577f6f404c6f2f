"""Who goes first, as the documents say it and clients see it: an oracle for queue policies.

For histories in which all requests cost the same and nothing goes wrong. Clients see when first
tokens come; whoever is planned first may be a few steps later than another one elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.simulation.client_process import Outcome
from tests.simulation.faults import World

# "Every ninth admission goes to whoever has waited longest": of the one queue, and of those that
# wait at an executor.
_TURN_EVERY = 9
# So many may have the turn, as the oldest of the one queue, while an older one is at an executor.
_MOST_TURNS_OF_OTHERS = 2
_OUTPUT_WEIGHT = 2

Key = Callable[[Outcome], tuple[Any, ...]]


def problems_of_order(world: World) -> list[str]:
    """What its queue policy does not allow."""
    outcomes = [outcome for client in world.clients for outcome in client.outcomes]
    if any(not outcome.num_tokens for outcome in outcomes):
        return ["somebody got nothing"]
    shape, config = world.executors[0].shape, world.config
    slack_s = (config.pipeline_depth + 3) * shape.step_s
    match config.policies.queue_policy:
        case "fcfs":
            return _overtaken(outcomes, _arrival, slack_s)
        case "priority":
            return _overtaken_too_often(outcomes, _priority, slack_s)
        case "deadline":
            return _overtaken_too_often(outcomes, _deadline, slack_s)
        case "fair":
            num_rows = config.max_num_seqs * len(world.executors)
            return _unfair(outcomes, config.policies.tenant_weights, num_rows)
    raise AssertionError("there is no other policy")


def _arrival(outcome: Outcome) -> tuple[Any, ...]:
    return (outcome.asked_at_s,)


def _priority(outcome: Outcome) -> tuple[Any, ...]:
    return (outcome.wanted.scheduling.priority, outcome.asked_at_s)


def _deadline(outcome: Outcome) -> tuple[Any, ...]:
    scheduling = outcome.wanted.scheduling
    assert scheduling.deadline_s is not None
    return (scheduling.priority, outcome.asked_at_s + scheduling.deadline_s)


def _overtaken_too_often(outcomes: Sequence[Outcome], key: Key, slack_s: float) -> list[str]:
    """Where some may go before others now and then."""
    problems, turns = list[str](), list[Outcome]()
    for outcome, passed in _overtakers(outcomes, key, slack_s):
        waiting = [w for w in outcomes if _waits(w, outcome.first_token_at_s, slack_s)]
        # Whose turn it is, nobody who waits has waited longer.
        if all(outcome.asked_at_s <= w.asked_at_s + slack_s for w in waiting):
            turns.append(outcome)
        else:
            problems.append(_describe(outcome, passed))
    num_turns = len(turns) + len(problems)
    if len(problems) <= _MOST_TURNS_OF_OTHERS:
        problems.clear()
    if num_turns > 2 * (len(outcomes) // _TURN_EVERY) + 1:
        problems.append(f"{num_turns} of {len(outcomes)} began as it was their turn")
    return problems


def _overtaken(outcomes: Sequence[Outcome], key: Key, slack_s: float) -> list[str]:
    """Where nobody may go before anybody."""
    return [_describe(*each) for each in _overtakers(outcomes, key, slack_s)]


def _overtakers(
    outcomes: Sequence[Outcome], key: Key, slack_s: float
) -> Iterator[tuple[Outcome, list[Outcome]]]:
    """Who got its first token while others waited who go before it, and these."""
    for outcome in sorted(outcomes, key=lambda each: each.first_token_at_s):
        waiting = [w for w in outcomes if _waits(w, outcome.first_token_at_s, slack_s)]
        passed = [w for w in waiting if key(w) < key(outcome)]
        if passed:
            yield outcome, passed


def _describe(outcome: Outcome, passed: Sequence[Outcome]) -> str:
    names = ", ".join(each.wanted.request_id for each in passed[:3])
    at_s = outcome.first_token_at_s
    return f"{outcome.wanted.request_id} began before {names} at {at_s:.3f}"


def _waits(outcome: Outcome, at_s: float, slack_s: float) -> bool:
    """Whether it has waited for long enough at that time, and still does for as long."""
    return outcome.asked_at_s + slack_s < at_s < outcome.first_token_at_s - slack_s


def _unfair(outcomes: Sequence[Outcome], weights: Mapping[str, float], num_rows: int) -> list[str]:
    """Tenants that got more, by their weights, than others that waited all the time."""
    tenants = {outcome.wanted.scheduling.tenant for outcome in outcomes}
    starts = [
        (max(each.first_token_at_s for each in outcomes if each.wanted.scheduling.tenant == tenant))
        for tenant in tenants
    ]
    # Until then all of them wait.
    at_s = min(starts)
    served = Counter[str]()
    for outcome in outcomes:
        num_tokens = sum(token_at_s <= at_s for token_at_s in outcome.token_times_s)
        if num_tokens:
            service = len(outcome.wanted.prompt) + _OUTPUT_WEIGHT * num_tokens
            served[outcome.wanted.scheduling.tenant] += service
    shares = {tenant: served[tenant] / weights.get(tenant, 1.0) for tenant in tenants}
    cost = max(len(o.wanted.prompt) + _OUTPUT_WEIGHT * o.num_tokens for o in outcomes)
    # Those that run are paid for as they go.
    allowed = (num_rows + 1) * cost
    if max(shares.values()) - min(shares.values()) <= allowed:
        return []
    return [f"by {at_s:.3f} tenants had {shares}, which may differ by {allowed}"]
