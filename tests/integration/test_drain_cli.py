"""`splitserve drain` as an operator runs it, against a real scheduler."""

from __future__ import annotations

import asyncio
import re
import subprocess

from splitserve_client import SamplingParams
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.addresses import reserve_address
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service
from tests.support.processes.forked import run_process

PROMPT = [4, 7, 9]
PARAMS = SamplingParams(seed=3, max_tokens=40)


async def drain(service: FakeService, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `splitserve drain` to its end."""
    arguments = ("drain", *arguments, "--address", service.scheduler.address)
    return await asyncio.to_thread(run_process, "splitserve_cli", *arguments)


async def complete(service: FakeService) -> None:
    generation = await service.client.complete(PROMPT, PARAMS)
    assert generation.completions == expected_completions(PROMPT, PARAMS)


async def test_executors_are_gone_and_their_streams_go_on_when_the_command_has_ended() -> None:
    watches = [StepWatch() for _ in range(3)]
    going = [FakeExecutor(fault=watch) for watch in watches[:2]]
    staying = FakeExecutor(fault=watches[2])
    async with fake_service(*going, staying) as service:
        for watch in watches:
            watch.hold(after=3)
        completing = [asyncio.create_task(complete(service)) for _ in range(9)]
        for watch in watches:
            await watch.wait_held()

        # Their steps are held: nothing ends there any more, all has to move.
        addresses = [executor.address for executor in going]
        done = await drain(service, *addresses, addresses[0], "--timeout-s", "0")

        assert (done.returncode, done.stderr) == (0, "")
        moved = re.findall(r"^(\S+) drained, (\d+) requests moved$", done.stdout, re.MULTILINE)
        assert {address for address, _ in moved} == set(addresses)
        assert len(moved) == len(done.stdout.splitlines()) == 2
        assert all(int(number) > 0 for _, number in moved)
        (left,) = (await service.client.list_executors()).executors
        assert left.address == staying.address

        for watch in watches:
            watch.release()
        await asyncio.gather(*completing)


async def test_command_says_which_was_not_drained_and_drains_the_others() -> None:
    executors = FakeExecutor(), FakeExecutor()
    async with fake_service(*executors) as service:
        unknown = reserve_address()
        done = await drain(service, unknown, executors[0].address)
        assert done.returncode == 1
        assert done.stdout == f"{executors[0].address} drained, 0 requests moved\n"
        assert done.stderr.startswith(f"splitserve drain: {unknown}: ")
        assert done.stderr.endswith(" [EXECUTOR_UNKNOWN]\n")
        assert done.stderr.count("\n") == 1


async def test_command_drains_nobody_when_the_time_makes_no_sense() -> None:
    executor = FakeExecutor()
    async with fake_service(executor) as service:
        for seconds in ("3601", "soon"):
            done = await drain(service, executor.address, f"--timeout-s={seconds}")
            assert done.returncode != 0
            assert done.stdout == ""
            assert "timeout" in done.stderr
            assert "Traceback" not in done.stderr
        (left,) = (await service.client.list_executors()).executors
        assert not left.is_draining


async def test_command_takes_back_whom_it_sent_away() -> None:
    going, staying = FakeExecutor(), FakeExecutor()
    async with fake_service(going, staying) as service:
        assert (await drain(service, going.address)).returncode == 0
        await service.wait_connected(1)
        done = await drain(service, "--undo", going.address)
        assert (done.returncode, done.stdout, done.stderr) == (
            0,
            f"{going.address} taken back\n",
            "",
        )
        await service.wait_connected(2)
        unknown = reserve_address()
        done = await drain(service, "--undo", unknown)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith(" [EXECUTOR_UNKNOWN]\n")
