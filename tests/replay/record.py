"""Records the journals of this folder anew: for a new format, or when decisions are to change.

`everything.journal` is what this software does. `beam_of_width_1` is a fault that was mended long
ago, and is planted again for the recording.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

from scheduler_service.scheduler.engine import RowColumns
from scheduler_service.scheduler.values import BeamParams, Request, SamplingParams, Sequence
from tests.support.core.pure_fleet import PureFleet
from tests.support.core.recorded_run import RandomRun, open_file, run_config, run_machine

FOLDER = Path(__file__).parent
EVERYTHING = FOLDER / "everything.journal"
FIXED = FOLDER / "beam_of_width_1.fixed_at_5.journal"
_SEED = 1
_NUM_TURNS = 150


def main() -> None:
    """Records both journals."""
    logging.disable()
    _record_everything()
    _record_fault()


def _record_everything() -> None:
    """Two executors, and whatever happens to them."""
    EVERYTHING.unlink(missing_ok=True)
    journal = open_file(EVERYTHING)
    RandomRun(journal, run_config(queue_policy="priority"), _SEED).run(_NUM_TURNS)
    journal.close()


def _record_fault() -> None:
    """A beam search of width 1 is taken for a plain request, and its candidate for a token."""
    add = RowColumns.add

    def add_as_plain(rows: RowColumns, sequence: Sequence, *values: Any) -> int:  # noqa: ANN401
        row_id = add(rows, sequence, *values)
        rows.num_not_plain -= not rows.is_plain[row_id]
        rows.is_plain[row_id] = True
        return row_id

    FIXED.unlink(missing_ok=True)
    journal = open_file(FIXED)
    params = SamplingParams(beam=BeamParams(1), max_tokens=4)
    with mock.patch.object(RowColumns, "add", add_as_plain):
        recorded, executor = PureFleet(journal=journal), run_machine()
        recorded.join(executor)
        recorded.submit(Request.create("r1", [1, 2, 3], params, arrival=1, seed=1))
        recorded.settle()
        recorded.answer(executor)
    journal.close()


if __name__ == "__main__":
    main()
