"""A real stack under a seeded schedule of faults: every stream brings what it brings undisturbed.

Nothing here depends on the time that anything takes: moments are counted in tokens, and what ends
by the clock is a fault, never a wait for something that is to happen. More of it: `make chaos`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from splitserve_client import SamplingParams
from tests.support.chaos.faults import FAULTS, FullDisk, Schedule
from tests.support.chaos.history import chaos
from tests.support.chaos.load import NUM_STREAMS
from tests.support.chaos.network import proxy_network
from tests.support.chaos.stack import Stack
from tests.support.processes.patience import PATIENCE_S

OF_EXECUTORS = (
    "executor killed",
    "executor stopped",
    "executor paused",
    "garbage: no numbers",
    "garbage: no token",
    "executor crawls",
    "executor sick: steps fail",
    "executor sick: no numbers",
    "all executors killed",
)
OF_NETWORK = tuple(kind for kind in FAULTS if kind.startswith(("network", "stream")))
OF_SERVICES = (
    "disk full",
    "gateway paused",
    "scheduler paused",
    "gateway killed",
    "scheduler killed",
    "gateway stopped",
    "scheduler stopped",
    "all schedulers killed",
)


# Without kernels scores depend a little on who shares a step, and so would these tests.
pytestmark = pytest.mark.usefixtures("native_library")


# A machine with much other work takes its time; nobody waits for it otherwise.
@pytest.mark.timeout(3600)
async def test_no_stream_notices_more_than_a_pause_whatever_is_lost(tmp_path: Path) -> None:
    async with proxy_network(3) as network, chaos(network, tmp_path) as running:
        for seed, kinds in enumerate((OF_SERVICES, OF_EXECUTORS, OF_NETWORK)):
            load = await running.live_through(Schedule.of_each(seed, kinds))
            assert load.num_answers >= NUM_STREAMS
        await stop_journal(running.stack)


async def stop_journal(stack: Stack) -> None:
    """Fills the disks of all schedulers, and asks until a journal has stopped; they go on."""
    for name in stack.scheduler_names:
        await FullDisk((name,)).begin(stack)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    logs = [stack.log(name) for name in stack.scheduler_names]
    async with asyncio.timeout(PATIENCE_S):
        while not any(" journal_stopped " in log.read_text() for log in logs):
            await stack.clients[0].complete([1, 2, 3], params)
        await stack.clients[0].complete([1, 2, 3], params)
