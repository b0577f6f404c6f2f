"""Experts of a mixture with a linear layer for each matrix, not one tensor for all experts.

Shape letters: T tokens, W width of the model, I width of an expert, E experts, k of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_WEIGHTS = ("gate_up_proj", "down_proj")


def why_not_separate(plain: Any) -> str | None:  # noqa: ANN401
    """Returns why `SeparateExperts` cannot replace a module of `transformers`; None if it can.

    Its numbers have to be compared, too (`try_experts`).
    """
    if any(getattr(getattr(plain, name, None), "ndim", 0) != 3 for name in _WEIGHTS):
        return f"{type(plain).__name__} has no gate_up_proj and down_proj of all experts"
    has_gate = getattr(plain, "has_gate", False) and hasattr(plain, "_apply_gate")
    if not has_gate or getattr(plain, "has_post_expert_norm", False):
        return f"{type(plain).__name__} has no gate, or a norm after each expert"
    return None


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
        for name in _WEIGHTS:
            delattr(plain, name)
        self.rules = plain
        # No lists of modules: one as long as the model has layers would be taken for these.
        self.gate_up = _numbered([layers[0] for layers in gate_up])
        self.up = _numbered([layers[1] for layers in gate_up if len(layers) == 2])
        self.down = _numbered(down)

    def forward(self, states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sums of the experts' outputs, [T, W].

        `states`: [T, W]. `top_k_index`: [T, k], an index of E or more stands for no expert.
        `top_k_weights`: [T, k].
        """
        output = torch.zeros_like(states)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= len(self.down):
                continue
            tokens, places = torch.where(top_k_index == expert)
            weighted = self._computed(expert, states[tokens]) * top_k_weights[tokens, places, None]
            output.index_add_(0, tokens, weighted.to(output.dtype))
        return output

    def _computed(self, expert: int, states: Tensor) -> Tensor:
        rules: Any = self.rules
        number = str(expert)
        gate_up: Tensor = self.gate_up[number](states)
        if number in self.up:
            parts = gate_up, self.up[number](states)
            is_apart = rules.is_concatenated
            gate_up = torch.cat(parts, -1) if is_apart else torch.stack(parts, -1).flatten(-2)
        if rules.has_bias:
            gate_up = gate_up + rules.gate_up_proj_bias[expert]
        result: Tensor = self.down[number](rules._apply_gate(gate_up))
        return result + rules.down_proj_bias[expert] if rules.has_bias else result


def _numbered(layers: Sequence[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
