"""`--deterministic`: scores are the same bits alone and under pressure, whatever happens to a row.

Alone means: one request at a time, its prompt in one step, a pool that holds all of it. Under
pressure, rows share steps and prompts are cut; requests are swapped out or computed again all the
time, and find each other's blocks in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from executor_service.backends import AUTO, Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from scheduler_service.scheduler.values import PreemptionMode, StepEvents
from splitserve_kernels.cpu import NativeLibrary
from tests.support.models.model_pair import ModelPair, ObservedEngine, make_request
from tests.support.models.tiny_models import make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_SIZE = 8
PROMPT_LENS = (23, 5, 40, 17, 31, 9)
NUM_OUTPUT_TOKENS = 16
Scores = dict[str, list[tuple[int, float]]]


class _ScoringEngine(ObservedEngine):
    """Keeps the score of every token that is delivered."""

    def _deliver(self, events: StepEvents) -> StepEvents:
        for event in events.tokens:
            assert event.scored is not None
            name = event.sequence.request.request_id
            self.scores.setdefault(name, []).append((event.token_id, event.scored.logprob))
        return super()._deliver(events)

    scores: Scores


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def compute(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    native_library: NativeLibrary,
) -> Compute:
    directory: Path = make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=3)
    dtype = "bfloat16" if request.param == "int8" else request.param
    return choose_compute(
        lambda: load_model(ModelConfig(str(directory), dtype=dtype)),
        AUTO,
        BLOCK_SIZE,
        is_deterministic=True,
        is_int8=request.param == "int8",
    )


def _engine(pair: ModelPair, compute: Compute, **options: object) -> _ScoringEngine:
    engine = _ScoringEngine(pair, compute=compute, block_size=BLOCK_SIZE, **options)  # type: ignore[arg-type]
    engine.scores = {}
    return engine


def _serve(engine: _ScoringEngine, prompts: list[list[int]], together: bool) -> Scores:
    requests = [
        # Half of them draw, and what is drawn is what is attended to next.
        make_request(
            index,
            prompt,
            seed=index,
            temperature=0.8 * (index % 2),
            max_tokens=NUM_OUTPUT_TOKENS,
            num_logprobs=0,
        )
        for index, prompt in enumerate(prompts)
    ]
    for batch in [requests] if together else [[request] for request in requests]:
        engine.serve(*batch)
    return engine.scores


@pytest.mark.cases(4)
@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_scores_are_the_same_bits_under_pressure(
    compute: Compute, pair_of: Callable[..., ModelPair], mode: PreemptionMode
) -> None:
    pair = pair_of("llama")
    prompts = pair.prompts(PROMPT_LENS)
    prompts[3] = prompts[2][:24] + prompts[3]
    alone = _engine(pair, compute, num_device_blocks=64, prefix_caching=False)
    expected = _serve(alone, prompts, together=False)
    pressed = _engine(
        pair,
        compute,
        num_device_blocks=10,
        num_host_blocks=40,
        max_num_batched_tokens=20,
        preempt_at=range(3, 200, 4),
        preemption_mode=mode,
    )

    assert _serve(pressed, prompts, together=True) == expected

    assert alone.core.num_preemptions == 0
    assert all(len(scores) == NUM_OUTPUT_TOKENS for scores in expected.values())
    preempted = (pressed.core.num_swapped_out, pressed.core.num_recomputed)
    assert preempted[0 if mode is PreemptionMode.SWAP else 1] >= 6
