"""Adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

Source: https://github.com/huggingface/peft.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from executor_service.adapters.assembly import (
    Assembly,
    ModuleTensors,
    NamedTensor,
    Places,
    check_shape,
)
from executor_service.adapters.peft_config import PeftConfig
from executor_service.adapters.targets import short_name
from executor_service.model import Adapter, LoadedModel, LowRankUpdate, Target
from splitserve_adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterInvalid, read_config

_PREFIX = "base_model.model."
_LOW_RANK = re.compile(
    r"^(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(\.default)?(?P<end>\.weight|\.bias|)$"
)
_REPLACED = re.compile(
    r"^(?P<module>.+?)(\.base_layer|\.modules_to_save(\.default)?)?\.(?P<kind>weight|bias)$"
)
_FIELDS = {
    ("lora_A", ".weight"): "down",
    ("lora_B", ".weight"): "up",
    ("lora_B", ".bias"): "up_bias",
    ("lora_embedding_A", ""): "down",
    ("lora_embedding_B", ""): "up",
    ("lora_magnitude_vector", ""): "magnitude",
    ("lora_magnitude_vector", ".weight"): "magnitude",
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_peft(name: str, files: Mapping[str, bytes], loaded: LoadedModel, max_rank: int) -> Adapter:
    """Returns the adapter in `files` for `loaded`. Raises AdapterInvalid."""
    config = PeftConfig.of(read_config(files[CONFIG_NAME]), max_rank)
    reader = _PeftReader(config, loaded)
    for tensor_name, data in _tensors(files[WEIGHTS_NAME]).items():
        reader.take(tensor_name, data)
    return reader.adapter(name)


def _tensors(content: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise AdapterInvalid(f"{WEIGHTS_NAME} is truncated or corrupt: {error}") from error
    if not tensors:
        raise AdapterInvalid(f"{WEIGHTS_NAME} has no tensors")
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise AdapterInvalid(
                f"{WEIGHTS_NAME}: {name} has dtype {kind}; allowed: float32, float16, bfloat16"
            )
    return tensors


class _PeftReader:
    """Sorts the tensors of an adapter by the modules that they change."""

    def __init__(self, config: PeftConfig, loaded: LoadedModel) -> None:
        self._config = config
        self._loaded = loaded
        self._places = Places(loaded)
        self._modules: dict[str, ModuleTensors] = {}
        self._weights: dict[str, NamedTensor] = {}

    def take(self, name: str, data: Tensor) -> None:
        """Takes one tensor. Raises AdapterInvalid if the configuration does not explain it."""
        tensor = NamedTensor(f"{WEIGHTS_NAME}: {name}", data)
        own = name.removeprefix(_PREFIX)
        found = _LOW_RANK.match(own)
        if found is not None and (found["kind"], found["end"]) in _FIELDS:
            self._add(found["module"], _FIELDS[found["kind"], found["end"]], tensor)
            return
        found = _REPLACED.match(own)
        if found is None:
            raise AdapterInvalid(f"{tensor.name} is no tensor of a LoRA adapter")
        if found["kind"] == "weight":
            self._weights[found["module"]] = tensor
        else:
            self._take_bias(found["module"], tensor)

    def adapter(self, name: str) -> Adapter:
        """Returns the adapter of all tensors. Raises AdapterInvalid."""
        for module, tensors in self._modules.items():
            self._modules[module] = self._explained(module, tensors)
        self._check_complete()
        updates = Assembly(self._loaded, self._places).updates(self._modules)
        own_embedding, own_head = self._own_weights()
        embedding = None
        for target in self._loaded.adapter_targets.values():
            if target.is_embedding:
                embedding = updates.pop(target.name, None)
            elif target.is_head and own_head is not None and not self._ties_embedding:
                _check_plain_head(updates.get(target.name))
        return finished(name, updates, embedding, own_embedding, own_head)

    @property
    def _ties_embedding(self) -> bool:
        return bool(self._config.get("ensure_weight_tying", False)) and self._is_tied

    @property
    def _is_tied(self) -> bool:
        config: Any = self._loaded.model.config
        return bool(config.get_text_config(decoder=True).tie_word_embeddings)

    def _add(self, module: str, field: str, tensor: NamedTensor) -> None:
        known = self._modules.get(module, ModuleTensors())
        if getattr(known, field) is not None:
            raise AdapterInvalid(f"{tensor.name} is there twice, with and without .default")
        self._modules[module] = replace(known, **{field: tensor})

    def _take_bias(self, module: str, tensor: NamedTensor) -> None:
        bias = self._config.get("bias", "none")
        if bias == "none" and not self._config.saves(module):
            raise AdapterInvalid(f"{tensor.name} is there though bias is 'none' in {CONFIG_NAME}")
        if self._places.of(module):
            self._add(module, "bias", tensor)
            return
        own = self._loaded.base_tensor(f"{module}.bias")
        if own is None or not torch.equal(own, tensor.data.to(own.dtype)):
            raise AdapterInvalid(
                f"{tensor.name}: bias is {bias!r}, and this one is changed; allowed: changed biases"
                " of linear layers"
            )

    def _explained(self, module: str, tensors: ModuleTensors) -> ModuleTensors:
        """Returns the tensors with their factor. Raises AdapterInvalid if the fields differ."""
        if tensors.down is None or tensors.up is None:
            return tensors
        places, config = self._places.of(module), self._config
        is_linear = not any(each.target.is_embedding or each.target.is_head for each in places)
        if places and not config.changes(module, is_linear=is_linear):
            raise AdapterInvalid(
                f"{tensors.down.name}: target_modules and the other fields of {CONFIG_NAME} do not"
                f" name {module}"
            )
        rank = config.rank_of(module)
        if tensors.down.data.ndim != 2 or len(tensors.down.data) != rank:
            raise AdapterInvalid(
                f"{tensors.down.name} has shape {list(tensors.down.data.shape)} where"
                f" {CONFIG_NAME} gives the rank {rank}"
            )
        for field, tensor, kind in (
            ("use_dora", tensors.magnitude, "lora_magnitude_vector"),
            ("lora_bias", tensors.up_bias, "bias of lora_B"),
        ):
            is_set = bool(config.get(field, False))
            is_exempt = field == "lora_bias" and not is_linear
            if is_set != (tensor is not None) and not is_exempt:
                state = "no" if is_set else "a"
                raise AdapterInvalid(
                    f"{WEIGHTS_NAME}: {module} has {state} {kind} though {field} is"
                    f" {str(is_set).lower()} in {CONFIG_NAME}"
                )
        return replace(tensors, scale=config.scale_of(module))

    def _check_complete(self) -> None:
        """Raises AdapterInvalid if the configuration names layers that have no tensors."""
        changed = {
            place.target.name
            for module, tensors in self._modules.items()
            if tensors.down is not None
            for place in self._places.of(module)
        }
        for target in self._loaded.adapter_targets.values():
            is_linear = not (target.is_embedding or target.is_head)
            if target.name in changed:
                continue
            if self._config.changes(target.name, is_linear=is_linear):
                raise AdapterInvalid(
                    f"{WEIGHTS_NAME} lacks the tensors of {target.name}, which target_modules of"
                    f" {CONFIG_NAME} names"
                )

    def _own_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the adapter's own embedding and head."""
        targets = self._loaded.adapter_targets.values()
        served = {short_name(t.name): t for t in targets if t.is_embedding or t.is_head}
        for name in self._config.get("modules_to_save", []):
            if not any(each == name or each.endswith(f".{name}") for each in served):
                raise AdapterInvalid(
                    f"{CONFIG_NAME}: modules_to_save has {name!r}; allowed:"
                    f" {', '.join(each.rpartition('.')[2] for each in served)}"
                )
        own: dict[bool, Tensor] = {}
        for module, tensor in self._weights.items():
            target = served.get(short_name(module))
            if target is None:
                raise AdapterInvalid(
                    f"{tensor.name} replaces weights; allowed: those of {', '.join(served)}"
                )
            self._take_weight(module, target, tensor, own)
        for target in served.values():
            is_saved = self._config.saves(target.name)
            if is_saved and target.is_head and self._ties_embedding and False in own:
                own.setdefault(True, own[False])
            if is_saved and target.is_head not in own:
                raise AdapterInvalid(
                    f"{WEIGHTS_NAME} lacks the weights of {target.name}, which modules_to_save of"
                    f" {CONFIG_NAME} names"
                )
        if False in own and self._ties_embedding:
            own.setdefault(True, own[False])
        return own.get(False), own.get(True)

    def _take_weight(
        self, module: str, target: Target, tensor: NamedTensor, own: dict[bool, Tensor]
    ) -> None:
        """Adds a replaced weight to `own`, by whether it is that of the head."""
        shape = (target.num_inputs, target.num_outputs)
        check_shape(tensor, shape[::-1] if target.is_head else shape, target.name)
        weight = tensor.data.to(self._loaded.dtype)
        if self._config.saves(module):
            own[target.is_head] = weight.to(self._loaded.device)
            return
        # PEFT saves the base model's weights beside a changed embedding.
        base = self._loaded.base_tensor(f"{target.name}.weight")
        if base is None or not torch.equal(base, weight):
            raise AdapterInvalid(
                f"{tensor.name} differs from the model's weights, and modules_to_save of"
                f" {CONFIG_NAME} does not name it: the adapter may be of another model"
            )


def _check_plain_head(update: LowRankUpdate | None) -> None:
    if update is not None and bool(update.up.any()):
        raise AdapterInvalid(f"{WEIGHTS_NAME}: the head has own weights and low-rank ones")


def finished(
    name: str,
    updates: Mapping[str, LowRankUpdate],
    embedding: LowRankUpdate | None = None,
    own_embedding: Tensor | None = None,
    own_head: Tensor | None = None,
) -> Adapter:
    """Returns an adapter with its size."""
    tensors = [own_embedding, own_head]
    for update in (*updates.values(), embedding):
        if update is not None:
            tensors += [update.down, update.up, update.bias, update.gain]
    num_bytes = sum({id(each): each.nbytes for each in tensors if each is not None}.values())
    return Adapter(name, updates, embedding, own_embedding, own_head, num_bytes)
