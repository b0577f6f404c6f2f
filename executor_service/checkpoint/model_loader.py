"""Loading of decoder-only checkpoints that `transformers` knows.

Models that cannot be served are refused by name. `transformers` is imported only when a model is
loaded: it takes seconds.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.adapters import aligned_targets
from executor_service.checkpoint.audio_input import read_audio_info
from executor_service.checkpoint.base_tensors import base_tensors
from executor_service.checkpoint.folder import Checkpoint, resolve_checkpoint
from executor_service.checkpoint.generation_config import (
    GenerationConfig,
    read_eos_token_ids,
    read_generation_config,
)
from executor_service.checkpoint.kv_scales import read_kv_scales
from executor_service.checkpoint.model_kind import (
    causal_classes,
    check_kind,
    encoder_decoder_class,
    is_causal,
    takes_audio,
    text_part,
    wrapper_class,
)
from executor_service.checkpoint.quantised_experts import StoredExperts
from executor_service.checkpoint.quantised_layers import (
    check_rounding,
    keep_packed,
    quantised_weights,
    round_linears,
    set_quantised,
    warn_dequantised,
)
from executor_service.checkpoint.tokenizer_files import read_tokenizer, with_tokenizer_eos
from executor_service.checkpoint.vector_model import (
    VectorPlan,
    describe_vectors,
    limited_length,
    make_decoder,
    make_head,
    make_uncached,
    plan_vectors,
    width_of,
)
from executor_service.checkpoint.weight_names import check_weight_names
from executor_service.device import (
    LayerShape,
    available_host_bytes,
    format_bytes,
    is_out_of_memory,
    release_file_pages,
    release_freed_memory,
)
from executor_service.errors import (
    ExecutorError,
    ModelUnreadable,
    ModelUnsupported,
    OutOfMemory,
    one_line,
)
from executor_service.model import (
    EncoderDecoder,
    LoadedModel,
    VectorParts,
    check_config,
    check_model_class,
    choose_max_model_len,
    fix_rope,
    num_positions_before,
    show_progress,
    weights_bytes,
)
from executor_service.quantization import ROUNDINGS, LazyTensor
from executor_service.steps import ModelVectors
from executor_service.trials import try_model
from splitserve_kernels.packed_weight import StoredWeight
from splitserve_kernels.paged_batch import SLOT_SCALES, KVScales

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Float16 weights become float32 if these take at most this share of the free memory.
_FLOAT32_MEMORY_RATIO = 0.6
_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Values of kv_cache_dtype by the type of device; all others serve "auto" alone.
_ALLOWED_KV_DTYPES = {"cpu": ("auto", "int8", "fp8"), "cuda": ("auto", "fp8")}
# Sizes of heads before a scale, a float32 that torch reads in place.
_SCALED_HEAD_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Model to load, and how.

    `model`: a checkpoint directory, or a model id of the Hugging Face hub. `device`: in the syntax
    of torch. `dtype`: "float32", "bfloat16", "float16", or "auto" for that of the checkpoint,
    except that a CPU computes float16 in a faster dtype. `kv_cache_dtype`: "int8", on CPUs only,
    "fp8", or "auto" for that of the model. `max_model_len`: in tokens; None for all positions of
    the model. `name`: shown to clients; None for that of the directory. `task`: a value of --task,
    "auto" for what the files say. `keeps_packed`: quantised weights of linear layers stay in their
    files until they are packed (`QuantizedLinear`). `rounding`: of the linear layers of a plain
    checkpoint, a name of `ROUNDINGS`.
    """

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    name: str | None = None
    keeps_packed: bool = False
    rounding: str | None = None
    task: str = "auto"


def load_model(model_config: ModelConfig) -> LoadedModel:
    """Reads the checkpoint, switches the model to paged attention, and tries it.

    Raises ModelUnreadable for a missing or broken checkpoint, ModelUnsupported if it cannot be
    served, OutOfMemory if it does not fit.
    """
    _check_kv_cache_dtype(model_config)
    checkpoint = resolve_checkpoint(model_config.model)
    if model_config.rounding is not None:
        check_rounding(model_config.rounding, checkpoint)
    _silence_transformers()
    config = _read_config(checkpoint)
    plan = plan_vectors(checkpoint, config, model_config.task)
    if plan is not None and plan.is_uncached:
        return _load_uncached(checkpoint, config, model_config, plan)
    if plan is None or plan.model_class is None:
        check_kind(config, checkpoint.architectures)
    text_config = config.get_text_config(decoder=True)
    max_model_len = _max_model_len(text_config, model_config, plan)
    check_config(config, text_config)
    rope = fix_rope(text_config, max_model_len)
    tokenizer = read_tokenizer(checkpoint, config)
    whole = model = read_model(checkpoint, config, model_config, plan)
    vectors: ModelVectors | None = None
    parts: VectorParts | None = None
    if plan is not None:
        head = make_head(plan, checkpoint, whole)
        vectors, parts = describe_vectors(plan, whole, head), VectorParts(head, width_of(whole))
        model = make_decoder(whole)
    if encoder_decoder_class(config, checkpoint.architectures) is not None:
        with torch.inference_mode():
            audio = read_audio_info(config, checkpoint.directory) if takes_audio(config) else None
            model = EncoderDecoder(whole, max_model_len, audio)
    with aligned_targets(model) as targets:
        profile = try_model(model, text_config, max_model_len)
    release_file_pages()
    release_freed_memory()
    kv_dtype = _KV_DTYPES.get(model_config.kv_cache_dtype, model.dtype)
    kv_scales: tuple[KVScales, ...] = ()
    if kv_dtype.itemsize == 1 and model.device.type == "cpu":
        _check_scaled_slots(model, profile.layers, model_config.kv_cache_dtype)
        kv_scales = (SLOT_SCALES,) * len(profile.layers)
    elif kv_dtype.itemsize == 1:
        kv_scales = read_kv_scales(checkpoint.weight_files, model, profile.modules)
    vocab_size = _vocab_size(model, text_config)
    generation_config = GenerationConfig()
    if checkpoint.gguf is None and vectors is None:
        generation_config = read_generation_config(checkpoint.directory, vocab_size)
    eos_token_ids = generation_config.eos_token_ids
    if eos_token_ids is None:
        eos_token_ids = _eos_token_ids(config, text_config, vocab_size)
    eos_token_ids = with_tokenizer_eos(eos_token_ids, tokenizer, vocab_size)
    return LoadedModel(
        model=model,
        name=model_config.name or checkpoint.name,
        architecture=type(whole).__name__,
        digest=_digest(checkpoint, rope),
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
        quantization=checkpoint.quantization,
        decoder_token_ids=_decoder_token_ids(config, generation_config, vocab_size)
        if isinstance(model, EncoderDecoder)
        else (),
        # Adapters of encoders, and of models that return vectors, are not applied.
        adapter_targets={} if isinstance(model, EncoderDecoder) or vectors else targets,
        base_tensor=base_tensors(checkpoint, whole),
        vectors=vectors,
        vector_parts=parts,
    )


def _max_model_len(
    text_config: Any,  # noqa: ANN401
    model_config: ModelConfig,
    plan: VectorPlan | None,
    num_unused: int = 0,
) -> int:
    """Returns the most tokens of a sequence, of which vectors may need fewer.

    `num_unused`: positions before that of the first token.
    """
    requested = model_config.max_model_len
    limit = choose_max_model_len(text_config, None) - num_unused
    if requested is None:
        return limit if plan is None else limited_length(plan, limit)
    if num_unused and requested > limit:
        raise ModelUnsupported(
            f"{text_config.model_type}: --max-model-len is {requested}; allowed: at most {limit}"
        )
    return choose_max_model_len(text_config, requested)


def _load_uncached(
    checkpoint: Checkpoint,
    config: Any,  # noqa: ANN401
    model_config: ModelConfig,
    plan: VectorPlan,
) -> LoadedModel:
    """Loads a model that returns vectors of whole texts."""
    if model_config.rounding is not None:
        raise ModelUnsupported(
            f"{config.model_type}: quantization {model_config.rounding}: not for encoders; allowed:"
            " none, or int8 on a CPU"
        )
    text_config = config.get_text_config(decoder=True)
    rope = fix_rope(text_config, _max_model_len(text_config, model_config, plan))
    tokenizer = read_tokenizer(checkpoint, config)
    whole = read_model(checkpoint, config, replace(model_config, keeps_packed=False), plan)
    if plan.model_class is None:
        whole = whole.base_model
    num_unused = num_positions_before(whole.base_model)
    max_model_len = _max_model_len(text_config, model_config, plan, num_unused)
    head = make_head(plan, checkpoint, whole)
    vectors = describe_vectors(plan, whole, head)
    uncached, description = make_uncached(plan, whole, head, max_model_len)
    release_file_pages()
    release_freed_memory()
    return LoadedModel(
        model=whole,
        name=model_config.name or checkpoint.name,
        architecture=type(whole).__name__,
        digest=_digest(checkpoint, rope),
        dtype=whole.dtype,
        kv_dtype=whole.dtype,
        device=torch.device(whole.device),
        attention_modules=(),
        layers=(),
        vocab_size=_vocab_size(whole.base_model, text_config),
        max_model_len=max_model_len,
        layer_options=(),
        sliding_window=None,
        eos_token_ids=(),
        keeps_logits=False,
        weights_bytes=weights_bytes(whole),
        tokenizer_files=tokenizer.files,
        quantization=checkpoint.quantization,
        vectors=vectors,
        vector_parts=VectorParts(head, vectors.embedding_size, uncached, description),
    )


def _check_kv_cache_dtype(model_config: ModelConfig) -> None:
    name, device = model_config.kv_cache_dtype, torch.device(model_config.device)
    allowed = _ALLOWED_KV_DTYPES.get(device.type, ("auto",))
    if name not in allowed:
        raise ModelUnsupported(
            f"kv_cache_dtype {name}: not for {device.type}; allowed: {', '.join(allowed)}"
        )


def _check_scaled_slots(model: nn.Module, layers: Sequence[LayerShape], name: str) -> None:
    """Raises ModelUnsupported if keys and values cannot be stored in 8 bits with their scales."""
    if isinstance(model, EncoderDecoder):
        raise ModelUnsupported(
            f"kv_cache_dtype {name}: not for models with an encoder; allowed: auto"
        )
    for layer in layers:
        dims = (layer.key_dim, layer.value_dim)
        if any(dim % _SCALED_HEAD_MULTIPLE for dim in dims):
            raise ModelUnsupported(
                f"kv_cache_dtype {name}: key and value heads of sizes {dims[0]} and {dims[1]};"
                f" allowed: multiples of {_SCALED_HEAD_MULTIPLE}, or kv_cache_dtype auto"
            )


def _silence_transformers() -> None:
    """Turns off progress bars and warnings of transformers.

    Important problems become our errors.
    """
    from transformers.utils import logging

    untyped: Any = logging
    untyped.disable_progress_bar()
    untyped.set_verbosity_error()


def _read_config(checkpoint: Checkpoint) -> Any:  # noqa: ANN401
    from transformers import CONFIG_MAPPING, AutoConfig

    if checkpoint.gguf is not None:
        made: Any = CONFIG_MAPPING[checkpoint.config["model_type"]]
        return made.from_dict(dict(checkpoint.config))
    try:
        config = AutoConfig.from_pretrained(
            checkpoint.directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # An unknown model type is a ValueError, a nonsensical value any of many types.
        message = f"{checkpoint.directory}/config.json: {one_line(error)}"
        raise ModelUnsupported(message) from error
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            # We apply it ourselves.
            del part.quantization_config
    return config


def read_model(
    checkpoint: Checkpoint,
    config: Any,  # noqa: ANN401
    model_config: ModelConfig,
    plan: VectorPlan | None = None,
) -> Any:  # noqa: ANN401
    """Returns the model of `transformers` with its weights, on its device.

    `plan`: of its vectors; None for a model that returns tokens.

    On a CPU, weights whose dtype stays are views of the mapped files: they are read at their first
    use, and take no memory of their own. Raises the errors of `load_model`.
    """
    started_s = time.perf_counter()
    auto_class, is_wrapper, is_headless = _class_of(config, checkpoint.architectures, plan)
    is_auto = model_config.dtype == "auto"
    try:
        dtype = "auto" if is_auto else _DTYPES[model_config.dtype]
        if is_auto and model_config.device == "cpu" and checkpoint.quantization is not None:
            dtype = _of_quantised(checkpoint, config)
        stored: dict[str, StoredWeight | StoredExperts] | None = (
            {} if model_config.keeps_packed else None
        )
        on_cpu = model_config.device == "cpu"
        model, info = _from_pretrained(auto_class, checkpoint, config, dtype, stored, on_cpu=on_cpu)
        if is_auto and model.dtype == torch.float16 and model_config.device == "cpu":
            dtype = _instead_of_float16(model)
            del model
            model, info = _from_pretrained(auto_class, checkpoint, config, dtype)
        check_weight_names(checkpoint.path, model, info, is_headless=is_headless)
        set_quantised(model, stored or {})
        if model_config.rounding is not None:
            rounding = ROUNDINGS[model_config.rounding]
            round_linears(model, rounding, torch.device(model_config.device))
        for parameter in show_progress(list(model.parameters()), "weights"):
            parameter.data = parameter.data.to(model_config.device)
        model = model.to(model_config.device).eval()
        if is_wrapper:
            model = text_part(model)
            if model.device.type == "cuda":
                torch.cuda.empty_cache()  # frees the parts that were left out
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


def _class_of(
    config: Any,  # noqa: ANN401
    architectures: Sequence[str],
    plan: VectorPlan | None,
) -> tuple[Any, bool, bool]:
    """Returns the class that loads the model, and whether it is a wrapper, or without a head."""
    if plan is not None and plan.model_class is not None:
        return plan.model_class, False, not plan.is_classifier
    return (*_auto_class(config, architectures), False)


def _from_pretrained(
    auto_class: Any,  # noqa: ANN401
    checkpoint: Checkpoint,
    config: Any,  # noqa: ANN401
    dtype: torch.dtype | str,
    stored: dict[str, StoredWeight | StoredExperts] | None = None,
    *,
    on_cpu: bool = True,
) -> tuple[Any, Any]:
    """Returns a model on the CPU, and the loading info.

    `stored`: is given quantised weights by module, see `keep_packed`; placeholders without memory
    take their place in the model. None: all weights are dequantised.
    """
    from transformers import GenerationConfig

    make_generation_config: Any = GenerationConfig
    directory: Path | None = checkpoint.directory
    weights: dict[str, LazyTensor] | None = None
    not_packed: dict[str, str] = {}
    if checkpoint.weight_format is not None or checkpoint.gguf is not None:
        if not isinstance(dtype, torch.dtype):
            dtype = _declared_dtype(config)
        weights = quantised_weights(checkpoint, dtype)
        directory, auto_class = None, _model_class(auto_class, config, checkpoint.architectures)
        if stored is not None:
            not_packed = keep_packed(auto_class, config, weights, dtype, stored, on_cpu=on_cpu)
    model, info = auto_class.from_pretrained(
        directory,
        config=config,
        state_dict=weights,
        dtype=dtype,
        # Reference of the trial: every model has eager attention, and it leaves nothing out (some
        # versions of transformers run soft-capped models through SDPA, without the cap).
        attn_implementation="eager",
        local_files_only=True,
        # Not that of the checkpoint, which we read ourselves: errors in it must not prevent
        # loading the weights.
        generation_config=make_generation_config(),
        trust_remote_code=False,
        output_loading_info=True,
        # Mismatches are named in an error below.
        ignore_mismatched_sizes=True,
    )
    read = [tensor for tensor in (weights or {}).values() if tensor.was_read]
    num_dequantised = sum(tensor.is_quantised for tensor in read)
    if num_dequantised:
        _log.info(
            "weights_dequantised format=%s num_tensors=%d dtype=%s file_size=%r size=%r",
            checkpoint.quantization,
            num_dequantised,
            str(model.dtype).removeprefix("torch."),
            format_bytes(sum(path.stat().st_size for path in checkpoint.weight_files)),
            format_bytes(weights_bytes(model)),
        )
    warn_dequantised(weights or {}, not_packed, model)
    return model, info


def _of_quantised(checkpoint: Checkpoint, config: Any) -> torch.dtype:  # noqa: ANN401
    """Returns the dtype in which a CPU computes dequantised weights.

    Bfloat16 instead of float16: codes of few bits are less exact than either.
    """
    dtype = _declared_dtype(config)
    if dtype != torch.float16:
        return dtype
    _log.info(
        "float16_computed_in_bfloat16 format=%s: the weights are quantised",
        checkpoint.quantization,
    )
    return torch.bfloat16


def _instead_of_float16(model: Any) -> torch.dtype:  # noqa: ANN401
    """Returns the dtype in which a CPU computes a float16 `model`, and logs it.

    No code for CPUs is fast in float16. Bfloat16 holds the same numbers if the weights use no more
    than its 8 bits, as in a model that was trained in bfloat16. Otherwise float32 holds them, in
    twice the memory; if that is not free, bfloat16 rounds the weights.
    """
    fields = f"model={type(model).__name__}"
    if all(_is_exact_in_bfloat16(parameter) for parameter in model.parameters()):
        _log.info("float16_computed_in_bfloat16 %s: bfloat16 holds the weights exactly", fields)
        return torch.bfloat16
    num_bytes, free_bytes = 2 * weights_bytes(model), available_host_bytes()
    if num_bytes <= _FLOAT32_MEMORY_RATIO * free_bytes:
        _log.info("float16_computed_in_float32 %s: bfloat16 would round the weights", fields)
        return torch.float32
    _log.warning(
        "float16_rounded_to_bfloat16 %s: weights lose 3 of 11 bits; float32 needs %s of %s free",
        fields,
        format_bytes(num_bytes),
        format_bytes(free_bytes),
    )
    return torch.bfloat16


def _is_exact_in_bfloat16(parameter: Tensor) -> bool:
    """Returns whether bfloat16 holds the same numbers.

    Checks parts, and stops at the first difference.
    """
    parts = torch.split(parameter.detach().flatten(), 2**20)
    return all(torch.equal(part.to(torch.bfloat16).to(part.dtype), part) for part in parts)


def _auto_class(config: Any, architectures: Sequence[str]) -> tuple[Any, bool]:  # noqa: ANN401
    """Returns the class that loads the model, and whether it is multimodal with a served text part.

    Raises ModelUnsupported if no class can be served.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    encoder_decoder = encoder_decoder_class(config, architectures)
    if encoder_decoder is not None:
        check_model_class(encoder_decoder, counts_positions=False)
        return encoder_decoder, False
    wrapper = wrapper_class(config, architectures)
    if wrapper is not None and not is_causal(config, architectures):
        return wrapper, True
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # A few configurations have several classes; loading decides between them.
    if isinstance(model_class, type):
        check_model_class(model_class)
    return AutoModelForCausalLM, False


def _declared_dtype(config: Any) -> torch.dtype:  # noqa: ANN401
    dtype = config.get_text_config(decoder=True).dtype or config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _model_class(auto_class: Any, config: Any, architectures: Sequence[str]) -> Any:  # noqa: ANN401
    """Returns the class that `auto_class` would choose; only it loads tensors from memory."""
    from transformers import AutoModelForCausalLM

    if auto_class is not AutoModelForCausalLM:
        return auto_class
    classes = causal_classes(config)
    named = [classes[name] for name in architectures if name in classes]
    return next(iter((*named, *classes.values())))


def _decoder_token_ids(
    config: Any,  # noqa: ANN401
    generation_config: GenerationConfig,
    vocab_size: int,
) -> tuple[int, ...]:
    """Returns the tokens with which the decoder of an encoder-decoder model begins.

    Returns none if the checkpoint does not say how it begins.
    """
    start, forced = generation_config.decoder_start, generation_config.forced_bos
    if start is None:
        start = getattr(config, "decoder_start_token_id", None)
    if forced is None:
        forced = getattr(config, "forced_bos_token_id", None)
    wanted = (start,) if forced is None else (start, forced)
    found = tuple(each for each in wanted if isinstance(each, int) and 0 <= each < vocab_size)
    if found == wanted:
        return found
    _log.warning(
        "decoder_start_unknown decoder_start_token_id=%s forced_bos_token_id=%s: requests have to"
        " name the decoder's first tokens",
        start,
        forced,
    )
    return ()


def _load_error(checkpoint: Checkpoint, error: Exception) -> ExecutorError:
    """Converts an error of `transformers` by its base class.

    The more special classes do not tell the cause.
    """
    line = f"{checkpoint.path}: {one_line(error)}"
    if is_out_of_memory(error):
        return OutOfMemory(line)
    if isinstance(error, (ImportError, NotImplementedError, ValueError)):
        return ModelUnsupported(line)
    return ModelUnreadable(line)


def _digest(checkpoint: Checkpoint, rope: str | None) -> str:
    """Returns the digest of the checkpoint, or another one if `rope` says that angles differ."""
    digest = checkpoint.digest()
    return digest if rope is None else hashlib.sha256(f"{digest} {rope}".encode()).hexdigest()


def _vocab_size(model: Any, text_config: Any) -> int:  # noqa: ANN401
    """Returns the number of tokens that can be both fed and sampled."""
    num_embeddings = int(model.get_input_embeddings().num_embeddings)
    return min(num_embeddings, int(getattr(text_config, "vocab_size", num_embeddings)))


def _eos_token_ids(config: Any, text_config: Any, vocab_size: int) -> tuple[int, ...]:  # noqa: ANN401
    """Returns the tokens that end a sequence, from the model's configuration."""
    for source in (config, text_config):
        token_ids = read_eos_token_ids(getattr(source, "eos_token_id", None), vocab_size)
        if token_ids is not None:
            return token_ids
    return ()
