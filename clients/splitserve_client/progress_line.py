"""Progress line of a batch on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

_WIDTH = 24
_EVERY_S = 0.1


class ProgressLine:
    """Rewrites one line of a terminal; use it as `with ProgressLine(total)`.

    `total`: number of items, None if unknown. `show`: None shows the line only on a terminal.
    """

    def __init__(
        self,
        total: int | None,
        *,
        show: bool | None,
        clock: Callable[[], float],
        file: TextIO | None = None,
    ) -> None:
        self._total = total
        self._file = file or sys.stderr
        self._is_shown = self._file.isatty() if show is None else show
        self._clock = clock
        self._start_s = self._written_s = clock()
        self._num_items = 0
        self._num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_shown:
            self._write("\n")

    def add(self, num_tokens: int) -> None:
        """Counts one more finished item with `num_tokens` output tokens."""
        self._num_items += 1
        self._num_tokens += num_tokens
        if self._is_shown and self._clock() - self._written_s >= _EVERY_S:
            self._written_s = self._clock()
            self._write("")

    def say(self, text: str) -> None:
        """Writes `text` on a line of its own, even if the progress line is not shown."""
        self._file.write(f"\r\x1b[K{text}\n" if self._is_shown else f"{text}\n")
        self._file.flush()

    def _write(self, end: str) -> None:
        count, bar = str(self._num_items), ""
        if self._total:
            num_full = _WIDTH * self._num_items // self._total
            bar = f"[{'#' * num_full}{'.' * (_WIDTH - num_full)}] "
            count = f"{count}/{self._total}"
        seconds = max(self._clock() - self._start_s, 1e-9)
        pace = f"{self._num_items / seconds:.1f}/s, {self._num_tokens / seconds:.0f} tokens/s"
        self._file.write(f"\r\x1b[K{bar}{count} ({pace}){end}")
        self._file.flush()
