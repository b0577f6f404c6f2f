"""What an EAGLE-3 head has to be for a model, and what it brings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_service.backends.choose import choose_compute
from executor_service.backends.compute import Compute
from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import load_engine
from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.speculation.load_draft import load_draft
from executor_service.speculation.speculating_runner import SpeculatingRunner
from executor_service.steps.sampling_params import SamplingParams
from executor_service.steps.step import BlockMoves, execute_step
from splitserve_options import options
from tests.support.models.tiny_heads import make_tiny_head, make_trained_head
from tests.support.models.tiny_models import SLIDING_WINDOW, VOCAB_SIZE, make_tiny_model
from tests.support.steps.counted_runner import CountedRunner, tell
from tests.support.steps.run_driver import RunningSequence, run
from tests.support.steps.step_driver import GREEDY, Row, make_step

pytestmark = pytest.mark.cases(4)

BLOCK_SIZE = 8
NUM_BLOCKS = 32
NUM_TOKENS = 80
PROMPTS = np.random.default_rng(7).integers(3, VOCAB_SIZE, (8, 12)).tolist()
RANDOM = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trained_head(tmp_path_factory.mktemp("head"), model, PROMPTS, 68)


def compute_of(model: Path, backend: str = "torch") -> Compute:
    return choose_compute(lambda: load_model(ModelConfig(str(model))), backend, BLOCK_SIZE)


class _Served:
    """A model with a head, or without."""

    def __init__(self, compute: Compute, head: Path | None) -> None:
        draft = None if head is None else load_draft(str(head), compute, "torch", BLOCK_SIZE)
        layers = () if draft is None else draft.layers
        pools = CacheConfig(BLOCK_SIZE, NUM_BLOCKS, NUM_BLOCKS, more_layers=layers)
        self.runner = build_runner(compute.loaded, pools, compute.make_model, compute.draw)
        self.counted = CountedRunner(self.runner)
        self.serving: Any = self.counted
        if draft is not None:
            proposer = draft.proposer(self.runner, compute.loaded, 512)
            self.serving = SpeculatingRunner(self.counted, proposer, self.counted)


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_rows_get_the_tokens_of_the_model_with_a_head(
    model: Path,
    trained: Path,
    tmp_path: Path,
    backend: str,
    params: SamplingParams,
    is_trained: bool,
) -> None:
    head = trained if is_trained else make_tiny_head(tmp_path)
    outputs = []
    for with_head in (False, True):
        served = _Served(compute_of(model, backend), head if with_head else None)
        sequences = [
            RunningSequence(prompt, 40, params, number, list(range(8 * number, 8 * number + 8)))
            for number, prompt in enumerate(PROMPTS[:3])
        ]
        run(served.serving, sequences, random.Random(2))
        outputs.append([each.output for each in sequences])
    assert outputs[0] == outputs[1]


def test_model_makes_fewer_passes_when_the_head_was_trained_for_it(
    model: Path, trained: Path, tmp_path: Path
) -> None:
    passes = {}
    heads = {"none": None, "random": make_tiny_head(tmp_path), "trained": trained}
    for name, head in heads.items():
        served = _Served(compute_of(model), head)
        for prompt in PROMPTS[:2]:
            tell(served.serving, prompt, GREEDY, list(range(10)), NUM_TOKENS)
        passes[name] = served.counted.num_passes
    assert passes["trained"] < 0.6 * passes["none"]
    assert passes["trained"] < 0.6 * passes["random"]


def test_head_goes_on_from_other_blocks_when_a_row_was_swapped(model: Path, trained: Path) -> None:
    """Keys, values and states of the head are moved with those of the model."""
    served = _Served(compute_of(model), trained)
    whole = tell(served.serving, PROMPTS[0], GREEDY, list(range(10)), NUM_TOKENS)
    served = _Served(compute_of(model), trained)
    half = tell(served.serving, PROMPTS[0], GREEDY, list(range(10)), 44)
    moved = np.arange(10, dtype=np.int32)
    out, back = BlockMoves(moved, moved + 5), BlockMoves(moved + 5, moved + 12)
    execute_step(served.serving, make_step([], swap_out=out, step_id=2))
    served.runner.cache.key_pools[0][:10] = 0
    execute_step(served.serving, make_step([], swap_in=back, step_id=3))
    sequence = RunningSequence(
        PROMPTS[0], NUM_TOKENS - 12, seed=4, block_table=list(range(12, 22)), output=half
    )
    sequence.num_computed = len(sequence.tokens) - 1
    before = served.counted.num_passes
    run(served.serving, [sequence], random.Random(0), most=7)
    assert sequence.output == whole
    assert served.counted.num_passes - before < 24


@pytest.mark.parametrize("every", [1, 5, 13])
def test_head_looks_no_further_back_than_the_model_keeps_blocks(tmp_path: Path, every: int) -> None:
    """The table's entries behind the window are those of a block that is full of NaN.

    `every`: so many tokens come before there are guesses again.
    """
    windowed = compute_of(make_tiny_model("mistral", tmp_path / "model", seed=1))
    draft = load_draft(str(make_tiny_head(tmp_path / "head")), windowed, "torch", BLOCK_SIZE)
    pools = CacheConfig(BLOCK_SIZE, NUM_BLOCKS, 0, more_layers=draft.layers)
    runner = build_runner(windowed.loaded, pools, windowed.make_model, windowed.draw)
    proposer = draft.proposer(runner, windowed.loaded, 512)
    spoiled = NUM_BLOCKS - 1
    # Not the states of the head, of which it would write what is NaN again.
    all_pools = [*runner.cache.key_pools[:-1], *runner.cache.value_pools[:-1]]
    for pool in all_pools:
        pool[spoiled] = torch.nan
    tokens, wanted = PROMPTS[0] * 8, np.array([2], np.int32)
    num_guesses = []
    for position in range(len(tokens)):
        num_behind = max(0, position - SLIDING_WINDOW + 1) // BLOCK_SIZE
        table = [spoiled] * num_behind + list(range(num_behind, 16))
        step = make_step([Row([tokens[position]], position, table, 1)])
        proposer.catch_up()
        if position and position % every == 0:
            proposer.prepare(step, wanted)
            num_guesses.append(len(proposer.propose(step, wanted).token_ids))
        runner.execute(step)
        proposer.follow(step, None)
    assert num_guesses == [2] * ((len(tokens) - 1) // every)
    assert all(bool(pool[spoiled].isnan().all()) for pool in all_pools)


def _changed(directory: Path, **settings: Any) -> Path:  # noqa: ANN401
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return directory


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"target_hidden_size": 65}, "reads states of 65 numbers, .* has 64"),
        ({"vocab_size": 200}, f"has 200 tokens, .* has {VOCAB_SIZE}"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
            r"reads layers \[0, 1, 3\], .* has 2",
        ),
    ],
)
def test_head_is_refused_before_its_weights_are_read_when_it_does_not_fit(
    model: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    head = _changed(make_tiny_head(tmp_path), **settings)
    # These weights would be refused, too, if somebody looked.
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"fc.weight", b"fc.wEight"))
    with pytest.raises(ModelUnsupported, match=reason):
        load_draft(str(head), compute_of(model), "torch", BLOCK_SIZE)


def test_head_is_refused_when_its_weights_are_broken(model: Path, tmp_path: Path) -> None:
    head = make_tiny_head(tmp_path)
    (head / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelUnreadable, match=r"model\.safetensors"):
        load_draft(str(head), compute_of(model), "torch", BLOCK_SIZE)


def test_engine_says_that_there_is_a_head(model: Path, trained: Path) -> None:
    values = options.parse(
        "executor",
        [
            f"--model={model}",
            f"--draft-model={trained}",
            "--num-device-blocks=8",
            "--attention-backend=torch",
            "--device=cpu",
        ],
        {},
    )
    engine = load_engine(ExecutorConfig.from_options(values), executor_epoch=1)
    assert f"{trained} (EAGLE-3)" in engine.compute
