"""Tiny models of the Llama kind, and what drives a native decoder without a scheduler.

Shape letters: L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import NativeModel
from executor_service.device import KVCache
from executor_service.model import LoadedModel
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
    logits = native.run(input_ids, positions, batch, torch.arange(len(input_ids)), cache)
    # They are overwritten by the next call.
    for row, part, (_, end) in zip(rows, torch.split(logits.clone(), new), spans, strict=True):
        row.logits.append(part)
        row.num_computed = end
