"""Adapters in a model that `transformers` runs: additions to the outputs of its layers.

Layers that apply adapters themselves (AdaptingLinear) do so, and on a GPU, kernels add the updates
of linear layers: the bits of a row do not depend on other rows. Elsewhere, the rows of one adapter
are multiplied apart from all others, in float32. A product of a few rows may be summed in another
order than one of many, so the last bits of a row's result can depend on how many tokens of the same
adapter a pass has. Rows without an adapter keep all their bits, except that experts that are not
packed are computed by other code (adapted_experts.py).

Shape letters: I inputs of a layer, O outputs, r rank, n rows of one adapter, T input tokens, S rows
of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor_service.model.adapted_experts import (
    AdaptedExperts,
    ExpertsChange,
    routed_anew,
    router_weight,
)
from executor_service.model.adapter import AdaptedTokens, Adapter, AdaptingLinear, Target
from executor_service.model.adapter_slots import AdapterSlots, ChooseAdding, PassUpdates
from executor_service.model.input_batch import InputBatch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.separate_experts import EXPERT_MATRICES
from splitserve_kernels.low_rank_update import LowRankUpdate

_Hook = Callable[[nn.Module, tuple[Tensor, ...], Any], Any]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one adapter in a pass.

    `tokens`: [n] int64, indexes of input tokens. `of_logits`: the same of what the head gets.
    """

    adapter: Adapter
    tokens: Tensor
    of_logits: Tensor


@dataclass(frozen=True, slots=True)
class _Change:
    """Change of a layer's `rows` by one adapter; None for what stays."""

    adapter: Adapter
    rows: Tensor
    update: LowRankUpdate | None
    own: Tensor | None


class AdaptedLinears:
    """Changes what the layers of a model compute, in passes with adapters only."""

    def __init__(self, loaded: LoadedModel, slots: AdapterSlots | None = None) -> None:
        """Changes nothing yet. `slots`: for kernels that add updates; None for plain torch."""
        self._loaded = loaded
        self._slots = slots
        self._biases: dict[str, Tensor] = {}
        self._prepared: WeakKeyDictionary[Adapter, Mapping[str, Any]] = WeakKeyDictionary()

    @contextmanager
    def applied(self, batch: InputBatch) -> Iterator[None]:
        """Inside, the model computes `batch` with the adapters of its tokens."""
        adapted = batch.rows.adapted
        updates = None if self._slots is None else self._slots.updates_of(batch)
        if adapted is None and updates is None:
            yield
            return
        rows: list[_Rows] = []
        replaced: list[tuple[Any, Callable[..., Tensor]]] = []
        if adapted is not None and not self.is_all_in_slots(adapted.adapters):
            rows, replaced = self._rows(batch, adapted), self._experts(adapted)
        with ExitStack() as restored:
            for target in self._loaded.adapter_targets.values():
                hook = self._adding_hook(target, updates, rows)
                changes = [] if hook or target.num_experts else _changes(target, rows)
                if changes and target.name in self._adapting:
                    replaced.append((self._adapting[target.name], self._forward(target, changes)))
                elif changes:
                    hook = (self._router_hook if target.is_router else self._hook)(target, changes)
                if hook is not None:
                    module = self._loaded.model.get_submodule(target.name)
                    restored.callback(module.register_forward_hook(hook).remove)
            for changed, forward in replaced:
                changed.forward = forward
                restored.callback(delattr, changed, "forward")
            yield

    def prepare(self, adapter: Adapter) -> Mapping[str, Any]:
        """Prepares an adapter for its passes, once. Any thread may call it.

        Returns what layers that apply adapters themselves take, and the weights of routers, both by
        the names of the targets. Raises RuntimeError if sizes are not those of the layers.
        """
        prepared = self._prepared.get(adapter)
        if prepared is None:
            prepared = dict(self._prepare(adapter))
            self._prepared[adapter] = prepared
        return prepared

    def _prepare(self, adapter: Adapter) -> Iterator[tuple[str, Any]]:
        for target in self._loaded.adapter_targets.values():
            update, own = _change(adapter, target)
            if update is None and own is None:
                continue
            if target.name in self._adapting:
                yield target.name, self._adapting[target.name].prepare(update, own)
            elif target.is_router and update is not None:
                router = self._loaded.model.get_submodule(target.name)
                yield target.name, router_weight(router, update)

    @cached_property
    def _adapting(self) -> Mapping[str, Any]:
        """The layers that apply adapters themselves, by their names."""
        model, targets = self._loaded.model, self._loaded.adapter_targets.values()
        modules = {each.name: model.get_submodule(each.module) for each in targets}
        return {name: each for name, each in modules.items() if isinstance(each, AdaptingLinear)}

    def _forward(self, target: Target, changes: Sequence[_Change]) -> Callable[[Tensor], Tensor]:
        """Returns what replaces the code of a layer that applies adapters itself."""
        module: AdaptingLinear = self._adapting[target.name]
        prepared = [self.prepare(each.adapter)[target.name] for each in changes]

        def forward(inputs: Tensor) -> Tensor:
            of_row = np.full(inputs.numel() // target.num_inputs, -1, np.int32)
            for index, each in enumerate(changes):
                of_row[each.rows.numpy()] = index
            return module.adapted(inputs, prepared, of_row)

        return forward

    def _experts(self, adapted: AdaptedTokens) -> list[tuple[Any, Callable[..., Tensor]]]:
        """Returns the modules of experts that adapters change, with what replaces their code."""
        targets = self._loaded.adapter_targets.values()
        of_token = torch.from_numpy(adapted.of_token).to(self._loaded.device, torch.int64)
        replaced: list[tuple[Any, Callable[..., Tensor]]] = []
        for name, number in {each.module: each.num_experts for each in targets}.items():
            if not number:
                continue
            changes = [
                ExpertsChange(*(each.experts.get(f"{name}.{matrix}") for matrix in EXPERT_MATRICES))
                for each in adapted.adapters
            ]
            if any(each.gate_up is not None or each.down is not None for each in changes):
                module = self._loaded.model.get_submodule(name)
                experts = AdaptedExperts(module, number, changes, of_token)
                replaced.append((module, experts.forward))
        return replaced

    def is_all_in_slots(self, adapters: Iterable[Adapter]) -> bool:
        """Returns whether kernels add all that `adapters` change."""
        return self._slots is not None and all(each.changes_linears_only for each in adapters)

    def _adding_hook(
        self, target: Target, updates: PassUpdates | None, rows: Sequence[_Rows]
    ) -> _Hook | None:
        """Returns what adds the updates of a layer by kernels; None if they do not change it."""
        if self._slots is None or updates is None:
            return None
        layer = self._slots.layer_of.get(target.name)
        if layer is None or not updates.changes(layer):
            return None
        if target.is_head and any(each.adapter.own_head is not None for each in rows):
            return None
        return self._adding(target, updates, layer)

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
            for each in changes:
                own, given = outputs[each.rows].float(), inputs[each.rows]
                if target.is_embedding:
                    own = _embedded(module, own, given, outputs.dtype, each.update, each.own)
                else:
                    bias = self._bias(module, target)
                    own = _multiplied(own, given.float(), bias, each.update, each.own)
                outputs[each.rows] = own.to(outputs.dtype)

        return change

    def _router_hook(self, target: Target, changes: Sequence[_Change]) -> _Hook:
        """Returns what changes the outputs of a router, and returns them."""

        def change(module: nn.Module, arguments: tuple[Tensor, ...], output: Any) -> Any:  # noqa: ANN401
            for each in changes:
                weight = self.prepare(each.adapter)[target.name]
                output = routed_anew(module, weight, arguments[0], each.rows, output)
            return output

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
    changes = []
    for each in rows:
        index = each.of_logits if target.is_head else each.tokens
        update, own = _change(each.adapter, target)
        if len(index) and (update is not None or own is not None):
            changes.append(_Change(each.adapter, index, update, own))
    return changes


def _change(adapter: Adapter, target: Target) -> tuple[LowRankUpdate | None, Tensor | None]:
    """Returns the update of a layer and the weights instead of its own, None for none."""
    if target.is_embedding:
        return adapter.embedding, adapter.own_embedding
    return adapter.updates.get(target.name), adapter.own_head if target.is_head else None


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
    added = factor * _rank_by_rank(update, update.down.T[token_ids].float())
    return outputs + added if update.gain is None else update.gain * (outputs + added)


def _low_rank(update: LowRankUpdate, reduced: Tensor) -> Tensor:
    """Returns the low-rank part [n, O] of an update; `reduced`: [n, r] float32."""
    return update.scale * functional.linear(reduced, update.up.float())


def _rank_by_rank(update: LowRankUpdate, reduced: Tensor) -> Tensor:
    """Returns the same, each row's sums in the same order whatever other rows there are."""
    added = torch.zeros(len(reduced), len(update.up), device=reduced.device)
    for rank, up in enumerate(update.up.float().T):
        added += reduced[:, rank : rank + 1] * up
    return update.scale * added


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
        if not (target.is_embedding or target.is_router or target.num_experts)
        and _has_dtype(loaded, target)
    ]
    return AdapterSlots(layers, limits, loaded.device, loaded.dtype, add)


def _has_dtype(loaded: LoadedModel, target: Target) -> bool:
    """Returns whether a layer computes in the model's dtype, as the matrices of adapters do."""
    weight = getattr(loaded.model.get_submodule(target.name), "weight", None)
    return not isinstance(weight, Tensor) or weight.dtype == loaded.dtype
