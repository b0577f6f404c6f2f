"""What is between the layers of a model of `transformers`, caught while it runs.

Shape letters: K places between layers, T input tokens, W width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.errors import ModelUnsupported

_STATES_ARGUMENT = "hidden_states"


class LayerStates:
    """Catches what some layers are given, in each pass from now on."""

    def __init__(
        self, model: nn.Module, attention_modules: Sequence[nn.Module], layers: Sequence[int]
    ) -> None:
        """`layers`: K indexes; the number of layers for what the last one returns.

        `attention_modules`: one in each layer of `model`, in their order. Raises ModelUnsupported
        if these are not the layers of one stack.
        """
        modules = _stack_of(model, attention_modules)
        self._layers = tuple(layers)
        self._caught: dict[int, Tensor] = {}
        for layer in set(layers):
            if layer < len(modules):
                modules[layer].register_forward_pre_hook(self._before(layer), with_kwargs=True)
            else:
                modules[-1].register_forward_hook(self._behind(layer))

    def of_last_pass(self) -> Tensor:
        """[K, T, W], in the order in which layers were asked for."""
        states = torch.stack([self._caught[layer] for layer in self._layers])
        self._caught.clear()
        return states

    def _before(self, layer: int) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        def catch(_module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:  # noqa: ANN401
            states: Tensor = arguments[0] if arguments else named[_STATES_ARGUMENT]
            self._caught[layer] = states[0]

        return catch

    def _behind(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def catch(_module: nn.Module, _arguments: Any, returned: Any) -> None:  # noqa: ANN401
            states: Tensor = returned[0] if isinstance(returned, tuple) else returned
            self._caught[layer] = states[0]

        return catch


def _stack_of(model: nn.Module, attention_modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The layer around each of `attention_modules`."""
    layer_of: dict[nn.Module, nn.Module] = {}
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList):
            for layer in stack:
                for module in layer.modules():
                    # The outermost list comes first.
                    layer_of.setdefault(module, layer)
    layers = [layer_of[module] for module in attention_modules if module in layer_of]
    if len(set(layers)) != len(attention_modules):
        raise ModelUnsupported(f"{type(model).__name__}: its layers are not one stack of layers")
    return layers
