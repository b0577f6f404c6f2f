"""A target that outlives single examples; each example is a call into its event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, TypeVar

from hypothesis import HealthCheck, settings

from tests.support.processes.patience import PATIENCE_S

T = TypeVar("T")

# An hour of them: make fuzz.
fuzzing = settings(
    max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "50")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class Running(Generic[T]):
    """`target`: what was entered; `errors`: what anything in this process logged as an error."""

    def __init__(self, runner: asyncio.Runner, target: T) -> None:
        self._runner = runner
        self.target = target
        self.errors: list[str] = []

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Does it, and looks whether anything was logged as an error."""
        self._runner.run(asyncio.wait_for(work, PATIENCE_S))
        assert self.errors == []


@contextmanager
def running(context: AbstractAsyncContextManager[T]) -> Iterator[Running[T]]:
    """What `context` gives, in an event loop that runs while there is something to do."""
    with asyncio.Runner() as runner:
        target = runner.run(context.__aenter__())
        started = Running(runner, target)
        collector = _Collector(started.errors)
        logging.getLogger().addHandler(collector)
        try:
            yield started
        finally:
            logging.getLogger().removeHandler(collector)
            runner.run(context.__aexit__(None, None, None))


class _Collector(logging.Handler):
    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self._errors.append(logging.Formatter().format(record))
