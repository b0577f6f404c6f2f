"""One of two scheduler processes is stopped by SIGSTOP: its connections stay open.

Detection on every hop is measured in virtual time (`tests/simulation/test_silent_peers.py`), and
gRPC's part on a network that drops packets in `tests/integration/test_silent_connections.py`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor_service.service import ranked
from splitserve_client import AsyncClient, SamplingParams, Tokens
from splitserve_rpc import KEEPALIVE_S
from tests.contract.stranger.process import poll
from tests.support.chaos import dark_scheduler
from tests.support.chaos.dark_connection import can_drop
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.models.tiny_tokenizers import byte_level
from tests.support.processes import light_executor
from tests.support.processes.addresses import reserve_address
from tests.support.processes.gate import GATE, GATED_SCHEDULER, Gate
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import Processes, gateway_process, light_processes

# Generous for busy machines.
pytestmark = pytest.mark.timeout(1800)

# Tokens that arrive until the scheduler is stopped; those under way arrive within LATE_S.
HELD_AT = 40
LATE_S = 1.0
# Limit until requests are served when another scheduler is named for a stopped one: 62 s once.
MOST_REFUSED_S = 20.0
PARAMS = SamplingParams(seed=5, max_tokens=200, ignore_eos=True)
PROMPT = [5, 6, 7]
TRUTH = list(expected_completions(PROMPT, PARAMS)[0].token_ids)
# 4.8 s on a quiet machine; gRPC alone would not know before its first ping.
MAX_PAUSE_S = KEEPALIVE_S + 2.0


@dataclass(frozen=True, slots=True)
class Peers:
    """Two schedulers, and by scheduler address the executors that prefer it."""

    schedulers: tuple[Processes, Processes]
    executors: dict[str, set[str]]

    @property
    def addresses(self) -> list[str]:
        return [scheduler.address for scheduler in self.schedulers]

    async def wait_settled(self) -> None:
        """Waits until each executor is connected to the scheduler that it prefers."""
        for scheduler in self.schedulers:
            await wait_at(scheduler, self.executors[scheduler.address])

    async def busy(self) -> tuple[Processes, Processes]:
        """Waits for the request; returns the scheduler that has it, and the other one."""

        async def ask() -> tuple[bool, list[int]]:
            nums = [
                sum(e.num_running_requests for e in await each.wait_until(lambda _: True))
                for each in self.schedulers
            ]
            return any(nums), nums

        one, two = self.schedulers
        nums = await poll(ask)
        return (one, two) if nums[0] else (two, one)


async def wait_at(scheduler: Processes, executors: set[str]) -> None:
    """Waits until exactly these are connected to `scheduler`."""
    await scheduler.wait_until(lambda known: {e.address for e in known} == executors)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv(GATE, str(gate.path))
    return gate


@pytest.fixture
def peers(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    # Without a tokenizer a gateway answers nothing.
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    monkeypatch.setenv(light_executor.TOKENIZER, str(tmp_path))
    with light_processes(tmp_path / "one") as one, light_processes(tmp_path / "two") as two:
        schedulers = (one.address, two.address)
        executors: dict[str, set[str]] = {one.address: set(), two.address: set()}
        for preferred in (one.address, one.address, two.address):
            address = reserve_address()
            while ranked(schedulers, address)[0] != preferred:
                address = reserve_address()
            one.start_executor(
                f"--scheduler={','.join(schedulers)}",
                f"--advertise-address={address}",
                "--move-after-s=0.1",
                address=address,
            )
            executors[preferred].add(address)
        for scheduler in (one, two):
            scheduler.start_scheduler("--reconnect-timeout-s", "0.2", *GATED_SCHEDULER)
        yield Peers((one, two), executors)


async def library_tokens(addresses: list[str]) -> AsyncIterator[list[int]]:
    async with (
        AsyncClient(",".join(addresses), PATIENT) as client,
        aclosing(client.generate(PROMPT, PARAMS)) as events,
    ):
        async for event in events:
            if isinstance(event, Tokens):
                yield list(event.token_ids)


async def gateway_tokens(addresses: list[str]) -> AsyncIterator[list[int]]:
    async with gateway_process(*addresses) as gateway:
        await gateway.wait_ready()
        body: dict[str, object] = {
            "model": (await gateway.http.get("/v1/models")).json()["data"][0]["id"],
            "prompt": PROMPT,
            "seed": PARAMS.seed,
            "max_tokens": PARAMS.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async for event in gateway.events(body):
            for choice in event["choices"]:
                yield choice.get("token_ids") or []


@pytest.mark.parametrize("stream", [library_tokens, gateway_tokens])
async def test_stream_and_executors_move_when_their_scheduler_is_stopped(
    peers: Peers, gate: Gate, stream: Callable[[list[str]], AsyncIterator[list[int]]]
) -> None:
    await peers.wait_settled()
    gate.hold(HELD_AT)
    tokens, times_s = list[int](), list[float]()

    async def read() -> None:
        async for token_ids in stream(peers.addresses):
            tokens.extend(token_ids)
            times_s.append(time.monotonic())

    reading = asyncio.create_task(read())
    busy, other = await peers.busy()
    assert busy.scheduler is not None
    busy.scheduler.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    gate.release()
    await reading
    assert tokens == TRUTH
    first_s = next(at_s for at_s in times_s if at_s > stopped_s + LATE_S)
    assert first_s - stopped_s <= MAX_PAUSE_S
    await wait_at(other, set().union(*peers.executors.values()))


async def test_requests_are_served_soon_when_another_scheduler_is_named(
    tmp_path: Path,
) -> None:
    named = tmp_path / "schedulers"
    with light_processes(tmp_path / "one") as one, light_processes(tmp_path / "two") as two:
        named.write_text(one.address)
        for scheduler in (one, two):
            scheduler.start_scheduler("--reconnect-timeout-s", "0.2", *GATED_SCHEDULER)
        for _ in range(2):
            one.start_executor(f"--scheduler=file:{named}")
        await one.wait_until(lambda executors: len(executors) == 2)
        async with gateway_process(f"file:{named}") as gateway:
            await gateway.wait_ready()

            async def ask() -> tuple[bool, int]:
                body = {"model": "light", "prompt": PROMPT, "max_tokens": 3}
                answer = await gateway.http.post("/v1/completions", json=body)
                return answer.status_code == 200, answer.status_code

            await gateway.wait_models({"light"})
            assert one.scheduler is not None
            one.scheduler.send_signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            named.write_text(two.address)
            await poll(ask)
            assert time.monotonic() - stopped_s <= MOST_REFUSED_S


async def test_streams_continue_when_the_network_drops_all_of_a_scheduler(
    tmp_path: Path,
) -> None:
    if not await asyncio.to_thread(can_drop):
        pytest.skip("this machine allows no network namespaces, or has neither iptables nor nft")
    took_s = await asyncio.to_thread(dark_scheduler.measure, tmp_path)
    assert max(took_s.values()) <= MAX_PAUSE_S, took_s
