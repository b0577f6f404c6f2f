"""Tests what clients see of the prefix cache."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from executor_service.steps import SAMPLING_FEATURES, Feature
from splitserve_client import Generation, SamplingParams, SchedulingParams
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.processes.fake_service import FakeService, fake_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMS = SamplingParams(seed=4, max_tokens=5)
PLAIN = SchedulingParams()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[FakeService]:
    features = SAMPLING_FEATURES | {Feature.ADAPTERS}
    executor = FakeExecutor(num_device_blocks=256, features=features)
    async with fake_service(executor) as running:
        yield running


def prompt_of(number: int, length: int = 30) -> list[int]:
    """Prompts of different numbers begin differently."""
    return [number, *((7 * number + 3 * i) % 128 for i in range(1, length))]


async def ask(
    service: FakeService,
    prompt: list[int],
    scheduling: SchedulingParams = PLAIN,
) -> int:
    """Completes `prompt` as it must be; returns how many of its tokens were cached."""
    generation: Generation = await service.client.complete(prompt, PARAMS, scheduling=scheduling)
    truth = expected_completions(prompt, PARAMS, adapter=scheduling.adapter)
    assert generation.completions == truth
    return generation.usage.num_cached_tokens


async def test_usage_counts_cached_tokens_of_earlier_prompts(
    service: FakeService,
) -> None:
    prompt = prompt_of(1)
    assert await ask(service, prompt) == 0
    assert await ask(service, prompt) == 28
    assert await ask(service, [*prompt[:17], 99]) == 16


@pytest.mark.parametrize(
    "other",
    [
        SchedulingParams(bypass_prefix_cache=True),
        SchedulingParams(cache_salt="pepper"),
        SchedulingParams(adapter="style"),
        SchedulingParams(adapter="style", cache_salt="pepper"),
        SchedulingParams(tenant="somebody else"),
    ],
    ids=["bypass", "salt", "adapter", "both", "tenant"],
)
async def test_nothing_is_shared_when_the_context_differs(
    service: FakeService, other: SchedulingParams
) -> None:
    prompt = [*prompt_of(4), len(other.cache_salt), len(other.adapter)]
    prompt[0] = 20 + len(other.cache_salt) + 2 * len(other.adapter) + 3 * len(other.tenant)
    assert await ask(service, prompt) == 0
    assert await ask(service, prompt, other) == 0
    assert await ask(service, prompt) == 28
    # Within a context it is found again.
    assert await ask(service, prompt, other) == (0 if other.bypass_prefix_cache else 28)


async def test_public_prefix_is_shared_between_tenants(service: FakeService) -> None:
    prompt = prompt_of(8)
    of_a = SchedulingParams(tenant="a", num_public_prefix_tokens=18)
    assert await ask(service, prompt, of_a) == 0
    assert await ask(service, prompt, of_a) == 28
    assert await ask(service, prompt, SchedulingParams(tenant="b")) == 0
    of_c = SchedulingParams(tenant="c", num_public_prefix_tokens=30)
    assert await ask(service, prompt, of_c) == 16


async def test_tenants_share_when_the_operator_says_so() -> None:
    async with fake_service(FakeExecutor(), share_prefixes_across_tenants=True) as service:
        prompt = prompt_of(1)
        assert await ask(service, prompt, SchedulingParams(tenant="a")) == 0
        assert await ask(service, prompt, SchedulingParams(tenant="b")) == 28


async def test_nothing_is_cached_when_prefix_caching_is_off() -> None:
    async with fake_service(FakeExecutor(), no_prefix_caching=True) as service:
        prompt = prompt_of(1)
        assert [await ask(service, prompt) for _ in range(2)] == [0, 0]
        (state,) = (await service.client.list_executors()).executors
        assert state.num_cached_device_blocks == 0
