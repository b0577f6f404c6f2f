from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.driver import Driver
from scheduler_service.journal.replay import replay
from scheduler_service.journal.segment_file import SegmentReader
from tests.support.core.machines import Machine
from tests.support.core.recorded_run import open_file
from tests.support.core.stepped_fleet import Fleet, turns


async def test_effects_are_recorded_when_the_driver_fails_to_execute_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_driver: Driver, _at_ns: int | None) -> None:
        monkeypatch.undo()
        raise RuntimeError("a fault of the driver")

    journal = open_file(path)
    fleet = Fleet(journal=journal)
    machine = Machine("executor:1")
    await fleet.join(machine)

    monkeypatch.setattr(Driver, "_set_timer", fail)

    with pytest.raises(RuntimeError, match="a fault of the driver"):
        fleet.submit(1)
    fleet.cluster.look_again()
    await turns()
    await fleet.finish(machine)
    await fleet.cluster.drain(0)
    journal.close()

    entries = list(SegmentReader(path))
    effects = [effect for entry in entries for effect in entry.effects]
    assigned = [each.request_assigned for each in effects if each.HasField("request_assigned")]
    assert [each.address for each in assigned] == ["executor:1"]
    assert any(each.HasField("send_step") for each in effects)
    assert replay(path).difference is None
