"""Rotary embeddings scaled for long contexts, against `transformers`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.backends import choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import ModelUnsupported
from executor_service.model import choose_max_model_len, fix_rope
from tests.support.models.model_pair import load_reference, served_logits
from tests.support.models.tiny_models import VOCAB_SIZE, load_tiny_model, make_tiny_model

ORIGINAL, LONG, SHORT = 32, 128, 20
BLOCK_SIZE = 8
# Of float32 logits of about 10: sums in another order.
TOLERANCE = 1e-3

_BASE: Mapping[str, Any] = {"rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
YARN: Mapping[str, Any] = {"rope_type": "yarn", "factor": 4.0, **_BASE}
DYNAMIC: Mapping[str, Any] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


def _long_rope(num_angles: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(num_angles)],
        "long_factor": [1.5 + 0.5 * i for i in range(num_angles)],
        **_BASE,
    }


# Heads have 16 numbers. Phi-4-mini rotates three quarters of a head.
_PHI3: Mapping[str, Any] = {
    "rope_parameters": {**_long_rope(6), "partial_rotary_factor": 0.75},
    "original_max_position_embeddings": ORIGINAL,
    "max_position_embeddings": LONG,
    "sliding_window": None,
}
_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "longrope, phi3": ("phi3", _PHI3),
    "longrope": ("llama", {"rope_parameters": _long_rope(8), "max_position_embeddings": LONG}),
    "yarn": ("llama", {"rope_parameters": YARN, "max_position_embeddings": ORIGINAL}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
}
_GROWING = [name for name in _MODELS if name != "yarn"]
TOKENS = torch.randint(3, VOCAB_SIZE, (LONG,), generator=torch.Generator().manual_seed(5)).tolist()


def _save(name: str, directory: Path) -> Path:
    architecture, overrides = _MODELS[name]
    return make_tiny_model(architecture, directory, seed=1, overrides=overrides)


@torch.inference_mode()
def _logits(directory: Path, backend: str, tokens: Sequence[int], max_model_len: int) -> Tensor:
    """Logits [L, V] of `tokens`, computed in three chunks as an executor does."""
    config = ModelConfig(str(directory), max_model_len=max_model_len)
    compute = choose_compute(lambda: load_model(config), backend, BLOCK_SIZE)
    ends = [3, len(tokens) - 1]
    return served_logits(compute.loaded, compute.make_model, tokens, BLOCK_SIZE, ends)


@torch.inference_mode()
def _transformers_logits(directory: Path, tokens: Sequence[int]) -> Tensor:
    """Logits [L, V]; `transformers` chooses the angles by the number of tokens."""
    logits: Tensor = load_reference(directory)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", _MODELS)
def test_angles_are_those_of_the_longest_sequence_when_that_is_beyond_the_original_length(
    tmp_path: Path, name: str, backend: str
) -> None:
    directory = _save(name, tmp_path)
    expected = _transformers_logits(directory, TOKENS)
    long = _logits(directory, backend, TOKENS, LONG)
    torch.testing.assert_close(long, expected, atol=TOLERANCE, rtol=0)
    short = _logits(directory, backend, TOKENS[:SHORT], LONG)
    torch.testing.assert_close(short, expected[:SHORT], atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", _GROWING)
def test_angles_are_the_original_ones_when_no_sequence_is_longer(
    tmp_path: Path, name: str, backend: str
) -> None:
    directory = _save(name, tmp_path)
    expected = _transformers_logits(directory, TOKENS[:ORIGINAL])
    actual = _logits(directory, backend, TOKENS[:ORIGINAL], ORIGINAL)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
    scaled = _transformers_logits(directory, TOKENS)[:ORIGINAL]
    assert float((actual - scaled).abs().max()) > 100 * TOLERANCE


def test_phimoe_scales_attention_for_long_sequences_when_factors_are_long(tmp_path: Path) -> None:
    rope = {**_long_rope(8), "short_mscale": 1.1, "long_mscale": 1.3}
    options = {**_PHI3, "rope_parameters": rope}
    model: Any = load_tiny_model("phimoe", tmp_path, **options).model
    positions = torch.tensor([[0, 3, SHORT]])
    cosines, _ = model.model.rotary_emb(torch.zeros(1), positions)
    exponents = torch.arange(8) / 8
    angles = positions[0, :, None] / (torch.tensor(rope["long_factor"]) * 1e4**exponents)
    torch.testing.assert_close(cosines[0, :, :8], 1.3 * angles.cos())


@pytest.mark.parametrize(
    ("name", "default"),
    [("longrope, phi3", LONG), ("longrope", LONG), ("yarn", LONG), ("dynamic", ORIGINAL)],
)
def test_max_model_len_is_what_the_configuration_allows_when_rope_is_scaled(
    tmp_path: Path, name: str, default: int
) -> None:
    directory = _save(name, tmp_path)
    assert load_model(ModelConfig(str(directory))).max_model_len == default
    with pytest.raises(ModelUnsupported, match=f"max-model-len is 129; allowed: at most {LONG}"):
        load_model(ModelConfig(str(directory), max_model_len=LONG + 1))


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("longrope, phi3", "long_rope_factors max_model_len=33 original_positions=32:"),
        ("dynamic", "dynamic_rope_fixed max_model_len=33 original_positions=32 rope_theta=11"),
    ],
)
def test_log_and_digest_show_when_short_sequences_get_other_angles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, event: str
) -> None:
    directory = _save(name, tmp_path)
    caplog.set_level(logging.WARNING, "executor_service")
    digests = []
    for max_model_len in (ORIGINAL - 1, ORIGINAL, ORIGINAL + 1):
        assert event not in caplog.text
        config = ModelConfig(str(directory), max_model_len=max_model_len)
        digests.append(load_model(config).digest)
    assert caplog.text.count(event) == 1
    assert digests[0] == digests[1] != digests[2]


def test_fix_rope_changes_each_type_of_layer_when_they_differ() -> None:
    full, sliding = _long_rope(8), {"rope_type": "default", "rope_theta": 1e4}
    before = dict(sliding)
    ropes = {"full_attention": full, "sliding_attention": sliding}
    config = SimpleNamespace(rope_parameters=ropes, max_position_embeddings=LONG)
    assert fix_rope(config, LONG) == "long_rope_factors"
    assert full["short_factor"] == full["long_factor"]
    assert sliding == before


def test_dynamic_rope_is_left_alone_when_alpha_scales_it() -> None:
    rope = {**DYNAMIC, "alpha": 1000.0}
    config = SimpleNamespace(
        model_type="hunyuan_v1_dense", rope_parameters=rope, max_position_embeddings=ORIGINAL
    )
    with pytest.raises(ModelUnsupported, match="allowed: at most 32"):
        choose_max_model_len(config, LONG)
    assert fix_rope(config, LONG) is None
    assert rope == {**DYNAMIC, "alpha": 1000.0}
