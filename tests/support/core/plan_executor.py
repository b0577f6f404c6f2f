"""An executor that is told the core's plans themselves: the step contract without its messages.

It asserts what the contract demands of a batch, in plain Python, and leaves the rest to a runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from executor_service.steps import (
    BlockMoves,
    CrossInput,
    Grammar,
    Int32Array,
    LogprobColumns,
    ParamRows,
    RowStatus,
    SamplingParams,
    StepInput,
    StepOutput,
    TokenRuns,
)
from scheduler_service.scheduler.values import (
    NewRow,
    Request,
    SchedulerConfig,
    ScoredToken,
    StepOutcome,
    StepPlan,
    StepStatus,
)
from tests.support.fakes.fake_runner import FakeRunner

NOTHING = np.empty(0, np.int32)


def check_moves(plan: StepPlan, config: SchedulerConfig) -> None:
    """Ids are in range, destinations distinct, and no block is both ends of a copy."""
    device, host = range(config.num_device_blocks), range(config.num_host_blocks)
    moves = plan.moves
    for pairs, sources, destinations in (
        (moves.swap_out, device, host),
        (moves.swap_in, host, device),
        (moves.copy, device, device),
    ):
        assert all(source in sources and to in destinations for source, to in pairs)
        assert len({to for _, to in pairs}) == len(pairs), "a destination occurs twice"
    assert {source for source, _ in moves.copy}.isdisjoint(to for _, to in moves.copy)
    assert len({to for _, to in moves.swap_in + moves.copy}) == len(moves.swap_in + moves.copy)


def move_columns(pairs: Sequence[tuple[int, int]]) -> BlockMoves:
    """Sources and destinations."""
    if not pairs:
        return BlockMoves(NOTHING, NOTHING)
    columns = np.array(pairs, np.int32)
    return BlockMoves(columns[:, 0], columns[:, 1])


def padded_tables(tables: Sequence[list[int]]) -> Int32Array:
    """[R, M], padded with -1."""
    width = max(map(len, tables), default=0)
    return np.array([table + [-1] * (width - len(table)) for table in tables], np.int32).reshape(
        len(tables), width
    )


def scores_by_index(
    columns: LogprobColumns | None, indexes: list[int]
) -> dict[int, list[ScoredToken]]:
    """Scores by index in the step; `indexes`: of the rows of the runner."""
    by_row: dict[int, list[ScoredToken]] = {}
    if columns is None:
        return by_row
    offsets = columns.top_offsets.tolist()
    top = list(zip(columns.top_token_ids.tolist(), columns.top_logprobs.tolist(), strict=True))
    for k, row in enumerate(columns.row_indexes.tolist()):
        token = ScoredToken(
            int(columns.positions[k]),
            int(columns.token_ids[k]),
            float(columns.logprobs[k]),
            int(columns.ranks[k]),
            top[offsets[k] : offsets[k + 1]],
        )
        by_row.setdefault(indexes[row], []).append(token)
    return by_row


class InjectedFailure(Exception):
    """Error of a runner that the test asked for."""


@dataclass(slots=True)
class _Row:
    """`sampled_in`, `token`: the latest step that was to sample, and what came of it, or -1.

    `token_at`: where that is.
    """

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    adapter: str
    table: list[int]
    cross_blocks: list[int]
    num_encoder_tokens: int
    encoder_token_ids: Int32Array
    history: list[int] | None
    sampled_in: int = 0
    token: int = -1
    token_at: int = 0


@dataclass(slots=True)
class _Work:
    """Work of one row, and its index in the step."""

    index: int
    row_id: int
    row: _Row
    start: int
    token_ids: list[int]
    samples: bool
    num_run_on: int
    drafts: list[int]

    @property
    def num_more(self) -> int:
        """Slots behind its input that it may write."""
        return self.num_run_on + len(self.drafts)


@dataclass(slots=True)
class PlanExecutor:
    """Executes steps one by one. `base_step_id`: the latest that was applied."""

    config: SchedulerConfig
    runner: FakeRunner
    base_step_id: int | None = None
    _rows: dict[int, _Row] = field(default_factory=dict)

    def send(self, plan: StepPlan) -> StepPlan:
        """Copies what later changes of the plan must not reach."""
        num_computed = plan.work.num_computed_tokens.copy()
        return replace(plan, work=replace(plan.work, num_computed_tokens=num_computed))

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Runs a step, unless it builds on one that was not applied."""
        if plan.base_step_id not in (None, self.base_step_id):
            return StepOutcome(plan.step_id, StepStatus.NEED_SNAPSHOT)
        self._change_rows(plan)
        check_moves(plan, self.config)
        works = self._works(plan)
        self._check_slots(works)
        ready = [work for work in works if work.token_ids]
        step = self._step_input(plan, ready)
        for work in works:
            work.row.encoder_token_ids = NOTHING
            if work.samples:
                work.row.sampled_in, work.row.token = plan.step_id, -1
        self.base_step_id = plan.step_id
        try:
            output = self.runner.execute(step)
        except InjectedFailure as error:
            return StepOutcome(plan.step_id, StepStatus.FAILED, error=str(error))
        return self._outcome(plan, works, ready, output)

    # -- rows ----------------------------------------------------------------------------------

    def _change_rows(self, plan: StepPlan) -> None:
        if plan.base_step_id is None:
            assert not plan.removed_row_ids, "a snapshot removes nothing"
            self._rows.clear()
        for row_id in plan.removed_row_ids:
            del self._rows[row_id]
        for new in plan.new_rows:
            assert 0 <= new.row_id < self.config.max_num_seqs, "row id out of range"
            assert new.row_id not in self._rows, "the row exists"
            self._rows[new.row_id] = _make_row(new)
        writes, end = plan.table_writes, 0
        assert len(np.unique(writes.row_ids)) == len(writes.row_ids), "two writes of one table"
        columns = (writes.row_ids, writes.start_indexes, writes.counts)
        blocks = writes.block_ids.tolist()
        for row_id, start, count in zip(*(column.tolist() for column in columns), strict=True):
            table = self._rows[row_id].table
            assert start <= len(table), "a hole in a block table"
            table[start : start + count] = blocks[end : end + count]
            end += count
        assert end == len(blocks), "blocks of no table"

    def _works(self, plan: StepPlan) -> list[_Work]:
        planned = plan.work
        row_ids: list[int] = planned.row_ids.tolist()
        assert len(set(row_ids)) == len(row_ids), "a row occurs twice"
        samples = [True] * len(row_ids) if planned.samples is None else planned.samples.tolist()
        tokens = planned.token_ids.tolist()
        num_run_on = planned.num_run_on_tokens
        runs = [0] * len(row_ids) if num_run_on is None else num_run_on.tolist()
        drafts = _drafts_of(plan)
        works, end = [], 0
        for index, (row_id, start, count, back) in enumerate(
            zip(
                row_ids,
                planned.num_computed_tokens.tolist(),
                planned.num_new_tokens.tolist(),
                planned.sampled_steps_back.tolist(),
                strict=True,
            )
        ):
            row = self._rows[row_id]
            assert count >= 1, "a row without input"
            if back:
                assert count == 1, "one sampled token is one input token"
                assert row.sampled_in == plan.step_id - back, "not the latest token sampled"
                inputs = [row.token] if row.token >= 0 else []
                # Its table covers the largest position that it can have.
                self._check_covered(row, start, runs[index] + len(drafts[index]))
                assert start >= row.token_at or not inputs, "it is further than it can be"
                start = row.token_at if inputs else start
            else:
                inputs = tokens[end : end + count]
                assert len(inputs) == count, "input tokens are missing"
                end += count
            assert samples[index] or not (runs[index] or drafts[index]), "who gets more samples"
            works.append(
                _Work(index, row_id, row, start, inputs, samples[index], runs[index], drafts[index])
            )
        assert end == len(tokens), "input tokens of no row"
        assert all(0 <= token < self.config.vocab_size for token in tokens), "no such token"
        return works

    def _check_covered(self, row: _Row, start: int, num_more: int) -> None:
        num_slots = len(row.table) * self.config.block_size
        assert start + 1 + num_more <= num_slots, "no slot for the largest position"

    def _check_slots(self, works: list[_Work]) -> None:
        """Block tables cover what is read and written; no slot is written twice."""
        block_size, window = self.config.block_size, self.config.sliding_window
        written: set[int] = set()
        num_written = 0
        for work in works:
            end = work.start + max(len(work.token_ids), 1) + work.num_more
            first = 0 if window is None else max(0, work.start - window + 1)
            needed = work.row.table[first // block_size : (end - 1) // block_size + 1]
            assert len(needed) == (end - 1) // block_size - first // block_size + 1, "no slot"
            assert min(needed) >= 0, "a block that was released is needed"
            assert max(needed) < self.config.num_device_blocks, "no such block"
            written.update(
                work.row.table[position // block_size] * block_size + position % block_size
                for position in range(work.start, end)
            )
            num_written += end - work.start
        assert len(written) == num_written, "two rows write one slot"

    # -- to the runner and back ----------------------------------------------------------------

    def _step_input(self, plan: StepPlan, works: list[_Work]) -> StepInput:
        rows = [work.row for work in works]
        return StepInput(
            step_id=plan.step_id,
            swap_out=move_columns(plan.moves.swap_out),
            swap_in=move_columns(plan.moves.swap_in),
            copy=move_columns(plan.moves.copy),
            row_ids=np.array([work.row_id for work in works], np.int32),
            num_computed_tokens=np.array([work.start for work in works], np.int32),
            num_new_tokens=np.array([len(work.token_ids) for work in works], np.int32),
            token_ids=np.array([t for work in works for t in work.token_ids], np.int32),
            samples=np.array([work.samples for work in works], np.bool_),
            block_tables=padded_tables([row.table for row in rows]),
            num_prompt_tokens=np.array([row.num_prompt_tokens for row in rows], np.int32),
            seeds=np.array([row.seed for row in rows], np.int64),
            sampling_params=ParamRows.of([row.params for row in rows]),
            histories=[row.history for row in rows],
            adapters=[row.adapter for row in rows],
            cross=_cross(rows),
            num_run_on_tokens=None
            if plan.work.num_more_tokens is None
            else np.array([work.num_run_on for work in works], np.int32),
            drafts=None
            if plan.work.drafts is None
            else TokenRuns.of([work.drafts for work in works]),
        )

    def _outcome(
        self, plan: StepPlan, works: list[_Work], ready: list[_Work], output: StepOutput
    ) -> StepOutcome:
        statuses = [int(RowStatus.INPUT_UNAVAILABLE)] * len(works)
        tokens: list[list[int]] = [[] for _ in works]
        for work, status, run in zip(
            ready, output.row_statuses.tolist(), _runs(output), strict=True
        ):
            statuses[work.index], tokens[work.index] = status, run
            if run:
                end = work.start + len(work.token_ids) + len(run) - 1
                work.row.token_at, work.row.token = end, run[-1]
                if work.row.history is not None:
                    work.row.history.append(run[-1])
                if run[-1] in work.row.params.stop_token_ids:
                    work.row.token = -1
        is_several = output.runs is not None
        indexes = [work.index for work in ready]
        scored = scores_by_index(output.logprobs, indexes)
        return StepOutcome(
            plan.step_id,
            StepStatus.OK,
            np.array([t for run in tokens for t in (run if is_several else run or [-1])], np.int32),
            None if all(status == RowStatus.OK for status in statuses) else statuses,
            {indexes[row]: message for row, message in output.row_errors.items()},
            scored,
            scores_by_index(output.prompt_logprobs, indexes),
            move_us=output.move_us,
            compute_us=output.forward_us + output.sample_us,
            token_counts=np.array([len(run) for run in tokens], np.int32) if is_several else None,
        )


def _drafts_of(plan: StepPlan) -> list[list[int]]:
    """Returns the draft tokens of each row."""
    drafts = plan.work.drafts
    if drafts is None:
        return [[] for _ in plan.work.row_ids]
    assert drafts.counts.sum() == len(drafts.token_ids), "drafts of no row"
    return [part.tolist() for part in np.split(drafts.token_ids, np.cumsum(drafts.counts)[:-1])]


def _make_row(new: NewRow) -> _Row:
    sequence, request = new.sequence, new.sequence.request
    params, encoder = _row_params(request), request.encoder_token_ids
    assert not any(block < 0 for block in new.cross_blocks)
    return _Row(
        params,
        sequence.seed,
        sequence.num_prompt_tokens,
        request.scheduling.adapter,
        new.block_table.tolist(),
        list(new.cross_blocks),
        0 if encoder is None else len(encoder),
        NOTHING if new.encoder_token_ids is None else new.encoder_token_ids,
        new.token_ids.tolist() if params.needs_history else None,
    )


def _row_params(request: Request) -> SamplingParams:
    params, grammar = request.row_params, request.params.grammar
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        suppressed_token_ids=tuple(params.stop_token_ids),
        num_logprobs=params.num_logprobs,
        num_prompt_logprobs=params.num_prompt_logprobs,
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words_token_ids=params.bad_words_token_ids,
        grammar=None if grammar is None else Grammar(grammar.kind, grammar.texts),
        stop_token_ids=request.params_set.stop_token_ids,
    )


def _runs(output: StepOutput) -> list[list[int]]:
    """The tokens of each row."""
    if output.runs is None:
        return [[token] if token >= 0 else [] for token in output.sampled_token_ids.tolist()]
    tokens: list[int] = output.runs.token_ids.tolist()
    return [tokens[start:end] for start, end in pairwise(output.runs.offsets.tolist())]


def _cross(rows: Sequence[_Row]) -> CrossInput | None:
    if not any(row.num_encoder_tokens for row in rows):
        return None
    return CrossInput(
        np.array([row.num_encoder_tokens for row in rows], np.int32),
        padded_tables([row.cross_blocks for row in rows]),
        [row.encoder_token_ids for row in rows],
    )
