"""Tests charges of requests that end without their client, or are refused."""

from __future__ import annotations

import asyncio

import pytest

from scheduler_service.callers import Admission
from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.request_limits import RequestName
from scheduler_service.scheduler.values import Request, SamplingParams
from scheduler_service.streams import RequestSink, SessionStream
from splitserve_contract import DomainError
from tests.support.core.bursts import CountedCharge
from tests.support.core.machines import BurstLink, Machine

NUM_WAITING = 2


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Setting:
    """A cluster that lets two requests wait, and a session of it."""

    def __init__(self) -> None:
        self.machine = Machine("executor:0")
        self.cluster = Driver(
            ClusterConfig(max_num_waiting=NUM_WAITING),
            1,
            lambda: None,
            now_ns=lambda: 0,
            connect=lambda info, _config: BurstLink(self.machine, info),
        )
        self.stream = SessionStream(self.cluster.delivery.new_outbox())
        self.cluster.delivery.open_stream(self.stream)

    async def join(self) -> None:
        """An executor that answers nothing."""
        await self.cluster.join(self.machine.info)
        await turns()

    def submit(self, handle: int, charge: CountedCharge, *, prompt: tuple[int, ...] = (1,)) -> None:
        name = RequestName(f"r{handle}")
        params = SamplingParams(max_tokens=5)
        request = Request.create(name.key, prompt, params, arrival=handle, seed=handle)
        self.stream.begin(handle, name)
        self.cluster.submit(request, RequestSink(self.stream, handle), Admission(name, charge))


async def test_charge_ends_when_the_scheduler_drains() -> None:
    setting, charges = Setting(), [CountedCharge() for _ in range(NUM_WAITING)]
    await setting.join()
    for handle, charge in enumerate(charges):
        setting.submit(handle, charge)
    await setting.cluster.drain(0)
    for charge in charges:
        charge.check(num_told=0)


async def test_charge_ends_when_no_executor_has_the_request() -> None:
    setting, charge = Setting(), CountedCharge()
    await setting.join()
    assert setting.machine.link is not None
    setting.machine.link.break_off()
    await turns()
    setting.submit(1, charge)
    assert setting.cluster.scheduler.num_waiting == 1
    setting.cluster.abort(RequestName("r1"))
    charge.check(num_told=0)
    await setting.cluster.drain(0)


def submit_many(setting: Setting, charges: list[CountedCharge]) -> None:
    """More requests than fit into queue and rows, each with a charge of its own."""
    for handle in range(1000):
        charges.append(CountedCharge())
        setting.submit(handle, charges[-1])


@pytest.mark.parametrize("is_connected", [True, False])
async def test_nothing_is_charged_when_the_queue_is_full(is_connected: bool) -> None:
    setting = Setting()
    await setting.join()
    if not is_connected:
        assert setting.machine.link is not None
        setting.machine.link.break_off()
        await turns()
    charges: list[CountedCharge] = []
    with pytest.raises(DomainError, match="requests wait; allowed") as caught:
        submit_many(setting, charges)
    *taken, refused = charges
    assert len(taken) >= NUM_WAITING
    assert caught.value.reason == "QUEUE_FULL"
    assert setting.cluster.num_unfinished == len(taken)
    assert (refused.num_begun, refused.num_outputs) == (0, [])
    await setting.cluster.drain(0)


async def test_nothing_is_charged_when_no_core_can_run_the_request() -> None:
    setting, charge = Setting(), CountedCharge()
    await setting.join()
    with pytest.raises(DomainError):
        setting.submit(1, charge, prompt=(10**6,))
    assert (charge.num_begun, charge.num_outputs) == (0, [])
    assert setting.cluster.num_unfinished == 0
    await setting.cluster.drain(0)
