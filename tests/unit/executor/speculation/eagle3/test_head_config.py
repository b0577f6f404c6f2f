"""What a config.json says of an EAGLE-3 head, and what refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_service.errors import ModelUnsupported
from executor_service.speculation.eagle3.head_weights import is_head, read_head_config

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
        ({"hidden_size": 0}, "hidden_size is 0; allowed: an integer from 1 on"),
        ({"hidden_size": True}, "hidden_size is True; allowed: an integer from 1 on"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size is 'many'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not understood"),
        ({"num_experts": 8}, "num_experts is 8, which is not understood"),
        ({"rope_scaling": {"mrope_section": [1]}}, "rope_scaling.mrope_section is"),
        ({"sliding_window": 4096}, "sliding_window is 4096; allowed: none"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1"),
        ({"norm_before_fc": True}, "norm_before_fc is True; allowed: False"),
        ({"norm_before_residual": True}, "norm_before_residual is True; allowed: False"),
        ({"eagle_config": [1]}, r"eagle_config is \[1\]; allowed: an object"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
        ({"eagle_config": {"depth": 3}}, "eagle_config.depth is 3, not understood"),
        ({IDS: [1, 2]}, rf"{IDS} is \[1, 2\]; allowed: 3 indexes of layers"),
        ({IDS: [1, 2, -3]}, rf"{IDS} is \[1, 2, -3\]; allowed: 3 indexes of layers"),
        ({IDS: "1, 2, 3"}, f"{IDS} is '1, 2, 3'; allowed: 3 indexes of layers"),
    ],
)
def test_head_is_refused_by_name_when_it_is_built_otherwise(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=f"head: an EAGLE-3 head, not served: {reason}"):
        read_head_config(DIRECTORY, SETTINGS | settings)
