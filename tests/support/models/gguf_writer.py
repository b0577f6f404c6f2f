"""Writes a model of `transformers` as a GGUF file, as llama.cpp's converter would.

The rules are those of its conversion scripts; `executor_service.quantization` must undo them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from torch import Tensor

Setting = float | str | list[int] | list[str]

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OSS_NORMS = {"post_attention_layernorm": "post_attention_norm"}
_PERMUTED = ("llama", "smollm3")


def write_gguf(
    path: Path,
    model: Any,  # noqa: ANN401
    architecture: str,
    settings: Mapping[str, Setting],
    *,
    type_name: str = "F32",
    extra: Mapping[str, Tensor] | None = None,
    left_out: Sequence[str] = (),
    max_tensors: int = 0,
) -> None:
    """Writes `model`, float32. `settings`: metadata beside the usual, with full keys.

    `type_name`: of matrices whose rows it can hold. `extra`: further tensors. `left_out`: names of
    tensors to leave out. `max_tensors`: of a file, if there are to be several.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    config = model.config
    usual = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if getattr(config, "head_dim", None):
        usual |= {"attention.key_length": config.head_dim}
    values = {f"{architecture}.{key}": value for key, value in usual.items()} | dict(settings)
    for key, value in values.items():
        _add_value(writer, key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        plain = tensor.float()
        for own, weight in _converted(name, plain, architecture, config):
            if own not in left_out:
                _add_tensor(writer, own, weight, type_name)
    for name, tensor in (extra or {}).items():
        _add_tensor(writer, name, tensor, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf_adapter(
    path: Path,
    architecture: str,
    config: Any,  # noqa: ANN401
    matrices: Mapping[str, tuple[Tensor, Tensor]],
    settings: Mapping[str, Setting],
) -> None:
    """Writes an adapter of a model with `config`. `matrices`: lora_A and lora_B by the module.

    Of the embedding, as PEFT has them: [r, V] and [W, r]. `settings`: metadata, beside the
    architecture.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in settings.items():
        _add_value(writer, key, value)
    for name, (down, up) in matrices.items():
        # The rows of a product are those of its left factor.
        ((own, converted),) = _converted(f"{name}.weight", up, architecture, config)
        writer.add_tensor(
            f"{own}.lora_a", (down.T if own.startswith("token_embd") else down).contiguous().numpy()
        )
        writer.add_tensor(f"{own}.lora_b", converted.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def round_matrices(model: Any, type_name: str) -> None:  # noqa: ANN401
    """Rounds the matrices of `model`, in place, to numbers that blocks of a type can hold."""
    kind = GGMLQuantizationType[type_name]
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.shape[-1] % 32 == 0:
            rounded = quants.dequantize(quants.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data.copy_(torch.from_numpy(rounded))


def _add_value(writer: GGUFWriter, key: str, value: Setting) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, type_name: str) -> None:
    numbers = tensor.contiguous().numpy()
    kind = GGMLQuantizationType[type_name]
    if type_name == "F32" or tensor.ndim < 2 or tensor.shape[-1] % 32:
        writer.add_tensor(name, numbers.astype(np.float32))
    else:
        writer.add_tensor(name, quants.quantize(numbers, kind), raw_dtype=kind)


def _converted(
    name: str,
    tensor: Tensor,
    architecture: str,
    config: Any,  # noqa: ANN401
) -> list[tuple[str, Tensor]]:
    """Returns the tensors of the file that hold one of the model, with their names."""
    found = _LAYER.match(name)
    prefix, rest = (f"blk.{found[1]}.", found[2]) if found else ("", name)
    if rest.startswith("mlp.experts."):
        return [(prefix + own, each) for own, each in _experts(rest, tensor, architecture)]
    if rest == "self_attn.sinks":
        return [(f"{prefix}attn_sinks.weight", tensor)]
    stem, _, kind = rest.rpartition(".")
    norms = _GEMMA_NORMS if "gemma" in architecture else _NORMS
    names = _NAMES | (_OSS_NORMS if architecture == "gpt-oss" else norms)
    own = names[stem]
    if "gemma" in architecture and "norm" in own:
        tensor = tensor + 1
    if architecture in _PERMUTED and own in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if own == "attn_q" else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    return [(f"{prefix}{own}.{kind}", tensor)]


def _experts(rest: str, tensor: Tensor, architecture: str) -> list[tuple[str, Tensor]]:
    name = rest.removeprefix("mlp.experts.")
    if architecture == "gpt-oss":
        kind = "bias" if name.endswith("_bias") else "weight"
        if name.startswith("down"):
            tensor = tensor if kind == "bias" else tensor.transpose(1, 2)
            return [(f"ffn_down_exps.{kind}", tensor)]
        gate, up = tensor[..., ::2], tensor[..., 1::2]
        if kind == "weight":
            gate, up = gate.transpose(1, 2), up.transpose(1, 2)
        return [(f"ffn_gate_exps.{kind}", gate), (f"ffn_up_exps.{kind}", up)]
    if name == "down_proj":
        return [("ffn_down_exps.weight", tensor)]
    gate, up = tensor.chunk(2, dim=1)
    return [("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up)]
