"""A scheduler is stopped as by a debugger: its connections stay. Real processes.

How soon each hop finds out is measured in virtual time (`tests/simulation/test_silent_peers.py`).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from splitserve_client import AsyncClient, SamplingParams, Tokens
from splitserve_rpc.server import KEEPALIVE_S
from tests.chaos.test_several_schedulers import SCHEDULER, Load, Peers, gate, peers
from tests.contract.stranger.process import poll
from tests.support.chaos import dark_scheduler
from tests.support.chaos.dark_connection import can_drop
from tests.support.fakes.fake_truth import expected_completions
from tests.support.models.tiny_tokenizers import byte_level
from tests.support.processes import light_executor
from tests.support.processes.gate import Gate
from tests.support.processes.gateway_process import gateway_process
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import Processes, light_processes

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

__all__ = ["gate", "peers"]

# So far the stream comes until its scheduler is stopped.
HELD_AT = 40
# What was on its way then is there.
LATE_S = 1.0
# Until requests are served when the only scheduler is stopped and another one named: 62 s once.
MOST_REFUSED_S = 20.0
PARAMS = SamplingParams(seed=5, max_tokens=200, ignore_eos=True)
PROMPT = [5, 6, 7]
TRUTH = list(expected_completions(PROMPT, PARAMS)[0].token_ids)
# 4.8 s on a machine with nothing else to do; gRPC alone would not know before its first ping.
MOST_S = KEEPALIVE_S + 2.0


@pytest.fixture(autouse=True)
def _tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors have one, without which a gateway answers nothing."""
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    monkeypatch.setenv(light_executor.TOKENIZER, str(tmp_path))


async def busy_scheduler(peers: Peers) -> Processes:
    """The one that has the request, once that has begun."""

    async def has_begun() -> tuple[bool, list[Load]]:
        loads = await peers.loads()
        return any(load.num_requests for load in loads), loads

    return max(await poll(has_begun), key=lambda load: load.num_requests).scheduler


class Reader:
    """Reads a stream whose scheduler is stopped in its middle."""

    def __init__(self, tokens: AsyncIterator[list[int]]) -> None:
        self.got: list[int] = []
        self._times_s: list[float] = []
        self._reading = asyncio.create_task(self._read(tokens))

    async def _read(self, tokens: AsyncIterator[list[int]]) -> None:
        async for token_ids in tokens:
            self.got += token_ids
            self._times_s.append(time.monotonic())

    async def end(self, peers: Peers, gate: Gate) -> tuple[Processes, float]:
        """Stops the scheduler for good once the stream is held by `gate`.

        Returns the other one, and after how many seconds the stream went on.
        """
        busy = await busy_scheduler(peers)
        assert busy.scheduler is not None
        busy.scheduler.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        gate.release()
        await self._reading
        assert self.got == TRUTH
        first_s = next(at_s for at_s in self._times_s if at_s > stopped_s + LATE_S)
        return peers.two if busy is peers.one else peers.one, first_s - stopped_s


async def test_stream_of_the_library_and_executors_go_on_while_their_scheduler_is_stopped(
    peers: Peers, gate: Gate
) -> None:
    await peers.wait_settled()
    gate.hold(HELD_AT)
    async with AsyncClient(peers.addresses, PATIENT) as client:

        async def tokens() -> AsyncIterator[list[int]]:
            async with aclosing(client.generate(PROMPT, PARAMS)) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        yield list(event.token_ids)

        other, pause_s = await Reader(tokens()).end(peers, gate)
        assert pause_s <= MOST_S
        await peers.wait_at(other, set().union(*peers.executors.values()))


async def test_stream_of_a_gateway_goes_on_while_its_scheduler_is_stopped(
    peers: Peers, gate: Gate
) -> None:
    await peers.wait_settled()
    async with gateway_process(peers.one.address, peers.two.address) as gateway:
        await gateway.wait_ready()
        gate.hold(HELD_AT)
        body: dict[str, object] = {
            "model": (await gateway.http.get("/v1/models")).json()["data"][0]["id"],
            "prompt": PROMPT,
            "seed": PARAMS.seed,
            "max_tokens": PARAMS.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }

        async def tokens() -> AsyncIterator[list[int]]:
            async for event in gateway.events(body):
                for choice in event["choices"]:
                    yield choice.get("token_ids") or []

        _, pause_s = await Reader(tokens()).end(peers, gate)
        assert pause_s <= MOST_S


async def test_requests_are_served_soon_when_another_scheduler_is_named_for_one_that_is_stopped(
    tmp_path: Path,
) -> None:
    named = tmp_path / "schedulers"
    with light_processes(tmp_path / "one") as one, light_processes(tmp_path / "two") as two:
        named.write_text(one.address)
        for scheduler in (one, two):
            scheduler.start_scheduler(*SCHEDULER)
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


async def test_streams_and_executors_go_on_when_the_network_of_their_scheduler_drops_everything(
    tmp_path: Path,
) -> None:
    if not await asyncio.to_thread(can_drop):
        pytest.skip("this machine allows no network namespaces, or has neither iptables nor nft")
    took_s = await asyncio.to_thread(dark_scheduler.measure, tmp_path)
    assert max(took_s.values()) <= MOST_S, took_s
