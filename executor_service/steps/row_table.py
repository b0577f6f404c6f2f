"""Row table: the data of each sequence that the executor keeps between steps.

Includes the tokens sampled in the latest steps, which are the input of later ones. Shape letters: N
row ids (`max_num_rows`), R rows of a step, X blocks of their longest cross table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from executor_service.steps.batch import NewCross, NewRows, TableWrites
from executor_service.steps.block_tables import BlockTables
from executor_service.steps.sampling_params import ParamRows, RowGrammars, StepGrammars
from executor_service.steps.step import BoolArray, CrossInput, EncoderInput, Int32Array, Int64Array
from executor_service.steps.token_runs import TokenRuns

_NO_BLOCK = -1
_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class _Cross:
    """Encoder data of one row. `encoder_input`: what is yet to be encoded; empty for nothing."""

    num_encoder_tokens: int = 0
    block_ids: Int32Array = field(default_factory=lambda: _NO_IDS)
    encoder_input: EncoderInput = field(default_factory=lambda: _NO_IDS)


_NO_CROSS = _Cross()


class RowTable:
    """Columns indexed by row id. Methods do not check arguments: the batch was checked before.

    `exists`: [N]. `tables`: the block tables. `sampled`: tokens that rows sampled in the latest
    steps.
    """

    def __init__(
        self, max_num_rows: int, max_inflight_steps: int, grammars: RowGrammars | None = None
    ) -> None:
        """Creates an empty table of N = `max_num_rows` rows.

        `max_inflight_steps`: number of steps that may be unfinished. `grammars`: follows the
        grammars of the rows; None if the executor has no such component.
        """
        self.exists: BoolArray = np.zeros(max_num_rows, np.bool_)
        self.tables = BlockTables(max_num_rows)
        self._num_prompt_tokens = np.zeros(max_num_rows, np.int32)
        self._seeds = np.zeros(max_num_rows, np.int64)
        self._params = ParamRows.empty(max_num_rows)
        self._histories = np.empty(max_num_rows, np.object_)
        self._has_history = np.zeros(max_num_rows, np.bool_)
        self._adapters = np.full(max_num_rows, "", np.object_)
        self._has_adapter = np.zeros(max_num_rows, np.bool_)
        self._grammars = grammars
        self._has_grammar = np.zeros(max_num_rows, np.bool_)
        self._crosses = np.full(max_num_rows, _NO_CROSS, np.object_)
        self._has_cross = np.zeros(max_num_rows, np.bool_)
        self.sampled = SampledInputs(max_num_rows, max_inflight_steps)

    # -- queries -----------------------------------------------------------------------------------

    def num_prompt_tokens(self, row_ids: Int32Array) -> Int32Array:
        """Returns the prompt lengths of the rows, [R] int32."""
        counts: Int32Array = self._num_prompt_tokens.take(row_ids)
        return counts

    def seeds(self, row_ids: Int32Array) -> Int64Array:
        """Returns the seeds of the rows, [R] int64."""
        seeds: Int64Array = self._seeds.take(row_ids)
        return seeds

    def sampling_params(self, row_ids: Int32Array) -> ParamRows:
        """Returns the R parameter sets of the rows."""
        return self._params.take(row_ids)

    def histories(self, row_ids: Int32Array) -> Sequence[list[int] | None]:
        """Returns R histories, None for rows without one; `record_sampled` appends to them."""
        if not np.count_nonzero(self._has_history):
            return [None] * len(row_ids)
        histories: list[list[int] | None] = self._histories.take(row_ids).tolist()
        return histories

    def adapters(self, row_ids: Int32Array) -> Sequence[str]:
        """Returns R adapter names, empty for rows without; () if no row of the table has one."""
        if not np.count_nonzero(self._has_adapter):
            return ()
        adapters: list[str] = self._adapters.take(row_ids).tolist()
        return adapters

    def grammars(self, row_ids: Int32Array) -> StepGrammars | None:
        """Returns the grammars of the rows; None if no row has one or none are followed."""
        if self._grammars is None or not np.count_nonzero(self._has_grammar):
            return None
        rows = np.flatnonzero(self._has_grammar.take(row_ids))
        return self._grammars.of_step(rows, row_ids[rows]) if len(rows) else None

    def cross(self, row_ids: Int32Array) -> CrossInput | None:
        """Returns the encoder data of the rows; None if none of them has encoder tokens."""
        if not np.count_nonzero(self._has_cross.take(row_ids)):
            return None
        crosses: list[_Cross] = self._crosses.take(row_ids).tolist()
        tables = np.full((len(crosses), max(len(c.block_ids) for c in crosses)), _NO_BLOCK)
        for table, cross in zip(tables, crosses, strict=True):
            table[: len(cross.block_ids)] = cross.block_ids
        return CrossInput(
            num_encoder_tokens=np.array([c.num_encoder_tokens for c in crosses], np.int32),
            block_tables=tables.astype(np.int32),
            encoder_inputs=[c.encoder_input for c in crosses],
        )

    def reads_output(self, row_ids: Int32Array) -> bool:
        """Returns whether the host must know the latest token of some row to sample again."""
        if not np.count_nonzero(self._has_history):
            return False
        rows = row_ids[self._has_history.take(row_ids)]
        return bool(np.count_nonzero(self._params.take(rows).reads_output))

    # -- changes -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Removes all rows."""
        self.remove(np.flatnonzero(self.exists).astype(np.int32))

    def remove(self, row_ids: Int32Array) -> None:
        """Removes rows."""
        if len(row_ids) == 0:
            return
        self.exists[row_ids] = False
        self.tables.remove(row_ids)
        self._params.forget(row_ids)
        self._histories[row_ids] = None
        self._has_history[row_ids] = False
        self._adapters[row_ids] = ""
        self._has_adapter[row_ids] = False
        self._crosses[row_ids] = _NO_CROSS
        self._has_cross[row_ids] = False
        self._has_grammar[row_ids] = False
        if self._grammars is not None:
            self._grammars.remove(row_ids)
        self.sampled.forget_rows(row_ids)

    def add(self, rows: NewRows) -> None:
        """Adds rows whose ids are free."""
        row_ids = rows.row_ids
        self.exists[row_ids] = True
        self._seeds[row_ids] = rows.seeds
        self._num_prompt_tokens[row_ids] = rows.num_prompt_tokens
        starts = np.zeros(len(row_ids), np.int32)
        self.tables.write(row_ids, starts, rows.block_offsets, rows.block_ids)
        params = ParamRows.of(rows.sampling_params).take(rows.sampling_params_indexes)
        self._params.put(row_ids, params)
        self._add_histories(rows, params)
        if len(rows.adapter_indexes):
            self._adapters[row_ids] = rows.row_adapters
            self._has_adapter[row_ids] = rows.adapter_indexes >= 0
        if rows.cross is not None:
            self._add_crosses(row_ids, rows.cross)

    def _add_histories(self, rows: NewRows, params: ParamRows) -> None:
        """Adds histories and grammars. `params`: one parameter set for each of the new rows."""
        offsets = rows.history_offsets.tolist()
        for i, row_id in enumerate(rows.row_ids.tolist()):
            if not params[i].needs_history:
                continue
            history = rows.history_token_ids[offsets[i] : offsets[i + 1]].tolist()
            self._histories[row_id] = history
            self._has_history[row_id] = True
            grammar = params[i].grammar
            if grammar is not None and self._grammars is not None:
                self._has_grammar[row_id] = True
                self._grammars.add(row_id, grammar, history, int(rows.num_prompt_tokens[i]))

    def _add_crosses(self, row_ids: Int32Array, cross: NewCross) -> None:
        for i in np.flatnonzero(cross.num_encoder_tokens).tolist():
            blocks = cross.block_offsets[i : i + 2]
            # Copied: the columns are views of the message, which would stay in memory with them.
            self._crosses[row_ids[i]] = _Cross(
                int(cross.num_encoder_tokens[i]),
                cross.block_ids[slice(*blocks)].copy(),
                cross.encoder_input(i).copy(),
            )
            self._has_cross[row_ids[i]] = True

    def forget_encoder_inputs(self, row_ids: Int32Array) -> None:
        """Drops the encoder input of rows whose step has begun, because that step encodes it."""
        if not np.count_nonzero(self._has_cross):
            return
        for row_id in row_ids[self._has_cross.take(row_ids)].tolist():
            self._crosses[row_id] = replace(self._crosses[row_id], encoder_input=_NO_IDS)

    def write_tables(self, writes: TableWrites) -> None:
        """Overwrites and extends block tables."""
        columns = (writes.row_ids, writes.start_indexes, writes.block_offsets, writes.block_ids)
        self.tables.write(*columns)

    def record_sampled(
        self,
        row_ids: Int32Array,
        step_id: int,
        token_ids: Int32Array,
        runs: TokenRuns | None = None,
    ) -> None:
        """Records the last token that each row sampled in `step_id`: `token_ids` [R], -1 for none.

        `runs`: all tokens of each row, None if each row has one at most; the histories have all but
        the last of them already. The token is appended to the row's history, unless the row was
        removed in the meantime. With `runs`, a stop token is not kept as input of later steps.
        """
        is_known = self.sampled.record(row_ids, step_id, token_ids, runs)
        is_known &= token_ids >= 0
        if runs is not None:
            ended = [
                index
                for index in np.flatnonzero(is_known).tolist()
                if token_ids[index] in self._params[row_ids[index]].stop_token_ids
            ]
            self.sampled.forget_tokens(row_ids[ended], step_id)
        if not np.count_nonzero(self._has_history):
            return
        for index in np.flatnonzero(is_known & self._has_history.take(row_ids)).tolist():
            self._histories[row_ids[index]].append(int(token_ids[index]))


# -- Tokens sampled in the latest steps ------------------------------------------------------------
#
# Shape letters: N row ids, D steps that may be unfinished, R rows of a step.

_NO_TOKEN = -1
# Stands for a token that is not known yet.
_ANY_TOKEN = 0
_NO_STEP = np.iinfo(np.int64).min


class SampledInputs:
    """Last token of each row in each of the latest steps, and its position in the sequence.

    A step is expected when it begins, and recorded when it is finished.
    """

    def __init__(self, max_num_rows: int, max_inflight_steps: int) -> None:
        """Creates an empty record; `max_inflight_steps`: D."""
        # Tokens of step k are in line k % 2D, with the step id k beside them. A step reads tokens
        # of steps less than D before it, and a step may begin while steps less than D before it are
        # unfinished.
        shape = (2 * max_inflight_steps, max_num_rows)
        self._tokens = np.full(shape, _NO_TOKEN, np.int32)
        self._steps = np.full(shape, _NO_STEP, np.int64)
        self._first_positions = np.zeros(shape, np.int32)
        self._last_positions = np.zeros(shape, np.int32)
        self._knows_runs = False

    # -- queries -----------------------------------------------------------------------------------

    def tokens(self, row_ids: Int32Array, step_id: int, steps_back: Int32Array) -> Int32Array:
        """Returns the token row i sampled `steps_back[i]` steps before `step_id`, -1 for none; [R].

        Covers at least the last D steps of each row. For a step that is not recorded yet the token
        is an arbitrary valid one.
        """
        first = int(steps_back[0])
        if np.count_nonzero(steps_back == first) == len(steps_back):
            wanted: Int64Array | int = step_id - first
            line = wanted % len(self._steps)
            tokens = self._tokens[line].take(row_ids)
            found_steps = self._steps[line].take(row_ids)
        else:
            wanted = step_id - steps_back.astype(np.int64)
            lines = wanted % len(self._steps)
            tokens = self._tokens[lines, row_ids]
            found_steps = self._steps[lines, row_ids]
        tokens[found_steps != wanted] = _NO_TOKEN
        return tokens

    def positions(
        self, row_ids: Int32Array, step_id: int, steps_back: Int32Array, most: Int32Array
    ) -> Int32Array:
        """Returns the position at which the input of row i begins, [R].

        If `steps_back[i]` is not 0, that is the position of the token sampled so many steps back.
        `most`: [R], the position itself for rows with literal input, for other rows the largest
        possible one. For a step that is not recorded yet, rows count as having got all tokens that
        were expected.
        """
        if not self._knows_runs or not np.count_nonzero(steps_back):
            return most
        wanted = step_id - steps_back.astype(np.int64)
        lines = wanted % len(self._steps)
        is_sampled = (steps_back > 0) & (self._steps[lines, row_ids] == wanted)
        positions = np.minimum(self._last_positions[lines, row_ids], most)
        return np.where(is_sampled, positions, most).astype(np.int32)

    def tokens_recorded(self, row_ids: Int32Array, step_ids: Int64Array) -> Int32Array:
        """Returns the token recorded for row i in step `step_ids[i]`, even of a removed row; [R].

        All of these steps must have been recorded, fewer than 2D steps before the latest expected
        one.
        """
        tokens: Int32Array = self._tokens[step_ids % len(self._tokens), row_ids]
        return tokens

    def positions_recorded(self, row_ids: Int32Array, step_ids: Int64Array) -> Int32Array:
        """Returns the positions of the tokens that `tokens_recorded` returns; [R]."""
        positions: Int32Array = self._last_positions[step_ids % len(self._tokens), row_ids]
        return positions

    # -- changes -----------------------------------------------------------------------------------

    def expect(
        self,
        row_ids: Int32Array,
        step_id: int,
        positions: Int32Array,
        num_more: Int32Array | None = None,
    ) -> None:
        """Notes that the rows sample in `step_id`, which is recorded later.

        `positions`: [R], the position of the first token of each row. `num_more`: [R], number of
        tokens that each row gets after it, unless the row ends earlier; None for none.
        """
        line = step_id % len(self._steps)
        # Assigning through 32-bit indexes is several times slower.
        indexes = row_ids.astype(np.intp)
        self._steps[line][indexes] = step_id
        self._tokens[line][indexes] = _ANY_TOKEN
        self._first_positions[line][indexes] = positions
        self._last_positions[line][indexes] = positions
        if num_more is not None:
            self._knows_runs = True
            self._last_positions[line][indexes] += num_more

    def record(
        self, row_ids: Int32Array, step_id: int, token_ids: Int32Array, runs: TokenRuns | None
    ) -> BoolArray:
        """Records that the rows sampled `token_ids` [R] in `step_id`; -1 for no token.

        `runs`: all tokens of each row, of which `token_ids` are the last; None if each row has one
        at most. Returns [R], which rows are still those that were expected.
        """
        line = step_id % len(self._steps)
        indexes = row_ids.astype(np.intp)
        self._tokens[line][indexes] = token_ids
        if runs is not None:
            self._knows_runs = True
            first = self._first_positions[line].take(row_ids)
            self._last_positions[line][indexes] = first + np.maximum(runs.counts - 1, 0)
        is_known: BoolArray = self._steps[line].take(row_ids) == step_id
        return is_known

    def forget_tokens(self, row_ids: Int32Array, step_id: int) -> None:
        """Removes the tokens that the rows sampled in `step_id`, so that they are no input."""
        self._tokens[step_id % len(self._steps), row_ids] = _NO_TOKEN

    def forget_rows(self, row_ids: Int32Array) -> None:
        """Removes the tokens of rows that are gone."""
        self._steps[:, row_ids] = _NO_STEP
