"""The grammars of all rows, and what those of one step allow.

Shape letters: G rows with a mask, W words of a mask.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor

from executor_service.grammars.compiler import GrammarCompiler
from executor_service.grammars.row_grammar import RowGrammar
from executor_service.grammars.vocabulary import Vocabulary
from executor_service.steps.sampling_params import Grammar
from executor_service.steps.step import Int32Array, Int64Array
from executor_service.steps.token_masks import TokenMasks

# A step without anything else to sample waits so long for a grammar, for which the next one may
# wait: most take as long to compile. The scheduler asks again, and less often the longer it takes.
_MAX_WAIT_S = 0.002
# Tokens that a step follows of rows that came with many; 256 take 3 ms.
_MAX_FOLLOWED = 256
_MAX_THREADS = 8


class CompiledGrammars:
    """See `RowGrammars`. Not thread-safe; what compiles does so in threads of its own."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        compiler: GrammarCompiler | None = None,
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        """`compiler`: None for one of its own."""
        self._compiler = compiler or GrammarCompiler(vocabulary)
        self._vocabulary = vocabulary
        self._max_wait_s = max_wait_s
        self._threads = LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        self._rows: dict[int, RowGrammar] = {}

    def add(
        self, row_id: int, grammar: Grammar, history: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """See `RowGrammars`."""
        row = RowGrammar(grammar, history, num_prompt_tokens)
        row.begin(self._compiler)
        self._rows[row_id] = row

    def remove(self, row_ids: Int32Array) -> None:
        """See `RowGrammars`."""
        if self._rows:
            for row_id in row_ids.tolist():
                self._rows.pop(row_id, None)

    def of_step(self, rows: Int64Array, row_ids: Int32Array) -> StepOfGrammars:
        """See `RowGrammars`."""
        return StepOfGrammars(self, rows, [self._rows[row_id] for row_id in row_ids.tolist()])

    def close(self) -> None:
        """Ends the threads of the compiler."""
        self._compiler.close()

    def advance(self, rows: Sequence[RowGrammar], *, may_wait: bool) -> None:
        """Brings `rows` to where their tokens are, as far as that goes at once.

        `may_wait`: if it goes for none, waits until it does, but not for long.
        """
        deadline = time.monotonic() + self._max_wait_s
        self._advance(rows)
        while may_wait and all(row.is_pending for row in rows):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            if all(row.matcher is None for row in rows):
                wanted = [row.wanted for row in rows if row.wanted is not None]
                if not wanted:
                    return
                wait(wanted, left_s, FIRST_COMPLETED)
            self._advance(rows)

    def _advance(self, rows: Sequence[RowGrammar]) -> None:
        left = _MAX_FOLLOWED
        for row in rows:
            row.begin(self._compiler)
            # One token is what a row samples in a step.
            followed = row.follow(max(1, left), self._vocabulary, self._compiler)
            left -= max(0, followed - 1)

    def words(self, rows: Sequence[RowGrammar]) -> Int32Array:
        """The masks [G, W] of rows that are not pending; some may fail, or be pending, by them."""
        samplable = self._vocabulary.samplable
        words = np.empty((len(rows), len(samplable)), np.uint32)
        matchers = [(row.matcher, index) for index, row in enumerate(rows) if row.matcher]
        if matchers:
            width = words.shape[1] * words.itemsize
            self._threads.unsafe_compute_mask_ptr(matchers, words.ctypes.data, width, len(rows))
        words &= samplable
        for row, line in zip(rows, words, strict=True):
            row.check(self._compiler)
            if row.may_end_early and row.matcher is not None and not row.matcher.is_accepting():
                line &= ~self._vocabulary.eos_bits
        return words.view(np.int32)


@dataclass(frozen=True, slots=True)
class StepOfGrammars:
    """See `StepGrammars`. `rows`: [number of states] int64, rising indexes of rows."""

    grammars: CompiledGrammars
    rows: Int64Array
    states: Sequence[RowGrammar]

    def masks(self, sampling_rows: Int64Array) -> TokenMasks:
        """See `StepGrammars`."""
        samples = np.isin(self.rows, sampling_rows, assume_unique=True)
        rows = np.searchsorted(sampling_rows, self.rows[samples])
        states = [self.states[index] for index in np.flatnonzero(samples).tolist()]
        self.grammars.advance(states, may_wait=0 < len(rows) == len(sampling_rows))
        has_mask = np.array([not (state.is_pending or state.error) for state in states], np.bool_)
        masked = [states[index] for index in np.flatnonzero(has_mask).tolist()]
        words = self.grammars.words(masked)
        is_right = np.array([state.matcher is not None for state in masked], np.bool_)
        of_rows = list(zip(rows.tolist(), states, strict=True))
        return TokenMasks(
            rows=rows[has_mask][is_right],
            words=words if is_right.all() else words[is_right],
            pending=[row for row, state in of_rows if state.is_pending and not state.is_lost],
            lost=[row for row, state in of_rows if state.is_lost],
            invalid={row: state.error for row, state in of_rows if state.error},
        )

    def take(self, rows: Int64Array) -> StepOfGrammars:
        """See `StepGrammars`."""
        index_of = {row: index for index, row in enumerate(self.rows.tolist())}
        found = [
            (place, self.states[index_of[row]])
            for place, row in enumerate(rows.tolist())
            if row in index_of
        ]
        return self._at(found)

    def drafted(
        self, rows: Int64Array, histories: Sequence[Sequence[int] | None]
    ) -> StepOfGrammars:
        """See `StepGrammars`."""
        # What each of a row's drafts would have to follow, too.
        self.grammars.advance(self.states, may_wait=False)
        state_of = dict(zip(self.rows.tolist(), self.states, strict=True))
        found = [
            (place, state_of[row].drafted(history))
            for place, (row, history) in enumerate(zip(rows.tolist(), histories, strict=True))
            if row in state_of and history is not None
        ]
        return self._at(found)

    def _at(self, found: Sequence[tuple[int, RowGrammar]]) -> StepOfGrammars:
        """Of a step with these states at these rows."""
        places = np.array([place for place, _ in found], np.int64)
        return StepOfGrammars(self.grammars, places, [state for _, state in found])
