"""Parts of a model of the Llama kind made of its tensors alone, without `transformers`.

A decoder takes weights and sizes from them. They cannot run. Angles are those of a rotary embedding
with constant frequencies, as `transformers` computes them.

Shape letters: P positions, D rotary size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

_EMBEDDING = "model.embed_tokens"
_HEAD = "lm_head"


class PlainConfig(SimpleNamespace):
    """Settings of a model's configuration that JSON can hold."""

    def get_text_config(self, decoder: bool = True) -> Self:
        """Returns itself, as the configurations of `transformers` do for models of text."""
        return self


class PlainRotary(nn.Module):
    """Rotary embedding. `frequencies`: [D / 2] float32. `scaling`: factor of cosines and sines."""

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        super().__init__()
        self.frequencies, self.scaling = frequencies, scaling

    def forward(self, _states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of `positions` [1, P], [1, P, D] float32 each."""
        half = positions[..., None].float() * self.frequencies
        angles = torch.cat([half, half], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


class PlainModel(nn.Module):
    """Model with the parts that decoders read. `dtype`: of its weights."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        rotary: PlainRotary,
        epsilon: float,
    ) -> None:
        """`tensors`: parameters by name, not copied; a tied head may be missing.

        `epsilon`: of all norms.
        """
        super().__init__()
        self.config = PlainConfig(**config)
        parameters = {
            name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()
        }
        parameters.setdefault(f"{_HEAD}.weight", parameters[f"{_EMBEDDING}.weight"])
        for name, parameter in parameters.items():
            self._add(name.split("."), parameter, epsilon)
        self.get_submodule("model").rotary_emb = rotary
        self.dtype = parameters[f"{_EMBEDDING}.weight"].dtype

    def get_input_embeddings(self) -> nn.Module:
        """Returns the token embedding."""
        return self.get_submodule(_EMBEDDING)

    def get_output_embeddings(self) -> nn.Module:
        """Returns the head."""
        return self.get_submodule(_HEAD)

    def _add(self, path: list[str], parameter: nn.Parameter, epsilon: float) -> None:
        module: nn.Module = self
        for name in path[:-1]:
            children = dict(module.named_children())
            if name not in children:
                module.add_module(name, nn.ModuleList() if name == "layers" else nn.Module())
            module = module.get_submodule(name)
        module.register_parameter(path[-1], parameter)
        untyped: Any = module
        if path[-1] != "weight":
            return
        if parameter.ndim == 1:
            untyped.variance_epsilon = epsilon
        elif path[:-1] == _EMBEDDING.split("."):
            untyped.num_embeddings, untyped.embedding_dim = parameter.shape
        else:
            untyped.out_features, untyped.in_features = parameter.shape
