"""Adapters of experts and routers: names that PEFT has or had for them, and their tensors.

PEFT wraps the module of all experts once for each of its two parameters that an adapter changes:
the inner one has `base_layer` in its name. Adapters that were trained while each expert had layers
of its own name these.

Shape letters: E experts, I inputs of an expert's matrix, O outputs, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_service.adapters.assembly import ModuleTensors, check_shape, label
from executor_service.adapters.peft_config import PeftConfig, lacking
from executor_service.adapters.targets import short_name
from executor_service.model import ExpertsUpdate, LoadedModel, Target, has_halves
from splitserve_adapters import AdapterInvalid

_INNER = ".base_layer"
_JOINED, _DOWN = "gate_up_proj", "down_proj"
_OF_ONE = re.compile(r"^(?P<experts>.+\.experts)\.(?P<expert>[0-9]{1,6})\.(?P<layer>[^.]+)$")
# Matrices of an expert by the names that its own layers had: the parameter, and the half of it.
_LAYERS = {
    "gate_proj": (_JOINED, 0),
    "up_proj": (_JOINED, 1),
    "down_proj": (_DOWN, None),
    "w1": (_JOINED, 0),
    "w3": (_JOINED, 1),
    "w2": (_DOWN, None),
}


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Place in the matrices of experts that a module of an adapter changes.

    `expert`: number of the only one; None for all experts. `half`: gate (0) or up (1) of
    `gate_up_proj`; None for the whole matrix. `parameter`: its name in the way of the adapter's
    other names, for patterns of the configuration.
    """

    target: Target
    parameter: str
    expert: int | None = None
    half: int | None = None


class ExpertPlaces:
    """Matrices of experts by the names that adapters may have for them."""

    def __init__(self, loaded: LoadedModel, config: PeftConfig) -> None:
        targets = loaded.adapter_targets.values()
        self._targets = {short_name(each.name): each for each in targets if each.num_experts}
        self._config = config
        # Of those whose gate and up are not interleaved, as those of separate layers never were.
        self._once_separate = {
            each.name
            for each in self._targets.values()
            if has_halves(loaded.model.get_submodule(each.module))
        }

    def of(self, module: str) -> ExpertPlace | None:
        """Returns what a module of an adapter changes; None if it is none of experts."""
        found = _OF_ONE.match(module)
        if found is not None:
            parameter, half = _LAYERS.get(found["layer"], ("", None))
            target = self._target(f"{found['experts']}.{parameter}")
            if target is None or target.name not in self._once_separate:
                return None
            if int(found["expert"]) >= target.num_experts:
                return None
            return ExpertPlace(target, module, int(found["expert"]), half)
        experts, depth = module, 0
        while experts.endswith(_INNER):
            experts, depth = experts.removesuffix(_INNER), depth + 1
        # From the outermost to the innermost.
        wrapped = [
            name
            for name in (f"{experts}.{_DOWN}", f"{experts}.{_JOINED}")
            if self._config.changes_parameter(name)
        ]
        target = self._target(wrapped[depth]) if depth < len(wrapped) else None
        return None if target is None else ExpertPlace(target, wrapped[depth])

    def check_complete(self, modules: Collection[str]) -> None:
        """Raises AdapterInvalid if the configuration names experts that have no tensors.

        `modules`: those with tensors.
        """
        places = [place for module in modules if (place := self.of(module)) is not None]
        changed = {place.target.name for place in places}
        for target in self._targets.values():
            if target.name not in changed and self._config.changes_parameter(target.name):
                raise lacking(target.name, "target_parameters")
        for one in {_without_number(place) for place in places if place.expert is not None}:
            for number in range(one.target.num_experts):
                name = _OF_ONE.sub(rf"\g<experts>.{number}.\g<layer>", one.parameter)
                if name not in modules and self._config.changes(name, is_linear=True):
                    raise lacking(name, "target_modules")

    def _target(self, name: str) -> Target | None:
        return self._targets.get(short_name(name))


def _without_number(place: ExpertPlace) -> ExpertPlace:
    return ExpertPlace(place.target, _OF_ONE.sub(r"\g<experts>.0.\g<layer>", place.parameter), 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """Change of some outputs of one expert. `down`: [r, I]. `up`: [outputs, r], with its factor."""

    expert: int
    rows: slice
    down: Tensor
    up: Tensor


def updates_of_experts(
    modules: Mapping[str, tuple[ExpertPlace, ModuleTensors]], loaded: LoadedModel
) -> dict[str, ExpertsUpdate]:
    """Returns the updates by the name of the matrix. `modules`: by the adapter's names.

    Raises AdapterInvalid for tensors that do not fit.
    """
    parts: dict[Target, list[_Part]] = {}
    taken: set[tuple[str, int | None, int | None]] = set()
    for name, (place, module) in modules.items():
        own = (place.target.name, place.expert, place.half)
        is_whole = place.expert is None and place.target in parts
        if is_whole or own in taken or (own[0], None, None) in taken:
            raise AdapterInvalid(f"{label(module)} and another tensor change the same outputs")
        taken.add(own)
        parts.setdefault(place.target, []).extend(_parts(name, place, module))
    return {target.name: _joined(target, own, loaded) for target, own in parts.items()}


def _parts(name: str, place: ExpertPlace, module: ModuleTensors) -> Iterator[_Part]:
    target = place.target
    num_outputs = target.num_outputs if place.half is None else target.num_outputs // 2
    num_experts = target.num_experts if place.expert is None else 1
    down, up = module.down, module.up
    if down is None or up is None or module.magnitude or module.up_bias or module.bias:
        raise AdapterInvalid(f"{label(module)}: an expert has lora_A and lora_B, and no others")
    num_ranks = len(down.data)
    check_shape(down, (num_ranks, target.num_inputs), name)
    check_shape(up, (num_outputs, num_ranks), name)
    downs = down.data.float().view(num_experts, -1, target.num_inputs)
    ups = module.scale * up.data.float().view(num_outputs, -1, num_experts).permute(2, 0, 1)
    start = num_outputs * (place.half or 0)
    for index in range(num_experts):
        expert = index if place.expert is None else place.expert
        yield _Part(expert, slice(start, start + num_outputs), downs[index], ups[index])


def _joined(target: Target, parts: Sequence[_Part], loaded: LoadedModel) -> ExpertsUpdate:
    """Returns the update of a matrix; ranks of parts of an expert stand beside each other."""
    ends = [0] * target.num_experts
    places = []
    for part in parts:
        places.append(slice(ends[part.expert], ends[part.expert] + len(part.down)))
        ends[part.expert] = places[-1].stop
    down = torch.zeros(target.num_experts, max(ends), target.num_inputs, dtype=loaded.dtype)
    up = torch.zeros(target.num_experts, target.num_outputs, max(ends), dtype=loaded.dtype)
    for part, ranks in zip(parts, places, strict=True):
        down[part.expert, ranks] = part.down.to(loaded.dtype)
        up[part.expert, part.rows, ranks] = part.up.to(loaded.dtype)
    if not bool(torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise AdapterInvalid(f"{target.name}: numbers are not finite in {loaded.dtype_name}")
    return ExpertsUpdate(down.to(loaded.device), up.to(loaded.device))
