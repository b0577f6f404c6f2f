"""Experts of a mixture, computed one after the other.

Shape letters: T tokens, W width of the model, I width of an expert, E experts, k of a token, n
tokens of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

# Parameters of experts in `transformers`.
EXPERT_MATRICES = ("gate_up_proj", "down_proj")


def why_not_separate(plain: Any) -> str | None:  # noqa: ANN401
    """Returns why `SeparateExperts` cannot replace a module of `transformers`; None if it can.

    Its numbers have to be compared, too (`try_experts`).
    """
    if any(getattr(getattr(plain, name, None), "ndim", 0) != 3 for name in EXPERT_MATRICES):
        return f"{type(plain).__name__} has no gate_up_proj and down_proj of all experts"
    has_gate = getattr(plain, "has_gate", False) and hasattr(plain, "_apply_gate")
    if not has_gate or getattr(plain, "has_post_expert_norm", False):
        return f"{type(plain).__name__} has no gate, or a norm after each expert"
    return None


def expert_sizes(experts: Any) -> dict[str, tuple[int, int, int]]:  # noqa: ANN401
    """Returns experts, inputs and outputs of both matrices, by the names that `transformers` has.

    `experts`: a module of `transformers`, or a SeparateExperts. Empty if it is neither, or one that
    `SeparateExperts` cannot replace.
    """
    if isinstance(experts, SeparateExperts):
        return experts.sizes
    if why_not_separate(experts) is not None:
        return {}
    shapes = {name: tuple(getattr(experts, name).shape) for name in EXPERT_MATRICES}
    if experts.is_transposed:
        return shapes
    return {name: (e, inputs, outputs) for name, (e, outputs, inputs) in shapes.items()}


def has_halves(experts: Any) -> bool:  # noqa: ANN401
    """Returns whether the outputs of gate and up are halves of `gate_up_proj`, not interleaved.

    `experts`: as `expert_sizes` takes.
    """
    rules = experts.rules if isinstance(experts, SeparateExperts) else experts
    return bool(rules.is_concatenated)


class Experts(Protocol):
    """Computes one expert at a time."""

    def gate_up_of(self, expert: int, states: Tensor) -> Tensor:
        """Returns the outputs [n, 2 I] of gate and up for `states` [n, W]."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """Returns what `down_of` takes, [n, I]."""
        ...

    def down_of(self, expert: int, gated: Tensor) -> Tensor:
        """Returns the outputs [n, W] of an expert."""
        ...


# Takes an expert, its tokens [n], and their states [n, W]; returns their outputs [n, W].
ComputeExpert = Callable[[int, Tensor, Tensor], Tensor]


def routed(
    compute: ComputeExpert,
    num_experts: int,
    states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Returns the weighted sums of the experts' outputs, [T, W].

    `states`: [T, W]. `top_k_index`: [T, k], an index of E or more stands for no expert.
    `top_k_weights`: [T, k].
    """
    output = torch.zeros_like(states)
    for expert in torch.unique(top_k_index).tolist():
        if expert >= num_experts:
            continue
        tokens, places = torch.where(top_k_index == expert)
        computed = compute(expert, tokens, states[tokens])
        weighted = computed * top_k_weights[tokens, places, None]
        output.index_add_(0, tokens, weighted.to(output.dtype))
    return output


class JoinedExperts:
    """Experts of `transformers`, with one tensor for all of them. An `Experts`."""

    def __init__(self, plain: Any) -> None:  # noqa: ANN401
        """`plain`: a module that `SeparateExperts` can replace."""
        self._plain = plain

    def gate_up_of(self, expert: int, states: Tensor) -> Tensor:
        return self._multiplied("gate_up_proj", expert, states)

    def gated(self, gate_up: Tensor) -> Tensor:
        result: Tensor = self._plain._apply_gate(gate_up)
        return result

    def down_of(self, expert: int, gated: Tensor) -> Tensor:
        return self._multiplied("down_proj", expert, gated)

    def _multiplied(self, name: str, expert: int, states: Tensor) -> Tensor:
        plain = self._plain
        weight = getattr(plain, name)[expert]
        bias = getattr(plain, f"{name}_bias")[expert] if plain.has_bias else None
        return functional.linear(states, weight.T if plain.is_transposed else weight, bias)


class SeparateExperts(nn.Module):
    """Replacement of the experts of `transformers`; computes the experts that tokens are routed to.

    `gate_up`: of each expert, one layer with all outputs in the order of `plain`, or two layers,
    gate and up, [I, W] each. `down`: [W, I] of each expert. The layers have no biases.
    """

    def __init__(
        self,
        plain: Any,  # noqa: ANN401
        gate_up: Sequence[Sequence[nn.Module]],
        down: Sequence[nn.Module],
    ) -> None:
        """Takes biases and activation of `plain`, which loses its weights."""
        super().__init__()
        for name in EXPERT_MATRICES:
            delattr(plain, name)
        self.rules = plain
        # No lists of modules: one as long as the model has layers would be taken for these.
        self.gate_up = _numbered([layers[0] for layers in gate_up])
        self.up = _numbered([layers[1] for layers in gate_up if len(layers) == 2])
        self.down = _numbered(down)

    @property
    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """See `expert_sizes`."""
        first: Any = self.gate_up["0"]
        down: Any = self.down["0"]
        num_experts, num_gates = len(self.down), 2 if self.up else 1
        return {
            "gate_up_proj": (num_experts, first.in_features, num_gates * first.out_features),
            "down_proj": (num_experts, down.in_features, down.out_features),
        }

    def forward(self, states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `routed`."""
        return routed(self._computed, len(self.down), states, top_k_index, top_k_weights)

    def _computed(self, expert: int, _tokens: Tensor, states: Tensor) -> Tensor:
        return self.down_of(expert, self.gated(self.gate_up_of(expert, states)))

    def gate_up_of(self, expert: int, states: Tensor) -> Tensor:
        """See `Experts`."""
        rules: Any = self.rules
        number = str(expert)
        gate_up: Tensor = self.gate_up[number](states)
        if number in self.up:
            parts = gate_up, self.up[number](states)
            is_apart = rules.is_concatenated
            gate_up = torch.cat(parts, -1) if is_apart else torch.stack(parts, -1).flatten(-2)
        return gate_up + rules.gate_up_proj_bias[expert] if rules.has_bias else gate_up

    def gated(self, gate_up: Tensor) -> Tensor:
        """See `Experts`."""
        rules: Any = self.rules
        result: Tensor = rules._apply_gate(gate_up)
        return result

    def down_of(self, expert: int, gated: Tensor) -> Tensor:
        """See `Experts`."""
        rules: Any = self.rules
        result: Tensor = self.down[str(expert)](gated)
        return result + rules.down_proj_bias[expert] if rules.has_bias else result


def _numbered(layers: Sequence[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
