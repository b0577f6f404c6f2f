"""What a process writes to standard error past its log, as lines of the log.

Libraries in C++ (gRPC's core, Torch) write there themselves, and so does whoever tells people why a
process cannot start. Who reads JSON wants all of it to be JSON.
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
# What nobody else writes: everything before it has been read when it is.
_LAST = b"\0the last line\n"
_LAST_LINES_S = 2.0

_log = logging.getLogger("stderr")


class StandardError:
    """Takes the place of file descriptor 2 until `close`; `file` is what was there before.

    A crash ends the reader too, so Python's own handler writes where the process was, as text, to
    what was there before.
    """

    def __init__(self) -> None:
        self.file: TextIO = os.fdopen(os.dup(_STDERR), "w", encoding="utf-8", buffering=1)
        reading, writing = os.pipe()
        os.dup2(writing, _STDERR)
        os.close(writing)
        self._reader = threading.Thread(target=_log_lines, args=(reading,), daemon=True)

    def start(self) -> None:
        """To be called when the log writes to `file`."""
        faulthandler.enable(self.file)
        self._reader.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Has everything logged that was written until now. What comes later is as it is."""
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
