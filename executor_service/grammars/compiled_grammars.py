"""Grammars of all rows, and the token masks of one step.

Shape letters: G rows with a mask, W words of a mask.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from executor_service.grammars.compiler import Compiled, GrammarCompiler
from executor_service.grammars.vocabulary import Vocabulary
from executor_service.steps import Grammar, Int32Array, Int64Array, TokenMasks
from splitserve_grammars import NO_TEXT, error_message

# Time that a step waits for a grammar if it has no other row to sample; most grammars compile in
# that time. The scheduler asks again, less often the longer the compilation takes.
_MAX_WAIT_S = 0.002
# Limit of tokens that a step follows for rows that came with many; 256 take 3 ms.
_MAX_FOLLOWED = 256
_MAX_THREADS = 8


class CompiledGrammars:
    """Implements `RowGrammars`. Not thread-safe; compilation runs in threads of its own."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        compiler: GrammarCompiler | None = None,
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        """`compiler`: None to create one."""
        self._compiler = compiler or GrammarCompiler(vocabulary)
        self._vocabulary = vocabulary
        self._max_wait_s = max_wait_s
        self._threads = LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        self._rows: dict[int, RowGrammar] = {}

    def add(
        self, row_id: int, grammar: Grammar, history: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Adds the grammar of a row and starts compiling; see `RowGrammars`."""
        row = RowGrammar(grammar, history, num_prompt_tokens)
        row.begin(self._compiler)
        self._rows[row_id] = row

    def remove(self, row_ids: Int32Array) -> None:
        """Removes rows; see `RowGrammars`."""
        if self._rows:
            for row_id in row_ids.tolist():
                self._rows.pop(row_id, None)

    def of_step(self, rows: Int64Array, row_ids: Int32Array) -> CompiledStepGrammars:
        """Returns the grammars of a step; see `RowGrammars`."""
        return CompiledStepGrammars(self, rows, [self._rows[row_id] for row_id in row_ids.tolist()])

    def close(self) -> None:
        """Ends the threads of the compiler."""
        self._compiler.close()

    def advance(self, rows: Sequence[RowGrammar], *, may_wait: bool) -> None:
        """Lets the matchers of `rows` follow the rows' tokens, as far as that is possible at once.

        `may_wait`: if no row gets ready, wait up to `max_wait_s` for the first one.
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
            # A row samples one token in a step.
            followed = row.follow(max(1, left), self._vocabulary, self._compiler)
            left -= max(0, followed - 1)

    def words(self, rows: Sequence[RowGrammar]) -> Int32Array:
        """Returns the masks [G, W] of rows that are not pending; some may fail or get pending."""
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
class CompiledStepGrammars:
    """Implements `StepGrammars`. `rows`: int64, the rising row index of each of `states`."""

    grammars: CompiledGrammars
    rows: Int64Array
    states: Sequence[RowGrammar]

    def masks(self, sampling_rows: Int64Array) -> TokenMasks:
        """Returns the token masks of `sampling_rows`; see `StepGrammars`."""
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

    def take(self, rows: Int64Array) -> CompiledStepGrammars:
        """Returns the grammars of a step that has only `rows`; see `StepGrammars`."""
        index_of = {row: index for index, row in enumerate(self.rows.tolist())}
        found = [
            (row_index, self.states[index_of[row]])
            for row_index, row in enumerate(rows.tolist())
            if row in index_of
        ]
        return self._at(found)

    def drafted(
        self, rows: Int64Array, histories: Sequence[Sequence[int] | None]
    ) -> CompiledStepGrammars:
        """Returns the grammars of a step with draft tokens; see `StepGrammars`."""
        # Followed here once, otherwise each draft of a row would have to follow the same tokens.
        self.grammars.advance(self.states, may_wait=False)
        state_of = dict(zip(self.rows.tolist(), self.states, strict=True))
        found = [
            (row_index, state_of[row].drafted(history))
            for row_index, (row, history) in enumerate(zip(rows.tolist(), histories, strict=True))
            if row in state_of and history is not None
        ]
        return self._at(found)

    def _at(self, found: Sequence[tuple[int, RowGrammar]]) -> CompiledStepGrammars:
        """Returns the grammars of a step that has these states at these row indexes."""
        rows = np.array([row_index for row_index, _ in found], np.int64)
        return CompiledStepGrammars(self.grammars, rows, [state for _, state in found])


# -- Position of one row in its grammar ------------------------------------------------------------

_STRAY = "doesn't satisfy the grammar"
# Error of a full lexer; other rows with the same grammar may have filled it.
_LEXER_FULL = "lexer error: too many"
_MIN_BETWEEN_LEXERS = 4  # tokens, so that a row which needs too much comes to an end


class RowGrammar:
    """Follows the output tokens of a row. All its state can be restored from these tokens.

    `matcher`: None until the grammar is compiled. `error`: reason why no token can be sampled any
    more. `wanted`: the compilation that the row waits for; None if the compiler has not accepted it
    yet.
    """

    __slots__ = (
        "_compiled",
        "_grammar",
        "_history",
        "_num_at_start",
        "_num_followed",
        "_num_prompt_tokens",
        "_num_until_new_lexer",
        "error",
        "matcher",
        "wanted",
    )

    def __init__(self, grammar: Grammar, history: Sequence[int], num_prompt_tokens: int) -> None:
        """`history`: all tokens of the row; later tokens are appended to it."""
        self._grammar = grammar
        self._history = history
        self._num_at_start = len(history)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_followed = num_prompt_tokens
        self._num_until_new_lexer = num_prompt_tokens
        self._compiled: Compiled | None = None
        self.matcher: LLMatcher | None = None
        self.error = ""
        self.wanted: Future[Compiled] | None = None

    @property
    def may_end_early(self) -> bool:
        """Whether the matcher may allow the end of the sequence before the text is complete."""
        return self._grammar.kind == "lark"

    @property
    def num_behind(self) -> int:
        """Number of tokens that the matcher has yet to follow."""
        return len(self._history) - self._num_followed

    @property
    def is_pending(self) -> bool:
        """Whether the row must wait for its next token."""
        return not self.error and (self.matcher is None or self.num_behind > 0)

    @property
    def is_lost(self) -> bool:
        """Whether the row is pending although it has sampled: only a row added anew may wait."""
        return self.is_pending and len(self._history) > self._num_at_start

    def begin(self, compiler: GrammarCompiler) -> None:
        """Sets the matcher, or the error, if the grammar is compiled; otherwise requests that."""
        if self.matcher is not None or self.error:
            return
        if self.wanted is None:
            self.wanted = compiler.compile(self._grammar)
        if self.wanted is not None and self.wanted.done():
            compiled = self._compiled = self.wanted.result()
            self.wanted = None
            self.error = compiled.error
            if compiled.matcher is not None:
                self.matcher = compiled.matcher.deep_copy()

    def follow(self, max_tokens: int, vocabulary: Vocabulary, compiler: GrammarCompiler) -> int:
        """Follows up to `max_tokens` tokens of the history; returns the number followed."""
        matcher, start = self.matcher, self._num_followed
        if matcher is None or self.error:
            return 0
        for token_id in self._history[start : start + max_tokens]:
            has_text = vocabulary.has_text[token_id] or token_id in vocabulary.eos_token_ids
            if not (has_text and matcher.consume_token(token_id)):
                self._fail(matcher.get_error(), compiler)
                return 0
            self._num_followed += 1
        return self._num_followed - start

    def check(self, compiler: GrammarCompiler) -> None:
        """Makes the row pending or failed if its matcher has an error and would allow anything."""
        if self.matcher is not None and self.matcher.is_error():
            self._fail(self.matcher.get_error(), compiler)

    def drafted(self, history: Sequence[int]) -> RowGrammar:
        """Returns a follower of `history`: this object for its own history, else a copy."""
        if history is self._history:
            return self
        other = RowGrammar(self._grammar, history, self._num_prompt_tokens)
        other._num_followed = self._num_followed
        other.error, other.wanted = self.error, self.wanted
        if self.matcher is not None:
            other.matcher = self.matcher.deep_copy()
        return other

    def _fail(self, error: str, compiler: GrammarCompiler) -> None:
        """Sets `error`, or starts over with an empty lexer if the lexer was full."""
        self.matcher = None
        compiled, self._compiled = self._compiled, None
        if error.startswith(_LEXER_FULL) and compiled is not None:
            compiler.forget(self._grammar, compiled)
            if self._num_followed >= self._num_until_new_lexer:
                self._num_until_new_lexer = self._num_followed + _MIN_BETWEEN_LEXERS
                self._num_followed = self._num_prompt_tokens
                return
        message = error_message(error)
        if not message or _STRAY in error:
            number = self._num_followed + 1
            message = f"token {number} of the sequence does not match the grammar"
        elif message == NO_TEXT:
            message = "no token of the model can continue the text"
        self.error = message
