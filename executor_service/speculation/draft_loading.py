"""Loading of a draft model or an EAGLE-3 head for a model; its config.json tells which it is.

The configuration is compared with the target model first, before any weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from executor_service.backends import Compute, LayerCompute, choose_compute, choose_layer_compute
from executor_service.checkpoint import (
    Checkpoint,
    ModelConfig,
    load_model,
    read_tokenizer,
    resolve_checkpoint,
)
from executor_service.device import LayerShape
from executor_service.errors import ModelUnsupported, one_line
from executor_service.model import LayerKind, LoadedModel, RevealingModel
from executor_service.runner import ModelRunner
from executor_service.sampling import Draw
from executor_service.speculation.draft_model import DraftLimits, DraftModel, LoadedProposer
from executor_service.speculation.eagle3 import (
    HeadConfig,
    HeadModel,
    HeadStates,
    HeadWeights,
    is_head,
    read_head_config,
    read_head_weights,
    states_shape,
)
from executor_service.steps import TokenizerFile, read_tokenizer_file
from splitserve_kernels.paged_batch import AttentionOptions
from splitserve_options import BUNDLED_MODEL

BUNDLED_DRAFT_DIRECTORY = Path(__file__).parents[1] / "bundled_draft"

# Values of kv_cache_dtype by `LoadedModel.kv_dtype_name`; others are "auto".
_KV_CACHE_DTYPES = {"int8": "int8", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model that fits its target model, and the code that runs it. A LoadedProposer."""

    compute: Compute

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return self.compute.loaded.layers

    @property
    def description(self) -> str:
        return f"{self.compute.loaded.name} with {self.compute.description}"

    def proposer(self, runner: ModelRunner, target: LoadedModel, max_num_tokens: int) -> DraftModel:
        compute = self.compute
        loaded, cache = compute.loaded, runner.cache
        own = cache.of_layers(slice(len(target.layers), None))
        model = compute.make_model(loaded, own)
        draft = ModelRunner(loaded, own, model, compute.draw, adjust=compute.adjust)
        limits = DraftLimits(
            vocab_size=loaded.vocab_size,
            target_vocab_size=target.vocab_size,
            max_model_len=loaded.max_model_len,
            max_num_tokens=max_num_tokens,
            num_reachable=_num_reachable_by(loaded, target),
        )
        return DraftModel(draft.execute, limits)


def load_draft(
    model: str, compute_of_target: Compute, attention_backend: str, block_size: int
) -> LoadedProposer:
    """Loads the draft `model`: a checkpoint as in `ModelConfig`, or "bundled".

    A draft model passes the trials of any model. `attention_backend`, `block_size`: as in
    `choose_compute`. Raises the errors of loading a model, and ModelUnsupported if the draft cannot
    guess for the model of `compute_of_target`.
    """
    target = compute_of_target.loaded
    if target.device.type != "cpu":
        raise ModelUnsupported(f"draft_model {model}: not for {target.device.type}; allowed: cpu")
    directory = str(BUNDLED_DRAFT_DIRECTORY) if model == BUNDLED_MODEL else model
    checkpoint = resolve_checkpoint(directory)
    if is_head(checkpoint.config):
        draw = compute_of_target.draw
        return load_head(checkpoint, model, target, draw, attention_backend, block_size)
    files = read_tokenizer(checkpoint).files
    _check_vocabulary(model, files, _declared_vocab_size(checkpoint), target)
    config = ModelConfig(
        model=directory,
        device=str(target.device),
        # The draft's keys and values lie in the same blocks.
        dtype=target.dtype_name,
        kv_cache_dtype=_KV_CACHE_DTYPES.get(target.kv_dtype_name, "auto"),
        name=model,
        task="generate",
    )
    compute = choose_compute(lambda: load_model(config), attention_backend, block_size)
    check_draft(compute.loaded, target)
    return LoadedDraft(compute)


def _num_reachable_by(draft: LoadedModel, target: LoadedModel) -> int | None:
    if target.sliding_window is None or draft.sliding_window is None:
        return None
    return target.sliding_window - draft.sliding_window


def check_draft(draft: LoadedModel, target: LoadedModel) -> None:
    """Raises ModelUnsupported if `draft` cannot guess for `target`."""
    if draft.kv_dtype != target.kv_dtype:
        raise _unfit(
            draft.name,
            f"its KV cache is {draft.kv_dtype_name}, that of {target.name} is"
            f" {target.kv_dtype_name}",
        )
    window = target.sliding_window
    if window is not None and (draft.sliding_window is None or draft.sliding_window > window):
        raise _unfit(
            draft.name,
            f"it attends to more than the {window} tokens whose blocks {target.name} keeps",
        )
    _check_vocabulary(draft.name, draft.tokenizer_files, draft.vocab_size, target)


def _declared_vocab_size(checkpoint: Checkpoint) -> int | None:
    """Returns the vocabulary size at the top of config.json; None if it has none there."""
    declared = checkpoint.config.get("vocab_size")
    return declared if isinstance(declared, int) else None


def _check_vocabulary(
    name: str,
    tokenizer_files: Mapping[str, TokenizerFile],
    vocab_size: int | None,
    target: LoadedModel,
) -> None:
    """Compares tokenizer files; without them, the number of tokens, if it is known.

    Raises ModelUnsupported if they differ.
    """
    names = [each.get("tokenizer.json") for each in (tokenizer_files, target.tokenizer_files)]
    if None in names:
        if vocab_size not in (None, target.vocab_size):
            raise _unfit(name, f"it has {vocab_size} tokens, {target.name} has {target.vocab_size}")
        return
    own, wanted = (_token_ids(name, file) for file in names if file is not None)
    differing = [text for text in {**own, **wanted} if own.get(text) != wanted.get(text)]
    if differing:
        raise _unfit(
            name,
            f"{len(differing)} tokens of its tokenizer.json differ from those of {target.name}",
        )


def _token_ids(name: str, file: TokenizerFile) -> Mapping[str, int]:
    try:
        content = read_tokenizer_file(file)
        vocabulary: Mapping[str, int] = Tokenizer.from_buffer(content).get_vocab()
    except Exception as error:
        # The library raises nothing more special.
        raise ModelUnsupported(
            f"{name}: tokenizer.json is not readable ({one_line(error)})"
        ) from error
    return vocabulary


def _unfit(name: str, reason: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"draft_model {name}: {reason}; allowed: a model with the same tokens, on a CPU"
    )


# -- Loading of EAGLE-3 heads ----------------------------------------------------------------------

_LEAST_WINDOW = 2


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """An EAGLE-3 head that fits its target model. A LoadedProposer."""

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
        return f"{self.name} (EAGLE-3) with {self.compute.description}"

    def proposer(self, runner: ModelRunner, target: LoadedModel, max_num_tokens: int) -> DraftModel:
        model, own = runner.model, runner.cache.of_layers(slice(len(target.layers), None))
        if not isinstance(model, RevealingModel):
            raise _unfit(self.name, f"{target.name} does not expose its hidden states")
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
        # Steps of the head depend on vocabulary, positions and window, which are the target's.
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
    """Loads a head. `name`: as the operator named it. `draw`: chooses tokens of `target`.

    Raises ModelUnsupported if the head cannot guess for `target`, before its weights are read.
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
    """Returns the window of a head for `target`, in tokens; None for no limit.

    It is one token less than the target's, as the head's tokens stand one position earlier.
    """
    return None if target.sliding_window is None else target.sliding_window - 1


def _num_reachable(target: LoadedModel) -> int | None:
    """Returns how far before a row's input the head may write, in tokens; None for no limit.

    Earlier slots are read for the input only.
    """
    return None if target.sliding_window is None else target.sliding_window - 2


def _check_head(name: str, config: HeadConfig, target: LoadedModel) -> None:
    model: Any = target.model
    width = model.config.get_text_config(decoder=True).hidden_size
    num_layers = len(target.layers)
    if config.target_width != width:
        raise _unfit(
            name, f"it reads hidden states of size {config.target_width}, {target.name} has {width}"
        )
    if config.vocab_size != target.vocab_size:
        raise _unfit(
            name, f"it has {config.vocab_size} tokens, {target.name} has {target.vocab_size}"
        )
    if target.has_slot_scales:
        raise _unfit(
            name,
            "it stores hidden states in KV blocks, which a kv_cache_dtype of"
            f" {target.kv_dtype_name} rounds; allowed: kv_cache_dtype auto",
        )
    if target.sliding_window is not None and target.sliding_window < _LEAST_WINDOW:
        raise _unfit(name, f"{target.name} keeps the blocks of only {target.sliding_window} tokens")
    if max(config.layers_of(num_layers)) > num_layers:
        raise _unfit(
            name,
            f"it reads layers {list(config.layers_of(num_layers))}, {target.name} has {num_layers}",
        )
