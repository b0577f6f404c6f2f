"""An urgent request takes room from others: from whom not, and what it may lean on afterwards."""

from __future__ import annotations

from scheduler_service.scheduler.values.config import PreemptionMode
from scheduler_service.scheduler.values.request import RequestStatus, SchedulingParams
from tests.support.core.checked_engine import CheckedEngine
from tests.support.core.driver import CoreDriver

PATIENT = SchedulingParams(priority=1)


def make_driver(**options: object) -> CoreDriver:
    values: dict[str, object] = {
        "num_host_blocks": 12,
        "preemption_mode": PreemptionMode.SWAP,
        "prefix_caching": False,
        "queue_policy": "priority",
    }
    return CoreDriver(**(values | options))  # type: ignore[arg-type]


def test_nobody_makes_way_when_the_step_swaps_somebody_in() -> None:
    driver = make_driver(num_device_blocks=11)
    driver.add(14, scheduling=PATIENT)
    swapped = driver.add(14)
    driver.step()
    driver.preempt(swapped)
    driver.step()
    driver.add(14, "urgent")
    back, _ = driver.step()
    assert back.moves.swap_in
    assert not back.moves.swap_out
    assert driver.step()[0].moves.swap_out, "now the patient one makes way"


def test_nobody_makes_way_when_the_step_gives_it_a_row() -> None:
    driver = make_driver(num_device_blocks=8)
    patient = driver.add(9, n=2, scheduling=PATIENT)
    driver.step()
    urgent = driver.add(17)
    joined, _ = driver.step()
    assert joined.new_rows
    assert (patient.status, urgent.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    driver.step()
    assert (patient.status, urgent.status) == (RequestStatus.SWAPPED, RequestStatus.RUNNING)


def test_urgent_request_finds_nothing_any_more_when_those_who_made_way_took_its_place() -> None:
    engine = CheckedEngine(
        num_device_blocks=6,
        num_host_blocks=6,
        preemption_mode=PreemptionMode.SWAP,
        queue_policy="priority",
    )
    prefix = list(range(1, 10))
    engine.add(prefix, max_tokens=1)
    engine.run()
    patient = engine.add(list(range(20, 42)), scheduling=PATIENT, max_tokens=2)
    engine.step()
    host = engine.core.placement.blocks.host
    assert host.num_published == 2
    urgent = engine.add([*prefix, 50], max_tokens=2)
    assert engine.core.placement.blocks.prefixes.find(urgent.sequence).num_tokens == 8
    engine.step()
    assert patient.status is RequestStatus.SWAPPED
    assert urgent.num_cached_tokens == 0
    engine.run()
