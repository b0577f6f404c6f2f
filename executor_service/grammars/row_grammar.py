"""Where one row is in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from llguidance import LLMatcher

from executor_service.grammars.compiler import Compiled, GrammarCompiler, shorten
from executor_service.grammars.vocabulary import Vocabulary
from executor_service.steps.sampling_params import Grammar

_DEAD_END = "NoExtensionBias"
_STRAY = "doesn't satisfy the grammar"


class RowGrammar:
    """Follows the output tokens of a row; nothing is kept that these would not bring back.

    `matcher`: None until the grammar is compiled. `error`: why no token can be sampled any more.
    `wanted`: what `matcher` waits for; None if the compiler did not take the grammar yet.
    """

    __slots__ = ("_grammar", "_history", "_num_followed", "error", "matcher", "wanted")

    def __init__(self, grammar: Grammar, history: Sequence[int], num_prompt_tokens: int) -> None:
        """`history`: all tokens of the row, to which its next ones are appended."""
        self._grammar = grammar
        self._history = history
        self._num_followed = num_prompt_tokens
        self.matcher: LLMatcher | None = None
        self.error = ""
        self.wanted: Future[Compiled] | None = None

    @property
    def may_end_early(self) -> bool:
        """Whether the matcher may allow the end of the sequence where its text is not complete."""
        return self._grammar.kind == "lark"

    @property
    def num_behind(self) -> int:
        """How many tokens the matcher has yet to follow."""
        return len(self._history) - self._num_followed

    @property
    def is_pending(self) -> bool:
        """Whether there may be a next token, but later."""
        return not self.error and (self.matcher is None or self.num_behind > 0)

    def begin(self, compiler: GrammarCompiler) -> None:
        """Has a matcher, or an error, if the grammar is compiled; otherwise sees to it."""
        if self.matcher is not None or self.error:
            return
        if self.wanted is None:
            self.wanted = compiler.compile(self._grammar)
        if self.wanted is not None and self.wanted.done():
            compiled = self.wanted.result()
            self.wanted = None
            self.error = compiled.error
            if compiled.matcher is not None:
                self.matcher = compiled.matcher.deep_copy()

    def follow(self, max_tokens: int, vocabulary: Vocabulary) -> int:
        """Follows so many of the tokens that it is behind; returns how many."""
        matcher, start = self.matcher, self._num_followed
        if matcher is None or self.error:
            return 0
        for token_id in self._history[start : start + max_tokens]:
            has_text = vocabulary.has_text[token_id] or token_id in vocabulary.eos_token_ids
            if not (has_text and matcher.consume_token(token_id)):
                number = self._num_followed + 1
                error = shorten(matcher.get_error())
                is_stray = not error or _STRAY in error
                stray = f"token {number} of the sequence does not follow the grammar"
                self.error = stray if is_stray else error
                self.matcher = None
                break
            self._num_followed += 1
        return self._num_followed - start

    def check(self) -> None:
        """Has an error if the matcher has one; it allows anything then."""
        if self.matcher is not None and self.matcher.is_error():
            error = shorten(self.matcher.get_error())
            is_dead_end = error == _DEAD_END
            self.error = "no token of the model can continue the text" if is_dead_end else error
            self.matcher = None
