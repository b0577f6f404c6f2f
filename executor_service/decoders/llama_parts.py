"""Models of the Llama kind, taken apart for a decoder that is not that of `transformers`.

A model is recognised by its class and every field of its configuration (`llama_config.py`), then by
its parts; a trial of the decoder comes after that. The reasons are in
docs/adr/0010-models-are-recognised-by-their-configuration.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.decoders.llama_config import why_not_llama_config
from executor_service.device.memory import release_file_pages
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.progress import show_progress
from splitserve_kernels.decoder_weights import DecoderShape, LayerWeights, LinearWeights

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_MODEL_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_ACTIVATIONS = {"SiLU", "SiLUActivation"}


def why_not_llama(loaded: LoadedModel) -> str | None:
    """What tells a model from the Llama kind; None if it may be one."""
    model: Any = loaded.model
    return why_not_llama_config(model) or _why_not_parts(model) or _why_not_layers(loaded)


def _why_not_parts(model: Any) -> str | None:  # noqa: ANN401
    base = getattr(model, "model", None)
    if _parts(model) != {"model", "lm_head"} or base is None or _parts(base) != _MODEL_PARTS:
        return "the model has other parts"
    for layer in base.layers:
        attention_parts = _parts(getattr(layer, "self_attn", None))
        if (
            _parts(layer) != _LAYER_PARTS
            or attention_parts not in (_ATTENTION_PARTS, _ATTENTION_PARTS | _HEAD_NORMS)
            or _parts(layer.mlp) != _MLP_PARTS
        ):
            return "its layers have other parts"
        activation = type(layer.mlp.act_fn).__name__
        if activation not in _ACTIVATIONS:
            return f"its activation is {activation}"
    norms = [module for name, module in base.named_modules() if name.endswith("norm")]
    epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
    if len(epsilons) > 1 or None in epsilons:
        return "its norms have no epsilon in common"
    return None


def _why_not_layers(loaded: LoadedModel) -> str | None:
    shapes = {(shape.key_dim, shape.value_dim, shape.num_kv_heads) for shape in loaded.layers}
    key_dim, value_dim, _ = next(iter(shapes))
    if len(shapes) > 1 or key_dim != value_dim or key_dim % 2:
        return "its heads differ in size, or have an odd one"
    options = loaded.layer_options
    if len({each.scale for each in options}) > 1:
        return "its layers scale scores differently"
    if any(each.softcap is not None or each.sinks is not None for each in options):
        return "its attention has a soft cap or sinks"
    return None


def decoder_shape(loaded: LoadedModel, rotary_dim: int) -> DecoderShape:
    """The sizes of a model that `why_not_llama` has nothing against."""
    model: Any = loaded.model
    layer, key = model.model.layers[0], loaded.layers[0]
    return DecoderShape(
        width=model.model.embed_tokens.weight.shape[1],
        mlp_width=layer.mlp.gate_proj.weight.shape[0],
        num_heads=layer.self_attn.q_proj.weight.shape[0] // key.key_dim,
        num_kv_heads=key.num_kv_heads,
        head_dim=key.key_dim,
        rotary_dim=rotary_dim,
        epsilon=float(layer.input_layernorm.variance_epsilon),
        scale=loaded.layer_options[0].scale,
    )


def take_layers(loaded: LoadedModel) -> Iterator[LayerWeights]:
    """The layers one by one. The model lets go of each when the next one is asked for.

    So do the pages of its weights, if these are mapped: memory holds what is copied once.
    """
    model: Any = loaded.model
    layers = list(zip(model.model.layers, loaded.layer_windows, strict=True))
    for layer, window in show_progress(layers, "layers packed"):
        attention, mlp = layer.self_attn, layer.mlp
        yield LayerWeights(
            query=linear_weights(attention.q_proj),
            key=linear_weights(attention.k_proj),
            value=linear_weights(attention.v_proj),
            attention_output=linear_weights(attention.o_proj),
            gate=linear_weights(mlp.gate_proj),
            up=linear_weights(mlp.up_proj),
            down=linear_weights(mlp.down_proj),
            input_norm=layer.input_layernorm.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
            sliding_window=window,
        )
        release_weights(layer)
        release_file_pages()


def linear_weights(module: nn.Linear) -> LinearWeights:
    """Those of the module, not copied."""
    return LinearWeights(module.weight, module.bias)


def release_weights(module: nn.Module) -> None:
    """Takes the numbers away from all parameters; `module` cannot run any more."""
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def rotation(loaded: LoadedModel, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions `start` .. `end` - 1, see `rotation_at`.

    Not of positions beyond the longest sequence: with these the angles of some models would change
    for all positions.
    """
    end = min(end, loaded.max_model_len)
    return rotation_at(loaded, torch.arange(start, end, device=loaded.device))


def rotation_at(loaded: LoadedModel, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `positions` [P], [P, rotary_dim / 2] float32 each."""
    model: Any = loaded.model
    anything = torch.zeros(1, dtype=torch.float32, device=loaded.device)
    cosines, sines = model.model.rotary_emb(anything, positions[None])
    # Both halves of a head are turned by the same angles.
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()


def _parts(module: Any) -> set[str]:  # noqa: ANN401
    return set() if module is None else {name for name, _ in module.named_children()}
