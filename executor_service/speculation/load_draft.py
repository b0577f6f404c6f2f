"""Loads a draft model for a model: what it may be, and where its keys and values lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from executor_service.backends.choose import choose_compute
from executor_service.backends.compute import Compute
from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.device.kv_cache import KVCache
from executor_service.errors import ModelUnsupported, one_line
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.model_runner import ModelRunner
from executor_service.speculation.draft_model import DraftLimits, DraftModel
from splitserve_options.option import BUNDLED_MODEL

BUNDLED_DRAFT_DIRECTORY = Path(__file__).parents[1] / "bundled_draft"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft that fits the model that it is for, and what runs it."""

    compute: Compute

    @property
    def loaded(self) -> LoadedModel:
        return self.compute.loaded

    def proposer(self, cache: KVCache, target: LoadedModel, max_num_tokens: int) -> DraftModel:
        """What guesses for `target`, on the layers of `cache` that are behind those of it.

        `max_num_tokens`: of a step.
        """
        loaded, compute = self.loaded, self.compute
        own = cache.of_layers(slice(len(target.layers), None))
        model = compute.make_model(loaded, own)
        draft = ModelRunner(loaded, own, model, compute.draw, adjust=compute.adjust)
        limits = DraftLimits(
            vocab_size=loaded.vocab_size,
            target_vocab_size=target.vocab_size,
            max_model_len=loaded.max_model_len,
            max_num_tokens=max_num_tokens,
        )
        return DraftModel(draft.execute, limits)


def load_draft(
    model: str, target: LoadedModel, attention_backend: str, block_size: int
) -> LoadedDraft:
    """`model`: a checkpoint, as `ModelConfig` takes it, or "bundled".

    It is tried as any model is. `attention_backend`, `block_size`: as `choose_compute` takes them.
    Raises what loading a model raises, and ModelUnsupported if it cannot guess for `target`.
    """
    if target.device.type != "cpu":
        raise ModelUnsupported(f"draft_model {model}: not for {target.device.type}; allowed: cpu")
    config = ModelConfig(
        model=str(BUNDLED_DRAFT_DIRECTORY) if model == BUNDLED_MODEL else model,
        device=str(target.device),
        # Its keys and values lie in the same blocks.
        dtype=target.dtype_name,
        name=model,
    )
    compute = choose_compute(lambda: load_model(config), attention_backend, block_size)
    check_draft(compute.loaded, target)
    return LoadedDraft(compute)


def check_draft(draft: LoadedModel, target: LoadedModel) -> None:
    """Raises ModelUnsupported if `draft` cannot guess for `target`."""
    if draft.kv_dtype != target.kv_dtype:
        raise _unfit(
            draft,
            f"its KV cache is {draft.kv_dtype_name}, that of {target.name} {target.kv_dtype_name}",
        )
    window = target.sliding_window
    if window is not None and (draft.sliding_window is None or draft.sliding_window > window):
        raise _unfit(
            draft,
            f"it attends to more than the {window} tokens that {target.name} keeps the blocks of",
        )
    _check_vocabulary(draft, target)


def _check_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    """By their files; without these, by the number of tokens."""
    names = [each.tokenizer_files.get("tokenizer.json") for each in (draft, target)]
    if None in names:
        if draft.vocab_size != target.vocab_size:
            raise _unfit(
                draft,
                f"it has {draft.vocab_size} tokens, {target.name} has {target.vocab_size}",
            )
        return
    own, wanted = (_token_ids(path) for path in names if path is not None)
    differing = [text for text in {**own, **wanted} if own.get(text) != wanted.get(text)]
    if differing:
        raise _unfit(
            draft,
            f"{len(differing)} tokens of its tokenizer.json are not those of {target.name}",
        )


def _token_ids(path: Path) -> Mapping[str, int]:
    try:
        vocabulary: Mapping[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:
        # The library raises nothing more special.
        raise ModelUnsupported(f"{path}: not readable ({one_line(error)})") from error
    return vocabulary


def _unfit(draft: LoadedModel, reason: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"draft_model {draft.name}: {reason}; allowed: a model with the same tokens, on a CPU"
    )
