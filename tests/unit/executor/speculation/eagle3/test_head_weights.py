"""Which tensors are those of an EAGLE-3 head, and what refuses a file with others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_service.checkpoint.folder import resolve_checkpoint
from executor_service.errors import ModelUnsupported
from executor_service.speculation.eagle3.head_weights import (
    HeadWeights,
    read_head_config,
    read_head_weights,
)
from tests.support.models.tiny_heads import TINY_SHAPE, make_tiny_head, random_head

NUM_LEFT_OUT = TINY_SHAPE.vocab_size // 8
Tensors = dict[str, Tensor]


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)


def read(directory: Path, dtype: torch.dtype = torch.float32) -> HeadWeights:
    checkpoint = resolve_checkpoint(str(directory))
    config = read_head_config(checkpoint.directory, checkpoint.config)
    return read_head_weights(checkpoint.weight_files, config, dtype)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: each for name, each in tensors.items() if name not in names}


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    weights = read(make_tiny_head(tmp_path, seed=5))
    head = random_head(TINY_SHAPE, 5)
    assert torch.equal(weights.fc, head.fc.weight)
    assert torch.equal(weights.hidden_norm, head.midlayer.hidden_norm.weight)
    assert torch.equal(weights.token_ids, torch.arange(NUM_LEFT_OUT, TINY_SHAPE.vocab_size))
    assert weights.embedding is None


def test_weights_have_the_dtype_of_the_model_when_the_file_has_another(tmp_path: Path) -> None:
    weights = read(make_tiny_head(tmp_path), torch.bfloat16)
    assert {weights.fc.dtype, weights.final_norm.dtype, weights.head.dtype} == {torch.bfloat16}


def test_weights_are_found_when_they_are_parts_of_a_whole(tmp_path: Path) -> None:
    expected = read(make_tiny_head(tmp_path))
    rewrite(tmp_path, lambda tensors: {f"model.{name}": each for name, each in tensors.items()})
    assert torch.equal(read(tmp_path).query, expected.query)


def test_weights_are_read_when_torch_has_saved_them(tmp_path: Path) -> None:
    expected = read(make_tiny_head(tmp_path))
    safe = tmp_path / "model.safetensors"
    torch.save(load_file(safe), tmp_path / "pytorch_model.bin")
    safe.unlink()
    assert torch.equal(read(tmp_path).down, expected.down)


def test_tokens_are_those_of_the_model_when_the_head_can_guess_all(tmp_path: Path) -> None:
    make_tiny_head(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"draft_vocab_size": 140', '"draft_vocab_size": 160'))

    def with_all(tensors: Tensors) -> Tensors:
        return without("d2t")(tensors) | {"lm_head.weight": torch.zeros(160, 64)}

    rewrite(tmp_path, with_all)
    assert torch.equal(read(tmp_path).token_ids, torch.arange(160))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("fc.weight"), r"1 tensors of an EAGLE-3 head are missing: fc\.weight"),
        (without("d2t"), "d2t is missing, and draft_vocab_size 140 is not vocab_size 160"),
        (
            lambda tensors: tensors | {"midlayer.self_attn.q_proj.bias": torch.zeros(64)},
            r"1 tensors of an EAGLE-3 head are not known: midlayer\.self_attn\.q_proj\.bias",
        ),
        (
            lambda tensors: tensors | {"fc.weight": torch.zeros(64, 128)},
            r"fc\.weight is \[64, 128\], where config\.json says \[64, 192\]",
        ),
        (
            lambda tensors: tensors | {"d2t": torch.full((140,), 21)},
            "d2t means tokens from 21 to 160; allowed: 0 to 159",
        ),
    ],
)
def test_weights_are_refused_by_name_when_they_are_others(
    tmp_path: Path, change: Callable[[Tensors], Tensors], reason: str
) -> None:
    rewrite(make_tiny_head(tmp_path), change)
    with pytest.raises(ModelUnsupported, match=reason):
        read(tmp_path)


def test_head_of_another_width_needs_embeddings_of_its_own(tmp_path: Path) -> None:
    path = make_tiny_head(tmp_path) / "config.json"
    path.write_text(
        path.read_text().replace('"target_hidden_size": 64', '"target_hidden_size": 32')
    )
    rewrite(tmp_path, lambda tensors: tensors | {"fc.weight": torch.zeros(64, 96)})
    with pytest.raises(ModelUnsupported, match=r"embed_tokens\.weight is missing, .* 64 and 32"):
        read(tmp_path)
    embedding = torch.ones(160, 64)
    rewrite(tmp_path, lambda tensors: tensors | {"embed_tokens.weight": embedding})
    own = read(tmp_path).embedding
    assert own is not None
    assert torch.equal(own, embedding)
