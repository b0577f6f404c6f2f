from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.journal.replay import replay
from scheduler_service.journal.segment_file import SegmentReader
from tests.support.core.machines import Machine
from tests.support.core.recorded_run import open_file
from tests.support.core.stepped_fleet import Fleet, turns


async def test_effects_are_recorded_when_the_driver_fails_to_execute_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []

    def fail(events: object) -> None:
        monkeypatch.undo()
        failed.append(events)
        raise RuntimeError("a fault of the driver")

    journal = open_file(path)
    fleet = Fleet(journal=journal)
    machine = Machine("executor:1")
    await fleet.join(machine)
    monkeypatch.setattr(fleet.cluster.delivery, "deliver", fail)
    fleet.submit(1)
    await turns()
    await fleet.finish(machine)
    await fleet.cluster.drain(0)
    journal.close()

    entries = list(SegmentReader(path))
    delivered = [
        effect for entry in entries for effect in entry.effects if effect.HasField("deliver_tokens")
    ]
    assert len(failed) == 1
    assert delivered
    assert replay(path).difference is None
