"""What clients see of the prefix cache, and what it must not tell them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from executor_service.steps.executor_info import SAMPLING_FEATURES, Feature
from splitserve_client import Generation, SamplingParams, SchedulingParams
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.fake_service import FakeService, StepWatch, fake_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_SIZE = 4
PARAMS = SamplingParams(seed=4, max_tokens=5)
PLAIN = SchedulingParams()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[FakeService]:
    features = SAMPLING_FEATURES | {Feature.ADAPTERS}
    executor = FakeExecutor(num_device_blocks=256, features=features, fault=StepWatch())
    async with fake_service(executor) as running:
        yield running


def prompt_of(number: int, length: int = 30) -> list[int]:
    """Prompts of different numbers begin differently."""
    return [number, *((7 * number + 3 * i) % 128 for i in range(1, length))]


async def ask(
    service: FakeService,
    prompt: list[int],
    scheduling: SchedulingParams = PLAIN,
    params: SamplingParams = PARAMS,
) -> int:
    """Completes `prompt` as it must be; returns how many of its tokens were cached."""
    generation: Generation = await service.client.complete(prompt, params, scheduling=scheduling)
    truth = expected_completions(prompt, params, adapter=scheduling.adapter)
    assert generation.completions == truth
    return generation.usage.num_cached_tokens


async def test_usage_counts_cached_tokens_when_the_prompt_was_seen_before(
    service: FakeService,
) -> None:
    prompt = prompt_of(1)
    assert await ask(service, prompt) == 0
    assert await ask(service, prompt) == 28
    assert await ask(service, [*prompt[:17], 99]) == 16


async def test_last_prompt_token_is_computed_when_all_of_its_blocks_are_cached(
    service: FakeService,
) -> None:
    prompt = prompt_of(2, 32)
    assert await ask(service, prompt) == 0
    assert await ask(service, prompt) == 28


async def test_usage_counts_outputs_of_earlier_requests_when_a_conversation_goes_on(
    service: FakeService,
) -> None:
    prompt, params = prompt_of(3, 8), SamplingParams(seed=4, max_tokens=13)
    await ask(service, prompt, params=params)
    (answer,) = expected_completions(prompt, params)
    # The last token was sampled, but nothing was computed after it.
    assert await ask(service, [*prompt, *answer.token_ids, 5]) == 20


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


async def test_public_beginning_is_shared_when_both_tenants_say_so(service: FakeService) -> None:
    prompt = prompt_of(8)
    of_a = SchedulingParams(tenant="a", num_public_prefix_tokens=18)
    assert await ask(service, prompt, of_a) == 0
    assert await ask(service, prompt, of_a) == 28
    assert await ask(service, prompt, SchedulingParams(tenant="b")) == 0
    of_c = SchedulingParams(tenant="c", num_public_prefix_tokens=30)
    assert await ask(service, prompt, of_c) == 16


async def test_bypassing_request_leaves_nothing_behind_when_it_ends(service: FakeService) -> None:
    before = (await service.client.list_executors()).executors[0].num_cached_device_blocks
    prompt = prompt_of(5)
    assert await ask(service, prompt, SchedulingParams(bypass_prefix_cache=True)) == 0
    after = (await service.client.list_executors()).executors[0].num_cached_device_blocks
    assert after == before
    assert await ask(service, prompt) == 0


async def test_priorities_share_when_tenant_and_salt_are_the_same(service: FakeService) -> None:
    prompt = prompt_of(6)
    assert await ask(service, prompt, SchedulingParams(tenant="a", cache_salt="s")) == 0
    other = SchedulingParams(tenant="a", priority=-3, cache_salt="s", deadline_s=60.0)
    assert await ask(service, prompt, other) == 28


async def test_tenants_share_when_the_operator_says_so() -> None:
    async with fake_service(FakeExecutor(), share_prefixes_across_tenants=True) as service:
        prompt = prompt_of(1)
        assert await ask(service, prompt, SchedulingParams(tenant="a")) == 0
        assert await ask(service, prompt, SchedulingParams(tenant="b")) == 28


async def test_prompt_logprobs_come_from_computing_when_the_prompt_is_cached(
    service: FakeService,
) -> None:
    prompt = prompt_of(7)
    await ask(service, prompt)
    params = SamplingParams(seed=4, max_tokens=5, num_prompt_logprobs=0)
    generation = await service.client.complete(prompt, params)
    assert generation.usage.num_cached_tokens == 0
    assert [score.token_id for score in generation.prompt_logprobs] == prompt[1:]


async def test_prefix_is_computed_once_when_prompts_that_share_it_arrive_together(
    service: FakeService,
) -> None:
    watch = service.executors[0].fault
    assert isinstance(watch, StepWatch)
    shared = prompt_of(8, 40)
    prompts = [[*shared, number, 1] for number in range(10)]
    watch.hold()
    first = asyncio.create_task(ask(service, prompt_of(9)))
    await watch.wait_held()
    asking = [asyncio.create_task(ask(service, prompt)) for prompt in prompts]
    # All but those the pipeline took before it was full.
    await service.wait_for(
        lambda listed: (
            listed.executors[0].num_waiting_requests + listed.executors[0].num_running_requests
            == 11
        )
    )
    before = sum(int(step.num_new_tokens.sum()) for step in watch.steps)
    watch.release()
    await first
    num_cached = [await asked for asked in asking]
    assert sorted(num_cached) == [0] + [40] * 9
    num_computed = sum(int(step.num_new_tokens.sum()) for step in watch.steps) - before
    assert num_computed <= 40 + 10 * (2 + 5) + 5


async def test_blocks_are_found_in_the_host_pool_when_the_device_needed_their_room() -> None:
    executor = FakeExecutor(num_device_blocks=24, num_host_blocks=64)
    async with fake_service(executor) as service:
        prompts = [prompt_of(number, 41) for number in range(6)]
        assert [await ask(service, prompt) for prompt in prompts] == [0] * 6
        (state,) = (await service.client.list_executors()).executors
        assert state.num_cached_device_blocks <= 24
        assert await ask(service, prompts[0]) == 40
        await service.wait_idle()


async def test_nothing_is_cached_when_prefix_caching_is_off() -> None:
    async with fake_service(FakeExecutor(), no_prefix_caching=True) as service:
        prompt = prompt_of(1)
        assert [await ask(service, prompt) for _ in range(2)] == [0, 0]
        (state,) = (await service.client.list_executors()).executors
        assert state.num_cached_device_blocks == 0
