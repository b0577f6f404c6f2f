"""Token counts of rows with penalties, kept on the device from step to step.

The tokens of a row are counted once, when the row is new. From then on each step adds the tokens
that it samples on the device, in the order of the steps, so the next step may begin before the host
knows them.

Shape letters: S rows that sample, Q rows of them with penalties, N rows that there is room for, V
tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.device import IntegerArrays, Uploads, streams_of, to_device
from executor_service.steps import Int32Array, Int64Array

# Bit of a count: the token is in the prompt. Lower bits count the occurrences in the output.
IN_PROMPT = 1 << 30
_INITIAL_ROOM = 4
# Limit of history tokens that are counted together: some 30 MiB of temporary memory.
_TOKENS_AT_A_TIME = 2**20


@dataclass(frozen=True, slots=True)
class CountedRows:
    """Locations of the counts of some of the S rows.

    `rows`: [Q] int64, rising indexes of these rows. `table`: [N, V] int32, on the device. `lines`:
    [Q] int64, the line of each row in the table. `row_ids`: [Q].
    """

    rows: Int64Array
    table: Tensor
    lines: Int64Array
    row_ids: Int32Array

    def part(self, rows: slice) -> CountedRows:
        """Returns the counts of the slice `rows`, with indexes counted from its start."""
        start, end = np.searchsorted(self.rows, (rows.start, rows.stop)).tolist()
        return CountedRows(
            self.rows[start:end] - rows.start,
            self.table,
            self.lines[start:end],
            self.row_ids[start:end],
        )


@dataclass(slots=True)
class _Counted:
    """Counted row: its line in the table, its history, and the number of tokens counted."""

    line: int
    history: Sequence[int]
    num_tokens: int


class TokenCounts:
    """Token counts of all rows that have penalties. Not thread-safe."""

    def __init__(
        self, vocab_size: int, device: torch.device, uploads: Uploads | None = None
    ) -> None:
        """Creates an empty table; memory is allocated with the first row.

        `uploads`: to `device`, for histories; None to create some.
        """
        self._uploads = uploads or Uploads(device, streams_of(device))
        self._table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._counted: dict[int, _Counted] = {}

    def of_rows(
        self,
        rows: Int64Array,
        row_ids: Int32Array,
        histories: Sequence[Sequence[int] | None],
        positions: Int32Array,
        num_prompt_tokens: Int32Array,
    ) -> CountedRows:
        """Returns counts of the tokens before `positions` [Q]; all columns belong to `rows` [Q].

        A history that is the same object as in the step before may still lack tokens sampled since.
        """
        new: list[_Uncounted] = []
        for index, (row_id, position) in enumerate(
            zip(row_ids.tolist(), positions.tolist(), strict=True)
        ):
            history = histories[index]
            assert history is not None, "a row with penalties has its history"
            counted = self._counted.get(row_id)
            if counted is None:
                self._counted[row_id] = _Counted(len(self._counted), history, position)
            elif counted.history is history and counted.num_tokens == position:
                continue
            else:
                counted.history, counted.num_tokens = history, position
            line = self._counted[row_id].line
            new.append(_Uncounted(line, history, position, int(num_prompt_tokens[index])))
        lines = [self._counted[row_id].line for row_id in row_ids.tolist()]
        if new:
            self._grow()
            for together in _counted_together(new):
                self._count(together)
        return CountedRows(rows, self._table, np.array(lines, np.int64), row_ids)

    def add(self, counted: CountedRows, token_ids: Tensor) -> None:
        """Adds `token_ids` [S] int32, the tokens that all rows have sampled, -1 for none."""
        rows = to_device(counted.rows, token_ids.device)
        lines = to_device(counted.lines, token_ids.device)
        sampled = token_ids[rows]
        # Each row has one line, so no count is added to twice.
        at = (lines, sampled.clamp(min=0).to(torch.int64))
        counted.table[at] += (sampled >= 0).to(torch.int32)
        for row_id in counted.row_ids.tolist():
            self._counted[row_id].num_tokens += 1

    def forget(self) -> None:
        """Drops all counts; rows are counted again when they are next asked for."""
        self._counted.clear()

    def _grow(self) -> None:
        """Enlarges the table to the number of counted rows."""
        room, vocab_size = self._table.shape
        wanted = len(self._counted)
        if wanted > room:
            larger = self._table.new_empty(max(wanted, 2 * room, _INITIAL_ROOM), vocab_size)
            larger[:room] = self._table
            self._table = larger

    def _count(self, rows: Sequence[_Uncounted]) -> None:
        """Counts all `rows` in as many operations as one row: a device's queue is finite."""
        table, vocab_size = self._table, self._table.shape[1]
        prompts, outputs = zip(*(row.prompt_and_output for row in rows), strict=True)
        num_prompt_tokens = sum(len(tokens) for tokens in prompts)
        lengths = np.array([len(tokens) for tokens in (*prompts, *outputs)], np.int64)
        lines = np.array([row.line for row in rows], np.int64)
        (lines_on_device, lengths_on_device), (tokens,) = self._uploads.send(
            IntegerArrays([lines, lengths], [np.concatenate((*prompts, *outputs))])
        )
        table.index_fill_(0, lines_on_device, 0)
        # With output_size given, the host does not wait for the sum of the lengths.
        starts = torch.repeat_interleave(
            (lines_on_device * vocab_size).repeat(2), lengths_on_device, output_size=len(tokens)
        )
        entries, counts = starts + tokens, table.view(-1)
        # Assigning a number would copy it to the device and wait for the copy.
        counts.index_fill_(0, entries[:num_prompt_tokens], IN_PROMPT)
        output = entries[num_prompt_tokens:]
        # Integer sums are exact in any order, so this is deterministic on every device.
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class _Uncounted:
    """Row whose first `num_tokens` tokens are to be counted in `line`."""

    line: int
    history: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int

    @property
    def prompt_and_output(self) -> tuple[Int32Array, Int32Array]:
        tokens = np.asarray(self.history[: self.num_tokens], dtype=np.int32)
        return tokens[: self.num_prompt_tokens], tokens[self.num_prompt_tokens :]


def _counted_together(rows: Sequence[_Uncounted]) -> Iterator[Sequence[_Uncounted]]:
    """Yields `rows` in order, in groups that fit the limit of temporary memory."""
    part: list[_Uncounted] = []
    num_tokens = 0
    for row in rows:
        if part and num_tokens + row.num_tokens > _TOKENS_AT_A_TIME:
            yield part
            part, num_tokens = [], 0
        part.append(row)
        num_tokens += row.num_tokens
    yield part
