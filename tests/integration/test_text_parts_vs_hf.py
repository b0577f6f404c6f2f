"""Multimodal models, small and random, serve text alone as Hugging Face generates it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_service.backends import AUTO, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import ModelUnsupported
from tests.support.models.model_pair import generate_greedily
from tests.support.models.model_walk import greedy_tokens
from tests.support.models.tiny_models import auto_class, make_tiny_model

pytestmark = pytest.mark.usefixtures("native_library")
PROMPT = [3, 17, 44, 9, 120, 61, 5, 88, 31, 7, 19]
NUM_TOKENS = 14
# The wrapper's type, and what of it is served. Wrappers of Llamas and of Mistrals run in the
# decoders that these run in; those with positions of three kinds are served as they are.
_SERVED_AS = {
    "internvl": "Qwen2ForCausalLM",
    "kimi_k25": "DeepseekV3ForCausalLM",
    "llava": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


def load_wrapper(directory: Path) -> Any:  # noqa: ANN401
    from transformers import AutoConfig

    return auto_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory)


@pytest.mark.cases(4)
@pytest.mark.parametrize("model_type", _SERVED_AS)
def test_text_part_gives_tokens_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    make_tiny_model(model_type, tmp_path, seed=1)
    expected = generate_greedily(load_wrapper(tmp_path), PROMPT, NUM_TOKENS)

    compute = choose_compute(lambda: load_model(ModelConfig(str(tmp_path))), AUTO, 8)

    assert compute.loaded.architecture == _SERVED_AS[model_type]
    assert greedy_tokens(compute, PROMPT, NUM_TOKENS) == expected


def test_parts_for_images_are_not_loaded(tmp_path: Path) -> None:
    make_tiny_model("qwen3_vl", tmp_path, seed=1)

    loaded = load_model(ModelConfig(str(tmp_path)))

    assert not [name for name, _ in loaded.model.named_parameters() if "visual" in name]
    whole = sum(parameter.nbytes for parameter in load_wrapper(tmp_path).parameters())
    assert loaded.weights_bytes < whole


def test_eos_is_the_wrappers_when_its_text_is_served(
    tmp_path: Path,
) -> None:
    make_tiny_model("llava", tmp_path, seed=1)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7}))

    assert load_model(ModelConfig(str(tmp_path))).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("blip-2", "rejects text alone"),
        ("paligemma", "nor is its text part supported (gemma: bidirectional encoder"),
        ("idefics", "multimodal model (with vision_config)"),
        ("minicpmv4_6", "nor is its text part supported (qwen3_5_text: linear attention"),
        ("pix2struct", "encoder-decoder"),
    ],
)
def test_multimodal_model_is_refused_when_it_serves_no_text(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    make_tiny_model(model_type, tmp_path, seed=1)

    with pytest.raises(ModelUnsupported) as refusal:
        load_model(ModelConfig(str(tmp_path)))

    assert reason in str(refusal.value)
    assert str(refusal.value).count("supported:") == 1


def test_text_part_is_not_served_when_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlavaForConditionalGeneration

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        output = forward(self, *args, **kwargs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1]) / 100
        return output

    make_tiny_model("llava", tmp_path, seed=1)
    forward = LlavaForConditionalGeneration.forward
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", doubled)

    assert load_model(ModelConfig(str(tmp_path))).architecture == "LlavaForConditionalGeneration"
