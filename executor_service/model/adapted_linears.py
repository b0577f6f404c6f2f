"""Adapters in a model that `transformers` runs: additions to the outputs of its layers.

The rows of one adapter are multiplied apart from all others, in float32. A product of a few rows
may be summed in another order than one of many, so the last bits of a row's result can depend on
how many tokens of the same adapter a pass has. Rows without an adapter keep all their bits. On a
GPU, kernels add the updates of linear layers, whose results do not depend on other rows.

Shape letters: I inputs of a layer, O outputs, r rank, n rows of one adapter, T input tokens, S rows
of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor_service.model.adapter import AdaptedTokens, Adapter, Target
from executor_service.model.adapter_slots import AdapterSlots, ChooseAdding, PassUpdates
from executor_service.model.input_batch import InputBatch
from executor_service.model.loaded_model import LoadedModel
from splitserve_kernels.low_rank_update import LowRankUpdate

_Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one adapter in a pass.

    `tokens`: [n] int64, indexes of input tokens. `of_logits`: the same of what the head gets.
    """

    adapter: Adapter
    tokens: Tensor
    of_logits: Tensor


# Rows of one adapter, and what it changes a layer with.
_Change = tuple[Tensor, LowRankUpdate | None, Tensor | None]


class AdaptedLinears:
    """Changes what the layers of a model compute, in passes with adapters only."""

    def __init__(self, loaded: LoadedModel, slots: AdapterSlots | None = None) -> None:
        """Changes nothing yet. `slots`: for kernels that add updates; None for plain torch."""
        self._loaded = loaded
        self._slots = slots
        self._biases: dict[str, Tensor] = {}

    @contextmanager
    def applied(self, batch: InputBatch) -> Iterator[None]:
        """Inside, the model computes `batch` with the adapters of its tokens."""
        hooks = [
            self._loaded.model.get_submodule(target.name).register_forward_hook(hook)
            for target, hook in list(self._hooks(batch))
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def is_all_in_slots(self, adapters: Iterable[Adapter]) -> bool:
        """Returns whether kernels add all that `adapters` change."""
        return self._slots is not None and all(each.changes_linears_only for each in adapters)

    def _hooks(self, batch: InputBatch) -> Iterator[tuple[Target, _Hook]]:
        adapted = batch.rows.adapted
        updates = None if self._slots is None else self._slots.updates_of(batch)
        if updates is None and adapted is None:
            return
        rows: list[_Rows] = []
        if adapted is not None and not self.is_all_in_slots(adapted.adapters):
            rows = self._rows(batch, adapted)
        for target in self._loaded.adapter_targets.values():
            layer = None if self._slots is None else self._slots.layer_of.get(target.name)
            is_replaced = target.is_head and any(each.adapter.own_head is not None for each in rows)
            if updates is not None and layer is not None and not is_replaced:
                if updates.changes(layer):
                    yield target, self._adding(target, updates, layer)
            elif changes := _changes(target, rows):
                yield target, self._hook(target, changes)

    def _adding(self, target: Target, updates: PassUpdates, layer: int) -> _Hook:
        """Returns what adds the updates of a layer to its outputs, by kernels."""
        of_lines = target.is_head and self._loaded.keeps_logits

        def add(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            inputs = arguments[0].reshape(-1, target.num_inputs).contiguous()
            outputs, bias = output.view(-1, target.num_outputs), self._bias(module, target)
            updates.add(layer, inputs, outputs, bias, of_lines=of_lines)

        return add

    def _rows(self, batch: InputBatch, adapted: AdaptedTokens) -> list[_Rows]:
        device = self._loaded.device
        of_token = torch.from_numpy(adapted.of_token)
        of_logits = of_token
        if self._loaded.keeps_logits:
            of_logits = of_token[torch.from_numpy(batch.rows.logits_index)]
        return [
            _Rows(
                adapter,
                torch.nonzero(of_token == index).flatten().to(device),
                torch.nonzero(of_logits == index).flatten().to(device),
            )
            for index, adapter in enumerate(adapted.adapters)
        ]

    def _hook(self, target: Target, changes: Sequence[_Change]) -> _Hook:
        """Returns what changes the outputs of a layer in place."""

        def change(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            inputs, outputs = arguments[0].reshape(-1), output.view(-1, target.num_outputs)
            if not target.is_embedding:
                inputs = inputs.view(-1, target.num_inputs)
            for index, update, weights in changes:
                own = outputs[index].float()
                if target.is_embedding:
                    own = _embedded(module, own, inputs[index], outputs.dtype, update, weights)
                else:
                    bias = self._bias(module, target)
                    own = _multiplied(own, inputs[index].float(), bias, update, weights)
                outputs[index] = own.to(outputs.dtype)

        return change

    def _bias(self, module: nn.Module, target: Target) -> Tensor | None:
        """Returns the bias of a layer, [O] float32; None for none."""
        if not target.has_bias:
            return None
        if target.name not in self._biases:
            # Replacements of layers have it in forms of their own; this calls no hook.
            loaded = self._loaded
            nothing = torch.zeros(1, target.num_inputs, dtype=loaded.dtype, device=loaded.device)
            self._biases[target.name] = module.forward(nothing)[0].float()
        return self._biases[target.name]


def _changes(target: Target, rows: Sequence[_Rows]) -> list[_Change]:
    """Returns what the adapters of a pass change in a layer."""
    changes: list[_Change] = []
    for each in rows:
        adapter, index, weights = each.adapter, each.tokens, None
        update = adapter.updates.get(target.name)
        if target.is_embedding:
            update, weights = adapter.embedding, adapter.own_embedding
        elif target.is_head:
            index, weights = each.of_logits, adapter.own_head
        if len(index) and (update is not None or weights is not None):
            changes.append((index, update, weights))
    return changes


def _multiplied(
    outputs: Tensor,
    inputs: Tensor,
    bias: Tensor | None,
    update: LowRankUpdate | None,
    weights: Tensor | None,
) -> Tensor:
    """Returns changed `outputs` [n, O] of a linear layer for `inputs` [n, I], in float32.

    `bias`: of the layer, [O].
    """
    if weights is not None:
        outputs = functional.linear(inputs, weights.float(), bias)
    if update is None:
        return outputs
    added = _low_rank(update, functional.linear(inputs, update.down.float()))
    if update.gain is not None:
        plain = outputs if bias is None else outputs - bias
        outputs, added = outputs + (update.gain - 1) * plain, update.gain * added
    outputs = outputs + added
    return outputs if update.bias is None else outputs + update.bias


def _embedded(
    module: Any,  # noqa: ANN401
    outputs: Tensor,
    token_ids: Tensor,
    dtype: torch.dtype,
    update: LowRankUpdate | None,
    weights: Tensor | None,
) -> Tensor:
    """Returns changed embeddings [n, O] of `token_ids` [n], in float32. `dtype`: of the model."""
    factor = getattr(module, "embed_scale", None)
    if factor is None:
        factor = 1.0
    elif isinstance(factor, Tensor):
        # As the model itself rounds it.
        factor = factor.to(dtype).float()
    if weights is not None:
        outputs = factor * weights[token_ids].float()
    if update is None:
        return outputs
    added = factor * _low_rank(update, update.down.T[token_ids].float())
    return outputs + added if update.gain is None else update.gain * (outputs + added)


def _low_rank(update: LowRankUpdate, reduced: Tensor) -> Tensor:
    """Returns the low-rank part [n, O] of an update; `reduced`: [n, r] float32."""
    return update.scale * functional.linear(reduced, update.up.float())


def linear_slots(loaded: LoadedModel, choose_adding: ChooseAdding) -> AdapterSlots | None:
    """Returns slots for adapters of all linear layers of `loaded`.

    Returns None if none are served, or if there are no kernels for them.
    """
    limits = loaded.adapter_limits
    add = choose_adding() if limits is not None and loaded.adapter_targets else None
    if limits is None or add is None:
        return None
    layers = [
        [target]
        for target in loaded.adapter_targets.values()
        if not target.is_embedding and _has_dtype(loaded, target)
    ]
    return AdapterSlots(layers, limits, loaded.device, loaded.dtype, add)


def _has_dtype(loaded: LoadedModel, target: Target) -> bool:
    """Returns whether a layer computes in the model's dtype, as the matrices of adapters do."""
    weight = getattr(loaded.model.get_submodule(target.name), "weight", None)
    return not isinstance(weight, Tensor) or weight.dtype == loaded.dtype
