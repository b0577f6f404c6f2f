"""Random models of well-known shapes, made on the device: no checkpoint, no hub."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_check.sizes import ModelShape, Sizes
from executor_service.model.loaded_model import LoadedModel, weights_bytes
from executor_service.trials.model_trial import try_model


def make_model(shape: ModelShape, sizes: Sizes) -> Any:  # noqa: ANN401
    """A model of `transformers` with random weights, which attends by torch's own kernels."""
    import transformers

    config = getattr(transformers, shape.config_class)(**shape.options)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device(sizes.device):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=sizes.dtype, attn_implementation="sdpa")
    return model.to(sizes.device).eval()


def load_random(shape: ModelShape, sizes: Sizes) -> LoadedModel:
    """Such a model, switched to paged attention as loading does. Raises ModelUnsupported."""
    model = make_model(shape, sizes)
    text_config = model.config.get_text_config(decoder=True)
    max_model_len = int(text_config.max_position_embeddings)
    profile = try_model(model, text_config, max_model_len)
    return LoadedModel(
        model=model,
        name=shape.name,
        architecture=type(model).__name__,
        digest="",
        dtype=model.dtype,
        kv_dtype=model.dtype,
        device=torch.device(model.device),
        attention_modules=profile.modules,
        layers=profile.layers,
        vocab_size=int(text_config.vocab_size),
        max_model_len=max_model_len,
        layer_options=profile.options,
        sliding_window=profile.sliding_window,
        eos_token_ids=(),
        keeps_logits=True,
        weights_bytes=weights_bytes(model),
        tokenizer_files={},
        expected=profile.expected,
    )


def decode_bytes(model: Any) -> int:  # noqa: ANN401
    """Bytes of weights that a step of decodes reads: all but embeddings that are only looked up."""
    head = model.get_output_embeddings().weight
    return (_num_body_weights(model) + int(head.numel())) * int(head.element_size())


def decode_flops(model: Any) -> int:  # noqa: ANN401
    """Operations of one decode with the weights, its logits among them; without attention."""
    return int(2 * (_num_body_weights(model) + model.get_output_embeddings().weight.numel()))


def prompt_flops(model: Any, num_tokens: int) -> int:  # noqa: ANN401
    """Operations of a prompt of which the last token alone gets logits."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Two products; the causal mask leaves half of each.
    per_pair = 2 * config.num_hidden_layers * config.num_attention_heads * head_dim
    return int(2 * _num_body_weights(model) * num_tokens + per_pair * num_tokens**2)


def _num_body_weights(model: Any) -> int:  # noqa: ANN401
    """All but the embeddings of input and output."""
    embeddings = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    outside = {id(weight) for weight in embeddings}
    return sum(weight.numel() for weight in model.parameters() if id(weight) not in outside)
