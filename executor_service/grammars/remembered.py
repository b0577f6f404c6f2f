"""Compiled grammars that are kept for the next row which has one."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher

from executor_service.steps.sampling_params import Grammar
from splitserve_grammars.limits import MAX_LEXER_BYTES

_MAX_REMEMBERED = 256
_MAX_BYTES = 512 * 1024**2


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """`matcher`: at the beginning of the text, only to be copied; None where `error` says why.

    All copies have one lexer, which grows as they go on. `num_bytes`: without it.
    """

    matcher: LLMatcher | None
    error: str = ""
    num_bytes: int = 0


class Remembered:
    """The latest ones, so many and so large together. Not thread-safe."""

    def __init__(self) -> None:
        self._done: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._num_bytes = 0

    def get(self, grammar: Grammar) -> Future[Compiled] | None:
        """It is the latest now."""
        if grammar in self._done:
            self._done.move_to_end(grammar)
        return self._done.get(grammar)

    def add(self, grammar: Grammar, done: Future[Compiled]) -> None:
        """Forgets others for it; `grammar` is not remembered yet."""
        self._done[grammar] = done
        self._num_bytes += _num_bytes(grammar, done.result())
        while len(self._done) > _MAX_REMEMBERED or self._num_bytes > _MAX_BYTES:
            self.forget(next(iter(self._done)))

    def forget(self, grammar: Grammar) -> None:
        """`grammar` is remembered."""
        self._num_bytes -= _num_bytes(grammar, self._done.pop(grammar).result())


def _num_bytes(grammar: Grammar, compiled: Compiled) -> int:
    of_texts = sum(len(text.encode()) for text in grammar.texts)
    return of_texts + (0 if compiled.matcher is None else compiled.num_bytes + MAX_LEXER_BYTES)
