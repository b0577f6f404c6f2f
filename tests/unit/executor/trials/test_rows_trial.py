"""Rows side by side must have the states that they have alone, or are not computed so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.errors import TrialFailed
from executor_service.model import PoolingMode, TextModel
from executor_service.trials import try_rows
from tests.support.models.vector_models import NUM_POSITIONS, make_vector_model

Wrong = Callable[[Any], None]


def text_model(whole: Any) -> TextModel:  # noqa: ANN401
    return TextModel(whole, [PoolingMode.MEAN], is_causal=False, max_model_len=NUM_POSITIONS)


def ignores_positions(whole: Any) -> None:  # noqa: ANN401
    """As a model that counts positions itself: beyond the first row they are wrong."""

    def count(_module: object, arguments: Any, named: dict[str, Any]) -> Any:  # noqa: ANN401
        length = named["input_ids"].shape[1]
        return arguments, named | {"position_ids": torch.arange(length)[None] % NUM_POSITIONS}

    whole.embeddings.register_forward_pre_hook(count, with_kwargs=True)


def mixes_rows(whole: Any) -> None:  # noqa: ANN401
    """As a model with state outside attention: each token sees the one before it."""

    def mix(_module: object, _arguments: object, output: Tensor) -> Tensor:
        return output + output.roll(1, dims=1) * (torch.arange(output.shape[1])[:, None] > 0)

    whole.encoder.layer[1].output.register_forward_hook(mix)


def test_trial_accepts_rows_that_agree(tmp_path: Path) -> None:
    model = text_model(make_vector_model("bert", tmp_path))
    try_rows(model)
    assert model.is_flat


@pytest.mark.parametrize("wrong", [ignores_positions, mixes_rows])
def test_trial_fails_when_a_row_depends_on_the_others(tmp_path: Path, wrong: Wrong) -> None:
    whole = make_vector_model("bert", tmp_path)
    wrong(whole)
    with pytest.raises(TrialFailed, match="rows side by side have other states than alone"):
        try_rows(text_model(whole))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trial_is_in_float32_when_the_model_is_not(tmp_path: Path, dtype: torch.dtype) -> None:
    """Errors far below the rounding of 16 bits are found."""
    whole = make_vector_model("bert", tmp_path).to(dtype)
    try_rows(text_model(whole))
    table = whole.embeddings.position_embeddings.weight
    with torch.no_grad():
        table.mul_(1e-2)
    ignores_positions(whole)
    with pytest.raises(TrialFailed, match="other states"):
        try_rows(text_model(whole))


@pytest.mark.parametrize(
    ("model_type", "model_class", "reason"),
    [
        ("mpnet", "AutoModel", "bypasses transformers' attention interface"),
        ("t5", "T5EncoderModel", "its code takes no positions"),
    ],
)
def test_trial_fails_by_name_when_a_model_cannot_be_tried(
    tmp_path: Path, model_type: str, model_class: str, reason: str
) -> None:
    with pytest.raises(TrialFailed, match=reason):
        try_rows(text_model(make_vector_model(model_type, tmp_path, model_class)))


def test_trial_fails_when_a_window_is_too_long_to_be_tried(tmp_path: Path) -> None:
    whole = make_vector_model(
        "modernbert", tmp_path, local_attention=5000, max_position_embeddings=8000
    )
    model = TextModel(whole, [PoolingMode.MEAN], is_causal=False, max_model_len=8000)
    with pytest.raises(TrialFailed, match=r"sliding window of 2501 tokens is too long"):
        try_rows(model)
