"""A loaded LoRA adapter: what it changes in each module of the model; the tokens that have one.

Shape letters: r rank, V vocabulary, W width of the model, T input tokens of a pass, E experts, I
inputs of an expert's matrix, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from executor_service.steps import Int32Array
from splitserve_kernels.low_rank_update import LowRankUpdate


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer, embedding, router or matrix of experts that an adapter may change.

    `name`: path to it, as in the parameters of the `transformers` model. `num_inputs`: of an
    embedding, its tokens. `has_bias`: whether the layer has one. `is_head`: it computes the logits.
    `is_router`: it chooses the experts of a token. `num_experts`: 0 if it is a module; otherwise it
    is a parameter with a matrix of each expert, whose inputs and outputs the sizes are.
    """

    name: str
    num_inputs: int
    num_outputs: int
    is_embedding: bool = False
    has_bias: bool = False
    is_head: bool = False
    is_router: bool = False
    num_experts: int = 0

    @property
    def module(self) -> str:
        """Path to the module that multiplies with it."""
        return self.name.rpartition(".")[0] if self.num_experts else self.name


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


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsUpdate:
    """Low-rank change of a matrix of each expert: it adds up (down x) to the outputs.

    `down`: [E, r, I], `up`: [E, O, r], both contiguous and in the model's dtype.
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A loaded adapter. `name`: its name for rows. Equal only to itself.

    `updates`: of linear layers, by `Target.name`; the output head and routers are among them.
    `experts`: of the matrices of experts, by `Target.name`. `embedding`: of the token embedding;
    `down` is [r, V] there, and a column is looked up. It changes the weights: a factor that the
    model gives its embeddings applies to it, too. `own_embedding` [V, W] and `own_head` [V, W]:
    weights that replace those of the model (modules_to_save), None for none. `num_bytes`: of all
    these tensors.
    """

    name: str
    updates: Mapping[str, LowRankUpdate]
    embedding: LowRankUpdate | None = None
    own_embedding: Tensor | None = None
    own_head: Tensor | None = None
    num_bytes: int = 0
    experts: Mapping[str, ExpertsUpdate] = field(default_factory=dict)

    @property
    def changes_linears_only(self) -> bool:
        """Whether all changes are `updates`."""
        others = (self.embedding, self.own_embedding, self.own_head)
        return not self.experts and all(each is None for each in others)


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """Input tokens of a pass that have an adapter.

    `adapters`: the adapters, each once. `of_token`: [T], for each input token its index in
    `adapters`, -1 for none.
    """

    adapters: tuple[Adapter, ...]
    of_token: Int32Array


@runtime_checkable
class AdaptingLinear(Protocol):
    """A linear layer that applies adapters itself.

    The bits of a row depend on its own adapter only, not on the rows beside it.
    """

    def prepare(self, update: LowRankUpdate | None, own: Tensor | None) -> object:
        """Returns what `adapted` takes for an adapter with `update`.

        `own`: [O, I], weights instead of those of the layer, None for these. Any thread may call
        it. Raises RuntimeError if the sizes are not those of the layer.
        """
        ...

    def adapted(self, rows: Tensor, prepared: Sequence[object], of_row: Int32Array) -> Tensor:
        """Returns the outputs [..., O] of `rows` [..., I], n rows in all.

        `prepared`: of each adapter. `of_row`: [n], index in `prepared` of each row, -1 for none.
        """
        ...


class LoadedAdapters:
    """Adapters that rows may name. Each mapping is replaced, never changed: any thread may read it.

    `why_not`: why others cannot be loaded, for people.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, Adapter] = {}
        self.why_not: Mapping[str, str] = {}
