"""Draft models and EAGLE-3 heads: which fit a model, and that its tokens stay the same."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from executor_service.backends import Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.engine_loader import BUNDLED_DIRECTORY, LoadedEngine
from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.model import LoadedModel, torch_model
from executor_service.runner import CacheConfig, ModelRunner, build_runner
from executor_service.speculation import (
    BUNDLED_DRAFT_DIRECTORY,
    SpeculatingRunner,
    check_draft,
    load_draft,
)
from executor_service.steps import (
    BlockMoves,
    PendingStep,
    Runner,
    SamplingParams,
    StepInput,
    execute_step,
)
from tests.support.models.tiny_heads import make_tiny_head, make_trained_head
from tests.support.models.tiny_models import (
    SLIDING_WINDOW,
    VOCAB_SIZE,
    load_engine_of,
    make_tiny_model,
)
from tests.support.steps.step_driver import GREEDY, DrivenSequence, Row, drive_runs, make_step


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = {"model": ("llama", 1), "draft": ("qwen3", 2), "narrow": ("mistral", 3)}
    return {
        name: make_tiny_model(kind, tmp_path_factory.mktemp(name), seed=seed)
        for name, (kind, seed) in kinds.items()
    }


@pytest.fixture(scope="module")
def loaded_models(models: dict[str, Path]) -> dict[str, LoadedModel]:
    return {name: load_model(ModelConfig(str(path))) for name, path in models.items()}


def load(model: Path, *flags: str) -> LoadedEngine:
    common = ("--num-device-blocks=64", "--attention-backend=torch", "--device=cpu")
    return load_engine_of(f"--model={model}", *common, *flags)


def test_draft_has_its_layers_in_the_blocks_of_the_model(models: dict[str, Path]) -> None:
    alone = [load(models[name]).info.block_bytes for name in ("model", "draft")]
    both = load(models["model"], f"--draft-model={models['draft']}")
    assert both.info.block_bytes == sum(alone)
    assert str(models["draft"]) in both.compute


@pytest.mark.parametrize("draft", ["draft", "model"])
def test_engine_brings_the_same_tokens_with_a_draft(models: dict[str, Path], draft: str) -> None:
    outputs = []
    for flags in ((), (f"--draft-model={models[draft]}",)):
        engine = load(models["model"], *flags)
        rng = np.random.default_rng(5)
        sequences = [
            DrivenSequence(
                rng.integers(3, VOCAB_SIZE, 20).tolist(),
                24,
                seed=number,
                block_table=[4 * number + index for index in range(4)],
            )
            for number in range(2)
        ]
        drive_runs(engine.runner, sequences, random.Random(3))
        outputs.append([each.output for each in sequences])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("draft", "changes", "target", "reason"),
    [
        ("draft", {"vocab_size": 200}, "model", f"200 tokens, .* has {VOCAB_SIZE}"),
        ("draft", {}, "narrow", "attends to more than the 12 tokens"),
        ("draft", {"kv_dtype": torch.bfloat16}, "model", "KV cache is bfloat16"),
        ("narrow", {}, "narrow", None),
    ],
    ids=["other tokens", "attends too far", "other numbers", "fits"],
)
def test_draft_is_refused_when_it_does_not_fit_the_model(
    loaded_models: dict[str, LoadedModel],
    draft: str,
    changes: dict[str, Any],
    target: str,
    reason: str | None,
) -> None:
    refused = pytest.raises(ModelUnsupported, match=reason) if reason else nullcontext()
    with refused:
        check_draft(replace(loaded_models[draft], **changes), loaded_models[target])


def test_draft_is_refused_before_it_is_loaded_when_its_configuration_tells(
    loaded_models: dict[str, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(config: ModelConfig) -> LoadedModel:
        raise AssertionError(config.model)

    draft = make_tiny_model("llama", tmp_path, overrides={"vocab_size": 200})
    monkeypatch.setattr("executor_service.speculation.draft_loading.load_model", loads)
    target = Compute(loaded_models["model"], torch_model, "torch", 16)
    with pytest.raises(ModelUnsupported, match=f"200 tokens, .* has {VOCAB_SIZE}"):
        load_draft(str(draft), target, "torch", 16)


def test_draft_is_refused_when_the_model_is_on_a_gpu(loaded_models: dict[str, LoadedModel]) -> None:
    on_gpu = replace(loaded_models["model"], device=torch.device("cuda"))
    target = Compute(on_gpu, torch_model, "torch", 16)
    with pytest.raises(ModelUnsupported, match=r"draft_model x: not for cuda; allowed: cpu"):
        load_draft("x", target, "torch", 16)


def test_draft_is_refused_when_its_tokenizer_means_other_tokens(
    loaded_models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    def with_words(model: LoadedModel, *words: str) -> LoadedModel:
        path = tmp_path / f"{''.join(words)}.json"
        vocabulary = {word: index for index, word in enumerate(words)}
        Tokenizer(WordLevel(vocabulary, unk_token=words[0])).save(str(path))
        return replace(model, tokenizer_files={"tokenizer.json": path})

    target = with_words(loaded_models["model"], "a", "b", "c")
    check_draft(with_words(loaded_models["draft"], "a", "b", "c"), target)
    with pytest.raises(
        ModelUnsupported, match=r"2 tokens of its tokenizer\.json differ from those"
    ):
        check_draft(with_words(loaded_models["draft"], "a", "c", "b"), target)


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


@dataclass
class CountedRunner:
    """A runner, and how many passes it made. Time is these: guesses cost nothing."""

    runner: ModelRunner
    num_passes: int = 0

    def begin(self, step: StepInput) -> PendingStep | None:
        most = 0 if step.num_run_on_tokens is None else int(step.num_run_on_tokens.max())
        self.num_passes += 1 + most
        return self.runner.begin(step)

    def __call__(self) -> float:
        return float(self.num_passes)


def tell(
    runner: Runner,
    prompt: Sequence[int],
    params: SamplingParams,
    table: Sequence[int],
    max_num_tokens: int,
) -> list[int]:
    """What follows `prompt`, in steps of up to 8 tokens."""
    tokens, num_computed = list(prompt), 0
    while len(tokens) < max_num_tokens and tokens[-1] not in params.stop_token_ids:
        row = Row(tokens[num_computed:], num_computed, table, len(prompt), params=params, seed=4)
        most = min(7, max_num_tokens - len(tokens) - 1)
        step = replace(make_step([row]), num_run_on_tokens=np.array([most], np.int32))
        sampled = execute_step(runner, step).token_ids_of(0)
        num_computed = len(tokens) + len(sampled) - 1
        tokens += sampled
    return tokens[len(prompt) :]


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
            DrivenSequence(
                prompt, 40, params, number, block_table=list(range(8 * number, 8 * number + 8))
            )
            for number, prompt in enumerate(PROMPTS[:3])
        ]
        drive_runs(served.serving, sequences, random.Random(2))
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
    sequence = DrivenSequence(
        PROMPTS[0], NUM_TOKENS - 12, seed=4, block_table=list(range(12, 22)), output=half
    )
    sequence.num_computed = len(sequence.tokens) - 1
    before = served.counted.num_passes
    drive_runs(served.serving, [sequence], random.Random(0), most=7)
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
        ({"target_hidden_size": 65}, "reads hidden states of size 65, .* has 64"),
        ({"vocab_size": 200}, f"has 200 tokens, .* has {VOCAB_SIZE}"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
            r"reads layers \[0, 1, 3\], .* has 2",
        ),
    ],
)
def test_head_is_refused_before_its_weights_are_read(
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
    engine = load(model, f"--draft-model={trained}")
    assert f"{trained} (EAGLE-3)" in engine.compute


BUNDLED_BLOCK_SIZE = 16
STORY_PROMPT = "<|begin|><|user|>Tell me a story about a fox.<|end|><|assistant|>"
END_TOKEN_ID = 2
MAX_NUM_TOKENS = 300
TABLE = list(range(1, 30))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_bundled_draft_saves_half_of_the_passes(temperature: float) -> None:
    model = ModelConfig(str(BUNDLED_DIRECTORY), dtype="float32")
    compute = choose_compute(lambda: load_model(model), "auto", BUNDLED_BLOCK_SIZE)
    draft = load_draft("bundled", compute, "auto", BUNDLED_BLOCK_SIZE)
    pools = CacheConfig(BUNDLED_BLOCK_SIZE, 40, 0, more_layers=draft.layers)
    runner = build_runner(compute.loaded, pools, compute.make_model, compute.draw)
    tokenizer = Tokenizer.from_file(str(BUNDLED_DIRECTORY / "tokenizer.json"))
    prompt = tokenizer.encode(STORY_PROMPT, add_special_tokens=False).ids
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
