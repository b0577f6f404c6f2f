"""What a step is made of. A policy says which kinds of work may share a step, and when.

Source of the second: the scheduler of vLLM's first engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, assert_never

from scheduler_service.scheduler.values.config import BatchPolicyName, SchedulerConfig


@dataclass(frozen=True, slots=True)
class StepShape:
    """The kinds of work of a step, in this order: decodes, prefills, swapped, waiting requests.

    `splits_prompts`: a prompt that exceeds the budget left is computed in chunks; if not, it waits
    for a step that has room for all of it, unless no step has.
    """

    runs_decodes: bool
    takes_swapped: bool
    takes_waiting: bool
    splits_prompts: bool


class QueueState(NamedTuple):
    """What a batch policy looks at. `oldest_wait_us`: 0 if nothing waits.

    `has_prompts`: a waiting request could begin here, or a preempted one is to be computed again.
    `num_swapped`: 0, too, if waiting requests go before all that are swapped out.
    """

    has_prompts: bool
    num_swapped: int
    oldest_wait_us: float
    prefill_us: float


class BatchPolicy(Protocol):
    """Chooses the shapes of the next step."""

    def shapes(self, state: QueueState) -> tuple[StepShape, ...]:
        """What to try, in order, until one of them gives the step something to do."""
        ...


_MIXED = StepShape(runs_decodes=True, takes_swapped=True, takes_waiting=True, splits_prompts=True)
_PREFILLS = StepShape(
    runs_decodes=False, takes_swapped=False, takes_waiting=True, splits_prompts=False
)
_DECODES = StepShape(
    runs_decodes=True, takes_swapped=True, takes_waiting=False, splits_prompts=False
)


class MixedBatches:
    """Decodes first, and the rest of the budget for prompts: no step is without decodes."""

    def shapes(self, state: QueueState) -> tuple[StepShape, ...]:
        return (_MIXED,)


class PrefillFirst:
    """Steps of whole prompts before steps of decodes.

    With a `delay_factor` a prompt waits that many times as long as the last step of prompts took,
    while others run, so that more of them gather.
    """

    def __init__(self, delay_factor: float) -> None:
        self._delay_factor = delay_factor

    def shapes(self, state: QueueState) -> tuple[StepShape, ...]:
        gathers = state.oldest_wait_us < self._delay_factor * state.prefill_us
        if not state.has_prompts or state.num_swapped or gathers:
            return (_DECODES, _PREFILLS)
        return (_PREFILLS, _DECODES)


def make_batch_policy(config: SchedulerConfig) -> BatchPolicy:
    """The policy that `config` names."""
    match config.batch_policy:
        case BatchPolicyName.MIXED:
            return MixedBatches()
        case BatchPolicyName.PREFILL_FIRST:
            return PrefillFirst(config.delay_factor)
        case _:
            assert_never(config.batch_policy)
