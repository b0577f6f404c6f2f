"""Start with what an earlier start has found out: native decoders of models that passed all trials.

The first start of a model loads it with `transformers`, and tries the native decoder. If that
passes, its facts are stored: what the executor says about the model, the names of its tensors, the
frequencies of its rotary embedding, its tokenizer, and the logits of a few tokens. A later start
with the same files, code, processor and options needs neither `transformers` nor trials: it packs
the tensors of the files, and the logits must be the same, bit by bit.

Models of the Llama kind in a folder, with plain weights, are remembered, on CPUs and without a
draft model; none of which each start has to warn.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_service.backends.attention_candidates import DEFAULT_BLOCK_SIZE
from executor_service.backends.choose import AUTO, NATIVE, finished_compute, native_compute
from executor_service.backends.compute import Compute
from executor_service.backends.trial_cache import TrialCache, trial_key
from executor_service.checkpoint import Checkpoint, ModelConfig, base_tensors, resolve_checkpoint
from executor_service.decoders import (
    NativeModel,
    PlainModel,
    PlainRotary,
    rotation_at,
    why_not_native,
)
from executor_service.device import KVCache, LayerShape, release_file_pages, release_freed_memory
from executor_service.errors import TrialFailed
from executor_service.model import LoadedModel, Target, num_scratch_blocks, run_in_steps
from executor_service.quantization import lazy_plain_weights
from executor_service.steps import DefaultSampling, TokenizerFile
from executor_service.trials import trial_failures
from splitserve_kernels.cpu import DTYPES, load_library
from splitserve_kernels.cpu.build import BuildFailed
from splitserve_kernels.paged_batch import SLOT_SCALES, AttentionOptions, PagedBatch

_log = logging.getLogger(__name__)

# Sequences and tokens of each whose logits are compared.
_NUM_SEQUENCES, _NUM_TOKENS = 2, 4
# Positions whose angles are compared at the beginning and at the end.
_NUM_POSITIONS = 4096
# Pages of compared weights are released when there are so many.
_RELEASED_BYTES = 64 * 2**20
_DTYPES = {str(dtype): dtype for dtype in DTYPES}
_KV_DTYPES = _DTYPES | {str(dtype): dtype for dtype in (torch.int8, torch.float8_e4m3fn)}
_TEXTS = ("name", "architecture", "digest")
_NUMBERS = ("vocab_size", "max_model_len", "sliding_window", "keeps_logits", "weights_bytes")

Load = Callable[[], LoadedModel]
Choose = Callable[[Load], Compute]


@dataclass(frozen=True, slots=True)
class ComputeDemand:
    """Options that decide what is tried: those of `choose_compute`."""

    backend: str
    block_size: int | None
    is_deterministic: bool
    is_int8: bool


def recall_compute(
    cache: TrialCache, model_config: ModelConfig, demand: ComputeDemand, load: Load, choose: Choose
) -> Compute:
    """Returns the native decoder of a model that passed its trials, or what `choose` returns.

    `choose` gets a function that loads the model as `load` does; if it returns a native decoder,
    that is remembered. Raises the errors of `load` and `choose`.
    """
    checkpoint = _rememberable(model_config, demand)
    if checkpoint is None:
        return choose(load)
    weights, options = checkpoint.weight_files, (model_config, demand)
    key = trial_key(checkpoint.directory, weights, checkpoint.digest(), options)
    facts = cache.read(key)
    if facts is not None:
        recalled = _recalled(checkpoint, facts, demand)
        if recalled is not None:
            return recalled
    described: list[dict[str, Any] | None] = []

    def load_and_describe() -> LoadedModel:
        loaded = load()
        described.append(_described(checkpoint, loaded))
        return loaded

    compute = choose(load_and_describe)
    if compute.native is not None and described[0] is not None:
        cache.write(key, {**described[0], "answer": _answer(compute.loaded, compute.native)})
    return compute


def _rememberable(model_config: ModelConfig, demand: ComputeDemand) -> Checkpoint | None:
    """Returns the checkpoint of a model that may be remembered; None for others."""
    if demand.backend not in (AUTO, NATIVE) or torch.device(model_config.device).type != "cpu":
        return None
    if model_config.rounding is not None or not Path(model_config.model).is_dir():
        return None
    checkpoint = resolve_checkpoint(model_config.model, is_known=True)
    return checkpoint if checkpoint.quantization is None and checkpoint.gguf is None else None


def _recalled(
    checkpoint: Checkpoint, facts: Mapping[str, Any], demand: ComputeDemand
) -> Compute | None:
    """Returns the native decoder; None if it does not give the remembered answer."""
    started_s = time.perf_counter()
    try:
        library = load_library()
        with trial_failures():
            loaded = _loaded_from(checkpoint, facts)
            native = NativeModel(
                loaded, library, is_int8=demand.is_int8, is_exact=demand.is_deterministic
            )
            if _answer(loaded, native) != facts["answer"]:
                raise TrialFailed("its logits are not those of the start that tried it")
    except (BuildFailed, TrialFailed) as error:
        _log.warning("trials_repeated model=%s reason=%r", checkpoint.name, str(error))
        return None
    finally:
        release_file_pages()
        release_freed_memory()
    _log.info(
        "trials_remembered model=%s seconds=%.2f", loaded.name, time.perf_counter() - started_s
    )
    size = demand.block_size or DEFAULT_BLOCK_SIZE
    compute = native_compute(loaded, native, library, size, is_int8=demand.is_int8)
    return finished_compute(compute)


# -- Facts of a model ------------------------------------------------------------------------------


def _described(checkpoint: Checkpoint, loaded: LoadedModel) -> dict[str, Any] | None:
    """Collects the facts of a freshly loaded model; None if its files do not suffice for a start.

    The decoder takes the model apart later.
    """
    if why_not_native(loaded) is not None or loaded.vectors is not None:
        return None
    model: Any = loaded.model
    rotary = model.model.rotary_emb
    try:
        plain = PlainRotary(rotary.inv_freq, float(rotary.attention_scaling))
        reason = (
            _why_warned(checkpoint, loaded)
            or _why_other_tensors(checkpoint, model)
            or _why_other_angles(loaded, plain)
        )
    except (AttributeError, TypeError) as error:
        reason = str(error)
    if reason is not None:
        _log.info("trials_not_remembered model=%s reason=%r", loaded.name, reason)
        return None
    return {
        **{name: getattr(loaded, name) for name in (*_TEXTS, *_NUMBERS)},
        "dtype": str(loaded.dtype),
        "kv_dtype": str(loaded.kv_dtype),
        "has_slot_scales": loaded.has_slot_scales,
        "eos_token_ids": loaded.eos_token_ids,
        "layers": [dataclasses.astuple(layer) for layer in loaded.layers],
        "attention": [(each.scale, each.sliding_window) for each in loaded.layer_options],
        "sampling": dataclasses.asdict(loaded.default_sampling),
        "targets": [dataclasses.asdict(target) for target in loaded.adapter_targets.values()],
        "config": _plain_settings(vars(model.config)),
        "frequencies": rotary.inv_freq.tolist(),
        "scaling": plain.scaling,
        "epsilon": float(model.model.norm.variance_epsilon),
        "tensors": [name for name, _ in model.named_parameters()],  # a tied head is left out
        "tokenizer": {
            name: file.decode() for name, file in loaded.tokenizer_files.items()
            if isinstance(file, bytes)
        },
        "tokenizer_files": {
            name: str(file) for name, file in loaded.tokenizer_files.items()
            if not isinstance(file, bytes)
        },
    }  # fmt: skip


def _loaded_from(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> LoadedModel:
    """Returns the model that `facts` describe, with the tensors of the checkpoint's files."""
    dtype = _DTYPES[facts["dtype"]]
    layers = tuple(LayerShape(*layer) for layer in facts["layers"])
    stored = lazy_plain_weights(checkpoint.weight_files)
    tensors = {name: stored[name][:].to(dtype) for name in facts["tensors"]}
    rotary = PlainRotary(torch.tensor(facts["frequencies"]), facts["scaling"])
    model = PlainModel(tensors, facts["config"], rotary, facts["epsilon"])
    texts: dict[str, TokenizerFile] = {
        name: text.encode() for name, text in facts["tokenizer"].items()
    }
    files = {name: Path(path) for name, path in facts["tokenizer_files"].items()}
    targets = [Target(**target) for target in facts["targets"]]
    return LoadedModel(
        model=model,
        dtype=dtype,
        kv_dtype=_KV_DTYPES[facts["kv_dtype"]],
        kv_scales=(SLOT_SCALES,) * len(layers) if facts["has_slot_scales"] else (),
        device=torch.device("cpu"),
        attention_modules=(),
        layers=layers,
        layer_options=tuple(AttentionOptions(*each) for each in facts["attention"]),
        eos_token_ids=tuple(facts["eos_token_ids"]),
        tokenizer_files=texts | files,
        default_sampling=DefaultSampling(**facts["sampling"]),
        adapter_targets={target.name: target for target in targets},
        base_tensor=base_tensors(checkpoint, model),
        **{name: facts[name] for name in (*_TEXTS, *_NUMBERS)},
    )


def _plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that JSON can hold."""
    plain = {}
    for name, setting in settings.items():
        try:
            json.dumps(setting)
        except (TypeError, ValueError):
            continue
        plain[name] = setting
    return plain


def _why_warned(checkpoint: Checkpoint, loaded: LoadedModel) -> str | None:
    """Names a fact of the model of which every start warns; None if there is no such fact."""
    if loaded.digest != checkpoint.digest():
        return "its angles were changed"
    if isinstance(loaded.tokenizer_files.get("tokenizer.json"), Path):
        return "its tokenizer is used as it is"
    return None


def _why_other_tensors(checkpoint: Checkpoint, model: Any) -> str | None:  # noqa: ANN401
    """Compares parameters with the tensors of the files; names a difference, None for equality."""
    stored = lazy_plain_weights(checkpoint.weight_files)
    num_bytes = 0
    for name, parameter in model.named_parameters():
        if name not in stored:
            return f"{name} is not in the files"
        tensor = stored[name][:]
        if tensor.dtype == torch.float16:
            return "its weights are float16; free memory decides in what a CPU computes them"
        if not torch.equal(tensor.to(parameter.dtype), parameter):
            return f"{name} has other numbers in the files"
        num_bytes += parameter.nbytes
        if num_bytes >= _RELEASED_BYTES:
            num_bytes = 0
            release_file_pages()
    release_file_pages()
    return None


def _why_other_angles(loaded: LoadedModel, rotary: PlainRotary) -> str | None:
    """Compares the angles of `rotary` with the model's own; names a difference, None for none."""
    most = loaded.max_model_len
    first, last = range(min(most, _NUM_POSITIONS)), range(max(0, most - _NUM_POSITIONS), most)
    for span in (first, last):
        positions = torch.tensor(span)
        own = rotation_at(loaded, positions)
        plain = rotary(positions, positions[None])
        half = own[0].shape[1]
        if not all(
            torch.equal(a, b[0, :, :half].contiguous()) for a, b in zip(own, plain, strict=True)
        ):
            return "its angles have no constant frequencies"
    return None


def _answer(loaded: LoadedModel, native: NativeModel) -> str:
    """Returns the digest of the logits that `native` computes for a few tokens."""
    numbers = torch.arange(_NUM_SEQUENCES * _NUM_TOKENS) * 7919 + 1
    tokens = (numbers % loaded.vocab_size).view(_NUM_SEQUENCES, _NUM_TOKENS)
    block_size = _NUM_TOKENS
    num_blocks = num_scratch_blocks(tokens, block_size)
    sizes = (block_size, num_blocks, 0)
    cache = KVCache(loaded.layers, *sizes, loaded.kv_dtype, loaded.device, scales=loaded.kv_scales)

    def forward(input_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        index = torch.arange(len(input_ids))
        return native.run(input_ids, positions, batch, index, cache)

    with torch.inference_mode():
        logits = run_in_steps(tokens, forward, block_size)
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()
