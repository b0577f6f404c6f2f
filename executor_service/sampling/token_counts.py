"""How often the tokens of rows with penalties have occurred, on the device, from step to step.

A row's tokens are counted once, when it is new; from then on each step adds what the row samples
where it is sampled, in the order of the steps, so the next one may begin before the host knows it.

Shape letters: S rows that sample, Q those of them with penalties, N rows that there is room for, V
tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_service.device.kv_cache import to_device
from executor_service.device.streams import streams_of
from executor_service.device.uploads import Numbers, Uploads
from executor_service.steps.step import Int32Array, Int64Array

# In a count: the token is in the prompt. What is below are the occurrences in the output.
IN_PROMPT = 1 << 30
_INITIAL_ROOM = 4
# Of histories that are counted together: some 30 MiB of temporary memory.
_TOKENS_AT_A_TIME = 2**20


@dataclass(frozen=True, slots=True)
class CountedRows:
    """Where the counts of some of the S rows are.

    `rows`: [Q] int64, rising indexes of them. `table`: [N, V] int32, on the device. `lines`: [Q]
    int64, theirs in the table. `row_ids`: [Q].
    """

    rows: Int64Array
    table: Tensor
    lines: Int64Array
    row_ids: Int32Array

    def part(self, rows: slice) -> CountedRows:
        """Those of rows on end, by their indexes among these."""
        start, end = np.searchsorted(self.rows, (rows.start, rows.stop)).tolist()
        return CountedRows(
            self.rows[start:end] - rows.start,
            self.table,
            self.lines[start:end],
            self.row_ids[start:end],
        )


@dataclass(slots=True)
class _Counted:
    """A row: its line in the table, the history it was counted from, and how many tokens."""

    line: int
    history: Sequence[int]
    num_tokens: int


class TokenCounts:
    """The counts of all rows that have penalties. Not thread-safe."""

    def __init__(
        self, vocab_size: int, device: torch.device, uploads: Uploads | None = None
    ) -> None:
        """Takes no memory before there is a row.

        `uploads`: to `device`, how histories get there; None for some of its own.
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
        """The counts of the tokens before `positions` [Q]; all columns are those of `rows` [Q].

        A history that is the very same as in the step before need not have what was sampled since.
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
        """`token_ids` [S] int32 are what all rows have sampled, -1 for nothing."""
        rows = to_device(counted.rows, token_ids.device)
        lines = to_device(counted.lines, token_ids.device)
        sampled = token_ids[rows]
        # A row has one line, so nothing is added twice to the same count.
        at = (lines, sampled.clamp(min=0).to(torch.int64))
        counted.table[at] += (sampled >= 0).to(torch.int32)
        for row_id in counted.row_ids.tolist():
            self._counted[row_id].num_tokens += 1

    def forget(self) -> None:
        """Counts all rows anew when they are next asked for."""
        self._counted.clear()

    def _grow(self) -> None:
        """To room for all rows."""
        room, vocab_size = self._table.shape
        wanted = len(self._counted)
        if wanted > room:
            larger = self._table.new_empty(max(wanted, 2 * room, _INITIAL_ROOM), vocab_size)
            larger[:room] = self._table
            self._table = larger

    def _count(self, rows: Sequence[_Uncounted]) -> None:
        """Counts all `rows` in as many operations as one: the queue of a device is finite."""
        table, vocab_size = self._table, self._table.shape[1]
        prompts, outputs = zip(*(row.prompt_and_output for row in rows), strict=True)
        num_prompt_tokens = sum(len(tokens) for tokens in prompts)
        lengths = np.array([len(tokens) for tokens in (*prompts, *outputs)], np.int64)
        lines = np.array([row.line for row in rows], np.int64)
        (lines_on_device, lengths_on_device), (tokens,) = self._uploads.send(
            Numbers([lines, lengths], [np.concatenate((*prompts, *outputs))])
        )
        table.index_fill_(0, lines_on_device, 0)
        # With the size given, nobody waits for the device to add the lengths up.
        starts = torch.repeat_interleave(
            (lines_on_device * vocab_size).repeat(2), lengths_on_device, output_size=len(tokens)
        )
        places, counts = starts + tokens, table.view(-1)
        # An assignment of a number would copy it to the device, and wait for that.
        counts.index_fill_(0, places[:num_prompt_tokens], IN_PROMPT)
        output = places[num_prompt_tokens:]
        # Sums of integers are exact in any order, so this is deterministic on every device.
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class _Uncounted:
    """A row whose first `num_tokens` tokens are to be counted in `line`."""

    line: int
    history: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int

    @property
    def prompt_and_output(self) -> tuple[Int32Array, Int32Array]:
        tokens = np.asarray(self.history[: self.num_tokens], dtype=np.int32)
        return tokens[: self.num_prompt_tokens], tokens[self.num_prompt_tokens :]


def _counted_together(rows: Sequence[_Uncounted]) -> Iterator[Sequence[_Uncounted]]:
    """`rows` in their order, as many at a time as temporary memory is meant to hold."""
    part: list[_Uncounted] = []
    num_tokens = 0
    for row in rows:
        if part and num_tokens + row.num_tokens > _TOKENS_AT_A_TIME:
            yield part
            part, num_tokens = [], 0
        part.append(row)
        num_tokens += row.num_tokens
    yield part
