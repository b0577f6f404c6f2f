"""Several executors begin requests of the one waiting queue."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.scheduler.effects import RequestAssigned, RequestMoved
from scheduler_service.scheduler.executor_losses import LossCause
from scheduler_service.scheduler.queue.queue_policy import QUEUE_POLICIES
from scheduler_service.scheduler.values.admission import AdmissionBlocker
from scheduler_service.scheduler.values.config import FleetConfig, PreemptionMode
from scheduler_service.scheduler.values.request import Request, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from splitserve_rpc.domain_error import DomainError
from tests.support.core.checks import check_blocks, check_requests, check_rows
from tests.support.core.machines import VOCAB_SIZE, Machine
from tests.support.core.pure_fleet import PureFleet
from tests.support.fakes.fake_chain import expected_tokens


class SharedQueue(PureFleet):
    """A scheduler whose executors have the same queue policy; engines are checked at each event."""

    def __init__(
        self, policy: str, *machines: dict[str, object], max_num_waiting: int = 1024
    ) -> None:
        super().__init__(FleetConfig(queue_policy=policy, max_num_waiting=max_num_waiting))
        self.sent: list[Request] = []
        options: dict[str, object] = {"queue_policy": policy, "prefix_caching": False}
        for number, changes in enumerate(machines):
            machine = Machine(f"executor:{number}", **(options | changes))  # type: ignore[arg-type]
            self.join(machine)

    def add(self, num_tokens: int, max_tokens: int = 3, **scheduling: object) -> Request:
        """Submits a request, named r1, r2, ..., with so many prompt tokens."""
        number = len(self.sent) + 1
        request = Request.create(
            f"r{number}",
            _prompt(number, num_tokens),
            SamplingParams(max_tokens=max_tokens),
            arrival=number,
            seed=number,
            scheduling=SchedulingParams(**scheduling),  # type: ignore[arg-type]
        )
        request.client_key = number
        self.submit(request)
        self.sent.append(request)
        return request

    @property
    def begun(self) -> list[tuple[str, str]]:
        """Requests and the executors at which they began, in that order."""
        assigned = self.effects_of(RequestAssigned)
        return [(each.request.request_id, each.address[-1]) for each in assigned]

    def answer_at(self, number: int) -> None:
        """An executor answers its oldest step."""
        self.answer(self.machines[f"executor:{number}"])

    def _check(self) -> None:
        super()._check()
        for executor in self.scheduler.executors.values():
            placement = executor.engine.placement
            check_blocks(placement)
            check_requests(placement)
            check_rows(placement)


def _prompt(number: int, num_tokens: int) -> list[int]:
    return [number % VOCAB_SIZE, *range(2, num_tokens + 1)]


@pytest.mark.parametrize("policy", list(QUEUE_POLICIES))
@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_every_request_begins_once_and_gets_its_tokens_when_executors_have_few_blocks(
    policy: str, mode: PreemptionMode
) -> None:
    options: dict[str, object] = {
        "num_device_blocks": 14,
        "num_host_blocks": 14,
        "max_num_seqs": 4,
        "preemption_mode": mode,
    }
    fleet = SharedQueue(policy, options, options)
    for n in range(24):
        fleet.add(5 + n % 4, tenant=f"t{n % 3}", priority=n % 2, max_tokens=20)

    fleet.run()

    engines = [executor.engine for executor in fleet.scheduler.executors.values()]
    assert sum(engine.num_preemptions for engine in engines) > 0
    assert len(fleet.begun) == 24 + len(fleet.effects_of(RequestMoved))
    assert {address for _, address in fleet.begun} == {"0", "1"}
    for n, request in enumerate(fleet.sent):
        prompt = _prompt(n + 1, 5 + n % 4)
        expected = expected_tokens(prompt, 20, n + 1, VOCAB_SIZE)
        assert fleet.tokens[request.client_key] == expected


def test_large_request_is_passed_only_elsewhere_when_it_has_a_reservation() -> None:
    # Each executor has room for two small requests, of which one ends soon, or for the large one.
    few_blocks: dict[str, object] = {"num_device_blocks": 8, "max_num_seqs": 4}
    fleet = SharedQueue("fcfs", few_blocks, few_blocks)
    for number in range(4):
        fleet.add(10, max_tokens=2 if number < 2 else 6)
    fleet.settle()
    fleet.add(28, max_tokens=2)
    for _ in range(6):
        fleet.add(10, max_tokens=2)

    fleet.run()

    names = [name for name, _ in fleet.begun]
    (where,) = [address for name, address in fleet.begun if name == "r5"]
    before = fleet.begun[4 : names.index("r5")]
    # The policy lets nobody pass it where it waits; elsewhere small ones go on.
    assert {address for _, address in before} <= {"0", "1"} - {where}
    assert before


@pytest.mark.parametrize("lost", [0, 1])  # the executor of its reservation is one of them
def test_large_request_begins_when_either_executor_that_lacks_room_is_lost(lost: int) -> None:
    few_blocks: dict[str, object] = {"num_device_blocks": 8}
    fleet = SharedQueue("fcfs", few_blocks, few_blocks)
    for _ in range(2):
        fleet.add(20, max_tokens=6)
    fleet.settle()
    large = fleet.add(28, max_tokens=2)
    for number in range(2):
        fleet.answer_at(number)
    for executor in fleet.scheduler.executors.values():
        assert fleet.scheduler.obstacle(large, executor) is AdmissionBlocker.BLOCKS

    fleet.lose(fleet.machines[f"executor:{lost}"], LossCause.BLAMELESS)
    fleet.run()

    assert (large.request_id, str(1 - lost)) in fleet.begun
    assert set(fleet.finished) == {"r1", "r2", "r3"}


def test_small_executor_begins_what_fits_it_when_many_others_wait_for_a_large_one() -> None:
    small: dict[str, object] = {"max_model_len": 20}
    fleet = SharedQueue("fair", {"max_num_seqs": 1}, small)
    for number in range(100):
        fleet.add(30, max_tokens=20, tenant=f"t{number % 3}")
    fleet.settle()
    fleet.add(3, tenant="t0")

    fleet.settle()

    assert fleet.begun[1:] == [("r101", "1")]


def test_tenant_that_was_served_by_one_executor_waits_for_others_at_every_executor() -> None:
    one_row: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 100}
    fleet = SharedQueue("fair", one_row)
    fleet.add(80, max_tokens=1, tenant="a")
    fleet.run()
    fleet.join(Machine("executor:1", queue_policy="fair", prefix_caching=False, **one_row))
    for _ in range(2):
        fleet.add(20, max_tokens=1, tenant="a")
    for _ in range(4):
        fleet.add(20, max_tokens=1, tenant="b")
    fleet.run()
    tenants = [fleet.sent[int(name[1:]) - 1].scheduling.tenant for name, _ in fleet.begun]
    # Tenant b begins level with a. Each pays 22 for a request, whichever executor has it.
    assert "".join(tenants) == "aababbb"
    assert {address for _, address in fleet.begun[1:]} == {"0", "1"}


# -- places ----------------------------------------------------------------------------------------


def test_request_is_refused_and_told_when_to_retry_when_the_queue_is_full() -> None:
    fleet = SharedQueue("fcfs", {"max_num_seqs": 1}, max_num_waiting=2)
    fleet.add(3)
    fleet.settle()
    for _ in range(2):
        fleet.add(3)

    with pytest.raises(DomainError, match=r"2 requests wait; allowed: 2$") as refusal:
        fleet.add(3)

    assert refusal.value.reason == "QUEUE_FULL"
    assert refusal.value.retry_delay_s


def test_requests_of_a_lost_executor_wait_when_the_queue_is_full() -> None:
    fleet = SharedQueue("fcfs", {"max_num_seqs": 1}, {"max_num_seqs": 1}, max_num_waiting=1)
    for _ in range(2):
        fleet.add(3)
    fleet.settle()
    for _ in range(2):
        fleet.add(3)

    fleet.lose(fleet.machines["executor:0"])

    assert fleet.scheduler.num_waiting == 3
    fleet.run()
    assert set(fleet.finished) == {"r1", "r2", "r3", "r4"}


def test_flood_of_one_tenant_is_refused_and_others_wait_when_few_places_are_left() -> None:
    fleet = SharedQueue("fair", {"max_num_seqs": 1}, max_num_waiting=4)
    fleet.add(3, tenant="d")
    fleet.settle()
    for tenant in ("b", "a", "a"):
        fleet.add(3, tenant=tenant)

    with pytest.raises(DomainError, match="3 requests wait; allowed: 4, of which some") as refusal:
        fleet.add(3, tenant="a")
    fleet.add(3, tenant="c")

    assert refusal.value.reason == "QUEUE_FULL"
    assert fleet.scheduler.num_waiting == 4


def test_queue_has_places_for_requests_that_are_about_to_begin() -> None:
    fleet = SharedQueue("fcfs", {"max_num_seqs": 2}, max_num_waiting=1)
    for _ in range(3):
        fleet.add(3)
    with pytest.raises(DomainError, match="3 requests wait; allowed: 3"):
        fleet.add(3)
    fleet.settle()
    assert fleet.scheduler.num_waiting == 1
    with pytest.raises(DomainError, match="1 requests wait; allowed: 1"):
        fleet.add(3)
