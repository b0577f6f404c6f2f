"""Layers of a `transformers` model that an adapter may change, and their names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from executor_service.model import QuantizedEmbedding, QuantizedLinear, Target

# Parts of names that a model has, or lacks, if it is the text part of another one.
_OPTIONAL_PARTS = frozenset({"model", "transformer", "language_model", "text_model"})


def find_targets(model: Any) -> dict[str, Target]:  # noqa: ANN401
    """Returns the linear layers and the token embedding of `model`, by their names.

    `model`: of `transformers`, not taken apart yet.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    targets = {}
    for name, module in model.named_modules():
        if module is embedding and isinstance(module, nn.Embedding | QuantizedEmbedding):
            sizes = module.num_embeddings, module.embedding_dim
            targets[name] = Target(name, *sizes, is_embedding=True)
        elif (found := _sizes(module)) is not None:
            has_bias = module.bias is not None
            targets[name] = Target(name, *found, has_bias=has_bias, is_head=module is head)
    return targets


def is_transposed(module: nn.Module) -> bool:
    """Returns whether a linear layer has its weights as [inputs, outputs]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


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
    that gets some tokens only (an expert) or whose module is not called cannot be changed.
    """
    targets = find_targets(model)
    modules = {name: model.get_submodule(name) for name in targets}
    called: set[str] = set()
    num_tokens, aligned = 0, dict(targets)

    def begin(module: nn.Module, _: Any, named: dict[str, Any]) -> None:  # noqa: ANN401
        nonlocal num_tokens
        if module is model:
            num_tokens = named["input_ids"].numel() if "input_ids" in named else 0

    def watch(name: str, target: Target) -> Any:  # noqa: ANN401
        def note(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            if module is not modules[name]:
                return  # of a copy
            called.add(name)
            num_rows = arguments[0].numel() if arguments else 0
            if not target.is_embedding:
                num_rows //= target.num_inputs
            # The head may get some tokens only.
            if num_rows != num_tokens and not (target.is_head and num_rows):
                aligned.pop(name, None)

        return note

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [
        modules[name].register_forward_pre_hook(watch(name, each)) for name, each in targets.items()
    ]
    try:
        yield aligned
    finally:
        for hook in hooks:
            hook.remove()
        for name in set(targets) - called:
            aligned.pop(name, None)


def short_name(name: str) -> str:
    """Returns a name of a module or tensor without what depends on the model around it.

    `model.language_model.layers.0.mlp.up_proj` and `model.layers.0.mlp.up_proj` become
    `layers.0.mlp.up_proj`.
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _OPTIONAL_PARTS:
        parts.pop(0)
    return ".".join(parts)
