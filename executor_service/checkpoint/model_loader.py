"""Loads any decoder-only checkpoint that `transformers` knows, and refuses by name what it cannot.

`transformers` is imported only when a model is loaded: it takes seconds.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor_service.checkpoint.folder import Checkpoint, resolve_checkpoint
from executor_service.checkpoint.generation_config import read_eos_token_ids, read_generation_config
from executor_service.checkpoint.kv_scales import read_kv_scales
from executor_service.checkpoint.model_kind import check_kind
from executor_service.checkpoint.text_part import is_causal, text_part, wrapper_class
from executor_service.checkpoint.tokenizer_files import read_tokenizer, with_tokenizer_eos
from executor_service.checkpoint.weight_names import check_weight_names
from executor_service.device.errors import is_out_of_memory
from executor_service.device.memory import (
    available_host_bytes,
    format_bytes,
    release_file_pages,
)
from executor_service.errors import (
    ExecutorError,
    ModelUnreadable,
    ModelUnsupported,
    OutOfMemory,
    one_line,
)
from executor_service.model.loaded_model import LoadedModel, weights_bytes
from executor_service.model.model_support import (
    check_config,
    check_model_class,
    choose_max_model_len,
)
from executor_service.model.progress import show_progress
from executor_service.trials.model_trial import try_model
from splitserve_kernels.paged_batch import KVScales

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Float16 weights become float32 ones if these leave room for pools.
_FLOAT32_MEMORY_RATIO = 0.6
_KV_DTYPES = {"fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What to load.

    `model`: a checkpoint directory, or a model id of the Hugging Face hub. `device`: as torch
    writes it. `dtype`: "float32", "bfloat16", "float16", or "auto" for that of the checkpoint, and
    for what a CPU computes fast instead of float16.
    `kv_cache_dtype`: "fp8", which GPUs can, or "auto" for that of the model.
    `max_model_len`: in tokens; None for all that the model has positions for. `name`: shown to
    clients; None for that of the directory.
    """

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    name: str | None = None


def load_model(model_config: ModelConfig) -> LoadedModel:
    """Reads the checkpoint, switches it to paged attention and tries that it still says the same.

    Raises ModelUnreadable for a missing or broken checkpoint, ModelUnsupported for one that cannot
    be served, OutOfMemory for one that does not fit.
    """
    _check_kv_cache_dtype(model_config)
    checkpoint = resolve_checkpoint(model_config.model)
    _silence_transformers()
    config = _read_config(checkpoint)
    check_kind(config, checkpoint.architectures)
    text_config = config.get_text_config(decoder=True)
    max_model_len = choose_max_model_len(text_config, model_config.max_model_len)
    check_config(config, text_config, max_model_len)
    tokenizer = read_tokenizer(checkpoint, config)
    model = read_model(checkpoint, config, model_config)
    profile = try_model(model, text_config, max_model_len)
    release_file_pages()
    kv_dtype = _KV_DTYPES.get(model_config.kv_cache_dtype, model.dtype)
    kv_scales: tuple[KVScales, ...] = ()
    if kv_dtype.itemsize == 1:
        kv_scales = read_kv_scales(checkpoint.weight_files, model, profile.modules)
    vocab_size = _vocab_size(model, text_config)
    generation_config = read_generation_config(checkpoint.directory, vocab_size)
    eos_token_ids = generation_config.eos_token_ids
    if eos_token_ids is None:
        eos_token_ids = _eos_token_ids(config, text_config, vocab_size)
    eos_token_ids = with_tokenizer_eos(eos_token_ids, tokenizer, vocab_size)
    return LoadedModel(
        model=model,
        name=model_config.name or checkpoint.directory.resolve().name,
        architecture=type(model).__name__,
        digest=checkpoint.digest(),
        dtype=model.dtype,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        device=torch.device(model.device),
        attention_modules=profile.modules,
        layers=profile.layers,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        layer_options=profile.options,
        sliding_window=profile.sliding_window,
        eos_token_ids=eos_token_ids,
        keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
        weights_bytes=weights_bytes(model),
        tokenizer_files=tokenizer.files,
        expected=profile.expected,
        default_sampling=generation_config.sampling,
    )


def _check_kv_cache_dtype(model_config: ModelConfig) -> None:
    name, device = model_config.kv_cache_dtype, torch.device(model_config.device)
    allowed = ["auto"] if device.type == "cpu" else ["auto", *_KV_DTYPES]
    if name not in allowed:
        raise ModelUnsupported(
            f"kv_cache_dtype {name}: not for {device.type}; allowed: {', '.join(allowed)}"
        )


def _silence_transformers() -> None:
    """What matters of its warnings (missing weights, say) comes back as our errors."""
    from transformers.utils import logging

    untyped: Any = logging
    untyped.disable_progress_bar()
    untyped.set_verbosity_error()


def _read_config(checkpoint: Checkpoint) -> Any:  # noqa: ANN401
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            checkpoint.directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # An unknown model type is a ValueError, a nonsensical value any of many types.
        message = f"{checkpoint.directory}/config.json: {one_line(error)}"
        raise ModelUnsupported(message) from error
    if getattr(config, "quantization_config", None) is not None:
        # Of keys and values alone, or it would have been refused; those are not transformers'.
        del config.quantization_config
    return config


def read_model(checkpoint: Checkpoint, config: Any, model_config: ModelConfig) -> Any:  # noqa: ANN401
    """The model of `transformers` with its weights, on its device.

    On a CPU, weights whose dtype stays are those of the mapped files: they are read when they are
    first used, and hold no memory of their own. Raises what `load_model` does.
    """
    started_s = time.perf_counter()
    auto_class, is_wrapper = _auto_class(config, checkpoint.architectures)
    is_auto = model_config.dtype == "auto"
    try:
        model, info = _from_pretrained(
            auto_class, checkpoint, config, "auto" if is_auto else _DTYPES[model_config.dtype]
        )
        if is_auto and model.dtype == torch.float16 and model_config.device == "cpu":
            dtype = _instead_of_float16(model)
            del model
            model, info = _from_pretrained(auto_class, checkpoint, config, dtype)
        check_weight_names(checkpoint.directory, model, info)
        for parameter in show_progress(list(model.parameters()), "weights"):
            parameter.data = parameter.data.to(model_config.device)
        model = model.to(model_config.device).eval()
        if is_wrapper:
            model = text_part(model)
            if model.device.type == "cuda":
                torch.cuda.empty_cache()  # of the parts that were left out
    except ExecutorError:
        raise
    except Exception as error:
        raise _load_error(checkpoint, error) from error
    if model.dtype not in _DTYPES.values():
        raise ModelUnsupported(f"{config.model_type}: dtype {model.dtype} is not supported")
    num_files, seconds = len(checkpoint.weight_files), time.perf_counter() - started_s
    size = format_bytes(weights_bytes(model))
    _log.info("weights_loaded size=%r num_files=%d seconds=%.2f", size, num_files, seconds)
    return model


def _from_pretrained(
    auto_class: Any,  # noqa: ANN401
    checkpoint: Checkpoint,
    config: Any,  # noqa: ANN401
    dtype: torch.dtype | str,
) -> tuple[Any, Any]:
    """Returns a model on the CPU, and what its loading says."""
    from transformers import GenerationConfig

    make_generation_config: Any = GenerationConfig
    model, info = auto_class.from_pretrained(
        checkpoint.directory,
        config=config,
        dtype=dtype,
        # What the trial compares with: every model has it, and it leaves nothing out
        # (some versions of transformers run soft-capped models through SDPA, without the cap).
        attn_implementation="eager",
        local_files_only=True,
        # Not that of the checkpoint, which we read ourselves: what is wrong in it is no reason
        # not to load the weights.
        generation_config=make_generation_config(),
        trust_remote_code=False,
        output_loading_info=True,
        # Not to ignore them, but to name them in an error.
        ignore_mismatched_sizes=True,
    )
    return model, info


def _instead_of_float16(model: Any) -> torch.dtype:  # noqa: ANN401
    """Returns what a CPU computes a float16 `model` in, and logs it.

    No code for CPUs is fast in float16. Bfloat16 has the same numbers if the weights use no more
    than its 8 bits, as those of a model that was trained in it; else float32 has, in twice the
    memory. Where that is not free, bfloat16 rounds the weights.
    """
    fields = f"model={type(model).__name__}"
    if all(_is_exact_in_bfloat16(parameter) for parameter in model.parameters()):
        _log.info("float16_computed_in_bfloat16 %s: it holds the same weights", fields)
        return torch.bfloat16
    num_bytes, free_bytes = 2 * weights_bytes(model), available_host_bytes()
    if num_bytes <= _FLOAT32_MEMORY_RATIO * free_bytes:
        _log.info("float16_computed_in_float32 %s: bfloat16 would round the weights", fields)
        return torch.float32
    _log.warning(
        "float16_rounded_to_bfloat16 %s: weights lose 3 of 11 bits, as float32 takes %s of %s",
        fields,
        format_bytes(num_bytes),
        format_bytes(free_bytes),
    )
    return torch.bfloat16


def _is_exact_in_bfloat16(parameter: Tensor) -> bool:
    """Whether bfloat16 has the same numbers. Looks at parts, to end at the first that differs."""
    parts = torch.split(parameter.detach().flatten(), 2**20)
    return all(torch.equal(part.to(torch.bfloat16).to(part.dtype), part) for part in parts)


def _auto_class(config: Any, architectures: Sequence[str]) -> tuple[Any, bool]:  # noqa: ANN401
    """The class that loads the model, and whether that is multimodal, with a text part to serve.

    Raises ModelUnsupported if it has none that can be served.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    wrapper = wrapper_class(config, architectures)
    if wrapper is not None and not is_causal(config, architectures):
        return wrapper, True
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # A few configurations have several classes; which one it is shows when it is loaded.
    if isinstance(model_class, type):
        check_model_class(model_class)
    return AutoModelForCausalLM, False


def _load_error(checkpoint: Checkpoint, error: Exception) -> ExecutorError:
    """What an error of `transformers` means; its classes do not tell, so this goes by the base."""
    line = f"{checkpoint.directory}: {one_line(error)}"
    if is_out_of_memory(error):
        return OutOfMemory(line)
    if isinstance(error, (ImportError, NotImplementedError, ValueError)):
        return ModelUnsupported(line)
    return ModelUnreadable(line)


def _vocab_size(model: Any, text_config: Any) -> int:  # noqa: ANN401
    """Tokens that can be both fed and sampled."""
    num_embeddings = int(model.get_input_embeddings().weight.shape[0])
    return min(num_embeddings, int(getattr(text_config, "vocab_size", num_embeddings)))


def _eos_token_ids(config: Any, text_config: Any, vocab_size: int) -> tuple[int, ...]:  # noqa: ANN401
    """The tokens that end a sequence, where only the configuration of the model says so."""
    for source in (config, text_config):
        token_ids = read_eos_token_ids(getattr(source, "eos_token_id", None), vocab_size)
        if token_ids is not None:
            return token_ids
    return ()
