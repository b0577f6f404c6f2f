"""Command `splitserve replay`: replays a journal and compares decisions with the record."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler_service.journal.journal_replay import NOTHING, Difference, Report, replay
from scheduler_service.journal.segment_file import JournalUnreadable

_DESCRIPTION = """\
Replays a journal of `splitserve scheduler --journal FILE`: feeds the recorded events to a new
scheduler and compares its decisions with the recorded ones. Serves and sends nothing.
"""
_EPILOG = """\
exit code: 0 all decisions are equal; 1 a decision differs, the first difference is printed; 2 the
file cannot be read. FILE.1, which has the events before FILE, is a separate journal.
"""


def main(argv: Sequence[str]) -> int:
    """Replays a journal and prints the result. Returns the exit code, as `_EPILOG` lists it."""
    parser = argparse.ArgumentParser(
        "splitserve replay", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False
    )
    parser.add_argument("file", metavar="FILE", help="the journal")
    path = Path(parser.parse_args(argv).file)
    try:
        report = replay(path)
    except JournalUnreadable as error:
        sys.stderr.write(f"splitserve replay: {path}: {error}\n")
        return 2
    sys.stdout.write(describe(path, report))
    return 0 if report.difference is None else 1


def describe(path: Path, report: Report) -> str:
    """Returns the result of a replay as text for people, with a newline at the end."""
    last_event = report.first_event + report.num_events - 1
    events = f"events {report.first_event} to {last_event}" if report.num_events else "no event"
    lines = [
        f"{path}: {events}, {report.num_executors} executors, {report.num_steps} steps answered, "
        f"recorded by version {report.software_version}"
    ]
    if report.is_cut:
        lines.append(
            f"the file ends in the middle of an entry, because its writer was killed or is still "
            f"writing: {report.num_events} events were complete"
        )
    lines += ["identical"] if report.difference is None else _describe(report.difference)
    return "\n".join(lines) + "\n"


def _describe(difference: Difference) -> list[str]:
    about = f"different at event {difference.event}: {difference.kind}"
    if difference.address:
        about += f", executor {difference.address}"
    if difference.step_id:
        about += f", step {difference.step_id}"
    lines = [
        f"{about}, {difference.field.field}",
        f"  recorded: {difference.field.recorded or NOTHING}",
        f"  replayed: {difference.field.replayed or NOTHING}",
    ]
    if difference.error:
        lines.append(f"  raised in the replay: {difference.error}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
