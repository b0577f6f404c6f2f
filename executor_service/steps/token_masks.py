"""What grammars allow rows to sample, as steps see it: who compiles and follows them is elsewhere.

Shape letters: G rows with a mask, V tokens of the vocabulary, W words of a mask, 32 W >= V.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from executor_service.steps.sampling_params import Grammar

_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What those rows of a step that have a grammar, and sample, may sample.

    Rows are named by their indexes among all rows of the step that sample. `rows`: [G] int64,
    rising. `words`: [G, W] int32; bit t % 32, from the lowest, of word t // 32 says whether token t
    is allowed. `pending`: rows whose grammar is not compiled yet, or not brought to where the row
    is; `lost`: those among such rows that have sampled before, and have to be added anew.
    `invalid`: rows that have no next token, and why.
    """

    rows: _Int64s
    words: _Int32s
    pending: Sequence[int]
    invalid: Mapping[int, str]
    lost: Sequence[int] = ()

    def part(self, rows: slice) -> TokenMasks:
        """What rows on end may sample, by their indexes among these; others are left out."""
        start, end = np.searchsorted(self.rows, (rows.start, rows.stop)).tolist()
        return TokenMasks(self.rows[start:end] - rows.start, self.words[start:end], (), {})


class StepGrammars(Protocol):
    """The grammars of the rows of one step."""

    def masks(self, sampling_rows: _Int64s) -> TokenMasks:
        """`sampling_rows`: [S], the rising indexes of all rows of the step that sample.

        If none of them could sample now, waits for a moment. Raises nothing.
        """
        ...

    def take(self, rows: _Int64s) -> StepGrammars:
        """As of a step that has only `rows`, in this order."""
        ...

    def drafted(self, rows: _Int64s, histories: Sequence[Sequence[int] | None]) -> StepGrammars:
        """As of a step that has `rows`, some more than once, each after all of its history.

        What is there more in a history than in that of the row may turn out to be wrong.
        """
        ...


class RowGrammars(Protocol):
    """The grammars of all rows of an executor, by row ids."""

    def add(
        self, row_id: int, grammar: Grammar, history: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Begins to compile. `history`: all tokens of the row; whoever calls appends to it."""
        ...

    def remove(self, row_ids: _Int32s) -> None:
        """Forgets rows, with a grammar or without."""
        ...

    def of_step(self, rows: _Int64s, row_ids: _Int32s) -> StepGrammars:
        """`rows`: rising indexes of those rows of a step that have a grammar; `row_ids` theirs."""
        ...
