"""Draft model: a smaller model that guesses the next tokens of another, in the same KV blocks.

The draft draws as the target model does: with the same parameters and the same random numbers,
which are a function of seed and position. So where both have nearly the same distribution, they
sample the same token, however random that is. The draft ignores anything else that changes a row's
logits (penalties, biases, grammars).

It computes the same tokens as the target, but later: prompts before the next step, so that no
request waits for them; single tokens when it next guesses, or when very many are owed.

A head (EAGLE-3) reads more than tokens: the target's states at the position before. So it does not
compute the first token of a sequence. It recomputes its own guesses once they are accepted, because
it had no states of the target for them.

Shape letters: R rows of a step, K rows of a turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from executor_service.device import LayerShape
from executor_service.errors import ExecutorError
from executor_service.model import LoadedModel
from executor_service.runner import ModelRunner
from executor_service.steps import (
    BoolArray,
    Int32Array,
    ParamRows,
    SamplingParams,
    StepInput,
    StepOutput,
    TokenRuns,
    part_of,
)
from splitserve_contract import DRAW_PARAMETERS

# Numbers of owed tokens from which a row is brought up to date before guesses are asked for: after
# a chunk of a prompt, and after single tokens, which then cost as little as a chunk.
_LONG_PROMPT, _VERY_MANY = 16, 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of a draft model. `max_num_tokens`: tokens of a pass.

    `vocab_size`, `max_model_len`: of the draft; `target_vocab_size`: of the model that it guesses
    for. `follows_states`: the draft reads states of that model. `num_reachable`: the draft may
    compute at most this many tokens before a row's input, so that it reads nothing outside the
    sliding window of that model; None without a window.
    """

    vocab_size: int
    target_vocab_size: int
    max_model_len: int
    max_num_tokens: int
    follows_states: bool = False
    num_reachable: int | None = None

    @property
    def first_position(self) -> int:
        """Position of the first token of a sequence that the draft computes."""
        return 1 if self.follows_states else 0


class DraftModel:
    """Proposer that guesses by a draft model or a head. Not thread-safe."""

    def __init__(self, execute: Callable[[StepInput], StepOutput], limits: DraftLimits) -> None:
        """Creates a proposer without rows.

        `execute`: runs steps of the draft, on its own layers of the KV blocks.
        """
        self._execute = execute
        self._limits = limits
        self._rows = RowStates(lambda position: DraftedRow(max(position, limits.first_position)))
        self._last_step: StepInput | None = None

    def prepare(self, turn: StepInput, wanted: Int32Array) -> None:
        for index in np.flatnonzero(self._most(turn, wanted) > 0).tolist():
            self._rows.of(turn, index).go_to(int(turn.num_computed_tokens[index]))
        self._bring_up_to_date(turn, wanted > 0, _LONG_PROMPT)

    def propose(self, turn: StepInput, wanted: Int32Array) -> TokenRuns:
        most = self._most(turn, wanted)
        asked = np.flatnonzero(most > 0)
        guesses: list[list[int]] = [[] for _ in range(turn.num_rows)]
        if len(asked):
            rows = [self._rows.of(turn, row) for row in asked.tolist()]
            inputs = turn.token_ids[asked].tolist()
            for row, position in zip(rows, turn.num_computed_tokens[asked].tolist(), strict=True):
                row.go_to(position)
                self._leave_out(row, position)
            tokens = [[*row.owed, token] for row, token in zip(rows, inputs, strict=True)]
            step = self._step(turn, asked.tolist(), rows, tokens, is_asked=True)
            output = self._try(replace(step, num_run_on_tokens=most[asked] - 1))
            if output is not None:
                runs = [self._known(output.token_ids_of(index)) for index in range(len(rows))]
                for row, token, run in zip(rows, inputs, runs, strict=True):
                    row.settle([token] if self._limits.follows_states else [token, *run[:-1]])
                for index, run in zip(asked.tolist(), runs, strict=True):
                    guesses[index] = run
        return TokenRuns.of(guesses)

    def follow(self, step: StepInput, runs: TokenRuns | None) -> None:
        starts = (np.cumsum(step.num_new_tokens) - step.num_new_tokens).tolist()
        positions = step.num_computed_tokens.tolist()
        sampled = None if runs is None else runs.rows
        for index, (start, num_new) in enumerate(
            zip(starts, step.num_new_tokens.tolist(), strict=True)
        ):
            token_ids: list[int] = step.token_ids[start : start + num_new].tolist()
            if sampled is not None:
                token_ids += sampled[index][:-1]
            num_left_out = max(self._limits.first_position - positions[index], 0)
            row = self._rows.of(step, index)
            row.follow(positions[index] + num_left_out, token_ids[num_left_out:])
        self._last_step = step

    def catch_up(self) -> None:
        step, self._last_step = self._last_step, None
        if step is None:
            return
        self._bring_up_to_date(step, step.num_new_tokens > 1, _LONG_PROMPT)
        self._bring_up_to_date(step, step.num_new_tokens == 1, _VERY_MANY)

    def _most(self, turn: StepInput, wanted: Int32Array) -> Int32Array:
        """Returns the possible guesses of each row, at most `wanted` [K]; below 1 for none."""
        positions = turn.num_computed_tokens
        most = np.minimum(wanted, self._limits.max_model_len - positions)
        return np.where(positions < self._limits.first_position, 0, most).astype(np.int32)

    def _bring_up_to_date(self, step: StepInput, chosen: BoolArray, least: int) -> None:
        """Computes the owed tokens of `chosen` rows [R] that owe `least` tokens or more."""
        rows = [self._rows.of(step, index) for index in range(step.num_rows)]
        candidates = np.flatnonzero(chosen).tolist()
        for index in candidates:
            self._leave_out(rows[index], int(step.num_computed_tokens[index]))
        behind = [index for index in candidates if len(rows[index].owed) >= least]
        for part in self._parts(behind, rows):
            owing = [rows[index] for index in part]
            tokens = [row.owed for row in owing]
            owed = self._step(step, part, owing, tokens, is_asked=False)
            if self._try(owed) is None:
                return
            for row in owing:
                row.settle()

    def _leave_out(self, row: DraftedRow, position: int) -> None:
        """Skips owed tokens that are out of reach if the row's input begins at `position`."""
        if self._limits.num_reachable is not None:
            row.forget_before(position - self._limits.num_reachable)

    def _parts(self, behind: Sequence[int], rows: Sequence[DraftedRow]) -> Iterator[list[int]]:
        """Yields the rows `behind` in parts that fit into one pass.

        Rows beyond the draft's longest sequence are left out.
        """
        part: list[int] = []
        num_tokens = 0
        for index in behind:
            row = rows[index]
            if row.num_computed + len(row.owed) > self._limits.max_model_len:
                row.settle()
                continue
            if part and num_tokens + len(row.owed) > self._limits.max_num_tokens:
                yield part
                part, num_tokens = [], 0
            part.append(index)
            num_tokens += len(row.owed)
        if part:
            yield part

    def _step(
        self,
        step: StepInput,
        indexes: Sequence[int],
        rows: Sequence[DraftedRow],
        tokens: Sequence[Sequence[int]],
        *,
        is_asked: bool,
    ) -> StepInput:
        """Builds the draft's step for rows of `step`.

        It computes `tokens` of each row from its first uncomputed token on. `is_asked`: the rows
        sample.
        """
        selected = np.array(indexes, np.int64)
        num_rows = len(rows)
        token_ids = np.concatenate([np.asarray(each, np.int32) for each in tokens])
        part = part_of(
            step,
            selected,
            num_computed_tokens=np.array([row.num_computed for row in rows], np.int32),
            num_new_tokens=np.array([len(each) for each in tokens], np.int32),
            # Tokens unknown to the draft are replaced by its last one.
            token_ids=np.minimum(token_ids, self._limits.vocab_size - 1),
            samples=np.full(num_rows, is_asked),
        )
        return replace(
            part,
            sampling_params=_drawing(part.sampling_params),
            histories=[None] * num_rows,
            adapters=(),
            cross=None,
            grammars=None,
            tables=None,
        )

    def _known(self, run: list[int]) -> list[int]:
        """Returns the guesses of `run` up to the first that the target model does not know."""
        for index, token_id in enumerate(run):
            if token_id >= self._limits.target_vocab_size:
                return run[:index]
        return run

    def _try(self, step: StepInput) -> StepOutput | None:
        try:
            return self._execute(step)
        except ExecutorError:
            # How much of the step was computed is unknown; rows can do without guesses.
            _log.exception("draft_failed num_rows=%d", step.num_rows)
            self._rows.forget()
            return None


def _drawing(params: ParamRows) -> ParamRows:
    """Returns the parameters that a draw from logits depends on, and the stop tokens."""
    return ParamRows.of(
        [
            SamplingParams(
                stop_token_ids=each.stop_token_ids,
                **{p.name: getattr(each, p.name) for p in DRAW_PARAMETERS},
            )
            for each in params.objects
        ]
    )


# -- Progress of the draft model in a row ----------------------------------------------------------
#
# The draft's keys and values lie in the blocks of the row, beside those of the target model. Tokens
# before a row is first seen (a shared prefix, for example) count as computed: the row that filled
# these blocks had a draft as well. If it had none, guesses are worse, and nothing else.


@dataclass(slots=True)
class DraftedRow:
    """Progress of the draft in a row.

    `num_computed`: tokens of the row that the draft has computed. `owed`: the row's tokens after
    these. `guessed`: guesses after these that the draft has computed, from its last run; nothing is
    owed then.
    """

    num_computed: int
    owed: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)

    def go_to(self, position: int) -> None:
        """Notes that the row's next input token is at `position`."""
        known = self.num_computed + len(self.owed)
        if self.num_computed <= position <= known:
            del self.owed[position - self.num_computed :]
        else:
            # Ahead, another row has computed the tokens between; behind, tokens are recomputed.
            self.num_computed, self.owed, self.guessed = position, [], []

    def forget_before(self, position: int) -> None:
        """Drops owed tokens before `position`, which will not be computed any more."""
        num_forgotten = min(max(position - self.num_computed, 0), len(self.owed))
        del self.owed[:num_forgotten]
        self.num_computed += num_forgotten

    def follow(self, position: int, token_ids: Sequence[int]) -> None:
        """Notes the row's tokens from `position` on; they may replace earlier ones."""
        self.go_to(position)
        num_right = 0
        for guess, token_id in zip(self.guessed, token_ids, strict=False):
            if guess != token_id:
                break
            num_right += 1
        self.num_computed += num_right
        self.guessed = []
        self.owed += token_ids[num_right:]

    def settle(self, guessed: Sequence[int] = ()) -> None:
        """Notes that the owed tokens are computed, and after them those that were `guessed`."""
        self.num_computed += len(self.owed)
        self.owed, self.guessed = [], [*guessed]


# -- State of rows across steps --------------------------------------------------------------------

_State = TypeVar("_State")


class RowStates(Generic[_State]):
    """Draft states by row id; replacing a row creates a new state."""

    def __init__(self, make: Callable[[int], _State]) -> None:
        """Starts empty. `make`: returns the state of a row that is first seen at a position."""
        self._make = make
        # By row id: the identity of the row (seed, length of its prompt), and its state.
        self._states: dict[int, tuple[tuple[int, int], _State]] = {}

    def of(self, step: StepInput, index: int) -> _State:
        """Returns the state of the row of `step` at `index`."""
        identity = (int(step.seeds[index]), int(step.num_prompt_tokens[index]))
        row_id = int(step.row_ids[index])
        known = self._states.get(row_id)
        if known is None or known[0] != identity:
            known = (identity, self._make(int(step.num_computed_tokens[index])))
            self._states[row_id] = known
        return known[1]

    def forget(self) -> None:
        """Drops the states of all rows."""
        self._states.clear()


# -- Interfaces of drafts --------------------------------------------------------------------------
#
# Shape letters: R rows of the step, K rows of a turn.


class Proposer(Protocol):
    """Guesses the next tokens of rows. A wrong guess costs time and nothing else."""

    def prepare(self, turn: StepInput, wanted: Int32Array) -> None:
        """Prepares for a call of `propose` with the same arguments, which follows. Raises nothing.

        It does the work that would delay `propose` only once.
        """
        ...

    def propose(self, turn: StepInput, wanted: Int32Array) -> TokenRuns:
        """Returns at most `wanted` [K] guesses for each row of `turn`.

        They follow the row's one input token. The block tables have slots for all guesses. Raises
        nothing.
        """
        ...

    def follow(self, step: StepInput, runs: TokenRuns | None) -> None:
        """Notes that `step` was computed and its rows got `runs`; None for at most one token each.

        Raises nothing.
        """
        ...

    def catch_up(self) -> None:
        """Computes tokens that `follow` left, if there are many, before the next step.

        Raises nothing.
        """
        ...


class LoadedProposer(Protocol):
    """Loaded weights of a draft model or head."""

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Layers of the draft in each block, behind the layers of the target model."""
        ...

    @property
    def description(self) -> str:
        """Name of the draft and of the code that runs it, for people."""
        ...

    def proposer(self, runner: ModelRunner, target: LoadedModel, max_num_tokens: int) -> Proposer:
        """Creates a proposer for `target`, which `runner` runs, on the draft's layers of its cache.

        `max_num_tokens`: of a step. Raises ModelUnsupported if the target model turns out to be
        unsuitable.
        """
        ...
