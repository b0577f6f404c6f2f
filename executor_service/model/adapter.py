"""A loaded LoRA adapter: what it changes in each module of the model; the tokens that have one.

Shape letters: r rank, V vocabulary, W width of the model, T input tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from executor_service.steps import Int32Array
from splitserve_kernels.low_rank_update import LowRankUpdate


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer or embedding of the model that an adapter may change.

    `name`: path to it, as in the parameters of the `transformers` model. `num_inputs`: of an
    embedding, its tokens. `has_bias`: whether the layer has one. `is_head`: it computes the logits.
    """

    name: str
    num_inputs: int
    num_outputs: int
    is_embedding: bool = False
    has_bias: bool = False
    is_head: bool = False


# Layers that a model may have joined where an adapter has separate ones.
JOINED_MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of loaded adapters. `max_num`: adapters at once. `max_rank`: of one module."""

    max_num: int
    max_rank: int


# Returns a tensor of the base model by its name there, as in its checkpoint and in the model's
# dtype, on the CPU; None if the checkpoint has none of this name. Weights of linear layers are
# [O, I]. Reads the file each time.
BaseTensor = Callable[[str], Tensor | None]


def no_base_tensor(_name: str) -> Tensor | None:
    """Returns None: a `BaseTensor` of a model without files."""
    return None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A loaded adapter. `name`: its name for rows. Equal only to itself.

    `updates`: of linear layers, by `Target.name`; the output head is one of them. `embedding`: of
    the token embedding; `down` is [r, V] there, and a column is looked up. It changes the weights:
    a factor that the model gives its embeddings applies to it, too. `own_embedding` [V, W] and
    `own_head` [V, W]: weights that replace those of the model (modules_to_save), None for none.
    `num_bytes`: of all these tensors.
    """

    name: str
    updates: Mapping[str, LowRankUpdate]
    embedding: LowRankUpdate | None = None
    own_embedding: Tensor | None = None
    own_head: Tensor | None = None
    num_bytes: int = 0

    @property
    def changes_linears_only(self) -> bool:
        """Whether all changes are `updates`."""
        return self.embedding is None and self.own_embedding is None and self.own_head is None


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """Input tokens of a pass that have an adapter.

    `adapters`: the adapters, each once. `of_token`: [T], for each input token its index in
    `adapters`, -1 for none.
    """

    adapters: tuple[Adapter, ...]
    of_token: Int32Array


class LoadedAdapters:
    """Adapters that rows may name. Each mapping is replaced, never changed: any thread may read it.

    `why_not`: why others cannot be loaded, for people.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, Adapter] = {}
        self.why_not: Mapping[str, str] = {}
