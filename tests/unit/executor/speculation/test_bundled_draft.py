"""The draft that comes with the bundled model guesses most of what that says."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from executor_service.backends.choose import choose_compute
from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.engine_loader import BUNDLED_DIRECTORY
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.speculation.load_draft import BUNDLED_DRAFT_DIRECTORY, load_draft
from executor_service.speculation.speculating_runner import SpeculatingRunner
from executor_service.steps.sampling_params import SamplingParams
from tests.support.steps.counted_runner import CountedRunner, tell

BLOCK_SIZE = 16
PROMPT = "<|begin|><|user|>Tell me a story about a fox.<|end|><|assistant|>"
END_TOKEN_ID = 2
MAX_NUM_TOKENS = 300
TABLE = list(range(1, 30))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_bundled_draft_saves_more_than_half_of_the_passes_of_a_story(temperature: float) -> None:
    model = ModelConfig(str(BUNDLED_DIRECTORY), dtype="float32")
    compute = choose_compute(lambda: load_model(model), "auto", BLOCK_SIZE)
    draft = load_draft("bundled", compute, "auto", BLOCK_SIZE)
    pools = CacheConfig(BLOCK_SIZE, 40, 0, more_layers=draft.layers)
    runner = build_runner(compute.loaded, pools, compute.make_model, compute.draw)
    tokenizer = Tokenizer.from_file(str(BUNDLED_DIRECTORY / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    params = SamplingParams(temperature=temperature, stop_token_ids=frozenset({END_TOKEN_ID}))
    alone, guessed_for = CountedRunner(runner), CountedRunner(runner)
    expected = tell(alone, prompt, params, TABLE, MAX_NUM_TOKENS)
    proposer = draft.proposer(runner, compute.loaded, 512)
    serving = SpeculatingRunner(guessed_for, proposer, guessed_for)
    assert tell(serving, prompt, params, TABLE, MAX_NUM_TOKENS) == expected
    assert len(expected) > 40
    assert guessed_for.num_passes < alone.num_passes / 2


def test_bundled_draft_is_small() -> None:
    num_bytes = sum(path.stat().st_size for path in BUNDLED_DRAFT_DIRECTORY.iterdir())
    assert num_bytes < 700_000
