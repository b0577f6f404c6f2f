"""Loads an EAGLE-3 head for a model: whether it fits, and where its keys, values and states lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from executor_service.backends.layer_compute import LayerCompute, choose_layer_compute
from executor_service.checkpoint.folder import Checkpoint
from executor_service.device.kv_cache import LayerShape
from executor_service.errors import ModelUnsupported
from executor_service.model.loaded_model import LayerKind, LoadedModel
from executor_service.model.paged_model import RevealingModel
from executor_service.runner.model_runner import ModelRunner
from executor_service.sampling.sampler import Draw
from executor_service.speculation.draft_model import DraftLimits, DraftModel
from executor_service.speculation.eagle3.head_config import (
    ARCHITECTURE,
    HeadConfig,
    read_head_config,
)
from executor_service.speculation.eagle3.head_model import HeadModel
from executor_service.speculation.eagle3.head_states import HeadStates, states_shape
from executor_service.speculation.eagle3.head_weights import HeadWeights, read_head_weights
from splitserve_kernels.paged_batch import AttentionOptions

_LEAST_WINDOW = 2


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head that fits the model that it is for. The LoadedProposer."""

    name: str
    config: HeadConfig
    weights: HeadWeights
    compute: LayerCompute
    draw: Draw

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return _layer(self.config), states_shape(self.config.width)

    @property
    def description(self) -> str:
        return f"{self.name} (EAGLE-3) by {self.compute.description}"

    def proposer(self, runner: ModelRunner, target: LoadedModel, max_num_tokens: int) -> DraftModel:
        model, own = runner.model, runner.cache.of_layers(slice(len(target.layers), None))
        if not isinstance(model, RevealingModel):
            raise _unfit(self.name, f"{target.name} does not show what is between its layers")
        states = HeadStates(own.key_pools[1], self.compute.linear(self.weights.fc))
        model.reveal(self.config.layers_of(len(target.layers)), states.take)
        embedding = self.weights.embedding
        head = HeadModel(
            self.config,
            self.weights,
            self.compute,
            model.embed if embedding is None else embedding.__getitem__,
            own,
            states,
            _window(target),
        )
        # Of the model, it is the vocabulary, the positions and the window that steps depend on.
        like_target = replace(target, name=self.name, layers=self.layers)
        limits = DraftLimits(
            vocab_size=target.vocab_size,
            target_vocab_size=target.vocab_size,
            max_model_len=target.max_model_len,
            max_num_tokens=max_num_tokens,
            follows_states=True,
            num_reachable=_num_reachable(target),
        )
        return DraftModel(ModelRunner(like_target, own, head, self.draw).execute, limits)


def load_head(
    checkpoint: Checkpoint,
    name: str,
    target: LoadedModel,
    draw: Draw,
    attention_backend: str,
    block_size: int,
) -> LoadedHead:
    """`name`: how it was named to us. `draw`: what chooses tokens of `target`.

    Raises ModelUnsupported for a head that cannot guess for `target`, before its weights are read.
    """
    config = read_head_config(checkpoint.directory, checkpoint.config)
    _check_head(name, config, target)
    options = AttentionOptions(config.head_dim**-0.5, _window(target))
    kind = LayerKind(_layer(config), config.num_heads, options)
    return LoadedHead(
        name=name,
        config=config,
        weights=read_head_weights(checkpoint.weight_files, config, target.dtype),
        compute=choose_layer_compute(kind, target.dtype, attention_backend, block_size),
        draw=draw,
    )


def _layer(config: HeadConfig) -> LayerShape:
    return LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)


def _window(target: LoadedModel) -> int | None:
    """How many tokens it may look back: one less, as each stands where the one before it does."""
    return None if target.sliding_window is None else target.sliding_window - 1


def _num_reachable(target: LoadedModel) -> int | None:
    """How far before a row's input it may write: what was there is read for the input alone."""
    return None if target.sliding_window is None else target.sliding_window - 2


def _check_head(name: str, config: HeadConfig, target: LoadedModel) -> None:
    model: Any = target.model
    width = model.config.get_text_config(decoder=True).hidden_size
    num_layers = len(target.layers)
    if config.target_width != width:
        raise _unfit(
            name, f"it reads states of {config.target_width} numbers, {target.name} has {width}"
        )
    if config.vocab_size != target.vocab_size:
        raise _unfit(
            name, f"it has {config.vocab_size} tokens, {target.name} has {target.vocab_size}"
        )
    if target.sliding_window is not None and target.sliding_window < _LEAST_WINDOW:
        raise _unfit(name, f"{target.name} keeps the blocks of {target.sliding_window} tokens only")
    if max(config.layers_of(num_layers)) > num_layers:
        raise _unfit(
            name,
            f"it reads layers {list(config.layers_of(num_layers))}, {target.name} has {num_layers}",
        )


def _unfit(name: str, reason: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"draft_model {name}: {reason}; allowed: an EAGLE-3 head ({ARCHITECTURE}) that was trained"
        " for the model"
    )
