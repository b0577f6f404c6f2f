"""Adapters of experts and routers in a model that `transformers` runs.

What an adapter adds to an expert depends on the tokens that are routed there, and the activation
lies between both matrices: in such passes experts are computed one by one, in place of the module's
own code. A router is small: it is computed again with the adapter's weights.

Shape letters: T input tokens, W width of the model, k experts of a token, n tokens of an expert.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor_service.model.adapter import ExpertsUpdate
from executor_service.model.separate_experts import (
    EXPERT_MATRICES,
    Experts,
    JoinedExperts,
    SeparateExperts,
    routed,
)
from splitserve_kernels.low_rank_update import LowRankUpdate

# Tokens that are compared.
_NUM_COMPARED = 2


@dataclass(frozen=True, slots=True)
class ExpertsChange:
    """Updates of the experts' matrices by one adapter; None for an unchanged matrix."""

    gate_up: ExpertsUpdate | None
    down: ExpertsUpdate | None


class AdaptedExperts:
    """Experts of one module, in a pass with adapters."""

    def __init__(
        self,
        module: nn.Module,
        num_experts: int,
        changes: Sequence[ExpertsChange],
        of_token: Tensor,
    ) -> None:
        """`of_token`: [T] int64, index in `changes` of each token, -1 for none."""
        self._experts: Experts
        self._experts = module if isinstance(module, SeparateExperts) else JoinedExperts(module)
        self._num_experts = num_experts
        self._changes = changes
        self._of_token = of_token

    def forward(self, states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sums of the experts' outputs, [T, W], see `routed`."""
        return routed(self._computed, self._num_experts, states, top_k_index, top_k_weights)

    def _computed(self, expert: int, tokens: Tensor, states: Tensor) -> Tensor:
        """Returns the outputs [n, W] of an expert for its `tokens` [n]."""
        of_row = self._of_token[tokens]
        gate_up = self._experts.gate_up_of(expert, states)
        rows = [torch.nonzero(of_row == index).flatten() for index in range(len(self._changes))]
        for own, change in zip(rows, self._changes, strict=True):
            _add(gate_up, change.gate_up, expert, own, states)
        gated = self._experts.gated(gate_up)
        down = self._experts.down_of(expert, gated)
        for own, change in zip(rows, self._changes, strict=True):
            _add(down, change.down, expert, own, gated)
        return down


def computes_alike(experts: nn.Module, arguments: Sequence[Tensor], output: Tensor) -> bool:
    """Returns whether AdaptedExperts computes what experts of `transformers` do, without adapters.

    `arguments`, `output`: of a call, of which some tokens are compared. It is True for
    SeparateExperts, whose code it is.
    """
    if isinstance(experts, SeparateExperts):
        return True
    states, index, weights = (each[:_NUM_COMPARED] for each in arguments)
    num_experts = experts.get_parameter(EXPERT_MATRICES[0]).shape[0]
    without = AdaptedExperts(experts, num_experts, (), torch.zeros(len(states)))
    expected = output[:_NUM_COMPARED].float()
    error = (without.forward(states, index, weights).float() - expected).abs().max()
    return bool(error <= torch.finfo(output.dtype).eps ** 0.5 * expected.abs().max())


def _add(
    outputs: Tensor, update: ExpertsUpdate | None, expert: int, rows: Tensor, inputs: Tensor
) -> None:
    """Adds the update of an expert to some rows of its outputs."""
    if update is None or not len(rows):
        return
    reduced = functional.linear(inputs[rows].float(), update.down[expert].float())
    added = functional.linear(reduced, update.up[expert].float())
    outputs[rows] = (outputs[rows].float() + added).to(outputs.dtype)


# -- Routers ---------------------------------------------------------------------------------------


def router_weight(router: Any, update: LowRankUpdate) -> Tensor:  # noqa: ANN401
    """Returns the weight of a router with an update, in its dtype."""
    weight: Tensor = router.weight.detach()
    changed = weight.float() + update.scale * (update.up.float() @ update.down.float())
    if update.gain is not None:
        changed = update.gain[:, None] * changed
    return changed.to(weight.dtype)


def routed_anew(
    router: Any,  # noqa: ANN401
    weight: Tensor,
    states: Tensor,
    tokens: Tensor,
    outputs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Returns `outputs` of a router with those of some tokens computed with other weights.

    `states`: [T, W], or [1, T, W]. `outputs`: one tensor, or a tuple of them. They are not changed.
    """
    changed = copy.copy(router)
    parameter = nn.Parameter(weight, requires_grad=False)
    changed._parameters = {**router._parameters, "weight": parameter}
    # Not as a module: its hooks are those of `router`.
    anew = changed.forward(states[..., tokens, :])
    num_tokens = states.shape[-2]
    if isinstance(outputs, Tensor):
        return _with_rows(outputs, anew, tokens, num_tokens)
    pairs = zip(outputs, anew, strict=True)
    return tuple(_with_rows(all_rows, own, tokens, num_tokens) for all_rows, own in pairs)


def is_row_by_row(outputs: Any, num_tokens: int) -> bool:  # noqa: ANN401
    """Returns whether `routed_anew` can take the outputs of a router for so many tokens."""
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return all(isinstance(each, Tensor) and each.numel() % num_tokens == 0 for each in tensors)


def _with_rows(outputs: Tensor, rows: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    changed = outputs.clone().view(num_tokens, -1)
    changed[tokens] = rows.reshape(len(tokens), -1)
    return changed.view(outputs.shape)
