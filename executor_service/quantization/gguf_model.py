"""Configuration and weights of a model of `transformers` from a GGUF file.

llama.cpp's converter renames tensors, changes the order of some rows, and adds 1 to some norms;
here each change is undone. Source: conversion scripts of https://github.com/ggml-org/llama.cpp.

Shape letters: E experts, N outputs, K inputs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from executor_service.errors import ModelUnreadable, ModelUnsupported, one_line
from executor_service.quantization.gguf_blocks import pack_blocks
from executor_service.quantization.gguf_file import PLAIN_TYPES, GgufFile, GgufTensor
from executor_service.quantization.tensor_files import LazyTensor
from splitserve_kernels.packed_weight import PackedWeight, StoredWeight

_BLOCK = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<name>.+)$")
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
# Factors of rotary frequencies. Their effect has to be in the configuration.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_Settings = Callable[["GgufMetadata"], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Metadata of a file, with the keys of its architecture."""

    file: GgufFile

    @property
    def architecture(self) -> str:
        """Architecture in llama.cpp's terms."""
        return str(self.file.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        """Returns the value of a key of the architecture.

        Raises ModelUnsupported if it has a value for each layer, and these differ.
        """
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelUnsupported(
                f"{self.file.paths[0]}: {self.architecture}.{key} differs between layers, not"
                " served; supported: one value for all layers"
            )
        return value[0]

    def need(self, key: str) -> Any:  # noqa: ANN401
        """Returns the value of a key. Raises ModelUnreadable if the file lacks it."""
        value = self.get(key)
        if value is None:
            path = self.file.paths[0]
            raise ModelUnreadable(f"{path}: the metadata lack {self.architecture}.{key}")
        return value

    def __contains__(self, tensor_name: str) -> bool:
        """Returns whether the file has a tensor of this name."""
        return tensor_name in self.file.tensors


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """Rules for reading models of one architecture.

    `settings`: fields of the configuration beside the common ones. `names`: of a layer's modules,
    by llama.cpp's. `experts`: of modules that hold all experts in one tensor. `are_pairs_permuted`:
    rows of queries and keys are in llama.cpp's order of rotary pairs. `is_one_added`: the file's
    norms are those of the model plus 1.
    """

    model_type: str
    class_name: str
    settings: _Settings
    names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    experts: Mapping[str, str] = field(default_factory=dict)
    are_pairs_permuted: bool = False
    is_one_added: bool = False


def _rope(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns the rotary embedding with its scaling, as `rope_parameters`."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(metadata.get("rope.freq_base", 10000.0)),
    }
    kind, factor = metadata.get("rope.scaling.type"), metadata.get("rope.scaling.factor")
    original = metadata.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in metadata:
        return rope | _llama3_scaling(metadata, rope["rope_theta"])
    if kind in (None, "none") or factor in (None, 1.0):
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and original is not None:
        return rope | {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": int(original),
        }
    raise ModelUnsupported(
        f"{metadata.file.paths[0]}: rope.scaling.type is {kind}, not served; supported: none,"
        " linear, yarn"
    )


def _llama3_scaling(metadata: GgufMetadata, theta: float) -> dict[str, Any]:
    """Returns the scaling of Llama 3.1 and later, whose factors the file has as a tensor.

    Raises ModelUnsupported if the factors are those of no published model.
    """
    stored = _plain(metadata.file.tensors["rope_freqs.weight"], torch.float32)
    pairs = torch.arange(0, 2 * len(stored), 2, dtype=torch.float32)
    lengths = 2 * math.pi * theta ** (pairs / (2 * len(stored)))
    low, high, original = 1.0, 4.0, 8192
    for factor in (8.0, 32.0, 16.0):
        smooth = ((original / lengths - low) / (high - low)).clamp(0.0, 1.0)
        expected = 1.0 / ((1 - smooth) / factor + smooth)
        if torch.allclose(stored, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ModelUnsupported(
        f"{metadata.file.paths[0]}: rope_freqs.weight has factors of no known scaling, not served;"
        " supported: those of Llama 3.1, 3.2 and 3.3"
    )


def _default_rope(metadata: GgufMetadata) -> dict[str, Any]:
    return {"rope_parameters": _rope(metadata)}


def _llama(metadata: GgufMetadata) -> dict[str, Any]:
    return _default_rope(metadata) | {
        "attention_bias": "blk.0.attn_q.bias" in metadata,
        "mlp_bias": "blk.0.ffn_up.bias" in metadata,
    }


def _mixtral(metadata: GgufMetadata) -> dict[str, Any]:
    return _default_rope(metadata) | {
        "num_local_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
    }


def _qwen3_moe(metadata: GgufMetadata) -> dict[str, Any]:
    return _default_rope(metadata) | {
        "num_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _smollm3(metadata: GgufMetadata) -> dict[str, Any]:
    # Every fourth layer has no rotary embedding; llama.cpp has this number in its code.
    return _default_rope(metadata) | {"no_rope_layer_interval": 4}


def _query_scale(metadata: GgufMetadata, num_layers_of_widest: int) -> int:
    """Returns the number whose root divides attention scores.

    It is the head size, except in the largest model of the family, where it is the width of the
    model for each head.
    """
    if metadata.need("block_count") == num_layers_of_widest:
        return int(metadata.need("embedding_length") // metadata.need("attention.head_count"))
    return int(metadata.need("attention.key_length"))


def _gemma2(metadata: GgufMetadata) -> dict[str, Any]:
    return _default_rope(metadata) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(metadata, 46),
    }


def _gemma3(metadata: GgufMetadata) -> dict[str, Any]:
    rope = _rope(metadata)
    local = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 10000.0)}
    num_layers = metadata.need("block_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.need("attention.sliding_window"),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scale(metadata, 62),
        # Every sixth layer attends to all positions.
        "layer_types": [
            "sliding_attention" if (layer + 1) % 6 else "full_attention"
            for layer in range(num_layers)
        ],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _phi3(metadata: GgufMetadata) -> dict[str, Any]:
    rope = _rope(metadata)
    original = metadata.get("rope.scaling.original_context_length")
    settings: dict[str, Any] = {"sliding_window": metadata.get("attention.sliding_window")}
    if "rope_factors_long.weight" in metadata:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        for kind in ("long", "short"):
            stored = metadata.file.tensors[f"rope_factors_{kind}.weight"]
            rope[f"{kind}_factor"] = _plain(stored, torch.float32).tolist()
        settings["original_max_position_embeddings"] = original
    head_dim = metadata.need("embedding_length") // metadata.need("attention.head_count")
    rope["partial_rotary_factor"] = metadata.get("rope.dimension_count", head_dim) / head_dim
    return settings | {"rope_parameters": rope}


def _gpt_oss(metadata: GgufMetadata) -> dict[str, Any]:
    rope = _rope(metadata)
    if rope["rope_type"] == "yarn":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {
        "rope_parameters": rope,
        "num_local_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "intermediate_size": metadata.need("expert_feed_forward_length"),
        "sliding_window": metadata.need("attention.sliding_window"),
    }


_GEMMA_LAYER = _LAYER_NAMES | _GEMMA_NAMES
_ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", _llama, are_pairs_permuted=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM", _default_rope),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM", _default_rope),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        names=_LAYER_NAMES | {"ffn_gate_inp": "mlp.gate"},
        experts=_EXPERTS,
    ),
    "gemma2": GgufArchitecture(
        "gemma2", "Gemma2ForCausalLM", _gemma2, names=_GEMMA_LAYER, is_one_added=True
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text", "Gemma3ForCausalLM", _gemma3, names=_GEMMA_LAYER, is_one_added=True
    ),
    "phi3": GgufArchitecture(
        "phi3",
        "Phi3ForCausalLM",
        _phi3,
        names=_LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "smollm3": GgufArchitecture("smollm3", "SmolLM3ForCausalLM", _smollm3, are_pairs_permuted=True),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _gpt_oss,
        names=_LAYER_NAMES
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
    ),
}
_MIXTRAL = GgufArchitecture(
    "mixtral",
    "MixtralForCausalLM",
    _mixtral,
    names=_LAYER_NAMES | {"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=_MIXTRAL_EXPERTS,
    are_pairs_permuted=True,
)


def _architecture(metadata: GgufMetadata) -> GgufArchitecture:
    if metadata.architecture == "llama" and metadata.get("expert_count"):
        return _MIXTRAL
    try:
        return _ARCHITECTURES[metadata.architecture]
    except KeyError:
        raise ModelUnsupported(
            f"{metadata.file.paths[0]}: general.architecture is {metadata.architecture}, not"
            f" served; supported: {', '.join(_ARCHITECTURES)}"
        ) from None


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the contents of a config.json for the model of a file.

    Raises ModelUnsupported for an architecture, or an option of it, that is not read, and
    ModelUnreadable for missing and nonsensical metadata.
    """
    try:
        return _config(file)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelUnreadable(
            f"{file.paths[0]}: the metadata describe no model ({one_line(error)})"
        ) from error


def _config(file: GgufFile) -> dict[str, Any]:
    metadata = GgufMetadata(file)
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelUnsupported(
            f"{file.paths[0]}: general.type is {kind}, not served; supported: model"
        )
    architecture = _architecture(metadata)
    num_heads = metadata.need("attention.head_count")
    width = metadata.need("embedding_length")
    tokens = file.metadata.get("tokenizer.ggml.tokens") or ()
    config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "dtype": _dtype(file),
        "vocab_size": _embedding(metadata).shape[0] or len(tokens),
        "hidden_size": width,
        "intermediate_size": metadata.get("feed_forward_length"),
        "num_hidden_layers": metadata.need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", num_heads),
        "head_dim": metadata.get("attention.key_length", width // num_heads),
        "max_position_embeddings": metadata.need("context_length"),
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in metadata,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(file.metadata),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {
        key: value
        for key, value in (config | architecture.settings(metadata)).items()
        if value is not None or key in ("eos_token_id", "bos_token_id", "pad_token_id")
    }


def _end_tokens(metadata: Mapping[str, Any]) -> list[int] | None:
    """Returns the tokens that end a text, a turn of a chat, or a message of a turn."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = dict.fromkeys(metadata[key] for key in keys if key in metadata)
    return list(found) or None


def _dtype(file: GgufFile) -> str:
    """Returns the dtype of most matrices; bfloat16 for quantised ones."""
    kinds = Counter(tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1)
    most = kinds.most_common(1)[0][0] if kinds else ""
    return str(PLAIN_TYPES.get(most, torch.bfloat16)).removeprefix("torch.")


def _embedding(metadata: GgufMetadata) -> GgufTensor:
    try:
        return metadata.file.tensors["token_embd.weight"]
    except KeyError:
        raise ModelUnreadable(
            f"{metadata.file.paths[0]}: the weights lack token_embd.weight"
        ) from None


def gguf_weights(file: GgufFile, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Returns the weights by the names of `transformers`. `dtype`: in which layers compute.

    Raises ModelUnreadable for a tensor that has no place in the model.
    """
    metadata = GgufMetadata(file)
    architecture = _architecture(metadata)
    weights: dict[str, LazyTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name not in _ROPE_TENSORS:
            weights.update(_named(tensor, metadata, architecture, dtype))
    return weights


def _named(
    tensor: GgufTensor, metadata: GgufMetadata, architecture: GgufArchitecture, dtype: torch.dtype
) -> Iterator[tuple[str, LazyTensor]]:
    """Yields the weights that a tensor holds, with their names."""
    stem, _, kind = tensor.name.rpartition(".")
    found = _BLOCK.match(stem)
    if found is None:
        if stem not in _NAMES:
            raise _no_place(tensor, metadata)
        yield f"{_NAMES[stem]}.{kind}", _changed(tensor, architecture, dtype)
        return
    prefix, name = f"model.layers.{found['layer']}", found["name"]
    if name in architecture.experts:
        template = architecture.experts[name]
        for expert in range(tensor.shape[0]):
            yield f"{prefix}.{template.format(expert)}.{kind}", _expert(tensor, expert, dtype)
    elif metadata.architecture == "gpt-oss" and name in _OSS_EXPERTS:
        if name != "ffn_gate_exps":
            yield (
                f"{prefix}.mlp.experts.{_OSS_EXPERTS[name]}{_oss_ending(kind)}",
                _oss_expert(tensor, metadata, dtype),
            )
    elif name in architecture.names:
        own = f"{prefix}.{architecture.names[name]}"
        is_permuted = architecture.are_pairs_permuted and name in ("attn_q", "attn_k")
        num_heads = metadata.need("attention.head_count")
        if name == "attn_k":
            num_heads = metadata.get("attention.head_count_kv", num_heads)
        yield (
            own if name == "attn_sinks" else f"{own}.{kind}",
            _changed(tensor, architecture, dtype, num_heads=num_heads if is_permuted else 0),
        )
    else:
        raise _no_place(tensor, metadata)


@dataclass(frozen=True, slots=True)
class GgufLayer:
    """A layer of a model of `transformers` by its name, without the last part (`weight`).

    `are_queries_permuted`, `are_keys_permuted`: its rows are in llama.cpp's order of pairs.
    """

    name: str
    are_queries_permuted: bool = False
    are_keys_permuted: bool = False


def gguf_layer(architecture_name: str, model_type: str, stem: str) -> GgufLayer | None:
    """Returns the layer of a model that llama.cpp calls `stem`; None for none.

    `architecture_name`: in llama.cpp's terms. `model_type`: that of the model's configuration.
    Raises ModelUnsupported if they are different kinds of models.
    """
    kinds = (*_ARCHITECTURES.items(), ("llama", _MIXTRAL))
    found = [a for name, a in kinds if name == architecture_name and a.model_type == model_type]
    if not found:
        allowed = sorted({name for name, each in kinds if each.model_type == model_type})
        raise ModelUnsupported(
            f"general.architecture is {architecture_name} where the model is a {model_type};"
            f" allowed: {', '.join(allowed) or 'none'}"
        )
    (architecture,) = found
    block = _BLOCK.match(stem)
    if block is None:
        return GgufLayer(_NAMES[stem]) if stem in _NAMES else None
    name = block["name"]
    if name not in architecture.names:
        return None
    is_permuted = architecture.are_pairs_permuted
    return GgufLayer(
        f"model.layers.{block['layer']}.{architecture.names[name]}",
        is_permuted and name == "attn_q",
        is_permuted and name == "attn_k",
    )


def _no_place(tensor: GgufTensor, metadata: GgufMetadata) -> ModelUnreadable:
    return ModelUnreadable(
        f"{metadata.file.paths[0]}: a model of {metadata.architecture} has no place for"
        f" {tensor.name}"
    )


def _changed(
    tensor: GgufTensor, architecture: GgufArchitecture, dtype: torch.dtype, *, num_heads: int = 0
) -> LazyTensor:
    """Returns a tensor in the model's form. `num_heads`: undo the order of pairs; 0 for none."""
    is_norm = "norm" in tensor.name

    def read() -> Tensor:
        plain = _plain(tensor, torch.float32 if is_norm else dtype)
        if num_heads:
            plain = plain[order_of_pairs(len(plain), num_heads)]
        if is_norm and architecture.is_one_added:
            plain = plain - 1
        return plain

    def read_rows(rows: slice) -> PackedWeight:
        order: slice | Tensor = rows
        if num_heads:
            order = order_of_pairs(tensor.shape[0], num_heads)[rows]
        return pack_blocks(tensor.type_name, tensor.data[order], dtype)

    def stored() -> StoredWeight | None:
        if tensor.type_name in PLAIN_TYPES or len(tensor.shape) != 2:
            return None
        return StoredWeight((tensor.shape[0], tensor.shape[1]), dtype, read_rows)

    return LazyTensor(read, is_quantised=tensor.is_quantised, stored=stored)


def order_of_pairs(num_rows: int, num_heads: int) -> Tensor:
    """Returns the rows of a file in the order of `transformers`.

    llama.cpp has the two halves of a head interleaved.
    """
    rows = torch.arange(num_rows).view(num_heads, -1, 2)
    return rows.transpose(1, 2).reshape(-1)


def _plain(tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of a tensor in its shape."""
    if tensor.type_name in PLAIN_TYPES:
        return tensor.plain().to(dtype)
    return pack_blocks(tensor.type_name, tensor.data, dtype).dequantized().view(tensor.shape)


def _tensor_of_expert(tensor: GgufTensor, number: int) -> GgufTensor:
    """Returns the rows of one expert of a tensor [E, N, K]."""
    num_rows = tensor.shape[1]
    rows = tensor.data[number * num_rows : (number + 1) * num_rows]
    return GgufTensor(tensor.name, tensor.type_name, tensor.shape[1:], rows)


def _expert(tensor: GgufTensor, number: int, dtype: torch.dtype) -> LazyTensor:
    """Returns the matrix of one expert of a tensor [E, N, K]."""
    own = _tensor_of_expert(tensor, number)
    return LazyTensor(
        lambda: _plain(own, dtype),
        is_quantised=tensor.is_quantised,
        stored=lambda: _stored(own, dtype),
    )


def _stored(tensor: GgufTensor, dtype: torch.dtype) -> StoredWeight | None:
    """Returns the weights [N, K] of a matrix as they are packed; None if they are not."""
    if not tensor.is_quantised or len(tensor.shape) != 2:
        return None
    return StoredWeight(
        (tensor.shape[0], tensor.shape[1]),
        dtype,
        lambda rows: pack_blocks(tensor.type_name, tensor.data[rows], dtype),
    )


# -- Experts of gpt-oss, whose gate and up rows alternate in `transformers` ------------------------

_OSS_EXPERTS = {
    "ffn_gate_exps": "gate_up_proj",
    "ffn_up_exps": "gate_up_proj",
    "ffn_down_exps": "down_proj",
}


def _oss_ending(kind: str) -> str:
    return "_bias" if kind == "bias" else ""


def _oss_expert(tensor: GgufTensor, metadata: GgufMetadata, dtype: torch.dtype) -> LazyTensor:
    """Returns a tensor of all experts, [E, K, N], or their biases, [E, N]."""
    parts = [tensor]
    if "ffn_up_exps" in tensor.name:
        parts.insert(0, metadata.file.tensors[tensor.name.replace("ffn_up_exps", "ffn_gate_exps")])

    def read() -> Tensor:
        plain = _plain(tensor, dtype)
        if len(parts) > 1:
            other = parts[0]
            plain = torch.stack((_plain(other, dtype), plain), dim=2).flatten(1, 2)
        return plain.transpose(1, 2).contiguous() if plain.ndim == 3 else plain

    def stored() -> tuple[tuple[StoredWeight, ...], ...] | None:
        if len(tensor.shape) != 3:
            return None
        experts = []
        for number in range(tensor.shape[0]):
            own = [_stored(_tensor_of_expert(part, number), dtype) for part in parts]
            packed = [each for each in own if each is not None]
            if len(packed) < len(parts):
                return None
            experts.append(tuple(packed))
        return tuple(experts)

    return LazyTensor(read, is_quantised=tensor.is_quantised, stored_experts=stored)
