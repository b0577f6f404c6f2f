"""Tests connections that break while several sequences are streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import pytest
import pytest_asyncio

from splitserve_client import (
    AsyncClient,
    BeamSearch,
    ClientConfig,
    Completion,
    Finish,
    RetryPolicy,
    SamplingParams,
    Tokens,
    collect_generation,
)
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.cut_proxy import CutProxy, cut_proxy
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 9, 8, 7, 1]
THREE = SamplingParams(seed=11, max_tokens=60, n=3)
# Its sequences end at different times.
UNEVEN = replace(THREE, stop_token_ids=(5, 37, 69, 101))
CONFIG = ClientConfig(retry=RetryPolicy(first_delay_s=0.01, max_delay_s=0.05))

Ask: TypeAlias = Callable[[list[int], SamplingParams], AsyncIterator[Tokens | Finish]]


@dataclass(frozen=True, slots=True)
class Running:
    """A service, and a client whose connection to it can be cut."""

    service: FakeService
    watch: StepWatch
    proxy: CutProxy
    client: AsyncClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    watch = StepWatch()
    async with (
        fake_service(FakeExecutor(num_device_blocks=256, fault=watch)) as service,
        cut_proxy(service.scheduler.address) as proxy,
        AsyncClient(proxy.address, CONFIG) as client,
    ):
        yield Running(service, watch, proxy, client)


@pytest_asyncio.fixture(loop_scope="module", params=["generate", "session"])
async def ask(request: pytest.FixtureRequest, running: Running) -> AsyncIterator[Ask]:
    if request.param == "generate":
        yield running.client.generate
    else:
        async with running.client.session() as session:
            yield session.submit


async def complete_with_cuts(
    running: Running, ask: Ask, params: SamplingParams, steps: list[int]
) -> tuple[tuple[Completion, ...], int]:
    """The completions, and how often something was cut: each time so many steps later."""
    before = running.proxy.num_cuts
    collecting = asyncio.create_task(
        collect_generation(ask(PROMPT, params), params.num_completions)
    )
    for num_steps in steps:
        running.watch.hold(after=num_steps)
        await running.watch.wait_held()
        running.proxy.cut()
        running.watch.release()
    generation = await collecting
    await running.service.wait_idle()
    return generation.completions, running.proxy.num_cuts - before


@pytest.mark.parametrize("params", [THREE, UNEVEN], ids=["even", "uneven"])
async def test_sequences_go_on_when_the_connection_breaks(
    running: Running, ask: Ask, params: SamplingParams
) -> None:
    completions, num_cuts = await complete_with_cuts(running, ask, params, [9, 6, 20])
    assert num_cuts >= 3
    assert completions == expected_completions(PROMPT, params)


@pytest.mark.parametrize(
    "params",
    [
        replace(UNEVEN, n=2, best_of=5),
        replace(THREE, max_tokens=20, beam_search=BeamSearch(4)),
    ],
    ids=["best_of", "beam search"],
)
async def test_request_starts_over_when_the_best_are_chosen(
    running: Running, ask: Ask, params: SamplingParams
) -> None:
    completions, num_cuts = await complete_with_cuts(running, ask, params, [10, 5])
    assert num_cuts >= 2
    assert completions == expected_completions(PROMPT, params)


async def test_resumed_sequences_bring_what_is_missing(
    running: Running,
) -> None:
    truth = expected_completions(PROMPT, UNEVEN)
    lengths = (7, len(truth[1].token_ids), 0)
    received = {i: truth[i].token_ids[:length] for i, length in enumerate(lengths) if length}
    generation = await running.client.complete(PROMPT, UNEVEN, resume_token_ids=received)
    for completion, expected, length in zip(generation.completions, truth, lengths, strict=True):
        assert completion.token_ids == expected.token_ids[length:]
        assert (completion.reason, completion.stop_token_id) == (
            expected.reason,
            expected.stop_token_id,
        )
    assert generation.usage.num_prompt_tokens == len(PROMPT)
    assert generation.usage.num_output_tokens == sum(len(c.token_ids) for c in truth)
