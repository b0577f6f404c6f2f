"""Vectors equal those of sentence-transformers, on folders that it wrote itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.models.tiny_models import edit_json, load_engine_of
from tests.support.models.vector_models import (
    EMBEDDING,
    SCORES,
    make_vector_model,
    run_rows,
    vectors_of,
)

TEXTS = (
    "t9",
    " ".join(f"t{number}" for number in range(4, 122)),
    "t30 t31 t32 t33",
    "t31 t30 t33",
    " ".join(f"t{number}" for number in range(80, 50, -1)),
)
PAIRS = (("t9", "t10 t11"), ("t30 t31 t32", "t30"), ("t9 t8", TEXTS[4]))
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def sentence_model(
    directory: Path,
    mode: Any,  # noqa: ANN401
    *steps: Any,  # noqa: ANN401
    model_type: str = "bert",
) -> Any:  # noqa: ANN401
    """A model that sentence-transformers has saved in `directory`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    source = directory.with_name("source")
    model_class = "T5EncoderModel" if model_type == "t5" else "AutoModel"
    make_vector_model(model_type, source, model_class)
    transformer = Transformer(str(source), max_seq_length=120)
    pooling = Pooling(transformer.get_embedding_dimension(), mode)
    model = SentenceTransformer(modules=[transformer, pooling, *steps], device="cpu")
    model.save(str(directory))
    return model


def rows_of(model: Any, texts: Sequence[str]) -> list[list[int]]:  # noqa: ANN401
    return [model.tokenizer(text)["input_ids"] for text in texts]


def encoded(model: Any, texts: Sequence[str]) -> list[Tensor]:  # noqa: ANN401
    found: Any = model.encode(list(texts), convert_to_numpy=True, show_progress_bar=False)
    return list(torch.from_numpy(found))


def check(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for vector, right in zip(found, expected, strict=True):
        torch.testing.assert_close(vector, right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("mode", [*MODES, ("mean", "lasttoken", "cls")])
def test_pooling_is_followed_when_its_mode_is(tmp_path: Path, mode: str | Sequence[str]) -> None:
    model = sentence_model(tmp_path / "model", mode)
    engine = load_engine_of("--model", str(tmp_path / "model"))
    assert engine.info.model.max_model_len == 120
    check(vectors_of(run_rows(engine, rows_of(model, TEXTS))), encoded(model, TEXTS))


@pytest.mark.parametrize("model_type", ["roberta", "modernbert", "mpnet", "t5"])
def test_model_type_is_followed_when_its_positions_are_its_own(
    tmp_path: Path, model_type: str
) -> None:
    model = sentence_model(tmp_path / "model", "mean", model_type=model_type)
    engine = load_engine_of("--model", str(tmp_path / "model"))
    check(vectors_of(run_rows(engine, rows_of(model, TEXTS))), encoded(model, TEXTS))


def test_decoder_is_followed_when_its_files_say_last_token(tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Normalize

    model = sentence_model(tmp_path / "model", "lasttoken", Normalize(), model_type="qwen3")
    engine = load_engine_of("--model", str(tmp_path / "model"), "--num-device-blocks=64")
    check(vectors_of(run_rows(engine, rows_of(model, TEXTS))), encoded(model, TEXTS))
    assert "rows side by side" not in engine.compute


def test_decoder_is_uncached_when_its_files_say_mean(tmp_path: Path) -> None:
    model = sentence_model(tmp_path / "model", "mean", model_type="qwen3")
    engine = load_engine_of("--model", str(tmp_path / "model"))
    check(vectors_of(run_rows(engine, rows_of(model, TEXTS))), encoded(model, TEXTS))
    assert engine.compute.endswith("rows side by side")


def _steps() -> list[Any]:
    from sentence_transformers.base.modules import Dense, Normalize

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        dense = Dense(64, 48), Dense(48, 24, bias=False, activation_function=torch.nn.Identity())
    return [*dense, Normalize()]


def test_steps_behind_pooling_are_followed_when_vectors_are_cut_or_raw(tmp_path: Path) -> None:
    model = sentence_model(tmp_path / "model", "cls", *_steps())
    engine = load_engine_of("--model", str(tmp_path / "model"))
    rows = rows_of(model, TEXTS)
    expected = encoded(model, TEXTS)
    asked = [EMBEDDING, replace(EMBEDDING, num_dimensions=8), replace(EMBEDDING, raw=True)]
    params = [asked[row % 3] for row in range(len(rows))]
    found = vectors_of(run_rows(engine, rows, params))
    normalize = torch.nn.functional.normalize
    check([found[0], found[3]], [expected[0], expected[3]])
    # Cut first, then normalised.
    check([found[1], found[4]], [normalize(expected[row][:8], dim=0) for row in (1, 4)])
    check([normalize(found[2], dim=0)], [expected[2]])
    assert abs(float(found[2].norm()) - 1) > 0.01


def test_files_of_old_versions_are_followed(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    sentence_model(directory, "cls", *_steps())
    modules = json.loads((directory / "modules.json").read_text())
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 100, "do_lower_case": False})
    )
    old = {
        "word_embedding_dimension": 64,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(old))
    for name in ("2_Dense", "3_Dense"):
        weights = directory / name / "model.safetensors"
        torch.save(load_file(weights), directory / name / "pytorch_model.bin")
        weights.unlink()
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    engine = load_engine_of("--model", str(directory))
    assert engine.info.model.max_model_len == 100
    texts = [text for text in TEXTS if len(text.split()) < 98]
    check(vectors_of(run_rows(engine, rows_of(model, texts))), encoded(model, texts))


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
@pytest.mark.parametrize("is_old", [True, False])
def test_cross_encoder_is_followed_when_it_scores_pairs(
    tmp_path: Path, activation: str, is_old: bool
) -> None:
    from sentence_transformers import CrossEncoder

    source, directory = tmp_path / "source", tmp_path / "model"
    make_vector_model("bert", source, "AutoModelForSequenceClassification", num_labels=1)
    if is_old:
        name = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}"
        edit_json(
            source / "config.json", sbert_ce_default_activation_function=f"{name}.{activation}"
        )
        directory = source
    model = CrossEncoder(str(source), device="cpu")
    if not is_old:
        model.activation_fn = getattr(torch.nn, activation)()
        model.save(str(directory))
    rows, params = [], []
    for first, second in PAIRS:
        tokens = model.tokenizer(first, second)
        rows.append(tokens["input_ids"])
        params.append(replace(SCORES, second_text_start=tokens["token_type_ids"].index(1)))
    engine = load_engine_of("--model", str(directory))
    expected: Any = model.predict(list(PAIRS), show_progress_bar=False)
    found = vectors_of(run_rows(engine, rows, params))
    check(found, [torch.from_numpy(each).view(1) for each in expected.reshape(-1, 1)])
