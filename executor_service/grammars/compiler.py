"""Compilation of grammars in threads beside the steps, with a cache of compiled grammars."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits

from executor_service.grammars.vocabulary import Vocabulary
from executor_service.steps import Grammar
from splitserve_grammars import (
    FIRST_TRIAL_CPU_S,
    MAX_COMPILE_CPU_S,
    MAX_LEXER_BYTES,
    PARSER_LIMITS,
    STACK_BYTES,
    GrammarTrials,
    TrialTooSlow,
    error_message,
)
from splitserve_grammars.llguidance_text import grammar_text

_MAX_WAITING = 1024
_MAX_END_S = 1.0
_BROKEN = "the executor could not compile the grammar"

_log = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles grammars in two lanes, each a thread with a process for trials; see `_Lane`.

    Methods may be called in any thread.
    """

    def __init__(
        self, vocabulary: Vocabulary, make_trials: Callable[[], GrammarTrials] = GrammarTrials
    ) -> None:
        self._vocabulary = vocabulary
        self._make_trials = make_trials
        self._changed = threading.Condition()
        self._remembered = GrammarCache()
        # Weak references: a grammar is compiled only as long as a caller keeps its future.
        self._wanted: weakref.WeakValueDictionary[Grammar, Future[Compiled]]
        self._wanted = weakref.WeakValueDictionary()
        second = _Lane(MAX_COMPILE_CPU_S)
        self._lanes = (_Lane(FIRST_TRIAL_CPU_S, second), second)
        self._tried: set[Grammar] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def compile(self, grammar: Grammar) -> Future[Compiled] | None:
        """Returns the future of `grammar`, None if too many grammars are waiting. Does not block.

        The grammar is not compiled unless the caller keeps the future.
        """
        with self._changed:
            known = self._remembered.get(grammar) or self._wanted.get(grammar)
            if known is not None:
                return known
            if self._num_waiting() >= _MAX_WAITING:
                self._drop_unwanted()
                if self._num_waiting() >= _MAX_WAITING:
                    return None
            wanted = self._wanted[grammar] = Future()
            self._lanes[0].waiting[grammar] = None
            if not self._threads:
                self._start_threads()
            self._changed.notify_all()
            return wanted

    def forget(self, grammar: Grammar, compiled: Compiled) -> None:
        """Drops `compiled` from the cache if it is current, so that `grammar` is compiled again."""
        with self._changed:
            known = self._remembered.get(grammar)
            if known is not None and known.result() is compiled:
                self._remembered.forget(grammar)
                del self._wanted[grammar]

    def close(self) -> None:
        """Ends the threads and their processes; waits up to a second for each.

        A thread that is still trying a grammar ends with this process.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_MAX_END_S)

    def _num_waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes)

    def _drop_unwanted(self) -> None:
        for lane in self._lanes:
            lane.waiting = {grammar: None for grammar in lane.waiting if grammar in self._wanted}

    def _start_threads(self) -> None:
        previous = threading.stack_size(STACK_BYTES)
        try:
            for number, lane in enumerate(self._lanes):
                name = f"grammar-compiler-{number}"
                thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(previous)

    def _work(self, lane: _Lane) -> None:
        trials = self._make_trials()
        try:
            while (grammar := self._next(lane)) is not None:
                self._compile_if_wanted(grammar, lane, trials)
        finally:
            trials.close()

    def _next(self, lane: _Lane) -> Grammar | None:
        """Waits for the next grammar of the lane; None when the compiler is closed."""
        with self._changed:
            while not (lane.waiting or self._is_closed):
                self._changed.wait()
            if self._is_closed:
                return None
            grammar = next(iter(lane.waiting))
            del lane.waiting[grammar]
            return grammar

    def _compile_if_wanted(self, grammar: Grammar, lane: _Lane, trials: GrammarTrials) -> None:
        with self._changed:
            wanted = self._wanted.get(grammar)
            if wanted is None or wanted.done() or grammar in self._tried:
                return
            self._tried.add(grammar)
        compiled = self._compile(grammar, lane, trials)
        with self._changed:
            self._tried.discard(grammar)
            if compiled is not None:
                wanted.set_result(compiled)
                if compiled.error == _BROKEN:
                    del self._wanted[grammar]
                else:
                    self._remembered.add(grammar, wanted)
            elif lane.slower is not None:
                lane.slower.waiting[grammar] = None
                self._changed.notify_all()

    def _compile(self, grammar: Grammar, lane: _Lane, trials: GrammarTrials) -> Compiled | None:
        """Compiles within the lane's CPU limit; None if a slower lane has to try again."""
        try:
            verdict = trials.ask(grammar.kind, grammar.texts, lane.max_cpu_s)
            if verdict.error:
                compiled = Compiled(None, verdict.error)
            else:
                compiled = self._in_process(grammar, verdict.num_bytes)
        except TrialTooSlow as error:
            if lane.slower is not None:
                return None
            compiled = Compiled(None, str(error))
        except Exception:
            # A bug of ours, or no process can be started: affects only rows with this grammar.
            _log.exception("grammar_compiler_broken")
            return Compiled(None, _BROKEN)
        if compiled.error:
            _log.info("grammar_invalid kind=%s", grammar.kind)
        return compiled

    def _in_process(self, grammar: Grammar, num_bytes: int) -> Compiled:
        """Compiles after a trial; takes little longer: a larger vocabulary counts for masks."""
        text = grammar_text(grammar.kind, grammar.texts)
        limits = LLParserLimits(**PARSER_LIMITS)
        matcher = LLMatcher(self._vocabulary.tokenizer, text, log_level=0, limits=limits)
        error = error_message(matcher.get_error())
        return Compiled(None, error) if error else Compiled(matcher, num_bytes=num_bytes)


class _Lane:
    """Grammars waiting for one thread, in order.

    `slower`: the lane that tries grammars again that take too long here. So quick grammars wait
    only for first trials, which are short.
    """

    def __init__(self, max_cpu_s: float, slower: _Lane | None = None) -> None:
        self.max_cpu_s = max_cpu_s
        self.slower = slower
        self.waiting: dict[Grammar, None] = {}


# -- Cache of compiled grammars --------------------------------------------------------------------

_MAX_REMEMBERED = 256
_MAX_BYTES = 512 * 1024**2


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """Result of a compilation. `matcher`: at the start of the text, only to be copied.

    `error`: the reason if `matcher` is None. All copies of a matcher share one lexer, which grows
    while they are used. `num_bytes`: size without that lexer.
    """

    matcher: LLMatcher | None
    error: str = ""
    num_bytes: int = 0


class GrammarCache:
    """LRU cache of compiled grammars, bounded in number and bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._done: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._num_bytes = 0

    def get(self, grammar: Grammar) -> Future[Compiled] | None:
        """Returns the cached future or None, and marks it as most recently used."""
        if grammar in self._done:
            self._done.move_to_end(grammar)
        return self._done.get(grammar)

    def add(self, grammar: Grammar, done: Future[Compiled]) -> None:
        """Adds `grammar`, which is not in the cache yet; evicts the least recently used ones."""
        self._done[grammar] = done
        self._num_bytes += _num_bytes(grammar, done.result())
        while len(self._done) > _MAX_REMEMBERED or self._num_bytes > _MAX_BYTES:
            self.forget(next(iter(self._done)))

    def forget(self, grammar: Grammar) -> None:
        """Removes `grammar`, which is in the cache."""
        self._num_bytes -= _num_bytes(grammar, self._done.pop(grammar).result())


def _num_bytes(grammar: Grammar, compiled: Compiled) -> int:
    of_texts = sum(len(text.encode()) for text in grammar.texts)
    return of_texts + (0 if compiled.matcher is None else compiled.num_bytes + MAX_LEXER_BYTES)
