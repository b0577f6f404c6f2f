"""Loads any decoder-only checkpoint that `transformers` knows, and refuses by name what it cannot.

`transformers` is imported only when a model is loaded: it takes seconds.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from executor_service.checkpoint import Checkpoint, resolve_checkpoint
from executor_service.errors import ExecutorError, ModelUnreadable, ModelUnsupported, OutOfMemory
from executor_service.loaded_model import LoadedModel
from executor_service.model_support import check_config, check_model_class, choose_max_model_len
from executor_service.self_check import check_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What to load.

    `model`: a checkpoint directory, or a model id of the Hugging Face hub. `device`: as torch
    writes it. `dtype`: "float32", "bfloat16", "float16", or "auto" for that of the checkpoint.
    `max_model_len`: in tokens; None for all that the model has positions for. `name`: shown to
    clients; None for that of the directory.
    """

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    name: str | None = None


def load_model(model_config: ModelConfig) -> LoadedModel:
    """Reads the checkpoint, switches it to paged attention and checks that it still says the same.

    Raises ModelUnreadable for a missing or broken checkpoint, ModelUnsupported for one that cannot
    be served, OutOfMemory for one that does not fit.
    """
    checkpoint = resolve_checkpoint(model_config.model)
    _silence_progress_bars()
    config = _read_config(checkpoint)
    text_config = config.get_text_config(decoder=True)
    max_model_len = choose_max_model_len(text_config, model_config.max_model_len)
    check_config(config, text_config, max_model_len)
    model = _read_model(checkpoint, config, model_config)
    profile = check_model(model, text_config, max_model_len)
    vocab_size = _vocab_size(model, text_config)
    return LoadedModel(
        model=model,
        name=model_config.name or checkpoint.directory.resolve().name,
        architecture=type(model).__name__,
        digest=checkpoint.digest(),
        dtype=model.dtype,
        device=torch.device(model.device),
        attention_modules=profile.modules,
        layers=profile.layers,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(model, text_config, vocab_size),
        keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
        tokenizer_files=checkpoint.tokenizer_files,
    )


def _silence_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _read_config(checkpoint: Checkpoint) -> Any:  # noqa: ANN401
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.directory, local_files_only=True)
    except Exception as error:
        # An unknown model type is a ValueError, a nonsensical value any of many types.
        raise ModelUnsupported(
            f"{checkpoint.directory}/config.json: {_first_line(error)}"
        ) from error


def _read_model(checkpoint: Checkpoint, config: Any, model_config: ModelConfig) -> Any:  # noqa: ANN401
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnsupported(f"{config.model_type}: transformers has no causal language model")
    check_model_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    if model_config.dtype != "auto" and model_config.dtype not in _DTYPES:
        raise ModelUnsupported(f"dtype {model_config.dtype}: not one of auto, {', '.join(_DTYPES)}")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint.directory,
            config=config,
            dtype=_DTYPES.get(model_config.dtype, "auto"),
            local_files_only=True,
            output_loading_info=True,
        )
        model = model.to(model_config.device).eval()
    except Exception as error:
        raise _load_error(checkpoint, error) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelUnreadable(
            f"{checkpoint.directory}: the weights lack {len(missing)} tensors of"
            f" {type(model).__name__}, the first is {missing[0]}"
        )
    if model.dtype not in _DTYPES.values():
        raise ModelUnsupported(f"{config.model_type}: dtype {model.dtype} is not supported")
    return model


def _load_error(checkpoint: Checkpoint, error: Exception) -> ExecutorError:
    """What an error of `transformers` means; its classes do not tell, so this goes by the base."""
    line = f"{checkpoint.directory}: {_first_line(error)}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return OutOfMemory(line)
    if isinstance(error, (ImportError, NotImplementedError, ValueError)):
        return ModelUnsupported(line)
    return ModelUnreadable(line)


def _vocab_size(model: Any, text_config: Any) -> int:  # noqa: ANN401
    """Tokens that can be both fed and sampled."""
    num_embeddings = int(model.get_input_embeddings().weight.shape[0])
    return min(num_embeddings, int(getattr(text_config, "vocab_size", num_embeddings)))


def _eos_token_ids(model: Any, text_config: Any, vocab_size: int) -> tuple[int, ...]:  # noqa: ANN401
    """The tokens that end a sequence: those of the generation config, else of the config."""
    for source in (getattr(model, "generation_config", None), model.config, text_config):
        token_ids = getattr(source, "eos_token_id", None)
        if isinstance(token_ids, int):
            token_ids = [token_ids]
        if token_ids:
            return tuple(token_id for token_id in token_ids if 0 <= token_id < vocab_size)
    return ()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
