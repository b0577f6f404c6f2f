"""Lives of the requests in a journal, computed by replaying a segment for a life recorder.

Run with FILE REQUEST: replays the segment FILE and writes the ExplainResponse of REQUEST as bytes
to standard output. `splitserve explain` runs this module and shows the response.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler_service.callers import Admission
from scheduler_service.journal import JournalUnreadable, replay
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler import Effect, Event, RequestSubmitted, Scheduler
from scheduler_service.watching.explanation import explain
from scheduler_service.watching.life_recorder import LifeRecorder
from scheduler_service.watching.transition import Submission, Transition

# More requests than a journal is likely to have.
_NUM_KEPT = 100_000


def lives_of(path: Path, num_kept: int) -> LifeRecorder:
    """Replays the segment in `path`, and returns a recorder with the lives of its requests.

    Requests that were refused are missing. Requests that were there when the segment began have
    their arrival times, but not the reasons for which they waited before. `num_kept`: as of
    `LifeRecorder`. Raises JournalUnreadable.
    """
    watched = _Watched(num_kept)
    replay(path, watched)
    return watched.recorder


class _Watched:
    """Shows a recorder the same turns that the driver showed. Implements `ReplayObserver`."""

    def __init__(self, num_kept: int) -> None:
        self._now_ns = 0
        self._num_waiting = 0
        self._scheduler: Scheduler | None = None
        self.recorder = LifeRecorder(num_kept, lambda: self._now_ns)

    def begins(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        for place in scheduler.locations.values():
            self.recorder.add_unfinished(place, scheduler.now_ns)

    def handles(self, scheduler: Scheduler, event: Event, now_ns: int) -> None:
        self._now_ns = now_ns
        self._num_waiting = scheduler.num_waiting

    def handled(self, event: Event, found: list[Effect], now_ns: int) -> None:
        assert self._scheduler is not None
        submission = None
        if isinstance(event, RequestSubmitted):
            request = event.request
            name = RequestName.of_key(request.request_id, request.scheduling.tenant)
            submission = Submission(Admission(name), now_ns, self._num_waiting)
        turn = Transition.of(event, found, now_ns, self._scheduler, submission=submission)
        self.recorder.see(turn)


def main(argv: Sequence[str]) -> int:
    """Writes the ExplainResponse to standard output. Returns the exit code."""
    file, request_id = argv
    # The replayed scheduler logs the errors of the recorded run again.
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
