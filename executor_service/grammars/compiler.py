"""Compiles grammars beside the steps, each once as long as it is remembered."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits

from executor_service.grammars.grammar_text import GrammarInvalid, grammar_text
from executor_service.grammars.limits import PARSER_LIMITS, STACK_BYTES
from executor_service.grammars.trial import CompileTrial
from executor_service.grammars.vocabulary import Vocabulary
from executor_service.steps.sampling_params import Grammar

_NUM_THREADS = 2
_MAX_WAITING = 1024
_MAX_REMEMBERED = 256
_MAX_REMEMBERED_BYTES = 2 * 1024**2
_MAX_ERROR_CHARS = 500
_BROKEN = "it could not be compiled here"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """`matcher`: at the beginning of the text, only to be copied; None where `error` says why."""

    matcher: LLMatcher | None
    error: str = ""

    @classmethod
    def of(cls, matcher: LLMatcher) -> Compiled:
        """What a matcher says of itself."""
        error = shorten(matcher.get_error())
        return cls(None, error) if error else cls(matcher)


def shorten(error: str) -> str:
    """What llguidance says of an error; the grammar may be part of it, its own inner life not."""
    if error.startswith("panic"):
        return _BROKEN
    error = error.replace("<non-verbose/>", "").strip()
    return error if len(error) <= _MAX_ERROR_CHARS else error[:_MAX_ERROR_CHARS] + "..."


class GrammarCompiler:
    """A few threads, each with a process for trials. Its methods may be called in any thread."""

    def __init__(
        self, vocabulary: Vocabulary, make_trial: Callable[[], CompileTrial] = CompileTrial
    ) -> None:
        self._vocabulary = vocabulary
        self._make_trial = make_trial
        self._lock = threading.Lock()
        self._remembered: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._remembered_bytes = 0
        # Who wants one keeps it: what nobody waits for any more is not compiled.
        self._wanted: weakref.WeakValueDictionary[Grammar, Future[Compiled]]
        self._wanted = weakref.WeakValueDictionary()
        self._waiting: queue.Queue[Grammar | None] = queue.Queue(_MAX_WAITING)
        self._threads: list[threading.Thread] = []

    def compile(self, grammar: Grammar) -> Future[Compiled] | None:
        """`grammar`, compiled some time; None if too many wait already. Never waits.

        It is forgotten unless the caller keeps what this returns.
        """
        with self._lock:
            if grammar in self._remembered:
                self._remembered.move_to_end(grammar)
                return self._remembered[grammar]
            wanted = self._wanted.get(grammar)
            if wanted is not None:
                return wanted
            try:
                self._waiting.put_nowait(grammar)
            except queue.Full:
                return None
            wanted = self._wanted[grammar] = Future()
            if len(self._threads) < _NUM_THREADS:
                self._start_thread()
            return wanted

    def close(self) -> None:
        """Ends the threads and their processes; returns when they have ended."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        name = f"grammar-compiler-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        previous = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(previous)
        self._threads.append(thread)

    def _work(self) -> None:
        trial = self._make_trial()
        try:
            while (grammar := self._waiting.get()) is not None:
                self._compile_if_wanted(grammar, trial)
        finally:
            trial.close()

    def _compile_if_wanted(self, grammar: Grammar, trial: CompileTrial) -> None:
        with self._lock:
            wanted = self._wanted.get(grammar)
            if wanted is None or wanted.running() or wanted.done():
                return
            wanted.set_running_or_notify_cancel()
        try:
            text = grammar_text(grammar)
            error = trial.find_error(text)
            compiled = Compiled(None, shorten(error)) if error else self._in_process(text)
        except GrammarInvalid as invalid:
            compiled = Compiled(None, shorten(str(invalid)))
        except Exception:
            # A bug of ours, or no process can be started: it costs those that have this grammar.
            _log.exception("grammar_compiler_broken")
            wanted.set_result(Compiled(None, _BROKEN))
            return
        if compiled.error:
            _log.info("grammar_invalid kind=%s", grammar.kind)
        self._remember(grammar, wanted)
        wanted.set_result(compiled)

    def _in_process(self, text: str) -> Compiled:
        limits = LLParserLimits(**PARSER_LIMITS)
        tokenizer = self._vocabulary.tokenizer
        return Compiled.of(LLMatcher(tokenizer, text, log_level=0, limits=limits))

    def _remember(self, grammar: Grammar, wanted: Future[Compiled]) -> None:
        with self._lock:
            self._remembered[grammar] = wanted
            self._remembered_bytes += _num_bytes(grammar)
            while (
                len(self._remembered) > _MAX_REMEMBERED
                or self._remembered_bytes > _MAX_REMEMBERED_BYTES
            ):
                forgotten, _ = self._remembered.popitem(last=False)
                self._remembered_bytes -= _num_bytes(forgotten)


def _num_bytes(grammar: Grammar) -> int:
    return sum(len(text.encode()) for text in grammar.texts)
