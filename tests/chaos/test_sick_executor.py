"""An executor that lives and computes nothing right: no request fails for it, and it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from splitserve_client import AsyncClient, Readiness, RequestFailed, SamplingParams
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.light_executor import SICKNESS
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import LightProcesses

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

SAMPLED = SamplingParams(max_tokens=20)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[LightProcesses]:
    running = LightProcesses(tmp_path / "log")
    try:
        running.start_scheduler("--step-timeout-s", "30")
        yield running
    finally:
        running.kill_all()


def start_sick_one(
    running: LightProcesses, kind: str, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """An executor that is sick as long as `marker` is there; returns its address."""
    monkeypatch.setenv(SICKNESS, f"{kind}:{marker}")
    marker.touch()
    address = running.start_executor()
    monkeypatch.delenv(SICKNESS)
    return address


@pytest.mark.parametrize(("kind", "num_requests"), [("fails", 37), ("not_a_number", 86)])
async def test_all_requests_succeed_and_the_executor_is_taken_back_when_one_of_three_is_sick(
    kind: str,
    num_requests: int,
    running: LightProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sickness = tmp_path / "sickness"
    sick = start_sick_one(running, kind, sickness, monkeypatch)
    await running.run_executors(3)
    requests = [
        ([9, 10, number % 100], replace(SAMPLED, seed=number, n=1 + number % 5 // 4))
        for number in range(1, num_requests + 1)
    ]
    expected = [expected_completions(prompt, params) for prompt, params in requests]
    async with AsyncClient(running.address, PATIENT) as client:
        answers = await asyncio.gather(*(client.complete(*request) for request in requests))
        assert [answer.completions for answer in answers] == expected

        await running.wait_until(
            lambda executors: [e.address for e in executors if e.is_withdrawn] == [sick]
        )
        assert f"executor_withdrawn address={sick}" in running.log_text()
        assert (await client.get_model()).readiness is Readiness.READY
        sickness.unlink()
        await running.wait_until(
            lambda executors: len(executors) == 3 and not any(e.is_withdrawn for e in executors)
        )
        answers = await asyncio.gather(*(client.complete(*request) for request in requests))
        assert [answer.completions for answer in answers] == expected
    assert "violation" not in running.log_text()


@pytest.mark.parametrize("kind", ["fails", "not_a_number"])
async def test_requests_end_by_name_and_readiness_says_why_when_the_only_executor_is_sick(
    kind: str, running: LightProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sickness = tmp_path / "sickness"
    start_sick_one(running, kind, sickness, monkeypatch)
    await running.run_executors(1)
    async with AsyncClient(running.address, PATIENT) as client:
        for number in range(5):
            with pytest.raises(RequestFailed) as caught:
                await client.complete([9, 10, number], SAMPLED)
            assert caught.value.reason in ("INVALID_LOGITS", "EXECUTOR_LOST_REPEATEDLY")
        await wait_readiness(client, Readiness.EXECUTORS_FAILING)
        (executor,) = (await client.list_executors()).executors
        assert (executor.is_failing, executor.is_withdrawn) == (True, False)

        sickness.unlink()
        await wait_readiness(client, Readiness.READY)
        await client.complete([9, 10], SAMPLED)


async def wait_readiness(client: AsyncClient, readiness: Readiness) -> None:
    async def ask() -> tuple[bool, object]:
        model = await client.get_model()
        return model.readiness is readiness, model.readiness

    await poll(ask, PATIENCE_S)
