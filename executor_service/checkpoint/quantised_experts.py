"""Quantised experts of mixtures, which stay packed: a linear layer for each matrix.

Checkpoints have a tensor for each matrix, or one for all experts; `transformers` has one for all.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor_service.errors import TrialFailed
from executor_service.model import QuantizedLinear, SeparateExperts, why_not_separate
from executor_service.quantization import LazyTensor
from executor_service.trials import try_experts
from splitserve_kernels.packed_weight import StoredWeight

# Names of an expert's matrices, after that of the module: gate, up, down.
_NAMES = (
    ("mlp.experts", "mlp.experts.{}.gate_proj.weight", ".up_proj.", ".down_proj."),
    ("mlp.experts", "block_sparse_moe.experts.{}.w1.weight", ".w3.", ".w2."),
)
_GATES = (".gate_proj.", ".w1.")
_Matrices = tuple[tuple[StoredWeight, ...], ...]


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Weights of the experts of a module. `gate_up`: one or two of each expert. `down`: one."""

    gate_up: _Matrices
    down: _Matrices


def take_experts(
    skeleton: nn.Module, weights: MutableMapping[str, LazyTensor], dtype: torch.dtype
) -> tuple[dict[str, StoredExperts], dict[str, str | None]]:
    """Takes the quantised experts out of `weights`; returns them by the name of their module.

    Placeholders of one number, expanded to the shape, take their place. `skeleton`: the model
    without numbers. Returns also why quantised experts stay, by the name of their weights.
    """
    found: dict[str, StoredExperts] = {}
    reasons: dict[type, str | None] = {}
    for name, module in skeleton.named_modules():
        if not hasattr(module, "gate_up_proj") or not hasattr(module, "num_experts"):
            continue
        if type(module) not in reasons:
            reasons[type(module)] = _why_not(module)
        experts = None if reasons[type(module)] is not None else _stored(name, module, weights)
        if experts is None:
            continue
        found[name] = experts
        for part in ("gate_up_proj", "down_proj"):
            shape = getattr(module, part).shape
            weights[f"{name}.{part}"] = placeholder(shape, dtype)
    reason = next((each for each in reasons.values() if each), "their names are not known")
    left = (name for name, each in weights.items() if ".experts." in name and each.is_quantised)
    return found, dict.fromkeys(left, reason)


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    """Returns zeros of a shape, which take the memory of one."""
    return LazyTensor(lambda: torch.zeros(1, dtype=dtype).expand(shape))


def set_experts(model: Any, name: str, stored: StoredExperts) -> None:  # noqa: ANN401
    """Puts experts with the weights `stored` in place of those with placeholders."""
    separate = SeparateExperts(
        model.get_submodule(name),
        [[QuantizedLinear(each, None) for each in expert] for expert in stored.gate_up],
        [QuantizedLinear(each, None) for (each,) in stored.down],
    )
    model.set_submodule(name, separate)


def _why_not(module: nn.Module) -> str | None:
    reason = why_not_separate(module)
    if reason is None:
        try:
            try_experts(module)
        except TrialFailed as error:
            reason = str(error)
    return reason


def _stored(
    name: str,
    module: Any,  # noqa: ANN401
    weights: MutableMapping[str, LazyTensor],
) -> StoredExperts | None:
    """Returns the weights of a module, and removes their tensors; None if they are not packed."""
    joined = [weights.get(f"{name}.{part}") for part in ("gate_up_proj", "down_proj")]
    of_all = [None if each is None else each.stored_experts() for each in joined]
    if of_all[0] is not None and of_all[1] is not None:
        return StoredExperts(of_all[0], of_all[1])
    for gates, ups, downs in _separate_names(name, module.num_experts):
        names = [*gates, *ups, *downs]
        if any(each not in weights for each in names):
            continue
        stored = [weights[each].stored() for each in names]
        packed = [each for each in stored if each is not None]
        if len(packed) < len(names):
            return None
        for each in names:
            del weights[each]
        count = len(gates)
        pairs = zip(packed[:count], packed[count : 2 * count], strict=True)
        return StoredExperts(tuple(pairs), tuple((each,) for each in packed[2 * count :]))
    return None


def _separate_names(
    name: str, num_experts: int
) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Yields possible names of the gate, up and down matrices of each expert."""
    for ending, template, up, down in _NAMES:
        if not name.endswith(ending):
            continue
        gates = [name.removesuffix(ending) + template.format(each) for each in range(num_experts)]
        own = next(each for each in _GATES if each in template)
        yield gates, [n.replace(own, up) for n in gates], [n.replace(own, down) for n in gates]
