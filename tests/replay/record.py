"""Records `everything.journal` anew: when cores decide otherwise because they were meant to."""

from __future__ import annotations

import logging
from pathlib import Path

from scheduler_service.journal.journal import FileJournal
from tests.support.core.in_process import SCHEDULER_EPOCH
from tests.support.core.recorded_run import RandomRun, run_config

PATH = Path(__file__).with_name("everything.journal")
_SEED = 11
_NUM_TURNS = 40


def main() -> None:
    """Two cores, and whatever happens to them."""
    logging.disable()
    PATH.unlink(missing_ok=True)
    journal = FileJournal(PATH, 2**26, SCHEDULER_EPOCH)
    RandomRun(journal, run_config(queue_policy="priority"), _SEED).run(_NUM_TURNS)
    journal.close()


if __name__ == "__main__":
    main()
