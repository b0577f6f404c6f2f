"""Tests the scheduler's connection to an executor that restarts or is gone."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from executor_service.service import SERVICE, ExecutorServicer, encode_info
from scheduler_service.executors import (
    ExecutorGone,
    ExecutorLink,
    ExecutorLost,
    ExecutorRestarted,
    LinkConfig,
)
from splitserve.executor.v1 import executor_pb2, executor_pb2_grpc
from splitserve_rpc import bind_server
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.patience import PATIENCE_S

# No test waits for it.
FOR_EVER_S = 1e6
FOR_EVER = LinkConfig(reconnect_timeout_s=FOR_EVER_S, step_timeout_s=FOR_EVER_S)
PATIENCE = LinkConfig(reconnect_timeout_s=PATIENCE_S, step_timeout_s=PATIENCE_S)


async def test_new_life_is_reached_at_once() -> None:
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


async def test_executor_is_lost_at_once_when_nobody_listens_any_more() -> None:
    async with FakeExecutor() as executor:
        link = ExecutorLink(encode_info(executor.info), FOR_EVER)
        await link.check_alive()
        await executor.kill()
        with pytest.raises(ExecutorGone, match="now refuses connections"):
            await anext(link.results())
        await link.close()
        await executor.start()


async def test_executor_is_lost_at_once_when_a_new_life_still_loads_its_model() -> None:
    async with FakeExecutor() as executor:
        info = encode_info(executor.info)
        await executor.kill()
        loading = bind_server(info.address, (SERVICE,))
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(ExecutorServicer(), loading.server)
        await loading.server.start()
        link = ExecutorLink(info, FOR_EVER)
        with pytest.raises(ExecutorRestarted, match="is loading its model"):
            await anext(link.results())
        await link.close()
        await loading.stop(0)
        await executor.start()


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_executor_is_lost_when_its_link_is_closed(is_waiting: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        link = ExecutorLink(executor_pb2.ExecutorInfo(address=address), FOR_EVER)
        asking = asyncio.ensure_future(link.get_info(FOR_EVER_S))
        if is_waiting:
            await asyncio.sleep(0)
        await link.close()
        with pytest.raises(ExecutorLost, match="the link is closed"):
            await asking


@pytest.mark.parametrize("name", ["tokenizer\x1b]0;x\x07.json", "../x", "a\nb", "x" * 300])
async def test_executor_is_lost_when_a_tokenizer_file_name_is_bad(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"{}")
    async with FakeExecutor(tokenizer_files={"tokenizer.json": file, name: file}) as executor:
        link = ExecutorLink(encode_info(executor.info), PATIENCE)
        with pytest.raises(ExecutorLost, match="tokenizer has a file named") as lost:
            await link.tokenizer_files()
        await link.close()
    assert str(lost.value).isprintable()
    assert len(str(lost.value)) < 300
