"""Files of sentence-transformers: what they say, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import ExecutorError
from executor_service.steps import ModelVectors
from tests.support.models.tiny_models import edit_json
from tests.support.models.vector_models import make_vector_model

PREFIX = "sentence_transformers.models"
PLAIN = ("Transformer", "Pooling")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A BERT with files of sentence-transformers that say mean."""
    make_vector_model("bert", tmp_path, max_position_embeddings=24)
    write_modules(tmp_path, *PLAIN)
    write(tmp_path / "1_Pooling" / "config.json", pooling_mode="mean")
    return tmp_path


def write(path: Path, **settings: object) -> None:
    write_text(path, json.dumps(settings))


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def write_modules(directory: Path, *kinds: str, **changes: Mapping[str, Any]) -> None:
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"{PREFIX}.{kind}",
            **changes.get(kind, {}),
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))


def _modules(*kinds: str, **changes: Mapping[str, Any]) -> Callable[[Path], None]:
    return lambda directory: write_modules(directory, *kinds, **changes)


def _pooling(**settings: object) -> Callable[[Path], None]:
    return lambda directory: write(directory / "1_Pooling" / "config.json", **settings)


def _dense(**settings: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        write_modules(directory, *PLAIN, "Dense")
        write(directory / "2_Dense" / "config.json", **settings)
        save_file({"linear.weight": torch.ones(8, 64)}, directory / "2_Dense" / "model.safetensors")

    return change


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (_modules("Transformer", "LSTM"), "it has a module LSTM at this place"),
    (_modules("Transformer", "Normalize", "Pooling"), "a module Normalize at this place"),
    (_modules("Transformer"), "it has no module Pooling"),
    (_modules("StaticEmbedding", "Pooling"), "its first module is StaticEmbedding"),
    (_modules(*PLAIN, Pooling={"type": "mine.Pooling"}), "custom code is never run"),
    (_modules(*PLAIN, Transformer={"path": "0_Transformer"}), "in '0_Transformer', not beside it"),
    (_modules(*PLAIN, Pooling={"path": "../1_Pooling"}), "which is not the name of a folder"),
    (lambda directory: write_text(directory / "modules.json", "{"), "not readable as JSON"),
    (_pooling(pooling_mode="mean", include_prompt=False), "include_prompt is false"),
    (_pooling(pooling_mode="median"), "pooling_mode is 'median'; allowed: cls, max, mean"),
    (_dense(bias=False, activation_function="my.Gelu"), "activation_function is 'my.Gelu'"),
    (_dense(bias=True), "no weights as config.json says"),
    (_dense(bias=False, module_input_name="token_embeddings"), "is 'token_embeddings'"),
    (
        lambda directory: write(
            directory / "sentence_bert_config.json", transformer_task="text-generation"
        ),
        "its transformer_task is 'text-generation'",
    ),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_load_model_refuses_files_by_name(
    directory: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(directory)
    with pytest.raises(ExecutorError) as caught:
        load_model(ModelConfig(str(directory)))
    text = str(caught.value)
    assert reason in text
    assert str(directory) in text
    assert "\n" not in text


def test_load_model_refuses_a_dense_that_does_not_fit(directory: Path) -> None:
    _dense(bias=False)(directory)
    save_file({"linear.weight": torch.ones(8, 63)}, directory / "2_Dense" / "model.safetensors")
    with pytest.raises(ExecutorError, match="do not fit together"):
        load_model(ModelConfig(str(directory)))


@pytest.mark.parametrize(
    ("file", "settings", "length"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 20}, 20),
        ("tokenizer_config.json", {"model_max_length": 21}, 21),
        ("tokenizer_config.json", {"model_max_length": 10**30}, 24),
        ("sentence_bert_config.json", {"max_seq_length": 100}, 24),
    ],
)
def test_load_model_limits_texts_as_files_and_positions_say(
    directory: Path, file: str, settings: dict[str, int], length: int
) -> None:
    edit_json(directory / file, **settings)
    assert load_model(ModelConfig(str(directory))).max_model_len == length


def test_load_model_takes_longer_texts_when_it_is_asked_for(directory: Path) -> None:
    edit_json(directory / "sentence_bert_config.json", max_seq_length=20)
    assert load_model(ModelConfig(str(directory), max_model_len=23)).max_model_len == 23
    with pytest.raises(ExecutorError, match="--max-model-len is 25; allowed: at most 24"):
        load_model(ModelConfig(str(directory), max_model_len=25))


def test_load_model_leaves_positions_before_the_first_unused(tmp_path: Path) -> None:
    make_vector_model("roberta", tmp_path, max_position_embeddings=24)
    assert load_model(ModelConfig(str(tmp_path))).max_model_len == 22
    with pytest.raises(ExecutorError, match="--max-model-len is 23; allowed: at most 22"):
        load_model(ModelConfig(str(tmp_path), max_model_len=23))


def test_load_model_describes_vectors(directory: Path) -> None:
    _dense(bias=False)(directory)
    assert load_model(ModelConfig(str(directory))).vectors == ModelVectors(8, (), True)


def test_load_model_follows_files_when_the_class_is_a_classifier(directory: Path) -> None:
    make_vector_model("bert", directory, "BertForSequenceClassification")
    assert load_model(ModelConfig(str(directory))).vectors == ModelVectors(64, (), True)


@pytest.mark.parametrize(
    ("head", "is_served"),
    [
        ("BertModel", True),
        ("BertForMaskedLM", True),
        ("BertForPreTraining", True),
        ("BertForTokenClassification", False),
        ("BertForQuestionAnswering", False),
    ],
)
def test_load_model_embeds_with_an_encoder_when_its_head_has_no_other_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: str, is_served: bool
) -> None:
    make_vector_model("bert", tmp_path, head)
    if not is_served:
        with pytest.raises(ExecutorError, match=head):
            load_model(ModelConfig(str(tmp_path)))
    assert load_model(ModelConfig(str(tmp_path), task="embed")).vectors == ModelVectors(
        64, (), True
    )
    assert "pooling_assumed model=" in caplog.text
    assert "pooling=mean normalised=False" in caplog.text


@pytest.mark.parametrize("task", ["classify", "generate"])
def test_load_model_refuses_an_encoder_when_the_task_is_another(tmp_path: Path, task: str) -> None:
    make_vector_model("bert", tmp_path)
    with pytest.raises(ExecutorError, match="not served; supported"):
        load_model(ModelConfig(str(tmp_path), task=task))


@pytest.mark.parametrize(
    ("changes", "scores"),
    [
        ({}, [0.25, 0.75]),
        ({"problem_type": "multi_label_classification"}, [0.5, 0.75]),
        ({"problem_type": "regression"}, [0.0, 1.0986123]),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            [0.5, 0.75],
        ),
        (
            {
                "problem_type": "multi_label_classification",
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            [0.0, 1.0986123],
        ),
    ],
)
def test_classifier_makes_scores_as_its_configuration_says(
    tmp_path: Path, changes: dict[str, Any], scores: list[float]
) -> None:
    model = make_vector_model("bert", tmp_path, "BertForSequenceClassification", num_labels=2)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([1.0, 3.0]).log())
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", id2label={"0": "bad", "1": "good"}, **changes)
    loaded = load_model(ModelConfig(str(tmp_path)))
    assert loaded.vectors == ModelVectors(0, ("bad", "good"), True)
    assert loaded.vector_parts is not None
    assert loaded.vector_parts.uncached is not None
    params = loaded.vectors.plain_params
    (found,) = loaded.vector_parts.uncached.vectors([(torch.tensor([1, 5, 2]), params)])
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, torch.tensor(scores))


def test_classifier_is_refused_when_its_activation_is_unknown(tmp_path: Path) -> None:
    make_vector_model("bert", tmp_path, "BertForSequenceClassification", num_labels=2)
    name = "torch.nn.modules.activation.Tanh"
    edit_json(tmp_path / "config.json", sentence_transformers={"activation_fn": name})
    with pytest.raises(ExecutorError, match=f"'{name}'; allowed: Identity, Sigmoid, Softmax"):
        load_model(ModelConfig(str(tmp_path)))
