"""Loads what guesses for a model: a draft model, or a head; which it is, its config.json says.

What its configuration says is compared with the model first, before any weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from executor_service.backends.choose import choose_compute
from executor_service.backends.compute import Compute
from executor_service.checkpoint.folder import Checkpoint, resolve_checkpoint
from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.checkpoint.tokenizer_files import read_tokenizer
from executor_service.device.kv_cache import LayerShape
from executor_service.errors import ModelUnsupported, one_line
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.model_runner import ModelRunner
from executor_service.speculation.draft_model import DraftLimits, DraftModel
from executor_service.speculation.eagle3.head_config import is_head
from executor_service.speculation.load_head import load_head
from executor_service.speculation.proposer import LoadedProposer
from executor_service.steps.executor_info import TokenizerFile, read_tokenizer_file
from splitserve_options.option import BUNDLED_MODEL

BUNDLED_DRAFT_DIRECTORY = Path(__file__).parents[1] / "bundled_draft"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft that fits the model that it is for, and what runs it. The LoadedProposer."""

    compute: Compute

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return self.compute.loaded.layers

    @property
    def description(self) -> str:
        return f"{self.compute.loaded.name} by {self.compute.description}"

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
            num_reachable=_num_reachable(loaded, target),
        )
        return DraftModel(draft.execute, limits)


def load_draft(
    model: str, compute_of_target: Compute, attention_backend: str, block_size: int
) -> LoadedProposer:
    """`model`: a checkpoint, as `ModelConfig` takes it, or "bundled".

    A model is tried as any model is. `attention_backend`, `block_size`: as `choose_compute` takes
    them. Raises what loading a model raises, and ModelUnsupported if it cannot guess for that of
    `compute_of_target`.
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
        # Its keys and values lie in the same blocks.
        dtype=target.dtype_name,
        name=model,
    )
    compute = choose_compute(lambda: load_model(config), attention_backend, block_size)
    check_draft(compute.loaded, target)
    return LoadedDraft(compute)


def _num_reachable(draft: LoadedModel, target: LoadedModel) -> int | None:
    if target.sliding_window is None or draft.sliding_window is None:
        return None
    return target.sliding_window - draft.sliding_window


def check_draft(draft: LoadedModel, target: LoadedModel) -> None:
    """Raises ModelUnsupported if `draft` cannot guess for `target`."""
    if draft.kv_dtype != target.kv_dtype:
        raise _unfit(
            draft.name,
            f"its KV cache is {draft.kv_dtype_name}, that of {target.name} {target.kv_dtype_name}",
        )
    window = target.sliding_window
    if window is not None and (draft.sliding_window is None or draft.sliding_window > window):
        raise _unfit(
            draft.name,
            f"it attends to more than the {window} tokens that {target.name} keeps the blocks of",
        )
    _check_vocabulary(draft.name, draft.tokenizer_files, draft.vocab_size, target)


def _declared_vocab_size(checkpoint: Checkpoint) -> int | None:
    """As far as config.json says so at its top."""
    declared = checkpoint.config.get("vocab_size")
    return declared if isinstance(declared, int) else None


def _check_vocabulary(
    name: str,
    tokenizer_files: Mapping[str, TokenizerFile],
    vocab_size: int | None,
    target: LoadedModel,
) -> None:
    """By their files; without these, by the number of tokens, if that is known."""
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
            f"{len(differing)} tokens of its tokenizer.json are not those of {target.name}",
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
