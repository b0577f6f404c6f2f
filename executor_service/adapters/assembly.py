"""Placing an adapter's matrices on the layers of the model, which may have others joined or split.

An adapter may have been trained on a model with `qkv_proj` or `gate_up_proj` where this one has
separate layers, or the other way round.

Shape letters: I inputs of a layer, O outputs, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor_service.adapters.targets import short_name
from executor_service.model import JOINED_MODULES, LoadedModel, Target
from splitserve_adapters import AdapterInvalid
from splitserve_kernels.low_rank_update import LowRankUpdate

# Outputs of which the product of both matrices is computed at once, for norms.
_OUTPUTS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of an adapter. `name`: in its file, with the file's name, for error texts."""

    name: str
    data: Tensor


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """Tensors of an adapter for one module.

    `down`: [r, I]. `up`: [O, r]. `scale`: factor of their product. `up_bias`: [O], added before the
    factor. `magnitude`: [O], norm of the changed weights of each output (DoRA). `bias`: [O],
    replaces that of the layer.
    """

    down: NamedTensor | None = None
    up: NamedTensor | None = None
    scale: float = 1.0
    up_bias: NamedTensor | None = None
    magnitude: NamedTensor | None = None
    bias: NamedTensor | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Outputs of a layer of the model. `rows`: of it. `of_module`: of the adapter's module."""

    target: Target
    rows: slice
    of_module: slice

    @classmethod
    def whole(cls, target: Target) -> Place:
        """Returns all outputs of a layer."""
        rows = slice(0, target.num_outputs)
        return cls(target, rows, rows)


class Places:
    """Layers of a model by the names that adapters may have for them."""

    def __init__(self, loaded: LoadedModel) -> None:
        targets = loaded.adapter_targets
        self._targets = {name: each for name, each in targets.items() if not each.num_experts}
        self._joined_sizes = _joined_sizes(loaded.model.config)
        self._places: dict[str, tuple[Place, ...]] = {}
        for target in self._targets.values():
            self._places.update(self._of_joined(target))
        for target in self._targets.values():
            self._places[short_name(target.name)] = (Place.whole(target),)

    def of(self, module: str) -> tuple[Place, ...]:
        """Returns the outputs that a module of an adapter has in the model; empty for none."""
        return self._places.get(short_name(module), ())

    def _of_joined(self, target: Target) -> Iterator[tuple[str, tuple[Place, ...]]]:
        name = short_name(target.name)
        parent, _, last = name.rpartition(".")
        for joined, parts in JOINED_MODULES.items():
            if last == parts[0]:
                found = [self._sibling(target, each) for each in parts]
                targets = [each for each in found if each is not None]
                if len(targets) == len(parts):
                    yield f"{parent}.{joined}", tuple(_end_to_end(targets))
            elif last == joined:
                start = 0
                sizes = self._joined_sizes.get(joined, (target.num_outputs // 2,) * 2)
                if sum(sizes) != target.num_outputs:
                    continue
                for part, size in zip(parts, sizes, strict=True):
                    rows = slice(start, start + size)
                    yield f"{parent}.{part}", (Place(target, rows, slice(0, size)),)
                    start += size

    def _sibling(self, target: Target, last: str) -> Target | None:
        found = self._targets.get(f"{target.name.rpartition('.')[0]}.{last}")
        return found if found is not None and found.num_inputs == target.num_inputs else None


def _end_to_end(targets: Sequence[Target]) -> Iterator[Place]:
    start = 0
    for target in targets:
        end = start + target.num_outputs
        yield Place(target, slice(0, target.num_outputs), slice(start, end))
        start = end


def _joined_sizes(config: Any) -> dict[str, tuple[int, ...]]:  # noqa: ANN401
    text_config = config.get_text_config(decoder=True)
    num_heads = getattr(text_config, "num_attention_heads", None)
    if not num_heads:
        return {}
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    return {"qkv_proj": (num_heads * head_dim, *(num_kv_heads * head_dim,) * 2)}


class Assembly:
    """Builds the updates of an adapter, layer by layer."""

    def __init__(self, loaded: LoadedModel, places: Places) -> None:
        self._loaded = loaded
        self._places = places

    def updates(self, modules: Mapping[str, ModuleTensors]) -> dict[str, LowRankUpdate]:
        """Returns the updates by the name of the layer. `modules`: by the adapter's names.

        Raises AdapterInvalid for shapes that do not fit the model, and for numbers that are not
        finite.
        """
        placed: dict[str, list[tuple[Place, ModuleTensors]]] = {}
        for name, module in modules.items():
            places = self._places.of(name)
            _check_shapes(name, module, places)
            for place in places:
                placed.setdefault(place.target.name, []).append((place, module))
        return {name: self._update(parts) for name, parts in placed.items()}

    def _update(self, parts: Sequence[tuple[Place, ModuleTensors]]) -> LowRankUpdate:
        target = parts[0][0].target
        taken = torch.zeros(target.num_outputs, dtype=torch.bool)
        gain, bias = torch.ones(target.num_outputs), torch.zeros(target.num_outputs)
        for place, module in parts:
            if bool(taken[place.rows].any()):
                raise AdapterInvalid(f"{label(module)} and another tensor change the same outputs")
            taken[place.rows] = True
            if module.magnitude is not None:
                gain[place.rows] = self._gain(place, module, module.magnitude)
            bias[place.rows] = self._added_bias(place, module)
        has_gain = any(module.magnitude is not None for _, module in parts)
        down, up, scale = _low_rank(parts)
        return LowRankUpdate(
            self._finished(down, parts),
            self._finished(up, parts),
            scale,
            self._checked(bias, parts) if bool(bias.any()) else None,
            self._checked(gain, parts) if has_gain else None,
        )

    def _gain(self, place: Place, module: ModuleTensors, magnitude: NamedTensor) -> Tensor:
        name = f"{place.target.name}.weight"
        weight = self._base(name)
        if place.target.is_embedding:
            weight = weight.T
        down, up = _matrices(module)
        rows = torch.arange(place.target.num_outputs)[place.rows]
        norms = []
        for some in torch.split(rows, _OUTPUTS_AT_ONCE):
            of_module = up[some - place.rows.start + place.of_module.start]
            changed = weight[some].float() + module.scale * (of_module @ down)
            norms.append(torch.linalg.norm(changed, dim=1))
        return magnitude.data[place.of_module].float() / torch.cat(norms)

    def _added_bias(self, place: Place, module: ModuleTensors) -> Tensor:
        added = torch.zeros(place.target.num_outputs)[place.rows]
        if module.up_bias is not None:
            added += module.scale * module.up_bias.data[place.of_module].float()
        if module.bias is not None:
            if not place.target.has_bias:
                raise AdapterInvalid(
                    f"{module.bias.name}: the model's {place.target.name} has no bias"
                )
            own = self._base(f"{place.target.name}.bias")[place.rows]
            added += module.bias.data[place.of_module].float() - own.float()
        return added

    def _base(self, name: str) -> Tensor:
        tensor = self._loaded.base_tensor(name)
        if tensor is None:
            raise AdapterInvalid(
                f"use_dora or bias: the checkpoint of the model has no {name} to compare with;"
                " allowed: adapters without them"
            )
        return tensor

    def _finished(self, matrix: Tensor, parts: Sequence[tuple[Place, ModuleTensors]]) -> Tensor:
        return self._checked(matrix.to(self._loaded.dtype), parts).contiguous()

    def _checked(self, tensor: Tensor, parts: Sequence[tuple[Place, ModuleTensors]]) -> Tensor:
        if not _is_finite(tensor):
            names = ", ".join(label(module) for _, module in parts)
            raise AdapterInvalid(f"{names}: numbers are not finite in {self._loaded.dtype_name}")
        return tensor.to(self._loaded.device)


def _low_rank(parts: Sequence[tuple[Place, ModuleTensors]]) -> tuple[Tensor, Tensor, float]:
    """Returns both matrices of a layer, and their factor.

    Ranks of several modules stand beside each other. A layer of which only the bias changes has
    one rank of zeros.
    """
    target = parts[0][0].target
    [(place, module), *others] = parts
    is_whole = not others and place.rows == slice(0, target.num_outputs)
    if is_whole and module.down is not None and module.up is not None:
        return module.down.data, module.up.data[place.of_module], module.scale
    with_ranks = [(place, module) for place, module in parts if module.down is not None]
    if not with_ranks:
        return torch.zeros(1, target.num_inputs), torch.zeros(target.num_outputs, 1), 1.0
    scales = {module.scale for _, module in with_ranks}
    scale = scales.pop() if len(scales) == 1 else 1.0
    downs, ups = [], []
    for place, module in with_ranks:
        down, up = _matrices(module)
        own = torch.zeros(target.num_outputs, len(down))
        own[place.rows] = up[place.of_module] * (module.scale / scale)
        downs.append(down)
        ups.append(own)
    return torch.cat(downs), torch.cat(ups, dim=1), scale


def _matrices(module: ModuleTensors) -> tuple[Tensor, Tensor]:
    assert module.down is not None, "the shapes were checked"
    assert module.up is not None, "the shapes were checked"
    return module.down.data.float(), module.up.data.float()


def _check_shapes(name: str, module: ModuleTensors, places: Sequence[Place]) -> None:
    if not places:
        raise AdapterInvalid(f"{label(module)}: the model has no layer {name} that can be changed")
    num_outputs = max(place.of_module.stop for place in places)
    num_inputs = places[0].target.num_inputs
    if (module.down is None) != (module.up is None):
        raise AdapterInvalid(f"{label(module)} has no partner: a layer has lora_A and lora_B")
    is_bias_alone = module.magnitude is None and module.up_bias is None
    if module.down is None and not (module.bias is not None and is_bias_alone):
        raise AdapterInvalid(f"{label(module)} has no lora_A and lora_B beside it")
    rank = 0 if module.down is None else len(module.down.data)
    expected = (
        (module.down, (rank, num_inputs)),
        (module.up, (num_outputs, rank)),
        (module.up_bias, (num_outputs,)),
        (module.magnitude, (num_outputs,)),
        (module.bias, (num_outputs,)),
    )
    for tensor, shape in expected:
        if tensor is not None:
            check_shape(tensor, shape, name)


def check_shape(tensor: NamedTensor, shape: tuple[int, ...], layer: str) -> None:
    """Raises AdapterInvalid if a tensor has another shape than its layer needs."""
    if tuple(tensor.data.shape) != shape:
        raise AdapterInvalid(
            f"{tensor.name} has shape {list(tensor.data.shape)} where {layer} of the model needs"
            f" {list(shape)}: the adapter may be of another model"
        )
    if not math.prod(shape) or not _is_finite(tensor.data):
        raise AdapterInvalid(f"{tensor.name} has numbers that are not finite, or none")


def _is_finite(tensor: Tensor) -> bool:
    # The sum is far cheaper, and finite only if all numbers are; but it may overflow.
    is_sum_finite = math.isfinite(tensor.sum(dtype=torch.float32).item())
    return is_sum_finite or bool(torch.isfinite(tensor).all())


def label(module: ModuleTensors) -> str:
    """Returns the name of a tensor of a module, for error texts."""
    tensors = (module.down, module.up, module.up_bias, module.magnitude, module.bias)
    return next(tensor.name for tensor in tensors if tensor is not None)
