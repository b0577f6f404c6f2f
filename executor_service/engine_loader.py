"""Loading of the engine: from the configuration to a runner and the executor's description."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from executor_service.adapters import AdapterStore, read_adapter
from executor_service.backends import (
    TORCH,
    Compute,
    ComputeDemand,
    choose_compute,
    open_trial_cache,
    recall_compute,
)
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.config import ExecutorConfig
from executor_service.device import (
    HostReservations,
    available_host_bytes,
    choose_device,
    default_directory,
    is_out_of_memory,
)
from executor_service.errors import ModelUnsupported
from executor_service.grammars import CompiledGrammars, TokenizerUnsupported, Vocabulary
from executor_service.model import Adapter, AdapterLimits, AdaptingModel, LoadedModel
from executor_service.quantization import ROUNDINGS
from executor_service.runner import (
    CacheConfig,
    ModelRunner,
    RecordedModels,
    UncachedRunner,
    build_runner,
    compile_kernels,
    measure_step,
    measure_uncached_step,
)
from executor_service.speculation import DraftTotals, LoadedProposer, SpeculatingRunner, load_draft
from executor_service.steps import (
    MAX_NUM_DRAFTS,
    SAMPLING_FEATURES,
    AdapterSupport,
    EncoderInfo,
    ExecutorInfo,
    ExecutorLimits,
    Feature,
    ModelInfo,
    ModelVectors,
    Runner,
    TokenizerFile,
)
from splitserve_adapters import AdapterInvalid
from splitserve_common import imports_without_collections
from splitserve_options import BUNDLED_MODEL
from splitserve_rpc import MAX_MESSAGE_BYTES

BUNDLED_DIRECTORY = Path(__file__).parent / "bundled_model"
_MAX_INFLIGHT_STEPS = 8
# Limits of the contract.
_LONGEST_BLOCK = 65536
_MAX_NUMBERS, _MAX_LABEL_CHARS = 65536, 2**20
_MAX_TARGETS = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """Loaded model runner with KV pools, and executor info without an address.

    `grammars`: None if grammars cannot be followed with the model's tokenizer. `drafts`: None
    without a draft model. `adapters`: None if none are served.
    """

    runner: Runner
    grammars: CompiledGrammars | None
    info: ExecutorInfo
    architecture: str
    device: str
    compute: str
    tokenizer_files: Mapping[str, TokenizerFile]
    drafts: DraftTotals | None = None
    adapters: AdapterStore | None = None


def load_engine(config: ExecutorConfig, executor_epoch: int) -> LoadedEngine:
    """Loads the model and allocates the pools. Takes seconds to minutes.

    Raises ExecutorError if the model is missing, unsupported or too large.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model_config = _model_config(config, _take_device(config))
    compute = _compute(config, model_config)
    loaded = compute.loaded
    if loaded.vectors is not None:
        _check_vectors(config, loaded, loaded.vectors)
        if loaded.vectors.is_uncached:
            return _uncached_engine(config, executor_epoch, compute)
    if config.max_adapters > 0:
        limits = AdapterLimits(config.max_adapters, config.max_adapter_rank)
        loaded = replace(loaded, adapter_limits=limits)
    draft: LoadedProposer | None = None
    if config.draft_model is not None:
        draft = load_draft(
            config.draft_model, compute, config.attention_backend, compute.block_size
        )
    cache_config = _cache_config(config, compute, draft)
    make_model, make_measured = compute.make_model, None
    unrecorded: AbstractContextManager[None] = nullcontext()
    if compute.is_recordable and config.cuda_graphs == "auto":
        recorded = RecordedModels(
            make_model, config.max_num_seqs, config.max_num_batched_tokens, compute.static_draw
        )
        make_model, make_measured = recorded.make, recorded.make_largest
        unrecorded = recorded.left_out()
    runner = build_runner(
        loaded,
        cache_config,
        make_model,
        compute.draw,
        adjust=compute.adjust,
        make_measured=make_measured,
        reservations=HostReservations(
            default_directory() if config.runtime_dir is None else Path(config.runtime_dir),
            config.host_executors,
        ),
    )
    if loaded.device.type == "cuda":
        with unrecorded:
            compile_kernels(runner, loaded, config.max_num_seqs, config.max_num_batched_tokens)
    grammars = None if loaded.vectors is not None else _grammars(loaded)
    cache = runner.cache
    blocks = _Blocks(
        cache.block_size, cache.num_device_blocks, cache.num_host_blocks, cache.block_bytes
    )
    info = _describe(config, executor_epoch, loaded, blocks)
    trial_step = measure_step(runner, loaded, config.max_num_batched_tokens)
    features = {*info.features, *_token_features(loaded, runner, grammars)}
    adapters = _adapters(config, loaded, runner)
    if adapters is not None:
        features.add(Feature.ADAPTERS)
        info = _with_adapters(info, config, loaded)
    serving: Runner = runner
    drafts: DraftTotals | None = None
    if draft is not None:
        proposer = draft.proposer(runner, loaded, config.max_num_batched_tokens)
        serving = speculating = SpeculatingRunner(runner, proposer)
        drafts = speculating.totals
    described = _described(compute, draft)
    info = replace(
        info,
        features=frozenset(features),
        trial_step=trial_step,
        compute=described,
        slow_compute_reason=compute.why_slow or "",
    )
    return LoadedEngine(
        runner=serving,
        grammars=grammars,
        info=info,
        architecture=loaded.architecture,
        device=str(loaded.device),
        compute=described,
        tokenizer_files=loaded.tokenizer_files,
        drafts=drafts,
        adapters=adapters,
    )


def _compute(config: ExecutorConfig, model_config: ModelConfig) -> Compute:
    """Returns the code that computes the model: remembered from an earlier start, or tried now."""
    is_int8 = config.quantization == "int8"

    def load() -> LoadedModel:
        if "transformers.modeling_utils" not in sys.modules:
            with imports_without_collections():
                import transformers.modeling_utils  # noqa: F401
        return load_model(model_config)

    def choose(load: Callable[[], LoadedModel]) -> Compute:
        return choose_compute(
            load,
            config.attention_backend,
            config.block_size,
            is_deterministic=config.deterministic,
            is_int8=is_int8,
            flash_attention_3=config.flash_attn_3_from,
        )

    cache = open_trial_cache()
    # Draft models may use parts of the model that a decoder does not keep.
    if cache is None or config.draft_model is not None:
        return choose(load)
    demand = ComputeDemand(
        config.attention_backend, config.block_size, config.deterministic, is_int8
    )
    return recall_compute(cache, model_config, demand, load, choose)


def _token_features(
    loaded: LoadedModel, runner: ModelRunner, grammars: CompiledGrammars | None
) -> set[Feature]:
    """Returns the features of a model that returns tokens; none of one that returns vectors."""
    if loaded.vectors is not None:
        return set()
    features = set() if grammars is None else {Feature.GRAMMAR}
    if loaded.device.type == "cpu" or runner.runs_on_alone:
        # On a GPU whose model cannot run on alone, the host would wait for each token.
        features.add(Feature.SEVERAL_TOKENS)
    if loaded.device.type == "cpu":
        # Recorded runs of a GPU give all their tokens at once, and do not end early.
        features.add(Feature.PARTIAL_RESULTS)
    return features


def _check_vectors(config: ExecutorConfig, loaded: LoadedModel, vectors: ModelVectors) -> None:
    """Raises ModelUnsupported for options that a model of vectors does not have, and for its size.

    The limits are those of the contract.
    """
    size = max(vectors.embedding_size, len(vectors.labels))
    if size > _MAX_NUMBERS or sum(map(len, vectors.labels)) > _MAX_LABEL_CHARS:
        raise ModelUnsupported(
            f"{loaded.architecture}: {size} numbers or labels; allowed: at most {_MAX_NUMBERS},"
            f" and {_MAX_LABEL_CHARS} characters of labels"
        )
    if config.draft_model is not None:
        raise ModelUnsupported(
            f"draft_model {config.draft_model}: {loaded.architecture} returns vectors; allowed:"
            " none"
        )


def _uncached_engine(config: ExecutorConfig, executor_epoch: int, compute: Compute) -> LoadedEngine:
    """Returns the engine of a model whose rows are computed whole, without pools.

    Blocks have no meaning: rows have none.
    """
    loaded = compute.loaded
    if config.max_num_batched_tokens < loaded.max_model_len:
        _log.info(
            "batched_tokens_raised max_num_batched_tokens=%d max_model_len=%d: a text is one step",
            config.max_num_batched_tokens,
            loaded.max_model_len,
        )
        config = replace(config, max_num_batched_tokens=loaded.max_model_len)
    runner = UncachedRunner(loaded)
    blocks = _Blocks(min(loaded.max_model_len, _LONGEST_BLOCK), config.max_num_seqs, 0, 0)
    info = replace(
        _describe(config, executor_epoch, loaded, blocks),
        trial_step=measure_uncached_step(runner, loaded),
        compute=compute.description,
        slow_compute_reason=compute.why_slow or "",
    )
    return LoadedEngine(
        runner=runner,
        grammars=None,
        info=info,
        architecture=loaded.architecture,
        device=str(loaded.device),
        compute=compute.description,
        tokenizer_files=loaded.tokenizer_files,
    )


def _described(compute: Compute, draft: LoadedProposer | None) -> str:
    if draft is None:
        return compute.description
    return f"{compute.description}, draft model {draft.description}"


def _adapters(
    config: ExecutorConfig, loaded: LoadedModel, runner: ModelRunner
) -> AdapterStore | None:
    """Returns the store of adapters; None if --max-adapters is 0 or the model takes none."""
    model = runner.model
    takes_adapters = isinstance(model, AdaptingModel) and model.takes_adapters
    if config.max_adapters == 0 or loaded.vectors is not None or not takes_adapters:
        return None
    assert isinstance(model, AdaptingModel), "the model takes adapters"

    def read(name: str, files: Mapping[str, bytes]) -> Adapter:
        adapter = read_adapter(name, files, loaded, config.max_adapter_rank)
        try:
            model.prepare_adapter(adapter)
        except (ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise AdapterInvalid(str(error)) from error
        return adapter

    free_bytes = partial(_free_bytes, loaded.device)
    return AdapterStore(runner.adapters, read, config.max_adapters, free_bytes)


def _free_bytes(device: torch.device) -> int:
    """Returns the bytes that an adapter may take on the host, and on a GPU beside all steps."""
    host = available_host_bytes()
    return min(host, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else host


def _with_adapters(info: ExecutorInfo, config: ExecutorConfig, loaded: LoadedModel) -> ExecutorInfo:
    names = sorted({name.rpartition(".")[2] for name in loaded.adapter_targets})
    return replace(
        info,
        limits=replace(info.limits, max_adapters_per_step=config.max_adapters),
        adapter_support=AdapterSupport(
            config.max_adapters, config.max_adapter_rank, tuple(names[:_MAX_TARGETS])
        ),
    )


def _grammars(loaded: LoadedModel) -> CompiledGrammars | None:
    """Reads the vocabulary for grammars; returns None if the tokenizer does not allow them.

    It is read at the start: a large vocabulary, read at the first grammar, would stop the steps.
    """
    file = loaded.tokenizer_files.get("tokenizer.json")
    try:
        if file is None:
            raise TokenizerUnsupported("the model has no tokenizer")
        return CompiledGrammars(Vocabulary.read(file, loaded.vocab_size, loaded.eos_token_ids))
    except TokenizerUnsupported as reason:
        _log.info("grammars_not_served model=%s reason=%r", loaded.name, str(reason))
        return None


def _model_config(config: ExecutorConfig, device: str) -> ModelConfig:
    is_bundled = config.model == BUNDLED_MODEL
    return ModelConfig(
        model=str(BUNDLED_DIRECTORY) if is_bundled else config.model,
        device=device,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=config.max_model_len,
        name=config.served_model_name or (BUNDLED_MODEL if is_bundled else None),
        keeps_packed=config.quantization == "none" and config.attention_backend != TORCH,
        rounding=config.quantization if config.quantization in ROUNDINGS else None,
        task=config.task,
    )


def _take_device(config: ExecutorConfig) -> str:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = choose_device(config.device, config.device_index, num_gpus)
    if device != "cpu":
        # This thread launches the kernels and records the graphs, on its current device.
        torch.cuda.set_device(device)
    return device


def _cache_config(
    config: ExecutorConfig, compute: Compute, draft: LoadedProposer | None
) -> CacheConfig:
    sizes = CacheConfig(
        block_size=compute.block_size,
        num_device_blocks=config.num_device_blocks,
        num_host_blocks=config.num_host_blocks,
        # Verification gives each draft token a row in the pass.
        max_num_rows=config.max_num_seqs + MAX_NUM_DRAFTS,
        max_num_batched_tokens=config.max_num_batched_tokens,
        copy_blocks=compute.copy_blocks,
        more_layers=() if draft is None else draft.layers,
    )
    if config.memory_fraction is None:
        return sizes
    return replace(sizes, memory_fraction=config.memory_fraction, max_cpu_pool_bytes=None)


def _encoder(loaded: LoadedModel) -> EncoderInfo | None:
    if not loaded.has_encoder:
        return None
    return EncoderInfo(loaded.max_encoder_tokens or 0, loaded.decoder_token_ids, loaded.audio)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Size of a block in tokens, numbers of blocks, and bytes of one."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int


def _describe(
    config: ExecutorConfig, executor_epoch: int, loaded: LoadedModel, blocks: _Blocks
) -> ExecutorInfo:
    features = set(SAMPLING_FEATURES if loaded.vectors is None else {Feature.POOLING})
    if loaded.has_encoder:
        features.add(Feature.CROSS_ATTENTION)
    return ExecutorInfo(
        executor_epoch=executor_epoch,
        model=ModelInfo(
            name=loaded.name,
            digest=_digest(loaded, config),
            dtype=loaded.dtype_name,
            kv_cache_dtype=loaded.kv_dtype_name,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            sliding_window=loaded.sliding_window,
            default_sampling=loaded.default_sampling,
            quantization=loaded.quantization or "",
            encoder=_encoder(loaded),
            vectors=loaded.vectors,
        ),
        block_size=blocks.block_size,
        num_device_blocks=blocks.num_device_blocks,
        num_host_blocks=blocks.num_host_blocks,
        block_bytes=blocks.block_bytes,
        features=frozenset(features),
        limits=ExecutorLimits(
            max_num_rows=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_inflight_steps=_MAX_INFLIGHT_STEPS,
        ),
        software_version=_version(),
    )


def _digest(loaded: LoadedModel, config: ExecutorConfig) -> str:
    """Returns the model's digest.

    Rounded weights, or other scales of keys and values, change it.
    """
    settings = [] if config.quantization == "none" else [config.quantization]
    # The checkpoint's digest need not have seen these few bytes.
    settings += [f"{each.key!r} {each.value!r}" for each in loaded.kv_scales]
    if not settings:
        return loaded.digest
    return hashlib.sha256(" ".join([loaded.digest, *settings]).encode()).hexdigest()


def _version() -> str:
    try:
        return metadata.version("splitserve")
    except metadata.PackageNotFoundError:
        return "unknown"
