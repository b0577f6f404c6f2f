"""Where one row is in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from llguidance import LLMatcher

from executor_service.grammars.compiler import GrammarCompiler
from executor_service.grammars.remembered import Compiled
from executor_service.grammars.vocabulary import Vocabulary
from executor_service.steps.sampling_params import Grammar
from splitserve_grammars.messages import NO_TEXT, error_message

_STRAY = "doesn't satisfy the grammar"
# A lexer that is full, perhaps by what other rows with the same grammar wrote.
_LEXER_FULL = "lexer error: too many"
_MIN_BETWEEN_LEXERS = 4  # tokens, so that a row which needs too much comes to an end


class RowGrammar:
    """Follows the output tokens of a row; nothing is kept that these would not bring back.

    `matcher`: None until the grammar is compiled. `error`: why no token can be sampled any more.
    `wanted`: what `matcher` waits for; None if the compiler did not take the grammar yet.
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
        """`history`: all tokens of the row, to which its next ones are appended."""
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

    @property
    def is_lost(self) -> bool:
        """Whether it is pending although it has sampled: only a row that is added anew may wait."""
        return self.is_pending and len(self._history) > self._num_at_start

    def begin(self, compiler: GrammarCompiler) -> None:
        """Has a matcher, or an error, if the grammar is compiled; otherwise sees to it."""
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
        """Follows so many of the tokens that it is behind; returns how many."""
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
        """Is pending, or has an error, if the matcher has one; it allows anything then."""
        if self.matcher is not None and self.matcher.is_error():
            self._fail(self.matcher.get_error(), compiler)

    def drafted(self, history: Sequence[int]) -> RowGrammar:
        """What follows `history`: this one, if it is its own, else one that goes on from here."""
        if history is self._history:
            return self
        other = RowGrammar(self._grammar, history, self._num_prompt_tokens)
        other._num_followed = self._num_followed
        other.error, other.wanted = self.error, self.wanted
        if self.matcher is not None:
            other.matcher = self.matcher.deep_copy()
        return other

    def _fail(self, error: str, compiler: GrammarCompiler) -> None:
        """Begins anew with a lexer that is empty, if that is what it takes."""
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
            message = f"token {number} of the sequence does not follow the grammar"
        elif message == NO_TEXT:
            message = "no token of the model can continue the text"
        self.error = message
