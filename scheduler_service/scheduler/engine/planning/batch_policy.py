"""Batch policies: which kinds of work may share a step, and in which order they are tried.

Source of `PrefillFirst`: the scheduler of vLLM's first engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, assert_never

from scheduler_service.scheduler.values import BatchPolicyName, SchedulerConfig


@dataclass(frozen=True, slots=True)
class StepShape:
    """Kinds of work that a step may contain.

    The budget goes, in this order, to decodes, prefills, swapped requests and waiting requests.
    `splits_prompts`: a prompt that exceeds the budget left is computed in chunks. Otherwise the
    prompt waits for a step with room for all of it; only a prompt that is larger than any step is
    split.
    """

    runs_decodes: bool
    takes_swapped: bool
    takes_waiting: bool
    splits_prompts: bool


class QueueState(NamedTuple):
    """State of the queues that a batch policy decides by.

    `has_prompts`: a waiting request could begin here, or a preempted request is to be recomputed.
    `num_swapped`: swapped requests; 0 also if waiting requests go before all swapped ones.
    `oldest_wait_us`: longest wait of a prompt in us; 0 if none waits. `prefill_us`: duration of the
    last step that computed prompts, in us.
    """

    has_prompts: bool
    num_swapped: int
    oldest_wait_us: float
    prefill_us: float


class BatchPolicy(Protocol):
    """Chooses the shapes of the next step."""

    def shapes(self, state: QueueState) -> tuple[StepShape, ...]:
        """Returns the shapes to try, in order, until one of them gives the step some work."""
        ...


_MIXED = StepShape(runs_decodes=True, takes_swapped=True, takes_waiting=True, splits_prompts=True)
_WHOLE_PROMPTS = StepShape(
    runs_decodes=True, takes_swapped=True, takes_waiting=True, splits_prompts=False
)
_PREFILLS = StepShape(
    runs_decodes=False, takes_swapped=False, takes_waiting=True, splits_prompts=False
)
_DECODES = StepShape(
    runs_decodes=True, takes_swapped=True, takes_waiting=False, splits_prompts=False
)


class MixedBatches:
    """Mixed batches: decodes first, and the rest of the token budget for prompts."""

    def __init__(self, *, splits_prompts: bool = True) -> None:
        self._shapes = (_MIXED if splits_prompts else _WHOLE_PROMPTS,)

    def shapes(self, state: QueueState) -> tuple[StepShape, ...]:
        return self._shapes


class PrefillFirst:
    """Separate steps of whole prompts and of decodes; prompts go first.

    With a `delay_factor`, and while other requests run, a prompt waits `delay_factor` times the
    duration of the last prefill step, so that several prompts gather.
    """

    def __init__(self, delay_factor: float) -> None:
        self._delay_factor = delay_factor

    def shapes(self, state: QueueState) -> tuple[StepShape, ...]:
        gathers = state.oldest_wait_us < self._delay_factor * state.prefill_us
        if not state.has_prompts or state.num_swapped or gathers:
            return (_DECODES, _PREFILLS)
        return (_PREFILLS, _DECODES)


def make_batch_policy(config: SchedulerConfig) -> BatchPolicy:
    """Returns the batch policy that `config.batch_policy` names, if prompts may be split at all."""
    if config.is_uncached:
        return MixedBatches(splits_prompts=False)
    match config.batch_policy:
        case BatchPolicyName.MIXED:
            return MixedBatches()
        case BatchPolicyName.PREFILL_FIRST:
            return PrefillFirst(config.delay_factor)
        case _:
            assert_never(config.batch_policy)
