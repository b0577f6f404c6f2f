"""Checks of a step's result before any part of it is applied.

A fault in one row fails that row. A fault that belongs to no row breaks the contract. After these
checks the code that applies a result needs no checks of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from scheduler_service.scheduler.engine.outcomes.step_parts import StepParts
from scheduler_service.scheduler.engine.placement import Placement
from scheduler_service.scheduler.values import (
    BoolArray,
    ContractBroken,
    Int32Array,
    RowStatus,
    SchedulerConfig,
    ScoredToken,
    Sequence,
    SequenceStatus,
    StepOutcome,
    StepPart,
    StepPlan,
    StepStatus,
    VectorSizes,
)

# Tolerance for rounding: a logprob is at most 0.
_MAX_LOGPROB = 1e-3
_KNOWN = frozenset(RowStatus)
_OK = frozenset({RowStatus.OK})
# Statuses of rows that go on, and so have the scores of their prompts.
_SCORED = frozenset({RowStatus.OK, RowStatus.NOT_SAMPLED})
_OF_GRAMMARS = frozenset({RowStatus.NOT_SAMPLED, RowStatus.GRAMMAR_INVALID})


class OutcomeChecks:
    """Checks the results of steps before they are applied.

    `parts`: of the result that comes next.
    """

    def __init__(self, config: SchedulerConfig, placement: Placement, parts: StepParts) -> None:
        self._vocab_size = config.vocab_size
        self._vectors = config.vectors
        self._tokens = TokenChecks(config.vocab_size)
        self._placement = placement
        self._parts = parts

    def faults_of_part(self, plan: StepPlan, part: StepPart) -> dict[int, str]:
        """Returns by index the rows of a part whose tokens a result may not have."""
        outcome = StepOutcome(part.step_id, StepStatus.OK, part.token_ids, token_counts=part.counts)
        return self._tokens.find_wrong(plan, outcome, self._sequence_of)

    def check(self, plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
        """Returns `outcome` with faulty rows marked FAILED. Raises ContractBroken."""
        num_rows = len(plan.work.row_ids)
        statuses = outcome.row_statuses
        if statuses is not None and len(statuses) != num_rows:
            raise ContractBroken(
                f"columns of step {plan.step_id}: row_statuses has {len(statuses)} elements for "
                f"{num_rows} rows"
            )
        missing: dict[int, str] = {}
        if self._vectors is not None:
            outcome, missing = self._with_tokens(plan, outcome, self._vectors)
        outcome, faults = self._tokens.check(plan, outcome, self._sequence_of)
        faults |= missing
        if self._parts:
            faults |= self._parts.find_contradictions(outcome)
        if statuses is not None:
            faults |= self._statuses(plan, statuses)
        logprobs, prompt_logprobs = outcome.logprobs, outcome.prompt_logprobs
        rows, has_departed = self._placement.rows, bool(self._placement.departures)
        if rows.num_not_plain or has_departed:
            logprobs = self._logprobs(plan, outcome, faults)
        if rows.num_with_prompt_logprobs or has_departed or prompt_logprobs:
            prompt_logprobs = self._prompt_logprobs(plan, outcome, faults)
        if logprobs is not outcome.logprobs or prompt_logprobs is not outcome.prompt_logprobs:
            outcome = replace(outcome, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        return _with_faults(outcome, num_rows, faults) if faults else outcome

    def _statuses(self, plan: StepPlan, statuses: Items[int]) -> dict[int, str]:
        faults: dict[int, str] = {}
        for index, status in enumerate(statuses):
            if status not in _KNOWN:
                faults[index] = f"row_status is {status}, which this scheduler does not know"
            elif status in _OF_GRAMMARS and not self._has_grammar(plan, index):
                faults[index] = f"row_status is {RowStatus(status).name} for a row with no grammar"
            elif status == RowStatus.NOT_SAMPLED and not self._may_repeat(plan, index):
                faults[index] = "row_status is NOT_SAMPLED for a row that was sampled before"
        return faults

    def _with_tokens(
        self, plan: StepPlan, outcome: StepOutcome, vectors: VectorSizes
    ) -> tuple[StepOutcome, dict[int, str]]:
        """Returns `outcome` with a token for each vector, whose place it takes, and faulty rows."""
        num_rows = len(plan.work.row_ids)
        token_ids, faults = np.full(num_rows, -1, np.int32), dict[int, str]()
        is_due = np.ones(num_rows, np.bool_) if plan.work.samples is None else plan.work.samples
        if outcome.row_statuses is not None:
            is_due = is_due & _is_ok(outcome)
        for index in np.flatnonzero(is_due).tolist():
            sequence = self._sequence_of(plan, index)
            if sequence is None:
                continue
            problem = _problem_of_vector(sequence, outcome.vectors.get(index, b""), vectors)
            if problem is not None:
                faults[index] = problem
        token_ids[is_due] = 0
        return replace(outcome, token_ids=token_ids, token_counts=None), faults

    def _has_grammar(self, plan: StepPlan, index: int) -> bool:
        """Returns whether a row samples by a grammar; True also if its sequence has left."""
        sequence = self._sequence_of(plan, index)
        samples = plan.work.samples is None or bool(plan.work.samples[index])
        return samples and (sequence is None or sequence.request.params.grammar is not None)

    def _may_repeat(self, plan: StepPlan, index: int) -> bool:
        sequence = self._sequence_of(plan, index)
        if sequence is None:
            return True
        if sequence.status is SequenceStatus.RUNNING:
            return bool(self._placement.rows.may_repeat[sequence.row_id])
        return sequence.num_promised == 0

    def _sequence_of(self, plan: StepPlan, index: int) -> Sequence | None:
        work = plan.work
        return self._placement.sequence_of(int(work.row_ids[index]), int(work.stay_ids[index]))

    # -- scores --------------------------------------------------------------------------------

    def _logprobs(
        self, plan: StepPlan, outcome: StepOutcome, faults: dict[int, str]
    ) -> dict[int, Items[ScoredToken]]:
        """Returns the logprobs of rows that asked for them, one per token. Adds to `faults`."""
        work, found = plan.work, dict[int, Items[ScoredToken]]()
        for index, sequence in self._there(plan, outcome, faults, self._not_plain(plan), _OK):
            num_top = sequence.request.num_row_logprobs
            if num_top is None:
                continue
            first = int(work.num_computed_tokens[index] + work.num_new_tokens[index])
            expected = list(enumerate(outcome.tokens_of(index), first))
            scored = outcome.logprobs.get(index, ())[: len(expected)]
            is_beam = sequence.request.params.beam is not None
            if (problem := self._problem_of(scored, expected, num_top, is_beam)) is not None:
                faults[index] = problem
            else:
                found[index] = scored
        return found

    def _problem_of(
        self,
        scored: Items[ScoredToken],
        expected: Items[tuple[int, int]],
        num_top: int,
        is_beam: bool,
    ) -> str | None:
        """Returns what is wrong with the scores of a row, or None.

        `expected`: (position, token id) of each score.
        """
        if len(scored) < len(expected):
            return "logprobs are missing"
        for score, of in zip(scored, expected, strict=True):
            if _position_and_token(score) != of:
                return f"logprob is of token {score.token_id} at position {score.position}"
            if (problem := self._problem(score, num_top)) is not None:
                return problem
            if is_beam and len(score.top) < num_top:
                return f"{len(score.top)} alternatives; required: {num_top}"
        return None

    def _not_plain(self, plan: StepPlan) -> Iterable[int]:
        """Returns indexes of sampling rows whose sequences may want more than a token."""
        rows, work = self._placement.rows, plan.work
        is_wanted = np.ones(len(work.row_ids), np.bool_) if work.samples is None else work.samples
        if not self._placement.departures:
            is_wanted = is_wanted & ~rows.is_plain[work.row_ids]
        return np.flatnonzero(is_wanted).tolist()

    def _prompt_logprobs(
        self, plan: StepPlan, outcome: StepOutcome, faults: dict[int, str]
    ) -> dict[int, Items[ScoredToken]]:
        """Returns the prompt logprobs of rows that asked for them. Adds to `faults`."""
        work, found = plan.work, dict[int, Items[ScoredToken]]()
        literal = np.flatnonzero(work.sampled_steps_back == 0).tolist()
        for index, sequence in self._there(plan, outcome, faults, literal, _SCORED):
            num_top = sequence.request.params.num_prompt_logprobs
            start = int(work.num_computed_tokens[index])
            end = min(start + int(work.num_new_tokens[index]), sequence.num_prompt_tokens - 1)
            if num_top is None or end <= start:
                continue
            scored = outcome.prompt_logprobs.get(index, ())
            prompt = self._placement.known_tokens(sequence)[start + 1 : end + 1].tolist()
            expected = list(zip(range(start + 1, end + 1), prompt, strict=True))
            problems = (self._problem(score, num_top) for score in scored)
            if len(scored) != len(expected) or expected != [
                _position_and_token(score) for score in scored
            ]:
                faults[index] = f"prompt_logprobs are not those of positions {start + 1} to {end}"
            elif (problem := next(filter(None, problems), None)) is not None:
                faults[index] = problem
            else:
                found[index] = scored
        return found

    def _there(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        faults: dict[int, str],
        indexes: Iterable[int],
        allowed: Collection[RowStatus],
    ) -> Iterable[tuple[int, Sequence]]:
        """Yields rows with an `allowed` status and no fault whose sequence is still there."""
        statuses = outcome.row_statuses
        for index in indexes:
            if index in faults or (statuses is not None and statuses[index] not in allowed):
                continue
            sequence = self._sequence_of(plan, index)
            if sequence is not None:
                yield index, sequence

    def _problem(self, scored: ScoredToken, num_top: int) -> str | None:
        if not 1 <= scored.rank <= self._vocab_size:
            return f"rank is {scored.rank}; allowed: 1 to {self._vocab_size}"
        if len(scored.top) > num_top:
            return f"{len(scored.top)} alternatives; allowed: at most {num_top}"
        token_ids = [token_id for token_id, _ in scored.top]
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                return f"top_token_id is {token_id}; allowed: 0 to {self._vocab_size - 1}"
        if len(set(token_ids)) < len(token_ids):
            return "top_token_ids has duplicates"
        for logprob in (scored.logprob, *(logprob for _, logprob in scored.top)):
            if math.isnan(logprob) or logprob > _MAX_LOGPROB:
                return f"logprob is {logprob}; allowed: 0 or less"
        return None


def _problem_of_vector(sequence: Sequence, vector: bytes, vectors: VectorSizes) -> str | None:
    """Returns what is wrong with the vector of a row, or None."""
    pooling = sequence.request.params.pooling
    assert pooling is not None, "requests of this model ask for vectors"
    numbers = np.frombuffer(vector, "<f4")
    if len(numbers) != (expected := pooling.num_numbers(vectors)):
        return f"the vector has {len(numbers)} numbers; required: {expected}"
    return None if np.isfinite(numbers).all() else "the vector has numbers that are not finite"


def _position_and_token(scored: ScoredToken) -> tuple[int, int]:
    return scored.position, scored.token_id


def _with_faults(outcome: StepOutcome, num_rows: int, faults: dict[int, str]) -> StepOutcome:
    """Returns `outcome` in which the rows in `faults` have failed."""
    statuses = list(outcome.row_statuses or [RowStatus.OK] * num_rows)
    for index in faults:
        statuses[index] = RowStatus.FAILED
    errors = {i: f"the executor broke the step contract: {fault}" for i, fault in faults.items()}
    row_errors = {**outcome.row_errors, **errors}
    outcome = without_tokens(outcome, list(faults))
    return replace(outcome, row_statuses=statuses, row_errors=row_errors)


# -- Token checks ----------------------------------------------------------------------------------


class TokenChecks:
    """Checks the number of sampled tokens of each row, and that they are tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._end_of_vocab = np.array(vocab_size, np.uint32)

    def check(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        sequence_of: Callable[[StepPlan, int], Sequence | None],
    ) -> tuple[StepOutcome, dict[int, str]]:
        """Returns `outcome` in the form that the plan asks for, and faults by row.

        If rows may get several tokens, the outcome has `token_counts` and no tokens of failed rows;
        otherwise it has no `token_counts`. Raises ContractBroken if the columns do not fit the
        plan.
        """
        num_rows = len(plan.work.row_ids)
        counts = outcome.token_counts
        if counts is not None and (
            len(counts) != num_rows or int(counts.sum()) != len(outcome.token_ids)
        ):
            raise ContractBroken(
                f"columns of step {plan.step_id}: sampled_offsets has {int(counts.sum())} tokens "
                f"of {len(counts)} rows; received: {len(outcome.token_ids)} of {num_rows}"
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
        # Read as unsigned, a negative id is larger than any vocabulary.
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
        """Returns the faults of a step in which rows may get several tokens; all rows sample."""
        counts, num_more = outcome.counts, plan.work.num_more_tokens
        assert num_more is not None
        faults = _too_many(counts, num_more + 1)
        is_lacking = counts == 0
        if outcome.row_statuses is not None:
            is_lacking &= _is_ok(outcome)
        faults |= dict.fromkeys(np.flatnonzero(is_lacking).tolist(), "no token was sampled")
        return faults | self.find_wrong(plan, outcome, sequence_of)

    def find_wrong(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        sequence_of: Callable[[StepPlan, int], Sequence | None],
    ) -> dict[int, str]:
        """Returns rows with ids that are no tokens, or with a token behind a stop token."""
        counts, faults = outcome.counts, dict[int, str]()
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
                faults[index] = "a token follows a stop token"
        return faults

    def _out_of_range(self, token_id: int) -> str:
        return f"sampled_token_id is {token_id}; allowed: 0 to {self._vocab_size - 1}"


def without_tokens(outcome: StepOutcome, rows: list[int]) -> StepOutcome:
    """Returns `outcome` in which these rows have no token."""
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
        index: f"{counts[index]} tokens; allowed: at most {most[index]}"
        for index in np.flatnonzero(counts > most).tolist()
    }


def _is_ok(outcome: StepOutcome) -> BoolArray:
    is_ok: BoolArray = np.asarray(outcome.row_statuses) == RowStatus.OK
    return is_ok


def _with_counts(outcome: StepOutcome) -> StepOutcome:
    """Returns `outcome` with `token_counts`, and without tokens of rows that are not OK."""
    if outcome.token_counts is None:
        counts = outcome.counts
        token_ids = outcome.token_ids[counts > 0]
        outcome = replace(outcome, token_ids=token_ids, token_counts=counts)
    if outcome.row_statuses is not None:
        outcome = without_tokens(outcome, np.flatnonzero(~_is_ok(outcome)).tolist())
    return outcome


def _without_counts(outcome: StepOutcome, counts: Int32Array) -> StepOutcome:
    """Returns `outcome` with the first token of each row, or -1, and without `token_counts`."""
    token_ids = np.full(len(counts), -1, np.int32)
    starts = np.cumsum(counts) - counts
    token_ids[counts > 0] = outcome.token_ids[starts[counts > 0]]
    return replace(outcome, token_ids=token_ids, token_counts=None)
