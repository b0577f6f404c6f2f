"""Which models may guess for which, and where their keys and values lie."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from executor_service.backends.compute import Compute
from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import LoadedEngine, load_engine
from executor_service.errors import ModelUnsupported
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import torch_model
from executor_service.speculation.load_draft import check_draft, load_draft
from splitserve_options import options
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.support.steps.run_driver import RunningSequence, run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = {"model": ("llama", 1), "draft": ("qwen3", 2), "narrow": ("mistral", 3)}
    return {
        name: make_tiny_model(kind, tmp_path_factory.mktemp(name), seed=seed)
        for name, (kind, seed) in kinds.items()
    }


@pytest.fixture(scope="module")
def loaded(models: dict[str, Path]) -> dict[str, LoadedModel]:
    return {name: load_model(ModelConfig(str(path))) for name, path in models.items()}


def load(model: Path, *flags: str) -> LoadedEngine:
    common = ("--num-device-blocks=64", "--attention-backend=torch", "--device=cpu")
    values = options.parse("executor", [f"--model={model}", *common, *flags], {})
    return load_engine(ExecutorConfig.from_options(values), executor_epoch=1)


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
            RunningSequence(
                rng.integers(3, VOCAB_SIZE, 20).tolist(),
                24,
                seed=number,
                block_table=[4 * number + index for index in range(4)],
            )
            for number in range(2)
        ]
        run(engine.runner, sequences, random.Random(3))
        outputs.append([each.output for each in sequences])
    assert outputs[0] == outputs[1]


def test_draft_is_refused_when_it_has_other_tokens(loaded: dict[str, LoadedModel]) -> None:
    draft = replace(loaded["draft"], vocab_size=200)
    with pytest.raises(ModelUnsupported, match=f"200 tokens, .* has {VOCAB_SIZE}"):
        check_draft(draft, loaded["model"])


def test_draft_is_refused_before_it_is_loaded_when_its_configuration_tells(
    loaded: dict[str, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(config: ModelConfig) -> LoadedModel:
        raise AssertionError(config.model)

    draft = make_tiny_model("llama", tmp_path, overrides={"vocab_size": 200})
    monkeypatch.setattr("executor_service.speculation.load_draft.load_model", loads)
    target = Compute(loaded["model"], torch_model, "torch", 16)
    with pytest.raises(ModelUnsupported, match=f"200 tokens, .* has {VOCAB_SIZE}"):
        load_draft(str(draft), target, "torch", 16)


def test_draft_is_refused_when_it_attends_to_what_the_model_forgets(
    loaded: dict[str, LoadedModel],
) -> None:
    with pytest.raises(ModelUnsupported, match="attends to more than the 12 tokens"):
        check_draft(loaded["draft"], loaded["narrow"])
    check_draft(loaded["narrow"], loaded["narrow"])


def test_draft_is_refused_when_its_numbers_do_not_fit_the_blocks(
    loaded: dict[str, LoadedModel],
) -> None:
    half = replace(loaded["draft"], kv_dtype=torch.bfloat16)
    with pytest.raises(ModelUnsupported, match="KV cache is bfloat16"):
        check_draft(half, loaded["model"])


def test_draft_is_refused_when_the_model_is_on_a_gpu(loaded: dict[str, LoadedModel]) -> None:
    on_gpu = replace(loaded["model"], device=torch.device("cuda"))
    target = Compute(on_gpu, torch_model, "torch", 16)
    with pytest.raises(ModelUnsupported, match=r"draft_model x: not for cuda; allowed: cpu"):
        load_draft("x", target, "torch", 16)


def test_draft_is_refused_when_its_tokenizer_means_other_tokens(
    loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    def with_words(model: LoadedModel, *words: str) -> LoadedModel:
        path = tmp_path / f"{''.join(words)}.json"
        vocabulary = {word: index for index, word in enumerate(words)}
        Tokenizer(WordLevel(vocabulary, unk_token=words[0])).save(str(path))
        return replace(model, tokenizer_files={"tokenizer.json": path})

    target = with_words(loaded["model"], "a", "b", "c")
    check_draft(with_words(loaded["draft"], "a", "b", "c"), target)
    with pytest.raises(ModelUnsupported, match=r"2 tokens of its tokenizer\.json are not those"):
        check_draft(with_words(loaded["draft"], "a", "c", "b"), target)
