"""Steps of models that return vectors: a faulty row fails alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_service.errors import OutOfMemory, StepFailed
from executor_service.steps import RowStatus, StepInput
from tests.support.models.tiny_models import load_engine_of
from tests.support.models.vector_models import (
    EMBEDDING,
    make_vector_model,
    random_rows,
    run_rows,
    vectors_of,
)
from tests.support.steps.step_driver import Row, make_step

BAD_TOKEN = 150


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("bert")
    make_vector_model("bert", path)
    return path


@pytest.fixture
def embeddings(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Lets the embeddings of BERT do something first."""
    from transformers.models.bert.modeling_bert import BertEmbeddings

    def first_do(action: Callable[[Any], None]) -> None:
        original = BertEmbeddings.forward

        def forward(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            action(named["input_ids"])
            return original(self, *arguments, **named)

        monkeypatch.setattr(BertEmbeddings, "forward", forward)

    return first_do


def test_engine_has_no_pools_when_rows_are_computed_whole(directory: Path) -> None:
    engine = load_engine_of("--model", str(directory), "--max-num-batched-tokens=16")
    info = engine.info
    assert (info.block_size, info.num_device_blocks) == (130, info.limits.max_num_rows)
    assert (info.num_host_blocks, info.block_bytes) == (0, 0)
    assert info.limits.max_num_batched_tokens == 130
    assert info.trial_step is not None
    assert not info.features


def test_row_fails_alone_when_its_computation_raises(
    directory: Path, embeddings: Callable[[Callable[[Any], None]], None]
) -> None:
    engine = load_engine_of("--model", str(directory))
    rows = random_rows(5, 3, 9)
    expected = vectors_of(run_rows(engine, rows))

    def refuse(input_ids: torch.Tensor) -> None:
        if bool((input_ids == BAD_TOKEN).any()):
            raise ValueError(f"secret {BAD_TOKEN}")

    embeddings(refuse)
    rows[1] = [4, BAD_TOKEN, 5]
    output = run_rows(engine, rows)
    assert output.row_statuses.tolist() == [RowStatus.OK, RowStatus.FAILED, RowStatus.OK]
    assert output.row_errors == {1: "ValueError in the forward pass"}
    assert output.vectors[1] is None
    for row in (0, 2):
        torch.testing.assert_close(torch.tensor(output.vectors[row]), expected[row])


def test_row_is_invalid_alone_when_its_vector_is_not_finite(tmp_path: Path) -> None:
    model = make_vector_model("bert", tmp_path)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[BAD_TOKEN] = torch.nan
    model.save_pretrained(tmp_path)
    engine = load_engine_of("--model", str(tmp_path))
    output = run_rows(engine, [[4, 5], [4, BAD_TOKEN], [6, 7]])
    assert output.row_statuses.tolist() == [
        RowStatus.OK,
        RowStatus.INVALID_LOGITS,
        RowStatus.OK,
    ]
    assert output.row_errors == {1: "the model returned a vector that is not finite"}
    assert [vector is None for vector in output.vectors] == [False, True, False]


def test_step_fails_when_memory_runs_out(
    directory: Path, embeddings: Callable[[Callable[[Any], None]], None]
) -> None:
    engine = load_engine_of("--model", str(directory))

    def run_out(_input_ids: object) -> None:
        raise torch.OutOfMemoryError

    embeddings(run_out)
    with pytest.raises(StepFailed) as caught:
        run_rows(engine, random_rows(5, 3))
    assert isinstance(caught.value.__cause__, OutOfMemory)


def test_rows_have_the_same_vectors_whatever_shares_their_step(directory: Path) -> None:
    """More tokens than one pass has, too."""
    engine = load_engine_of("--model", str(directory))
    rows = random_rows(*(1 + 29 * number % 130 for number in range(40)))
    together = vectors_of(run_rows(engine, rows))
    for row, vector in zip(rows, together, strict=True):
        (alone,) = vectors_of(run_rows(engine, [row]))
        torch.testing.assert_close(vector, alone, rtol=1e-5, atol=1e-5)


def _step(*rows: Row) -> StepInput:
    return make_step(rows)


@pytest.mark.parametrize("model_type", ["bert", "qwen3"])
def test_rows_without_vectors_are_told_apart(tmp_path: Path, model_type: str) -> None:
    """A row that is not at its end has none yet; one that asks for none fails."""
    make_vector_model(model_type, tmp_path)
    engine = load_engine_of("--model", str(tmp_path), "--task=embed", "--num-device-blocks=8")
    row = Row([4, 5, 6], 0, [0], 3, pooling=EMBEDDING)
    step = _step(row, replace(row, block_table=[1], samples=False), replace(row, block_table=[2]))
    step = replace(step, pooling=[EMBEDDING, EMBEDDING, None])
    pending = engine.runner.begin(step)
    assert pending is not None
    output = pending.finish()
    assert output.row_statuses.tolist() == [RowStatus.OK, RowStatus.OK, RowStatus.FAILED]
    assert list(output.row_errors) == [2]
    assert [vector is None for vector in output.vectors] == [False, True, True]
    assert output.sampled_token_ids.tolist() == [-1, -1, -1]
    assert isinstance(output.vectors[0], np.ndarray)
    assert output.vectors[0].dtype == np.float32
