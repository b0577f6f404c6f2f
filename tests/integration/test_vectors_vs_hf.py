"""Vectors of models equal those of `transformers`' own classes, which compute each row alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.gguf_writer import write_gguf
from tests.support.models.model_pair import load_reference
from tests.support.models.tiny_models import edit_json, load_engine_of, make_tiny_model
from tests.support.models.vector_models import (
    EMBEDDING,
    SCORES,
    make_vector_model,
    random_rows,
    run_rows,
    vectors_of,
)
from tests.unit.executor.checkpoint.test_quantised_checkpoints import CASES, write_quantised

SIDE_BY_SIDE = (
    "albert",
    "bert",
    "camembert",
    "distilbert",
    "electra",
    "eurobert",
    "gte",
    "jina_embeddings_v3",
    "modernbert",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
)
BY_LENGTH = ("deberta", "deberta-v2", "mpnet")
# The longest reaches the last position of models that number them from padding, too.
LENGTHS = (3, 128, 1, 40, 3, 17)
TOLERANCE = 1e-5


def check(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for vector, right in zip(found, expected, strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(vector, right, rtol=0, atol=TOLERANCE * max(scale, 1))
        if len(right) > 1:
            cosine = torch.nn.functional.cosine_similarity(vector, right, dim=0)
            assert float(cosine) > 1 - TOLERANCE


@torch.inference_mode()
def hidden(model: Any, row: Sequence[int]) -> Tensor:  # noqa: ANN401
    states: Tensor = model(input_ids=torch.tensor([row])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("model_type", [*SIDE_BY_SIDE, *BY_LENGTH])
def test_encoder_returns_means_when_rows_have_different_lengths(
    tmp_path: Path, model_type: str
) -> None:
    model = make_vector_model(model_type, tmp_path)
    engine = load_engine_of("--model", str(tmp_path))
    rows = random_rows(*LENGTHS)
    expected = [hidden(model, row).mean(dim=0) for row in rows]
    check(vectors_of(run_rows(engine, rows)), expected)
    way = "rows side by side" if model_type in SIDE_BY_SIDE else "rows grouped by length"
    assert engine.compute.endswith(way)
    assert engine.info.limits.max_num_batched_tokens >= engine.info.model.max_model_len
    longest = random_rows(engine.info.model.max_model_len)
    check(vectors_of(run_rows(engine, longest)), [hidden(model, longest[0]).mean(dim=0)])


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [("modernbert", {}), ("gemma3_text", {"use_bidirectional_attention": True})],
)
def test_sliding_window_is_followed_when_rows_are_far_longer(
    tmp_path: Path, model_type: str, overrides: dict[str, Any]
) -> None:
    model = make_vector_model(model_type, tmp_path, max_position_embeddings=400, **overrides)
    engine = load_engine_of("--model", str(tmp_path))
    rows = random_rows(399, 5, 257, 399)
    expected = [hidden(model, row).mean(dim=0) for row in rows]
    check(vectors_of(run_rows(engine, rows)), expected)
    assert engine.compute.endswith("rows side by side")


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("model_type", [*SIDE_BY_SIDE, *BY_LENGTH])
@pytest.mark.cases(10)
def test_encoder_scores_labels_when_rows_are_pairs(
    tmp_path: Path, model_type: str, num_labels: int
) -> None:
    model = make_vector_model(
        model_type, tmp_path, "AutoModelForSequenceClassification", num_labels=num_labels
    )
    engine = load_engine_of("--model", str(tmp_path))
    rows = random_rows(*LENGTHS)
    starts = [len(row) // 2 for row in rows]
    has_types = int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
    logits = []
    for row, start in zip(rows, starts, strict=True):
        types = torch.tensor([[0] * start + [1] * (len(row) - start if start else 0)])
        types = types if start else torch.zeros(1, len(row), dtype=torch.int64)
        named = {"token_type_ids": types} if has_types else {}
        with torch.inference_mode():
            logits.append(model(input_ids=torch.tensor([row]), **named).logits[0])
    params = [replace(SCORES, second_text_start=start) for start in starts]
    activation = torch.sigmoid if num_labels == 1 else lambda each: torch.softmax(each, dim=-1)
    check(vectors_of(run_rows(engine, rows, params)), [activation(each) for each in logits])
    raw = [replace(each, raw=True) for each in params]
    check(vectors_of(run_rows(engine, rows, raw)), logits)


@pytest.mark.parametrize(
    ("model_type", "model_class"),
    [
        ("qwen3", "AutoModel"),
        ("qwen3", "AutoModelForCausalLM"),
        ("gemma2", "AutoModel"),
        ("gpt2", "AutoModelForCausalLM"),
    ],
)
def test_decoder_embeds_by_its_last_token_when_a_prompt_is_cut_into_steps(
    tmp_path: Path, model_type: str, model_class: str
) -> None:
    model = make_vector_model(model_type, tmp_path, model_class)
    engine = load_engine_of("--model", str(tmp_path), "--task=embed", "--num-device-blocks=64")
    rows = random_rows(2, 128, 40, 17)
    expected = [hidden(model.base_model, row)[-1] for row in rows]
    halves = [len(row) // 2 for row in rows]
    begun = run_rows(
        engine, [row[:half] for row, half in zip(rows, halves, strict=True)], samples=False
    )
    assert list(begun.vectors) == [None] * len(rows)
    rest = [row[half:] for row, half in zip(rows, halves, strict=True)]
    raw = replace(EMBEDDING, raw=True)
    check(vectors_of(run_rows(engine, rest, raw, num_computed=halves)), expected)
    unit = [torch.nn.functional.normalize(each, dim=0) for each in expected]
    check(vectors_of(run_rows(engine, rest, num_computed=halves)), unit)


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_encoder_has_the_same_directions_when_it_computes_in_16_bits(
    tmp_path: Path, model_type: str
) -> None:
    model = make_vector_model(model_type, tmp_path)
    engine = load_engine_of("--model", str(tmp_path), "--dtype=bfloat16")
    rows = random_rows(*LENGTHS)
    found = torch.stack(vectors_of(run_rows(engine, rows)))
    expected = torch.stack([hidden(model, row).mean(dim=0) for row in rows])
    assert float(torch.cosine_similarity(found, expected).min()) > 0.999
    assert engine.compute.endswith("rows side by side")


def test_decoder_embeds_when_it_is_in_a_gguf_file(tmp_path: Path) -> None:
    directory, path = tmp_path / "plain", tmp_path / "model.gguf"
    model = load_reference(make_tiny_model("llama", directory))
    write_gguf(path, model, "llama", {})
    engine = load_engine_of("--model", str(path), "--task=embed", "--num-device-blocks=64")
    rows = random_rows(1, 128, 17)
    expected = [hidden(model.model, row)[-1] for row in rows]
    check(vectors_of(run_rows(engine, rows, replace(EMBEDDING, raw=True))), expected)


@pytest.mark.parametrize(("model_type", "num_labels"), [("llama", 3), ("qwen2", 1)])
def test_decoder_scores_labels_by_its_last_token(
    tmp_path: Path, model_type: str, num_labels: int
) -> None:
    model = make_vector_model(
        model_type, tmp_path, "AutoModelForSequenceClassification", num_labels=num_labels
    )
    engine = load_engine_of("--model", str(tmp_path), "--num-device-blocks=64")
    rows = random_rows(1, 128, 40, 17)
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    found = run_rows(engine, rows, replace(SCORES, raw=True))
    check(vectors_of(found), logits)
    assert engine.compute.startswith(("native decoder", "torch", "GPU decoder"))


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("llama", {"is_causal": False}),
    ],
)
def test_bidirectional_decoder_returns_means_of_states_that_see_later_tokens(
    tmp_path: Path, model_type: str, overrides: dict[str, Any]
) -> None:
    model = make_vector_model(model_type, tmp_path, **overrides)
    engine = load_engine_of("--model", str(tmp_path))
    rows = random_rows(*LENGTHS)
    expected = [hidden(model, row).mean(dim=0) for row in rows]
    check(vectors_of(run_rows(engine, rows)), expected)
    assert engine.compute.endswith("rows side by side")


@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
@pytest.mark.parametrize("name", ["w4a16", "gptq"])
@torch.inference_mode()
def test_decoder_embeds_when_its_weights_are_quantised(
    tmp_path: Path, name: str, mode: str
) -> None:
    """The numbers are those of the dequantised weights, with KV blocks and without."""
    model = write_quantised(tmp_path, *CASES[name])
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{k}"} for path, k in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    edit_json(tmp_path / "1_Pooling" / "config.json", pooling_mode=mode)
    engine = load_engine_of(
        "--model", str(tmp_path), "--dtype=float32", "--max-model-len=130", "--num-device-blocks=64"
    )
    rows = random_rows(1, 50, 17)
    states = [hidden(model.model, row) for row in rows]
    pooled = [each.mean(dim=0) if mode == "mean" else each[-1] for each in states]
    check(vectors_of(run_rows(engine, rows)), pooled)
    assert engine.info.block_bytes == 0 if mode == "mean" else engine.info.block_bytes > 0
