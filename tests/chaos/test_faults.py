"""A real stack under a seeded schedule of faults: every stream brings what it brings undisturbed.

Nothing here depends on the time that anything takes: moments are counted in tokens, and what ends
by the clock is a fault, never a wait for something that is to happen. More of it: `make chaos`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve_kernels.cpu.build import BuildFailed
from splitserve_kernels.cpu.library import load_library
from tests.support.chaos import namespaces
from tests.support.chaos.faults import FAULTS
from tests.support.chaos.history import Chaos, chaos
from tests.support.chaos.load import NUM_STREAMS
from tests.support.chaos.network import proxy_network
from tests.support.chaos.schedule import Schedule

# Of a history; a machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

OF_EXECUTORS = (
    "executor killed",
    "two executors killed",
    "all executors killed",
    "executor paused",
    "executor crawls",
    "garbage: no numbers",
    "garbage: no token",
)
OF_NETWORK = tuple(kind for kind in FAULTS if kind.startswith(("network", "stream")))
OF_SERVICES = (
    "disk full",
    "scheduler killed",
    "scheduler paused",
    "gateway killed",
    "gateway paused",
)
SEEDS = (1001,)
# Six kinds of what becomes of executors and networks, without what takes long.
SEED_OF_NETWORKS = 2174
# It takes as many executors as a request may take; they begin anew, which takes its time.
MANY = tuple(kind for kind in FAULTS if kind != "deadly request")


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Without them scores depend a little on who shares a step, and so would these tests."""
    try:
        load_library()
    except BuildFailed as failure:
        pytest.skip(str(failure))


async def live_through_each(kinds: tuple[str, ...], running: Chaos) -> None:
    for seed, kind in enumerate(kinds):
        load = await running.live_through(Schedule.drawn(seed, 1, [kind]))
        assert load.num_answers >= NUM_STREAMS


@pytest.mark.parametrize("kinds", [OF_EXECUTORS, OF_NETWORK], ids=["executors", "network"])
async def test_no_stream_notices_more_than_a_pause_when(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    async with proxy_network(3) as network, chaos(network, tmp_path) as running:
        await live_through_each(kinds, running)


async def test_streams_go_on_when_services_are_lost_or_cannot_write(tmp_path: Path) -> None:
    async with proxy_network(3) as network, chaos(network, tmp_path) as running:
        await live_through_each(OF_SERVICES, running)
        assert " journal_stopped " in running.stack.log("scheduler").read_text()


@pytest.mark.parametrize("seed", SEEDS)
async def test_streams_are_what_they_are_undisturbed_when_much_goes_wrong(
    tmp_path: Path, seed: int
) -> None:
    async with proxy_network(3) as network, chaos(network, tmp_path) as running:
        await running.live_through(Schedule.drawn(seed, 6, MANY))


@pytest.mark.skipif(not namespaces.is_allowed(), reason="needs namespaces, and nft in them")
def test_streams_are_what_they_are_undisturbed_when_the_kernel_cuts_and_loses() -> None:
    command = (sys.executable, "-m", "tests.chaos.run", "--network", "namespaces")
    history = ("--seed", str(SEED_OF_NETWORKS), "--faults", "6")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [*command, *history], env=environment, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout[-10000:] + result.stderr[-5000:]
    assert "1 histories, nothing lost or changed" in result.stdout
