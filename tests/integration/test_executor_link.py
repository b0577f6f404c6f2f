"""The scheduler's way to an executor that comes back."""

from __future__ import annotations

import pytest

from executor_service.service.encode_answer import encode_info
from scheduler_service.executors.executor_link import (
    ExecutorLink,
    ExecutorLost,
    ExecutorRestarted,
    LinkConfig,
)
from tests.support.fakes.fake_executor import FakeExecutor

PATIENCE = LinkConfig(reconnect_timeout_s=5.0, step_timeout_s=5.0)


async def test_new_life_is_reached_at_once_when_the_former_one_refused_connections() -> None:
    async with FakeExecutor() as executor:
        link = ExecutorLink(encode_info(executor.info), PATIENCE)
        await link.check_alive()
        await executor.kill()
        with pytest.raises(ExecutorLost):
            await link.check_alive()
        await executor.start()
        successor = ExecutorLink(encode_info(executor.info), PATIENCE)
        await successor.check_alive()
        await successor.close()
        await link.close()


async def test_link_tells_lives_apart_when_an_executor_has_restarted() -> None:
    async with FakeExecutor() as executor:
        former = encode_info(executor.info)
        await executor.kill()
        await executor.start()
        link = ExecutorLink(former, PATIENCE)
        with pytest.raises(ExecutorRestarted):
            await link.check_alive()
        await link.close()
