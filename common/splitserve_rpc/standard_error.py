"""Redirection of standard error into the log, for JSON logs.

C++ libraries (gRPC core, Torch) write to standard error themselves, as do messages about a failed
start. In a JSON log, these have to be JSON, too.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
from typing import TextIO

_STDERR = 2
_MAX_LINE_BYTES = 16_384
# End marker: all earlier output has been read when this line is read.
_LAST = b"\0the last line\n"
_LAST_LINES_S = 2.0

_log = logging.getLogger("stderr")


class StandardError:
    """Replaces file descriptor 2 by a pipe into the log until `close`. `file`: the original.

    A crash also ends the reader, so Python's fault handler writes its text to the original.
    """

    def __init__(self) -> None:
        self.file: TextIO = os.fdopen(os.dup(_STDERR), "w", encoding="utf-8", buffering=1)
        reading, writing = os.pipe()
        os.dup2(writing, _STDERR)
        os.close(writing)
        self._reader = threading.Thread(target=_log_lines, args=(reading,), daemon=True)

    def start(self) -> None:
        """Starts the reader. Must be called after the log writes to `file`."""
        faulthandler.enable(self.file)
        self._reader.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Logs all output so far and restores file descriptor 2. Later output is not logged."""
        atexit.unregister(self.close)
        sys.stderr.flush()
        os.write(_STDERR, b"\n" + _LAST)
        self._reader.join(_LAST_LINES_S)
        os.dup2(self.file.fileno(), _STDERR)


def _log_lines(reading: int) -> None:
    with open(reading, "rb") as lines:
        while (line := lines.readline(_MAX_LINE_BYTES)) and line != _LAST:
            if text := line.decode("utf-8", "backslashreplace").rstrip():
                _log.warning("%s", text)
