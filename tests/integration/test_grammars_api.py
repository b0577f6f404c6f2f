"""Tests grammars from a client to fake executors and back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from executor_service.steps import SAMPLING_FEATURES, Feature
from splitserve_client import (
    Choices,
    FinishReason,
    Generation,
    Regex,
    RequestFailed,
    SamplingParams,
)
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_runner import SlowCompiler
from tests.support.processes.fake_service import StepWatch, fake_service

EOS = 1
PROMPT = [3, 4, 5, 6, 7]
FEATURES = SAMPLING_FEATURES | {Feature.GRAMMAR}
CHOICES = Choices(("5 9 12 13", "5 9", "30"))
RULE = SamplingParams(seed=4, max_tokens=40, grammar=Regex("a rule"))


def executor(**changes: object) -> FakeExecutor:
    options = {"features": FEATURES, "eos_token_ids": (EOS,)} | changes
    return FakeExecutor(**options)  # type: ignore[arg-type]


def check(generation: Generation, params: SamplingParams) -> None:
    expected = expected_completions(PROMPT, params, eos_token_ids=[EOS])
    assert [c.token_ids for c in generation.completions] == [c.token_ids for c in expected]
    assert [c.reason for c in generation.completions] == [c.reason for c in expected]


async def test_outputs_follow_grammars_when_these_are_compiled_late() -> None:
    compiler = SlowCompiler(num_asks=5)
    wanted = [
        RULE,
        replace(RULE, n=3, num_logprobs=1),
        replace(RULE, n=1, best_of=2),
        SamplingParams(seed=1, max_tokens=20, grammar=CHOICES),
        SamplingParams(seed=2, max_tokens=2, grammar=CHOICES, num_prompt_logprobs=0),
        SamplingParams(seed=3, max_tokens=30),
    ]
    async with fake_service(executor(fault=compiler), max_num_batched_tokens=16) as service:
        tasks = [service.client.complete(PROMPT, params) for params in wanted]
        generations = await asyncio.gather(*tasks)
        await service.wait_idle()
    assert compiler.num_asked == 2 * 5
    for params, generation in zip(wanted[:-1], generations[:-1], strict=True):
        check(generation, params)
    expected = expected_completions(PROMPT, wanted[-1])
    assert generations[-1].token_ids[:5] == expected[0].token_ids[:5]
    assert generations[3].completions[0].reason is FinishReason.STOP
    assert generations[3].token_ids[-1] == EOS
    assert len(generations[4].prompt_logprobs) == len(PROMPT) - 1


async def test_output_goes_on_when_the_executor_was_killed() -> None:
    compiler = SlowCompiler(3)
    watch = StepWatch(compiler)
    only = executor(fault=watch)
    async with fake_service(only) as service:
        watch.hold(after=8)
        completing = asyncio.create_task(service.client.complete(PROMPT, RULE))
        await watch.wait_held()
        await service.kill(only, watch)
        await only.start()
        check(await completing, RULE)
    assert compiler.num_asked == 3


async def test_request_runs_where_grammars_are_applied_when_not_all_executors_do() -> None:
    plain, able = executor(features=SAMPLING_FEATURES), executor()
    async with fake_service(plain, able) as service:
        generations = await asyncio.gather(
            *(service.client.complete(PROMPT, replace(RULE, seed=seed)) for seed in range(6))
        )
    for seed, generation in enumerate(generations):
        check(generation, replace(RULE, seed=seed))
    assert plain.num_steps == 0


async def test_output_goes_on_when_the_client_resumes_it() -> None:
    (whole,) = expected_completions(PROMPT, RULE, eos_token_ids=[EOS])
    async with fake_service(executor(fault=SlowCompiler(2))) as service:
        for num_known in (1, len(whole.token_ids) // 2):
            known = whole.token_ids[:num_known]
            generation = await service.client.complete(PROMPT, RULE, resume_token_ids=known)
            assert (*known, *generation.token_ids) == whole.token_ids
        broken = [(token + 1) % 128 for token in whole.token_ids[:2]]
        with pytest.raises(RequestFailed) as caught:
            await service.client.complete(PROMPT, RULE, resume_token_ids=broken)
        assert caught.value.reason == "GRAMMAR_INVALID"
