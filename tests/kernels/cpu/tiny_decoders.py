"""Tiny models of the Llama kind, and what drives a native decoder without a scheduler.

Shape letters: L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import NativeModel
from executor_service.device import KVCache
from executor_service.model import AdaptedTokens, Adapter, LoadedModel
from splitserve_kernels.low_rank_update import LowRankUpdate
from splitserve_kernels.paged_batch import build_paged_batch
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model

_LLAMA3_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DirectoryOf = Callable[..., Path]
# Of each, the architecture and options of its configuration.
DECODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_odd_mlp": ("llama", {"intermediate_size": 100}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_rope_scaled": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_odd_vocabulary": ("llama", {"vocab_size": 151, "intermediate_size": 10}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
}


def save_decoder(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    architecture, overrides = DECODERS[name]
    return make_tiny_model(architecture, directory, seed=1, overrides=overrides, dtype=dtype)


def load_decoder(directory: Path) -> LoadedModel:
    """A copy: who builds a decoder of it takes its weights."""
    return copy.deepcopy(_load_once(directory))


@functools.cache
def _load_once(directory: Path) -> LoadedModel:
    return load_model(ModelConfig(str(directory)))


def load_rounded(directory: Path, rounding: str = "int4") -> LoadedModel:
    """A decoder whose matrices are rounded, of the saved one."""
    return load_model(ModelConfig(str(directory), rounding=rounding))


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE - 10, (length,), generator=generator).tolist()


@torch.inference_mode()
def hugging_face_logits(directory: Path, tokens: Sequence[int]) -> Tensor:
    """Float32 logits [L, V] of `transformers`, with its eager attention, computed in float32."""
    from transformers import AutoModelForCausalLM

    untyped: Any = AutoModelForCausalLM
    model = untyped.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@dataclass(slots=True)
class Served:
    """A sequence on its way through a decoder. `cuts`: how many tokens each time it comes."""

    tokens: list[int]
    cuts: list[int]
    adapter: Adapter | None = None
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def serve(
    native: NativeModel, loaded: LoadedModel, sequences: Sequence[Served], block_size: int
) -> list[Tensor]:
    """Logits [L, V] of every sequence; in each step a chunk of every one that is not done."""
    num_blocks = [-(-len(sequence.tokens) // block_size) for sequence in sequences]
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(4))
    tables = torch.full((len(sequences), max(num_blocks)), -1)
    for row, blocks in enumerate(torch.split(order, num_blocks)):
        tables[row, : len(blocks)] = blocks
    cache = KVCache(loaded.layers, block_size, len(order), 0, loaded.dtype, loaded.device)
    for pool in (*cache.key_pools, *cache.value_pools):
        pool.fill_(torch.nan)
    for step in range(max(len(sequence.cuts) for sequence in sequences)):
        rows = [row for row, sequence in enumerate(sequences) if step < len(sequence.cuts)]
        _run(native, cache, tables[rows], [sequences[row] for row in rows], step)
    return [torch.cat(sequence.logits) for sequence in sequences]


def _run(
    native: NativeModel, cache: KVCache, tables: Tensor, rows: Sequence[Served], step: int
) -> None:
    new = [row.cuts[step] for row in rows]
    spans = [(row.num_computed, row.num_computed + n) for row, n in zip(rows, new, strict=True)]
    computed = torch.tensor([start for start, _ in spans])
    batch = build_paged_batch(tables, computed, torch.tensor(new), cache.block_size)
    ids = [row.tokens[slice(*span)] for row, span in zip(rows, spans, strict=True)]
    positions = torch.cat([torch.arange(*span) for span in spans])
    input_ids = torch.tensor([token for part in ids for token in part])
    index, adapted = torch.arange(len(input_ids)), _adapted(rows, new)
    logits = native.run(input_ids, positions, batch, index, cache, adapted=adapted)
    # They are overwritten by the next call.
    for row, part, (_, end) in zip(rows, torch.split(logits.clone(), new), spans, strict=True):
        row.logits.append(part)
        row.num_computed = end


def _adapted(rows: Sequence[Served], new: Sequence[int]) -> AdaptedTokens | None:
    adapters = tuple(dict.fromkeys(row.adapter for row in rows if row.adapter is not None))
    if not adapters:
        return None
    of_row = [-1 if row.adapter is None else adapters.index(row.adapter) for row in rows]
    return AdaptedTokens(adapters, np.repeat(of_row, new).astype(np.int32))


# -- Adapters --------------------------------------------------------------------------------------

_SIZE = 0.2  # of a difference between weights, over the weights


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """What `random_adapter` makes. `names`: pattern of the names of the matrices that it changes.

    `has_own`: embedding and head instead of the model's. `has_vectors`: biases and gains.
    """

    names: str = r"_proj$"
    ranks: Sequence[int] = (4,)
    has_vectors: bool = False
    has_embedding: bool = False
    has_own: bool = False


@torch.no_grad()
def random_adapter(model: Any, kind: AdapterKind, seed: int) -> Adapter:  # noqa: ANN401
    """Random numbers for a `transformers` model, in its dtype; `ranks` take turns."""
    generator = torch.Generator().manual_seed(seed)
    ranks = itertools.cycle(kind.ranks)
    dtype = model.dtype

    def update(weight: Tensor, num_inputs: int, num_outputs: int) -> LowRankUpdate:
        rank, scale = next(ranks), 0.5
        size = _SIZE * float(weight.float().std()) / rank**0.5 / scale
        down = torch.randn(rank, num_inputs, generator=generator)
        up = torch.randn(num_outputs, rank, generator=generator) * size
        bias = gain = None
        if kind.has_vectors:
            bias = torch.randn(num_outputs, generator=generator) * 0.1
            gain = 1 + 0.2 * torch.rand(num_outputs, generator=generator)
        return LowRankUpdate(down.to(dtype), up.to(dtype), scale, bias, gain)

    updates = {
        name: update(module.weight, module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search(kind.names, name)
    }
    table = model.get_input_embeddings().weight
    embedding = update(table, *table.shape) if kind.has_embedding else None
    own = [
        (weight + _SIZE * weight.std() * torch.randn(weight.shape, generator=generator)).to(dtype)
        for weight in (table, model.lm_head.weight)
        if kind.has_own
    ]
    own_embedding, own_head = own or (None, None)
    return Adapter(f"a{seed}", updates, embedding, own_embedding, own_head)


@torch.no_grad()
def merged(model: Any, adapter: Adapter) -> Any:  # noqa: ANN401
    """A copy of a float32 `transformers` model with the weights that `adapter` makes of its own."""
    model = copy.deepcopy(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())  # no longer tied
    table = model.get_input_embeddings()
    if adapter.own_embedding is not None and adapter.own_head is not None:
        table.weight.copy_(adapter.own_embedding)
        model.lm_head.weight.copy_(adapter.own_head)
    if adapter.embedding is not None:
        update = adapter.embedding
        assert update.bias is None
        table.weight.add_(update.scale * (update.up @ update.down).T)
        table.weight.mul_(1.0 if update.gain is None else update.gain)
    for name, update in adapter.updates.items():
        module = model.get_submodule(name)
        module.weight.add_(update.scale * (update.up @ update.down))
        if update.gain is not None:
            module.weight.mul_(update.gain[:, None])
        if update.bias is not None:
            bias = 0.0 if module.bias is None else module.bias
            module.bias = nn.Parameter(bias + update.bias)
    return model.requires_grad_(False)
