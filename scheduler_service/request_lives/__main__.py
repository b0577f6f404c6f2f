"""The part of `splitserve explain --journal` that decides again: FILE REQUEST.

Writes an ExplainResponse as bytes, which that command shows.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler_service.journal.segment_file import JournalUnreadable
from scheduler_service.request_lives.explanation import explain
from scheduler_service.request_lives.from_journal import lives_of

# More than a journal is likely to have.
_NUM_KEPT = 100_000


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    file, request_id = argv
    # What went wrong then is no news now.
    logging.disable()
    try:
        recorder = lives_of(Path(file), _NUM_KEPT)
    except JournalUnreadable as error:
        sys.stderr.write(f"splitserve explain: {file}: {error}\n")
        return 1
    sys.stdout.buffer.write(explain(recorder, request_id).SerializeToString())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
