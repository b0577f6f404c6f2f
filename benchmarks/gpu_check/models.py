"""Random models of well-known shapes, made on the device: no checkpoint, no hub."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_check.sizes import ModelShape, Sizes
from executor_service.checkpoint import round_linears
from executor_service.model import LoadedModel, weights_bytes
from executor_service.quantization import ROUNDINGS
from executor_service.trials import try_model


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
    if shape.is_int4:
        round_linears(model, ROUNDINGS["int4"], sizes.device)
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
