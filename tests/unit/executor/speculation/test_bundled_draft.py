"""The draft that comes with the bundled model guesses most of what that says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from executor_service.backends.choose import choose_compute
from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.engine_loader import BUNDLED_DIRECTORY
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.speculation.load_draft import BUNDLED_DRAFT_DIRECTORY, load_draft
from executor_service.speculation.speculating_runner import SpeculatingRunner
from executor_service.steps.sampling_params import SamplingParams
from executor_service.steps.step import PendingStep, Runner, StepInput, execute_step
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE = 16
PROMPT = "<|begin|><|user|>Tell me a story about a fox.<|end|><|assistant|>"
END_TOKEN_ID = 2
MAX_NUM_TOKENS = 300
TABLE = list(range(1, 30))


@dataclass
class _CountedRunner:
    """A runner, and how many passes it made. Time is these: guesses cost nothing."""

    runner: ModelRunner
    num_passes: int = 0

    def begin(self, step: StepInput) -> PendingStep | None:
        most = 0 if step.num_run_on_tokens is None else int(step.num_run_on_tokens.max())
        self.num_passes += 1 + most
        return self.runner.begin(step)

    def __call__(self) -> float:
        return float(self.num_passes)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_bundled_draft_saves_more_than_half_of_the_passes_of_a_story(temperature: float) -> None:
    model = ModelConfig(str(BUNDLED_DIRECTORY), dtype="float32")
    compute = choose_compute(lambda: load_model(model), "auto", BLOCK_SIZE)
    draft = load_draft("bundled", compute.loaded, "auto", BLOCK_SIZE)
    pools = CacheConfig(BLOCK_SIZE, 40, 0, more_layers=draft.loaded.layers)
    alone = build_runner(compute.loaded, pools, compute.make_model, compute.draw)
    tokenizer = Tokenizer.from_file(str(BUNDLED_DIRECTORY / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    params = SamplingParams(temperature=temperature, stop_token_ids=frozenset({END_TOKEN_ID}))
    expected, num_passes = _tell(_CountedRunner(alone), prompt, params)
    counted = _CountedRunner(alone)
    proposer = draft.proposer(alone.cache, compute.loaded, 512)
    tokens, fewer = _tell(counted, prompt, params, SpeculatingRunner(counted, proposer, counted))
    assert tokens == expected
    assert len(tokens) > 40
    assert fewer < num_passes / 2


def _tell(
    counted: _CountedRunner, prompt: list[int], params: SamplingParams, by: Runner | None = None
) -> tuple[list[int], int]:
    """What follows `prompt`, and how many passes that took; `by`: None for `counted`."""
    tokens, num_computed = list(prompt), 0
    while len(tokens) < MAX_NUM_TOKENS and tokens[-1] != END_TOKEN_ID:
        row = Row(tokens[num_computed:], num_computed, TABLE, len(prompt), params=params, seed=4)
        step = replace(make_step([row]), num_run_on_tokens=np.array([7], np.int32))
        sampled = execute_step(by or counted, step).token_ids_of(0)
        num_computed = len(tokens) + len(sampled) - 1
        tokens += sampled
    return tokens[len(prompt) :], counted.num_passes


def test_bundled_draft_is_small() -> None:
    num_bytes = sum(path.stat().st_size for path in BUNDLED_DRAFT_DIRECTORY.iterdir())
    assert num_bytes < 700_000
