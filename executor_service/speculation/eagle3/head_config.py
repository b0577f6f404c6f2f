"""The configuration of an EAGLE-3 head, as checkpoints of LlamaForCausalLMEagle3 have it.

Every field is accounted for: what is set and not known here refuses the head by its name. Source of
the format: Li 2025, "EAGLE-3" (arXiv 2503.01840), and the checkpoints that were published since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from executor_service.decoders.llama_config import why_not_llama_settings
from executor_service.errors import ModelUnsupported, one_line

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_STATES = 3

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# What of a configuration is a head's alone; and what else it says about how the head is built, with
# the only values that are built here.
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
    """`target_width`: the width of the model whose states it reads; `width`: its own.

    `layer_ids`: which layers' inputs it reads, the number of layers for what is behind the last;
    None for those that are usual. `llama`: a LlamaConfig of `transformers` of its one layer.
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
        """Which layers' inputs are read of a model with so many."""
        if self.layer_ids is not None:
            return self.layer_ids
        # A low, a middle and a high one; models with few layers have them close together.
        return min(2, num_layers), num_layers // 2, max(num_layers - NUM_STATES, 0)


def is_head(settings: Mapping[str, Any]) -> bool:
    """Whether `settings`, what a config.json holds, are those of an EAGLE-3 head."""
    # The first ones that were published call themselves a Llama.
    return ARCHITECTURE in _architectures(settings) or "draft_vocab_size" in settings


def read_head_config(directory: Path, settings: Mapping[str, Any]) -> HeadConfig:
    """`settings`: what config.json in `directory` holds. Raises ModelUnsupported, by name."""
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
    """Raises ModelUnsupported for what is not understood."""
    of_llama = {name: each for name, each in settings.items() if name not in _OWN | _ONLY.keys()}
    reason = why_not_llama_settings(of_llama)
    if reason is not None:
        raise _refused(directory, f"{reason}; allowed: what a Llama has")
    for name, setting in {**own, **settings}.items():
        if name in _ONLY and setting not in (None, _ONLY[name]):
            raise _refused(directory, f"{name} is {setting!r}; allowed: {_ONLY[name]!r}")
        if name in own and name not in _ONLY.keys() | {_LAYER_IDS} and setting is not None:
            raise _refused(directory, f"eagle_config.{name} is {setting!r}, not understood")
    if settings.get("sliding_window") is not None and settings.get("use_sliding_window", True):
        raise _refused(
            directory, f"sliding_window is {settings['sliding_window']!r}; allowed: none"
        )
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        given = settings["partial_rotary_factor"]
        raise _refused(directory, f"partial_rotary_factor is {given!r}; allowed: 1")


def _layer_ids(
    directory: Path, settings: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[int, ...] | None:
    given = settings.get(_LAYER_IDS) or own.get(_LAYER_IDS)
    if not given:
        return None
    is_list = isinstance(given, list) and len(given) == NUM_STATES
    if not is_list or not all(type(each) is int and each >= 0 for each in given):
        raise _refused(
            directory, f"{_LAYER_IDS} is {given!r}; allowed: {NUM_STATES} indexes of layers"
        )
    # Two conventions are in use: layers whose inputs are read, where 2 is the usual first one, and
    # layers whose outputs are, where it is 1.
    return tuple(each + (given[0] == 1) for each in given)


def _size(
    directory: Path, settings: Mapping[str, Any], name: str, default: int | None = None
) -> int:
    given = settings.get(name)
    if given is None and default is not None:
        return default
    if type(given) is not int or given < 1:
        raise _refused(directory, f"{name} is {given!r}; allowed: an integer from 1 on")
    return given


def _refused(directory: Path, reason: str) -> ModelUnsupported:
    return ModelUnsupported(f"{directory}: an EAGLE-3 head, not served: {reason}")
