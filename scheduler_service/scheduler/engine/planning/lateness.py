"""Refusal of requests that cannot meet their deadline, judged by the fastest steps seen so far."""

from __future__ import annotations

from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.engine.planning.arrival_checks import prepare_request
from scheduler_service.scheduler.values import (
    FinishReason,
    Request,
    SchedulerConfig,
    StepOutcome,
    StepPlan,
)

# Most requests that one step refuses. Further late requests wait for the next step, but never run.
MAX_REFUSALS = 32
# Number of single-token steps to observe before the fastest of them counts: the first steps are
# slow, because something is loaded, compiled or captured.
MIN_SMALLEST_STEPS = 8
# Time after the latest step for which measurements count: without steps, a speed-up goes unnoticed.
BELIEVED_NS = 1_000_000_000
_MAX_CONTEXT_BITS = 32


class StepPace:
    """Lower bound on the duration of a step, learned from times that the executor reported.

    The bound comes from the smallest steps: a single token of a plain request. The duration of such
    a step grows with its context, at most in proportion. So the least time t at a context of k
    tokens bounds steps with larger contexts by t, and those with a smaller context c by t * c / k.
    A slow step proves nothing, however often it occurs: a smaller step may be fast.
    """

    def __init__(self) -> None:
        self._least_ns = 0
        self._latest_ns = 0
        # Counts and least times of single-token steps, by the bit length of their context.
        self._num_smallest = [0] * (_MAX_CONTEXT_BITS + 1)
        self._least_smallest_ns = [0] * (_MAX_CONTEXT_BITS + 1)

    def observe(self, plan: StepPlan, outcome: StepOutcome, placement: Placement) -> None:
        """Learns from an executed step; ignores a step without a time (`compute_us` <= 0)."""
        compute_us = outcome.compute_us
        if compute_us <= 0 or len(plan.work.row_ids) == 0:
            return
        self._latest_ns = placement.now_ns
        # For a step that brings several tokens per row, the least time for one of them. More draft
        # tokens may be accepted next time.
        most = plan.work.most_tokens if plan.work.drafts else max(int(outcome.counts.max()), 1)
        step_ns = compute_us * 1000 // most
        self._least_ns = min(self._least_ns or step_ns, step_ns)
        if plan.num_tokens == 1 and not plan.moves and _is_plain(plan, placement):
            bits = (int(plan.work.num_computed_tokens[0]) + 1).bit_length()
            self._num_smallest[bits] += 1
            least_ns = self._least_smallest_ns[bits] or step_ns
            self._least_smallest_ns[bits] = min(least_ns, step_ns)

    def least_ns(self, num_tokens: int, now_ns: int) -> int:
        """Returns the least duration in ns of a step with `num_tokens` or more of context.

        Returns 0 if nothing is known, or if the last step was more than BELIEVED_NS ago.
        """
        if now_ns - self._latest_ns > BELIEVED_NS:
            return 0
        bounds_ns = (
            step_ns * min(num_tokens, 2**bits) >> bits
            for bits, step_ns in enumerate(self._least_smallest_ns)
            if self._num_smallest[bits] >= MIN_SMALLEST_STEPS
        )
        return min(max(bounds_ns, default=0), self._least_ns)


class DeadlineEnforcer:
    """Ends requests that cannot meet their deadline, at most MAX_REFUSALS in a step.

    `is_behind`: more late requests are left, so the engine is to be asked for a step again soon.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement) -> None:
        self._refuses_late = placement.queue.refuses_late
        self._config = config
        self._placement = placement
        self._num_left = MAX_REFUSALS
        self._pace = StepPace()
        self.is_behind = False

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Learns the executor's speed from a step, if the queue policy refuses late requests."""
        if self._refuses_late:
            self._pace.observe(plan, outcome, self._placement)

    def refuse_overdue(self) -> None:
        """Ends waiting requests whose deadline has passed. Called at the beginning of each step."""
        if not self._refuses_late:
            return
        placement = self._placement
        self._num_left = MAX_REFUSALS
        for _ in range(MAX_REFUSALS):
            request = placement.queue.overdue()
            if request is None:
                break
            if request.prepared_for is not self._config:
                prepare_request(request, self._config)
            self._refuse(request, self._earliest_ns(request, 0))
        self.is_behind = placement.queue.overdue() is not None

    def cannot_meet(self, request: Request) -> bool:
        """Returns whether a waiting request cannot meet its deadline; if so, ends the request.

        After MAX_REFUSALS in one step the request is left to a later step. A request that has
        tokens, or is promised some, is never late.
        """
        deadline_ns = request.scheduling.deadline_ns
        if not self._refuses_late or deadline_ns is None:
            return False
        if any(s.num_output_tokens or s.num_promised for s in request.sequences):
            return False  # a request that has tokens goes on
        sequence = request.sequence
        num_cached = self._placement.blocks.prefixes.find(sequence).num_tokens
        earliest_ns = self._earliest_ns(request, len(sequence.token_ids) - num_cached)
        if earliest_ns <= deadline_ns:
            return False
        if self._num_left == 0:
            self.is_behind = True
            return True
        self._num_left -= 1
        self._refuse(request, earliest_ns)
        return True

    def _earliest_ns(self, request: Request, num_uncached_tokens: int) -> int:
        tokens_per_step, now_ns = self._config.max_num_batched_tokens, self._placement.now_ns
        smallest = min(len(request.sequence.token_ids), tokens_per_step)
        step_ns = self._pace.least_ns(smallest, now_ns)
        return earliest_finish_ns(request, now_ns, step_ns, num_uncached_tokens, tokens_per_step)

    def _refuse(self, request: Request, earliest_ns: int) -> None:
        late_s = (earliest_ns - (request.scheduling.deadline_ns or 0)) / 1e9
        message = f"the last token would come at least {late_s:.3f} s after the deadline"
        self._placement.finish(request, FinishReason.ERROR, ("DEADLINE_UNREACHABLE", message))


def earliest_finish_ns(
    request: Request,
    now_ns: int,
    step_ns: int,
    num_uncached_prompt_tokens: int,
    tokens_per_step: int,
) -> int:
    """Returns a lower bound on when a waiting request would have its last token if admitted now.

    In ns, by the clock of `now_ns`. Holds if a step takes at least `step_ns`, computes at most
    `tokens_per_step` tokens and samples at most one token of each sequence.
    """
    params = request.params
    least = max(params.min_tokens, 1)
    if params.max_tokens is not None and params.ignore_eos and not params.stop_token_ids:
        least = params.max_tokens
    if request.stop_len:
        least = min(least, request.stop_len - request.sequence.num_prompt_tokens)
    num_known = min(s.num_output_tokens + s.num_promised for s in request.unfinished)
    num_decode_steps = max(least - num_known, 1) - 1
    num_prefill_steps = max(-(-num_uncached_prompt_tokens // tokens_per_step), 1)
    return now_ns + (num_prefill_steps + num_decode_steps) * step_ns


def _is_plain(plan: StepPlan, placement: Placement) -> bool:
    """Returns whether the only row of a step still has its sequence and asks for tokens only.

    A plain row has no sibling sequences, logprobs, adapter or encoder input.
    """
    row_id = int(plan.work.row_ids[0])
    sequence = placement.sequence_of(row_id, int(plan.work.stay_ids[0]))
    if sequence is None:
        return False
    request = sequence.request
    is_single = request.params.num_sequences == 1 and request.params.num_logprobs is None
    return is_single and not request.scheduling.adapter and not request.num_encoder_tokens
