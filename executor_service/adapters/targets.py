"""Layers of a `transformers` model that an adapter may change, and their names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from torch import Tensor, nn

from executor_service.errors import TrialFailed
from executor_service.model import (
    QuantizedEmbedding,
    QuantizedLinear,
    Target,
    computes_alike,
    expert_sizes,
    is_row_by_row,
)
from executor_service.trials import trial_failures

# States of tokens, and the indexes and weights of their experts.
_NUM_EXPERTS_ARGUMENTS = 3
# Parts of names that a model has, or lacks, if it is the text part of another one.
_OPTIONAL_PARTS = frozenset({"model", "transformer", "language_model", "text_model"})


def find_targets(model: Any) -> dict[str, Target]:  # noqa: ANN401
    """Returns what adapters may change, by name.

    They are linear layers, the token embedding, matrices of experts, and routers beside these.
    `model`: of `transformers`, not taken apart yet.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    targets: dict[str, Target] = {}
    experts = "."
    for name, module in model.named_modules():
        if name.startswith(experts):
            continue
        if matrices := expert_sizes(module):
            experts = f"{name}."
            of_experts = [*_experts(name, matrices), *_routers(model, name, matrices)]
            targets.update((target.name, target) for target in of_experts)
        elif module is embedding and isinstance(module, nn.Embedding | QuantizedEmbedding):
            sizes = module.num_embeddings, module.embedding_dim
            targets[name] = Target(name, *sizes, is_embedding=True)
        elif (found := _sizes(module)) is not None:
            has_bias = module.bias is not None
            targets[name] = Target(name, *found, has_bias=has_bias, is_head=module is head)
    return targets


def _experts(name: str, matrices: Mapping[str, tuple[int, int, int]]) -> Iterator[Target]:
    for matrix, (num_experts, num_inputs, num_outputs) in matrices.items():
        yield Target(f"{name}.{matrix}", num_inputs, num_outputs, num_experts=num_experts)


def _routers(
    model: nn.Module, experts: str, matrices: Mapping[str, tuple[int, int, int]]
) -> Iterator[Target]:
    """Yields the routers beside `experts` that are no linear layers of their own."""
    num_experts, width, _ = matrices["gate_up_proj"]
    parent = experts.rpartition(".")[0]
    for name, module in model.get_submodule(parent).named_children():
        weight = module._parameters.get("weight")
        if weight is not None and weight.shape == (num_experts, width) and _sizes(module) is None:
            yield Target(f"{parent}.{name}", width, num_experts, is_router=True)


def is_transposed(module: nn.Module) -> bool:
    """Returns whether a linear layer has its weights as [inputs, outputs]."""
    # Nobody has made such a layer if its class was never imported, which takes seconds.
    classes = sys.modules.get("transformers.pytorch_utils")
    return classes is not None and isinstance(module, classes.Conv1D)


def _sizes(module: Any) -> tuple[int, int] | None:  # noqa: ANN401
    """Returns the numbers of inputs and outputs of a linear layer; None if it is none."""
    if is_transposed(module):
        return module.nx, module.nf
    # Subclasses of `nn.Linear` compute something else.
    if type(module) is nn.Linear or isinstance(module, QuantizedLinear):
        return module.in_features, module.out_features
    return None


@contextmanager
def aligned_targets(model: Any) -> Iterator[dict[str, Target]]:  # noqa: ANN401
    """Yields the targets of `model` that take a row for each input token.

    They are those whose calls inside have shown that: the mapping is filled at the end. A layer
    that gets some tokens only or whose module is not called cannot be changed. Experts get all
    tokens, and with them what the router has chosen.
    """
    calls = _Calls(model)
    try:
        yield calls.aligned
    finally:
        calls.end()


class _Calls:
    """Watches the calls of a model. `aligned`: targets that all calls allow to be changed."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401
        targets = find_targets(model)
        self.aligned = dict(targets)
        self._model = model
        self._modules = {each.name: model.get_submodule(each.module) for each in targets.values()}
        self._called: set[str] = set()
        self._num_tokens = 0
        self._hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for name, module in self._modules.items():
            target = targets[name]
            before = partial(self._before, target)
            self._hooks.append(module.register_forward_pre_hook(before))
            if target.num_experts or target.is_router:
                behind = partial(self._behind, target)
                self._hooks.append(module.register_forward_hook(behind, with_kwargs=True))

    def __deepcopy__(self, _memo: object) -> Self:
        """Returns itself: copies of the model keep the hooks, which ignore them."""
        return self

    def end(self) -> None:
        """Ends it, and removes what was not called."""
        for hook in self._hooks:
            hook.remove()
        for name in set(self.aligned) - self._called:
            del self.aligned[name]

    def _begin(self, module: nn.Module, _: Any, named: dict[str, Any]) -> None:  # noqa: ANN401
        if module is self._model:
            self._num_tokens = named["input_ids"].numel() if "input_ids" in named else 0

    def _before(self, target: Target, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if module is not self._modules[target.name]:
            return
        self._called.add(target.name)
        num_rows = _num_rows(target, arguments)
        # The head may get some tokens only.
        if num_rows != self._num_tokens and not (target.is_head and num_rows):
            self.aligned.pop(target.name, None)

    def _behind(
        self,
        target: Target,
        module: nn.Module,
        arguments: tuple[Tensor, ...],
        named: dict[str, Any],
        output: Any,  # noqa: ANN401
    ) -> None:
        if module is not self._modules[target.name]:
            return
        if named or not _can_change(target, module, arguments, output):
            self.aligned.pop(target.name, None)


def _can_change(target: Target, module: nn.Module, arguments: Any, output: Any) -> bool:  # noqa: ANN401
    """Returns whether the call of a router or of experts was one that adapters can change."""
    if target.is_router:
        states, num_tokens = arguments[0], _num_rows(target, arguments)
        is_usual = len(arguments) == 1 and states.shape[-2] == num_tokens
        return is_usual and is_row_by_row(output, num_tokens)
    if len(arguments) != _NUM_EXPERTS_ARGUMENTS:
        return False
    try:
        with trial_failures():
            return computes_alike(module, arguments, output)
    except TrialFailed:
        return False


def _num_rows(target: Target, arguments: tuple[Tensor, ...]) -> int:
    """Counts the input rows of a call; 0 if the module is called in another way."""
    if len(arguments) < (_NUM_EXPERTS_ARGUMENTS if target.num_experts else 1):
        return 0
    if target.num_experts:
        return len(arguments[0])
    return arguments[0].numel() // (1 if target.is_embedding else target.num_inputs)


def short_name(name: str) -> str:
    """Returns a name of a module or tensor without what depends on the model around it.

    `model.language_model.layers.0.mlp.up_proj` and `model.layers.0.mlp.up_proj` become
    `layers.0.mlp.up_proj`, and so does the former name of a mixture that `transformers` has
    changed.
    """
    parts = name.replace(".block_sparse_moe.", ".mlp.").split(".")
    while len(parts) > 1 and parts[0] in _OPTIONAL_PARTS:
        parts.pop(0)
    return ".".join(parts)
