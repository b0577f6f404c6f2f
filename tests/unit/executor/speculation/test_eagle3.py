"""EAGLE-3 heads: their configurations, their weights, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_service.backends import LayerCompute, choose_layer_compute
from executor_service.checkpoint import resolve_checkpoint
from executor_service.device import KVCache, LayerShape
from executor_service.errors import ModelUnsupported
from executor_service.model import LayerKind, build_input_batch
from executor_service.speculation.eagle3 import (
    HeadModel,
    HeadStates,
    HeadWeights,
    is_head,
    read_head_config,
    read_head_weights,
    states_shape,
)
from splitserve_kernels.paged_batch import AttentionOptions
from tests.support.models.tiny_heads import TINY_SHAPE, make_tiny_head, random_head
from tests.support.steps.step_driver import Row, make_step

# The shape of what was published for a model of 8 billion parameters.
SETTINGS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 128000,
    "draft_vocab_size": 32000,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
}
DIRECTORY = Path("head")
IDS = "eagle_aux_hidden_state_layer_ids"


def test_head_config_is_that_of_a_published_one() -> None:
    config = read_head_config(DIRECTORY, SETTINGS)
    assert (config.width, config.target_width, config.mlp_width) == (4096, 4096, 14336)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.vocab_size, config.draft_vocab_size) == (128256, 32000)
    assert config.epsilon == 1e-5
    assert config.layers_of(32) == (2, 16, 29)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({IDS: [2, 30, 58]}, (2, 30, 58)),
        ({"eagle_config": {IDS: [2, 30, 58], "use_aux_hidden_state": True}}, (2, 30, 58)),
        # The outputs of these layers, which are the inputs of the next ones.
        ({"eagle_config": {IDS: [1, 29, 57]}}, (2, 30, 58)),
        ({"eagle_config": {IDS: []}}, (2, 30, 58)),
        ({"eagle_config": None}, (2, 30, 58)),
    ],
)
def test_layers_are_those_that_the_head_was_trained_with(
    settings: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert read_head_config(DIRECTORY, SETTINGS | settings).layers_of(61) == expected


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_layers_are_some_of_the_model_when_it_has_few(num_layers: int) -> None:
    layers = read_head_config(DIRECTORY, SETTINGS).layers_of(num_layers)
    assert all(0 <= layer <= num_layers for layer in layers)


@pytest.mark.parametrize(
    ("settings", "is_one"),
    [
        (SETTINGS, True),
        # The first ones that were published.
        (SETTINGS | {"architectures": ["LlamaForCausalLM"]}, True),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, False),
        ({"architectures": "LlamaForCausalLMEagle3"}, False),
        ({}, False),
    ],
)
def test_is_head_tells_a_head_from_a_model(settings: dict[str, Any], is_one: bool) -> None:
    assert is_head(settings) == is_one


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; allowed: 1"),
        ({"hidden_size": 0}, "hidden_size is 0; allowed: an integer of 1 or more"),
        ({"hidden_size": True}, "hidden_size is True; allowed: an integer of 1 or more"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size is 'many'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported"),
        ({"num_experts": 8}, "num_experts is 8, which is not supported"),
        ({"rope_scaling": {"mrope_section": [1]}}, "rope_scaling.mrope_section is"),
        ({"sliding_window": 4096}, "sliding_window is 4096; allowed: none"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"norm_before_fc": True}, "norm_before_fc is True; allowed: False"),
        ({"norm_before_residual": True}, "norm_before_residual is True; allowed: False"),
        ({"eagle_config": [1]}, r"eagle_config is \[1\]; allowed: an object"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
        ({"eagle_config": {"depth": 3}}, "eagle_config.depth is 3, which is not supported"),
        ({IDS: [1, 2]}, rf"{IDS} is \[1, 2\]; allowed: 3 layer indexes"),
        ({IDS: [1, 2, -3]}, rf"{IDS} is \[1, 2, -3\]; allowed: 3 layer indexes"),
        ({IDS: "1, 2, 3"}, f"{IDS} is '1, 2, 3'; allowed: 3 layer indexes"),
    ],
)
def test_head_is_refused_by_name_when_it_is_built_otherwise(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=f"head: EAGLE-3 head not served: {reason}"):
        read_head_config(DIRECTORY, SETTINGS | settings)


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


def test_weights_have_the_dtype_of_the_model(tmp_path: Path) -> None:
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


def test_head_can_guess_all_tokens_without_a_mapping(tmp_path: Path) -> None:
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
            r"1 tensors of an EAGLE-3 head are unknown: midlayer\.self_attn\.q_proj\.bias",
        ),
        (
            lambda tensors: tensors | {"fc.weight": torch.zeros(64, 128)},
            r"fc\.weight has shape \[64, 128\]; allowed: \[64, 192\]",
        ),
        (
            lambda tensors: tensors | {"d2t": torch.full((140,), 21)},
            "d2t maps to tokens from 21 to 160; allowed: 0 to 159",
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
    with pytest.raises(
        ModelUnsupported,
        match=r"embed_tokens\.weight is missing; .* 64 differs from the model's 32",
    ):
        read(tmp_path)
    embedding = torch.ones(160, 64)
    rewrite(tmp_path, lambda tensors: tensors | {"embed_tokens.weight": embedding})
    own = read(tmp_path).embedding
    assert own is not None
    assert torch.equal(own, embedding)


BLOCK_SIZE = 8
NUM_TOKENS = 700
DEPTH = 3
LAYER = LayerShape(2, 16, 16)
KIND = LayerKind(LAYER, 4, AttentionOptions(16**-0.5))


class _Headed:
    """A head on pools, with the states of a text of NUM_TOKENS in its blocks."""

    def __init__(
        self, directory: Path, compute: LayerCompute, embedding: Tensor, states: Tensor
    ) -> None:
        checkpoint = resolve_checkpoint(str(make_tiny_head(directory, seed=3)))
        config = read_head_config(checkpoint.directory, checkpoint.config)
        weights = read_head_weights(checkpoint.weight_files, config, torch.float32)
        num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
        shapes = [LAYER, states_shape(config.width)]
        device = torch.device("cpu")
        cache = KVCache(shapes, BLOCK_SIZE, num_blocks, 0, torch.float32, device)
        self.table = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.states = HeadStates(cache.key_pools[1], compute.linear(weights.fc))
        self.model = HeadModel(config, weights, compute, embedding.__getitem__, cache, self.states)
        self.show(states, 0)

    def show(self, states: Tensor, position: int) -> None:
        """The model's states [L, 3 W] are these, from `position` on."""
        positions = torch.arange(position, position + len(states))
        slots = torch.tensor(self.table)[positions // BLOCK_SIZE] * BLOCK_SIZE
        self.states.take(
            states.view(len(states), 3, -1).transpose(0, 1), slots + positions % BLOCK_SIZE
        )

    def logits(self, tokens: list[int], position: int, *, samples: bool) -> Tensor:
        row = Row(tokens, position, self.table, 1, samples)
        batch = build_input_batch(make_step([row]), [0], BLOCK_SIZE, torch.device("cpu"))
        with torch.inference_mode():
            return self.model.logits(batch)


@pytest.fixture(params=["torch", "native"])
def compute(request: pytest.FixtureRequest) -> LayerCompute:
    chosen = choose_layer_compute(KIND, torch.float32, request.param, BLOCK_SIZE)
    assert (chosen.description == "torch") == (request.param == "torch")
    return chosen


def test_head_says_what_it_says_in_plain_torch(tmp_path: Path, compute: LayerCompute) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TINY_SHAPE.vocab_size, (NUM_TOKENS,), generator=generator)
    states = torch.randn(NUM_TOKENS, 3 * TINY_SHAPE.target_width, generator=generator)
    embedding = torch.randn(TINY_SHAPE.vocab_size, TINY_SHAPE.width, generator=generator)
    head = random_head(TINY_SHAPE, 3)
    with torch.inference_mode():
        expected = head(states[None, :-1], embedding[tokens][None, 1:], DEPTH)
    headed = _Headed(tmp_path, compute, embedding, states)
    position = 1
    # Parts of the text that are computed without a guess, and how much of it was known then.
    for end in (2, 3, 40, 41, 300, 690):
        if before := tokens[position : end - 1].tolist():
            assert len(headed.logits(before, position, samples=False)) == 0
        for depth in range(DEPTH):
            # What was not the model's yet is overwritten by what it guesses on from.
            said = headed.logits([int(tokens[end - 1 + depth])], end - 1 + depth, samples=True)
            of_head = expected[depth][0, end - 2 + depth]
            torch.testing.assert_close(said[0, head.token_ids], of_head, rtol=1e-3, atol=1e-3)
            assert torch.isneginf(said[0, : TINY_SHAPE.vocab_size // 8]).all()
        headed.show(states[end - 1 : end + DEPTH], end - 1)
        position = end - 1
