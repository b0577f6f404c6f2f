"""Configuration and weights of an EAGLE-3 head, both checked when read.

Shape letters: W width of the head, M of the target model, I of the MLP, H query heads, G key/value
heads, D head size, V tokens of the target model, U tokens that the head can guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from executor_service.decoders import why_not_llama_settings
from executor_service.errors import ModelUnreadable, ModelUnsupported, one_line

_EMBEDDING, _OFFSETS, _MASK = "embed_tokens.weight", "d2t", "t2d"
_NUM_NAMED = 3


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """Weights of a head, all in one dtype. `fc`: [W, 3 M]. `query`, `key`, `value`: [.., 2 W].

    `head`: [U, W]. `token_ids`: [U] int64, the target's ids of these tokens. `embedding`: [V, W];
    None for that of the target model.
    """

    fc: Tensor
    input_norm: Tensor
    hidden_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attention_output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    final_norm: Tensor
    head: Tensor
    token_ids: Tensor
    embedding: Tensor | None


def read_head_weights(files: Sequence[Path], config: HeadConfig, dtype: torch.dtype) -> HeadWeights:
    """Reads the weights of a head from `files`, those of its checkpoint.

    Raises ModelUnsupported, before it reads a number, if the files have other tensors than a head
    of this `config`, and ModelUnreadable if they are broken.
    """
    directory = files[0].parent
    shapes = _shapes(config)
    try:
        found = {_plain(name): shape for path in files for name, shape in _found(path).items()}
        _check_shapes(directory, shapes, found)
        tensors = {_plain(name): tensor for path in files for name, tensor in _read(path).items()}
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelUnreadable(f"{directory}: {one_line(error)}") from error
    by_name = {name: tensors[full].to(dtype) for name, full in _NAMES.items()}
    embedding = tensors.get(_EMBEDDING)
    if embedding is None and config.width != config.target_width:
        raise ModelUnsupported(
            f"{directory}: {_EMBEDDING} is missing; required because the head's width"
            f" {config.width} differs from the model's {config.target_width}"
        )
    return HeadWeights(
        **by_name,
        token_ids=_token_ids(directory, tensors.get(_OFFSETS), config),
        embedding=None if embedding is None else embedding.to(dtype),
    )


_NAMES: Mapping[str, str] = {
    "fc": "fc.weight",
    "input_norm": "midlayer.input_layernorm.weight",
    "hidden_norm": "midlayer.hidden_norm.weight",
    "query": "midlayer.self_attn.q_proj.weight",
    "key": "midlayer.self_attn.k_proj.weight",
    "value": "midlayer.self_attn.v_proj.weight",
    "attention_output": "midlayer.self_attn.o_proj.weight",
    "mlp_norm": "midlayer.post_attention_layernorm.weight",
    "gate": "midlayer.mlp.gate_proj.weight",
    "up": "midlayer.mlp.up_proj.weight",
    "down": "midlayer.mlp.down_proj.weight",
    "final_norm": "norm.weight",
    "head": "lm_head.weight",
}


def _shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors that a head may have, by their names in checkpoints."""
    width, mlp = config.width, config.mlp_width
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    norm = (width,)
    of_field = {
        "fc": (width, NUM_STATES * config.target_width),
        "input_norm": norm,
        "hidden_norm": norm,
        "query": (query, 2 * width),
        "key": (key, 2 * width),
        "value": (key, 2 * width),
        "attention_output": (width, query),
        "mlp_norm": norm,
        "gate": (mlp, width),
        "up": (mlp, width),
        "down": (width, mlp),
        "final_norm": norm,
        "head": (config.draft_vocab_size, width),
    }
    return {_NAMES[field]: shape for field, shape in of_field.items()} | {
        _EMBEDDING: (config.vocab_size, width),
        _OFFSETS: (config.draft_vocab_size,),
        _MASK: (config.vocab_size,),
    }


def _check_shapes(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
) -> None:
    missing = [name for name in _NAMES.values() if name not in found]
    unknown = [name for name in found if name not in shapes]
    for what, names in (("missing", missing), ("unknown", unknown)):
        if names:
            shown = ", ".join(sorted(names)[:_NUM_NAMED])
            raise ModelUnsupported(
                f"{directory}: {len(names)} tensors of an EAGLE-3 head are {what}: {shown}"
            )
    for name, shape in found.items():
        if shape != shapes[name]:
            raise ModelUnsupported(
                f"{directory}: {name} has shape {list(shape)}; allowed: {list(shapes[name])}"
            )


def _found(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors in a file."""
    if path.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in _read(path).items()}
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _read(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a file."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{path.name} is not a dictionary of tensors")
    return tensors


def _plain(name: str) -> str:
    """Returns the name without "model.", which heads saved as part of a model have."""
    return name.removeprefix("model.")


def _token_ids(directory: Path, offsets: Tensor | None, config: HeadConfig) -> Tensor:
    """Returns the token ids, [U] int64: the head's own numbers plus `offsets`.

    Raises ModelUnsupported if offsets are missing but needed, or lead outside of the vocabulary.
    """
    own = torch.arange(config.draft_vocab_size)
    if offsets is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ModelUnsupported(
                f"{directory}: {_OFFSETS} is missing, and draft_vocab_size"
                f" {config.draft_vocab_size} is not vocab_size {config.vocab_size}"
            )
        return own
    token_ids = own + offsets.to(torch.int64)
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= config.vocab_size:
        raise ModelUnsupported(
            f"{directory}: {_OFFSETS} maps to tokens from {int(token_ids.min())} to"
            f" {int(token_ids.max())}; allowed: 0 to {config.vocab_size - 1}"
        )
    return token_ids


# -- Configuration of an EAGLE-3 head, as in checkpoints of LlamaForCausalLMEagle3 -----------------
#
# Every field is accounted for: a set field that is unknown here refuses the head by name. Source
# of the format: Li 2025, "EAGLE-3" (arXiv 2503.01840), and the checkpoints that were published
# since.

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_STATES = 3

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields that only a head has; and further fields about its structure, with the only values that are
# supported here.
_OWN = frozenset({"draft_vocab_size", "eagle_config", "target_hidden_size", _LAYER_IDS})
_ONLY: Mapping[str, object] = MappingProxyType(
    {
        "norm_before_fc": False,
        "norm_before_residual": False,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Configuration of a head. `target_width`: width of the model whose states it reads.

    `width`: width of the head. `layer_ids`: layers whose inputs it reads, where the number of
    layers stands for the output of the last; None for the usual ones. `llama`: a LlamaConfig of
    `transformers` for its one layer.
    """

    width: int
    target_width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    epsilon: float
    layer_ids: tuple[int, ...] | None
    llama: Any

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs are read, of a model with `num_layers`."""
        if self.layer_ids is not None:
            return self.layer_ids
        # A low, a middle and a high layer; in models with few layers they are close together.
        return min(2, num_layers), num_layers // 2, max(num_layers - NUM_STATES, 0)


def is_head(settings: Mapping[str, Any]) -> bool:
    """Returns whether `settings`, the contents of a config.json, describe an EAGLE-3 head."""
    # The first published heads have the architecture name of a Llama.
    return ARCHITECTURE in _architectures(settings) or "draft_vocab_size" in settings


def read_head_config(directory: Path, settings: Mapping[str, Any]) -> HeadConfig:
    """Reads the configuration. `settings`: contents of config.json in `directory`.

    Raises ModelUnsupported, with the field's name, for a setting that is not supported.
    """
    own = settings.get("eagle_config") or {}
    if not isinstance(own, dict):
        raise _refused(directory, f"eagle_config is {own!r}; allowed: an object")
    _check_settings(directory, settings, own)
    num_layers = settings.get("num_hidden_layers", 1)
    if num_layers != 1:
        raise _refused(directory, f"num_hidden_layers is {num_layers!r}; allowed: 1")
    width = _size(directory, settings, "hidden_size")
    vocab_size = _size(directory, settings, "vocab_size")
    num_heads = _size(directory, settings, "num_attention_heads")
    llama = _llama_config(directory, settings)
    return HeadConfig(
        width=width,
        target_width=_size(directory, settings, "target_hidden_size", width),
        mlp_width=_size(directory, settings, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_size(directory, settings, "num_key_value_heads", num_heads),
        head_dim=_size(directory, settings, "head_dim", width // num_heads),
        vocab_size=vocab_size,
        draft_vocab_size=_size(directory, settings, "draft_vocab_size", vocab_size),
        epsilon=float(llama.rms_norm_eps),
        layer_ids=_layer_ids(directory, settings, own),
        llama=llama,
    )


def _llama_config(directory: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
    from transformers import LlamaConfig

    untyped: Any = LlamaConfig
    try:
        return untyped.from_dict(dict(settings))
    except Exception as error:
        # A nonsensical value is any of many types.
        raise _refused(directory, one_line(error)) from error


def _architectures(settings: Mapping[str, Any]) -> list[Any]:
    named = settings.get("architectures")
    return named if isinstance(named, list) else []


def _check_settings(directory: Path, settings: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported for settings that are unknown or not supported."""
    of_llama = {name: each for name, each in settings.items() if name not in _OWN | _ONLY.keys()}
    reason = why_not_llama_settings(of_llama)
    if reason is not None:
        raise _refused(directory, f"{reason}; allowed: the settings of a Llama model")
    for name, setting in {**own, **settings}.items():
        if name in _ONLY and setting not in (None, _ONLY[name]):
            raise _refused(directory, f"{name} is {setting!r}; allowed: {_ONLY[name]!r}")
        if name in own and name not in _ONLY.keys() | {_LAYER_IDS} and setting is not None:
            raise _refused(directory, f"eagle_config.{name} is {setting!r}, which is not supported")
    if settings.get("sliding_window") is not None and settings.get("use_sliding_window", True):
        raise _refused(
            directory, f"sliding_window is {settings['sliding_window']!r}; allowed: none"
        )
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        factor = settings["partial_rotary_factor"]
        raise _refused(directory, f"partial_rotary_factor is {factor!r}; allowed: 1")


def _layer_ids(
    directory: Path, settings: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[int, ...] | None:
    value = settings.get(_LAYER_IDS) or own.get(_LAYER_IDS)
    if not value:
        return None
    is_list = isinstance(value, list) and len(value) == NUM_STATES
    if not is_list or not all(type(each) is int and each >= 0 for each in value):
        raise _refused(directory, f"{_LAYER_IDS} is {value!r}; allowed: {NUM_STATES} layer indexes")
    # Two conventions are in use: layers whose inputs are read, usually from 2 on, and layers whose
    # outputs are read, usually from 1 on.
    return tuple(each + (value[0] == 1) for each in value)


def _size(
    directory: Path, settings: Mapping[str, Any], name: str, default: int | None = None
) -> int:
    value = settings.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise _refused(directory, f"{name} is {value!r}; allowed: an integer of 1 or more")
    return value


def _refused(directory: Path, reason: str) -> ModelUnsupported:
    return ModelUnsupported(f"{directory}: EAGLE-3 head not served: {reason}")
