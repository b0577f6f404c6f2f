"""Batches as a scheduler sends them that pipelines, loses steps, repeats itself and errs.

Each batch is made from the answers up to some steps before it, and everything drawn is in the
script; what is wrong with a step is in its tokens. So any executor can be sent the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from executor_service.steps import RowStatus, StepAnswer
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.steps.batches import NewRow, Sender, WorkRow

BLOCK_SIZE = 4
BLOCKS_PER_ROW = 3
MAX_LEN = BLOCK_SIZE * BLOCKS_PER_ROW
NUM_ROWS = 3
EXECUTOR_EPOCH = 1

Draw = Callable[[st.SearchStrategy[Any]], Any]

PARAMS: Sequence[dict[str, Any]] = (
    {},
    {},
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "num_logprobs": 2},
    {"temperature": 0.8, "top_p": 0.7},
    {"repetition_penalty": 1.6},
    {"temperature": 0.8, "frequency_penalty": 2.0, "presence_penalty": 1.0, "top_k": 40},
    {"num_prompt_logprobs": 1, "num_logprobs": 0},
    {"min_tokens": 9, "suppressed_token_ids": [5, 6]},
)
_KEEPS_HISTORY = ("repetition_penalty", "frequency_penalty", "num_prompt_logprobs")


@dataclass(slots=True)
class _Sequence:
    """Scheduler's state of one row. `sampled_in`: the step that sampled the last token.

    `num_tokens` counts those that are on their way; `known` are the others.
    """

    prompt: list[int]
    params: dict[str, Any]
    known: list[int]
    num_tokens: int
    num_computed: int = 0
    sampled_in: int = 0
    must_recompute: bool = False
    has_failed: bool = False


@dataclass(slots=True)
class Script:
    """Makes batches for a model whose last tokens are `bad_tokens`: to feed them goes wrong."""

    draw: Draw
    bad_tokens: Sequence[int]
    base: int | None = None
    sent: list[pb.ScheduleBatch] = field(default_factory=list)
    step_id: int = 0
    epoch: int = 1
    _rows: dict[int, _Sequence] = field(default_factory=dict)
    _in_table: set[int] = field(default_factory=set)
    _work: dict[tuple[int, int], list[tuple[int, _Sequence]]] = field(default_factory=dict)

    def learn(self, answer: StepAnswer) -> None:
        """Takes what became of a step."""
        work = self._work.pop((answer.scheduler_epoch, answer.step_id), [])
        for index, (num_tokens, sequence) in enumerate(work):
            if answer.output is None:
                sequence.must_recompute = True
                continue
            status = answer.output.row_statuses[index]
            token = int(answer.output.sampled_token_ids[index])
            if status == RowStatus.INPUT_UNAVAILABLE:
                sequence.must_recompute = True
            elif status != RowStatus.OK:
                sequence.has_failed = True
            elif token >= 0 and num_tokens == len(sequence.known):
                sequence.known.append(token)

    def next_batch(self) -> pb.ScheduleBatch:
        """The batch to send now."""
        kind = self.draw(st.sampled_from(["step"] * 24 + ["wrong", "stale", "repeat", "epoch"]))
        if kind == "repeat" and self.sent:
            return self.draw(st.sampled_from(self.sent[-5:]))  # type: ignore[no-any-return]
        sender = Sender(self.epoch, EXECUTOR_EPOCH)
        if kind == "wrong":
            work = [WorkRow(NUM_ROWS, 0, [1])]
            return sender.batch(self.step_id + 1, base=self.base, work=work)
        if kind == "stale":
            return sender.batch(self.step_id + 1, base=self.step_id + 5)
        if kind == "epoch":
            self.epoch, self.step_id, self.base = self.epoch + 1, 0, None
        self.sent.append(self._make_step())
        return self.sent[-1]

    def _make_step(self) -> pb.ScheduleBatch:
        step_id = self.step_id + self.draw(st.sampled_from([1] * 9 + [2, 8]))
        is_snapshot = self.base is None or self.draw(st.integers(0, 9)) == 9
        if is_snapshot:
            for sequence in self._rows.values():
                _recompute(sequence)
            self._in_table.clear()
        removed = [] if is_snapshot else self._forget_rows()
        new, work = self._choose_rows(step_id)
        swap_out = [(0, 1)] if self.draw(st.integers(0, 4)) == 4 else []
        batch = Sender(self.epoch, EXECUTOR_EPOCH).batch(
            step_id,
            base=None if is_snapshot else self.base,
            removed=removed,
            new=new,
            work=work,
            swap_out=swap_out,
        )
        self.step_id = self.base = step_id
        return batch

    def _forget_rows(self) -> list[int]:
        """Rows that leave the table: their sequence is over, or begins again."""
        removed = []
        for row_id, sequence in list(self._rows.items()):
            is_over = sequence.has_failed or sequence.num_tokens >= MAX_LEN
            if is_over or self.draw(st.integers(0, 15)) == 15:
                del self._rows[row_id]
            elif sequence.must_recompute:
                _recompute(sequence)
            else:
                continue
            if row_id in self._in_table:
                self._in_table.remove(row_id)
                removed.append(row_id)
        return removed

    def _choose_rows(self, step_id: int) -> tuple[list[NewRow], list[WorkRow]]:
        new: list[NewRow] = []
        work: list[WorkRow] = []
        worked: list[tuple[int, _Sequence]] = []
        for row_id in range(NUM_ROWS):
            if self.draw(st.integers(0, 7)) == 7:
                continue
            sequence = self._rows.setdefault(row_id, self._make_sequence())
            if sequence.num_tokens >= MAX_LEN:
                continue
            if row_id not in self._in_table:
                _recompute(sequence)
                self._in_table.add(row_id)
                new.append(_new_row(row_id, sequence))
            work.append(self._work_row(row_id, sequence, step_id))
            worked.append((sequence.num_tokens - work[-1].samples, sequence))
        self._work[self.epoch, step_id] = worked
        return new, work

    def _make_sequence(self) -> _Sequence:
        tokens = st.integers(20, min(self.bad_tokens) - 1)
        prompt = self.draw(st.lists(tokens, min_size=1, max_size=5))
        if self.draw(st.integers(0, 7)) == 7:
            prompt.append(self.draw(st.sampled_from(self.bad_tokens)))
        params = self.draw(st.sampled_from(PARAMS))
        return _Sequence(prompt, params, list(prompt), len(prompt))

    def _work_row(self, row_id: int, sequence: _Sequence, step_id: int) -> WorkRow:
        start = sequence.num_computed
        rest = sequence.known[start : sequence.num_tokens]
        if not rest:
            sequence.num_computed += 1
            back = step_id - sequence.sampled_in
            row = WorkRow(row_id, start, back=back)
        else:
            is_partial = len(rest) > 2 and self.draw(st.booleans())
            rest = rest[:2] if is_partial else rest
            sequence.num_computed += len(rest)
            samples = sequence.num_computed == sequence.num_tokens
            row = WorkRow(row_id, start, rest, samples=samples)
        if row.samples:
            sequence.num_tokens += 1
            sequence.sampled_in = step_id
        return row


def _recompute(sequence: _Sequence) -> None:
    sequence.num_computed, sequence.num_tokens = 0, len(sequence.known)
    sequence.must_recompute = False


def _new_row(row_id: int, sequence: _Sequence) -> NewRow:
    blocks = range(row_id * BLOCKS_PER_ROW, (row_id + 1) * BLOCKS_PER_ROW)
    keeps_history = any(name in sequence.params for name in _KEEPS_HISTORY)
    return NewRow(
        row_id,
        blocks,
        num_prompt=len(sequence.prompt),
        params=sequence.params,
        seed=row_id,
        history=sequence.known if keeps_history else (),
    )
