"""What a result says of tokens, looked at before it is believed; by row, what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from scheduler_service.core.plan import ContractBroken, RowStatus, StepOutcome, StepPlan
from scheduler_service.core.request import BoolArray, Int32Array, Sequence


class TokenChecks:
    """Of all sampled tokens: that there are as many as may be, and that they are tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._end_of_vocab = np.array(vocab_size, np.uint32)

    def check(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        sequence_of: Callable[[StepPlan, int], Sequence | None],
    ) -> tuple[StepOutcome, dict[int, str]]:
        """`outcome` as the plan has it, and the faults. Raises ContractBroken.

        That is with `token_counts` exactly if rows may get several tokens, and then without tokens
        of rows that have failed.
        """
        num_rows = len(plan.work.row_ids)
        counts = outcome.token_counts
        if counts is not None and (
            len(counts) != num_rows or int(counts.sum()) != len(outcome.token_ids)
        ):
            raise ContractBroken(
                f"columns of step {plan.step_id}: sampled_offsets say {int(counts.sum())} tokens "
                f"of {len(counts)} rows, there are {len(outcome.token_ids)} of {num_rows}"
            )
        if counts is None and len(outcome.token_ids) != num_rows:
            raise ContractBroken(
                f"columns of step {plan.step_id}: sampled_token_ids has {len(outcome.token_ids)} "
                f"elements for {num_rows} rows"
            )
        if plan.work.num_more_tokens is not None:
            outcome = _with_counts(outcome)
            return outcome, self._several(plan, outcome, sequence_of)
        faults: dict[int, str] = {}
        if counts is not None:
            faults = _too_many(counts, np.ones(num_rows, np.int32))
            outcome = _without_counts(outcome, counts)
        return outcome, faults | self._single(plan, outcome)

    def _single(self, plan: StepPlan, outcome: StepOutcome) -> dict[int, str]:
        token_ids, samples = outcome.token_ids, plan.work.samples
        # As unsigned numbers: negative ones are large.
        is_wrong = token_ids.view(np.uint32) >= self._end_of_vocab
        if not np.count_nonzero(is_wrong):
            return {}
        if samples is not None:
            is_wrong &= samples
        if outcome.row_statuses is not None:
            is_wrong &= _is_ok(outcome)
        return {
            index: self._out_of_range(int(token_ids[index]))
            for index in np.flatnonzero(is_wrong).tolist()
        }

    def _several(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        sequence_of: Callable[[StepPlan, int], Sequence | None],
    ) -> dict[int, str]:
        """Of a step all of whose rows sample."""
        counts, num_more = outcome.counts, plan.work.num_more_tokens
        assert num_more is not None
        faults = _too_many(counts, num_more + 1)
        is_lacking = counts == 0
        if outcome.row_statuses is not None:
            is_lacking &= _is_ok(outcome)
        faults |= dict.fromkeys(np.flatnonzero(is_lacking).tolist(), "it has no token")
        is_wrong = outcome.token_ids.view(np.uint32) >= self._end_of_vocab
        if np.count_nonzero(is_wrong):
            owners = np.repeat(np.arange(len(counts)), counts)
            for position in np.flatnonzero(is_wrong).tolist():
                faults[int(owners[position])] = self._out_of_range(int(outcome.token_ids[position]))
        for index in np.flatnonzero(counts > 1).tolist():
            sequence = None if index in faults else sequence_of(plan, index)
            if sequence is None:
                continue
            if not sequence.request.stop_token_ids.isdisjoint(outcome.tokens_of(index)[:-1]):
                faults[index] = "a token follows one that ends the sequence"
        return faults

    def _out_of_range(self, token_id: int) -> str:
        return f"sampled_token_id is {token_id}, allowed: 0 to {self._vocab_size - 1}"


def without_tokens(outcome: StepOutcome, rows: list[int]) -> StepOutcome:
    """`outcome` in which these rows have no token."""
    counts = outcome.token_counts
    if counts is None:
        token_ids = outcome.token_ids.copy()
        token_ids[rows] = -1
        return replace(outcome, token_ids=token_ids)
    is_kept = np.ones(len(counts), np.bool_)
    is_kept[rows] = False
    token_ids = outcome.token_ids[np.repeat(is_kept, counts)]
    return replace(outcome, token_ids=token_ids, token_counts=counts * is_kept)


def _too_many(counts: Int32Array, most: Int32Array) -> dict[int, str]:
    return {
        index: f"it has {counts[index]} tokens, allowed: at most {most[index]}"
        for index in np.flatnonzero(counts > most).tolist()
    }


def _is_ok(outcome: StepOutcome) -> BoolArray:
    is_ok: BoolArray = np.asarray(outcome.row_statuses) == RowStatus.OK
    return is_ok


def _with_counts(outcome: StepOutcome) -> StepOutcome:
    """With counts, and without tokens of rows that are not OK."""
    if outcome.token_counts is None:
        counts = outcome.counts
        token_ids = outcome.token_ids[counts > 0]
        outcome = replace(outcome, token_ids=token_ids, token_counts=counts)
    if outcome.row_statuses is not None:
        outcome = without_tokens(outcome, np.flatnonzero(~_is_ok(outcome)).tolist())
    return outcome


def _without_counts(outcome: StepOutcome, counts: Int32Array) -> StepOutcome:
    """The first token of each row, -1 for none."""
    token_ids = np.full(len(counts), -1, np.int32)
    starts = np.cumsum(counts) - counts
    token_ids[counts > 0] = outcome.token_ids[starts[counts > 0]]
    return replace(outcome, token_ids=token_ids, token_counts=None)
