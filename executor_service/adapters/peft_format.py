"""Adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

Source: https://github.com/huggingface/peft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
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
from executor_service.adapters.experts import ExpertPlaces, updates_of_experts
from executor_service.adapters.peft_config import PeftConfig, lacking
from executor_service.adapters.targets import short_name
from executor_service.model import Adapter, ExpertsUpdate, LoadedModel, Target
from splitserve_adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterInvalid, read_config
from splitserve_kernels.low_rank_update import LowRankUpdate

_PREFIX = "base_model.model."
_LOW_RANK = re.compile(
    r"^(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(\.default)?(?P<end>\.weight|\.bias|)$"
)
_REPLACED = re.compile(
    r"^(?P<module>.+?)(\.base_layer|\.modules_to_save(\.default)?)?\.(?P<kind>weight|bias)$"
)
_MEDIA = re.compile(r"(^|\.)(vision|visual|image|video|audio|speech|vq|multi_modal)")
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
        self._experts = ExpertPlaces(loaded, config)
        self._modules: dict[str, ModuleTensors] = {}
        self._weights: dict[str, NamedTensor] = {}

    def take(self, name: str, data: Tensor) -> None:
        """Takes one tensor. Raises AdapterInvalid if the configuration does not explain it."""
        tensor = NamedTensor(f"{WEIGHTS_NAME}: {name}", data)
        own = name.removeprefix(_PREFIX)
        found = _LOW_RANK.match(own)
        if found is not None and (found["kind"], found["end"]) in _FIELDS:
            if self._is_left_out(found["module"]):
                return
            self._add(found["module"], _FIELDS[found["kind"], found["end"]], tensor)
            return
        found = _REPLACED.match(own)
        if found is None:
            raise AdapterInvalid(f"{tensor.name} is no tensor of a LoRA adapter")
        if self._is_left_out(found["module"]):
            return
        if found["kind"] == "weight":
            self._weights[found["module"]] = tensor
        else:
            self._take_bias(found["module"], tensor)

    def adapter(self, name: str) -> Adapter:
        """Returns the adapter of all tensors. Raises AdapterInvalid."""
        for module, tensors in self._modules.items():
            self._modules[module] = self._explained(module, tensors)
        self._check_complete()
        of_experts = {
            module: (place, tensors)
            for module, tensors in self._modules.items()
            if (place := self._experts.of(module)) is not None
        }
        others = {name: each for name, each in self._modules.items() if name not in of_experts}
        updates = Assembly(self._loaded, self._places).updates(others)
        own = self._own_weights()
        for target, tensor in own.items():
            if target.name in updates and updates[target.name].gain is not None:
                raise AdapterInvalid(
                    f"{tensor.name} replaces weights whose norms use_dora needs"
                    "; allowed: one of both"
                )
        weights = {target: tensor.data.to(self._loaded.device) for target, tensor in own.items()}
        experts = updates_of_experts(of_experts, self._loaded)
        return finished(name, self._loaded, updates, weights, experts)

    @property
    def _is_tied(self) -> bool:
        config: Any = self._loaded.model.config
        return bool(getattr(config, "tie_word_embeddings", False))

    def _named(self, names: Callable[[str], bool], module: str, target: Target) -> bool:
        """Returns whether the configuration names a module: by `names`, or as a tied head."""
        if target.is_head and self._is_tied and self._config.get("ensure_weight_tying", False):
            targets = self._loaded.adapter_targets.values()
            return names(module) or any(names(each.name) for each in targets if each.is_embedding)
        return names(module)

    def _add(self, module: str, field: str, tensor: NamedTensor) -> None:
        known = self._modules.get(module, ModuleTensors())
        if getattr(known, field) is not None:
            raise AdapterInvalid(f"{tensor.name} is there twice, with and without .default")
        changed: dict[str, Any] = {field: tensor}
        self._modules[module] = replace(known, **changed)

    def _is_left_out(self, module: str) -> bool:
        """Returns whether a module is of the checkpoint's parts for images and sounds.

        Text alone is served, which they do not change.
        """
        if _MEDIA.search(module) is None or self._places.of(module):
            return False
        return self._loaded.base_tensor(f"{module}.weight") is not None

    def _take_bias(self, module: str, tensor: NamedTensor) -> None:
        bias = self._config.get("bias", "none")
        if bias == "none" and not self._config.saves(module):
            raise AdapterInvalid(f"{tensor.name} is there though bias is 'none' in {CONFIG_NAME}")
        if any(not place.target.is_router for place in self._places.of(module)):
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
        places = self._places.of(module)
        named, num_experts = self._named_as(module)
        if named is None:
            raise AdapterInvalid(
                f"{tensors.down.name}: target_modules and the other fields of {CONFIG_NAME} do not"
                f" name {module}"
            )
        rank = self._config.rank_of(named)
        if tensors.down.data.ndim != 2 or len(tensors.down.data) != rank * num_experts:
            raise AdapterInvalid(
                f"{tensors.down.name} has shape {list(tensors.down.data.shape)} where"
                f" {CONFIG_NAME} gives the rank {rank}"
            )
        is_embedding = any(each.target.is_embedding for each in places)
        for field, tensor, kind in (
            ("use_dora", tensors.magnitude, "lora_magnitude_vector"),
            ("lora_bias", tensors.up_bias, "bias of lora_B"),
        ):
            is_set = bool(self._config.get(field, False)) and not (
                is_embedding and field == "lora_bias"
            )
            if is_set != (tensor is not None):
                state = "no" if is_set else "a"
                raise AdapterInvalid(
                    f"{WEIGHTS_NAME}: {module} has {state} {kind} though {field} is"
                    f" {str(is_set).lower()} in {CONFIG_NAME}"
                )
        if tensors.up_bias is not None and places and places[0].target.is_router:
            raise AdapterInvalid(f"{tensors.up_bias.name}: lora_bias is not served for a router")
        return replace(tensors, scale=self._config.scale_of(named))

    def _named_as(self, module: str) -> tuple[str | None, int]:
        """Returns the name by which the configuration changes a module, None if it does not.

        Modules that the model lacks are named: others refuse them. Returns also the number of
        experts whose matrices the module's tensors have beside each other.
        """
        place = self._experts.of(module)
        if place is not None:
            is_named = place.expert is None or self._config.changes(module, is_linear=True)
            num_experts = place.target.num_experts if place.expert is None else 1
            return place.parameter if is_named else None, num_experts
        places = self._places.of(module)
        is_linear = not any(each.target.is_embedding or each.target.is_head for each in places)
        changes = partial(self._config.changes, is_linear=is_linear)
        if not places or self._named(changes, module, places[0].target):
            return module, 1
        parameter = f"{module}.weight"
        return parameter if self._config.changes_parameter(parameter) else None, 1

    def _check_complete(self) -> None:
        """Raises AdapterInvalid if the configuration names layers that have no tensors."""
        changed = {
            place.target.name
            for module, tensors in self._modules.items()
            if tensors.down is not None
            for place in self._places.of(module)
        }
        for target in self._loaded.adapter_targets.values():
            if target.name in changed or target.num_experts:
                continue
            is_linear = not (target.is_embedding or target.is_head or target.is_router)
            if self._config.changes(target.name, is_linear=is_linear):
                raise lacking(target.name, "target_modules")
            if self._config.changes_parameter(f"{target.name}.weight"):
                raise lacking(target.name, "target_parameters")
        self._experts.check_complete(self._modules)

    def _own_weights(self) -> dict[Target, NamedTensor]:
        """Returns the adapter's own weights, of the embedding and the head only."""
        targets = self._loaded.adapter_targets.values()
        served = {short_name(t.name): t for t in targets if t.is_embedding or t.is_head}
        for name in self._config.get("modules_to_save", []):
            if not any(f".{each.name}".endswith(f".{name}") for each in served.values()):
                raise AdapterInvalid(
                    f"{CONFIG_NAME}: modules_to_save has {name!r}; allowed: {', '.join(served)}"
                )
        own: dict[Target, NamedTensor] = {}
        for module, tensor in self._weights.items():
            target = served.get(short_name(module))
            if target is None:
                raise AdapterInvalid(
                    f"{tensor.name} replaces weights; allowed: those of {', '.join(served)}"
                )
            self._take_weight(target, tensor, own)
        for target in served.values():
            if self._named(self._config.saves, target.name, target) and target not in own:
                raise AdapterInvalid(
                    f"{WEIGHTS_NAME} lacks the weights of {target.name}, which modules_to_save of"
                    f" {CONFIG_NAME} names"
                )
        return own

    def _take_weight(
        self, target: Target, tensor: NamedTensor, own: dict[Target, NamedTensor]
    ) -> None:
        shape = (target.num_inputs, target.num_outputs)
        weight = NamedTensor(tensor.name, tensor.data.to(self._loaded.dtype))
        check_shape(weight, shape[::-1] if target.is_head else shape, target.name)
        if not self._named(self._config.saves, target.name, target):
            # PEFT saves the model's own weights beside a changed embedding. Where they differ (the
            # adapter was trained on others), it loads them, into a tied head, too.
            base = self._loaded.base_tensor(f"{target.name}.weight")
            if base is not None and torch.equal(base, weight.data):
                return
            for other in self._loaded.adapter_targets.values():
                if other.is_head and target.is_embedding and self._is_tied:
                    own.setdefault(other, weight)
        own[target] = weight


def finished(
    name: str,
    loaded: LoadedModel,
    updates: Mapping[str, LowRankUpdate],
    weights: Mapping[Target, Tensor],
    experts: Mapping[str, ExpertsUpdate],
) -> Adapter:
    """Returns an adapter. `updates`: by name of the layer. `weights`: own embedding and head.

    `experts`: updates of their matrices, by name.
    """
    tensors = list(weights.values())
    for of_matrix in experts.values():
        tensors += [of_matrix.down, of_matrix.up]
    for update in updates.values():
        parts = (update.down, update.up, update.bias, update.gain)
        tensors += [each for each in parts if each is not None]
    num_bytes = sum({id(each): each.nbytes for each in tensors}.values())
    targets = loaded.adapter_targets.values()
    of_linears = dict(updates)
    embedding = [of_linears.pop(t.name) for t in targets if t.is_embedding and t.name in updates]
    return Adapter(
        name,
        of_linears,
        next(iter(embedding), None),
        next((each for target, each in weights.items() if target.is_embedding), None),
        next((each for target, each in weights.items() if target.is_head), None),
        num_bytes,
        experts,
    )
