"""An executor that hangs in a step, beside one that does not. Nothing is timed."""

from __future__ import annotations

import asyncio

from splitserve_client import SamplingParams
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.fake_service import StepWatch, fake_service

PROMPT = [1, 2, 3, 4, 5]
PARAMS = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
# More than it takes to know what steps take.
NUM_STEPS = 20


async def test_stream_goes_on_elsewhere_when_a_step_hangs_and_the_executor_joins_again() -> None:
    watches = [StepWatch(), StepWatch()]
    executors = [FakeExecutor(fault=watch) for watch in watches]
    # On a busy machine a step may take longer than that now and then: it fails nobody.
    options = {"step_patience_s": 0.2, "step_timeout_s": 3600, "max_executor_losses": 64}
    async with fake_service(*executors, **options) as service:
        for watch in watches:
            watch.hold(after=NUM_STEPS)
        completing = asyncio.create_task(service.client.complete(PROMPT, PARAMS))
        held = [asyncio.ensure_future(watch.wait_held()) for watch in watches]
        await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        hung, other = (0, 1) if held[0].done() else (1, 0)
        held[other].cancel()
        watches[other].release()

        assert (await completing).completions == expected_completions(PROMPT, PARAMS)

        assert len(watches[hung].steps) == NUM_STEPS + 1
        watches[hung].release()
        await service.wait_connected(2)
        later = await asyncio.gather(
            *(service.client.complete([number], PARAMS) for number in range(6))
        )
        assert [generation.completions for generation in later] == [
            expected_completions([number], PARAMS) for number in range(6)
        ]
