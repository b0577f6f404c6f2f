"""Tries an attention backend against the plain torch oracle before it serves anybody.

Shape letters: R rows, T input tokens, H query heads, G key/value heads, D, E head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor_service.attention import AttentionBackend
from executor_service.checkpoint import one_line
from executor_service.kv_cache import KVCache, LayerShape
from executor_service.loaded_model import LoadedModel
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import AttentionOptions, build_paged_batch

# Largest difference of an output, by the dtype of queries; outputs are averages of numbers of about
# 1. It is the same for float8 pools: the oracle's are float8 too, and both round to the nearest.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
# A short prompt's end, a decode, a chunk after a prefix, a decode far behind the window.
_NUM_COMPUTED = (1, 40, 33, 150)
_NUM_NEW = (37, 1, 20, 1)


class BackendWrong(Exception):
    """An attention backend computes something else than the oracle."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers that attend alike have in common. `num_heads`: query heads."""

    layer: LayerShape
    num_heads: int
    options: AttentionOptions


def layer_kinds(loaded: LoadedModel) -> list[LayerKind]:
    """The kinds of layers of a model, each once (sinks may differ within a kind)."""
    config: Any = loaded.model.config
    num_heads = int(config.get_text_config(decoder=True).num_attention_heads)
    kinds = {}
    for layer, options in zip(loaded.layers, loaded.layer_options, strict=True):
        heads = max(num_heads // layer.num_kv_heads, 1) * layer.num_kv_heads
        numbers = (options.scale, options.sliding_window, options.softcap)
        kinds[layer, numbers, options.sinks is None] = LayerKind(layer, heads, options)
    return list(kinds.values())


def check_backend(backend: AttentionBackend, loaded: LoadedModel, block_size: int) -> None:
    """Compares outputs with the reference's, on random rows, for each kind of layer of `loaded`.

    Raises BackendWrong, also if the backend raises something.
    """
    for kind in layer_kinds(loaded):
        check_layer(backend, kind, block_size, loaded.dtype, loaded.device, loaded.kv_dtype)


@torch.inference_mode()
def check_layer(
    backend: AttentionBackend,
    kind: LayerKind,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """As `check_backend`, for layers of one kind.

    `kv_dtype`: that of the pools, None for `dtype`, which queries have.
    """
    try:
        pools = _pools(kind.layer, block_size, kv_dtype or dtype, device)
        _compare(backend, pools, kind, dtype)
    except BackendWrong:
        raise
    except Exception as error:
        raise BackendWrong(f"{type(error).__name__}: {one_line(error)}") from error


def _pools(
    layer: LayerShape, block_size: int, kv_dtype: torch.dtype, device: torch.device
) -> tuple[KVCache, KVCache]:
    """Those of the oracle and those of who is tried."""
    num_blocks = _block_tables(block_size).numel()
    oracle, tried = (
        KVCache([layer], block_size, num_blocks, 0, kv_dtype, device) for _ in range(2)
    )
    return oracle, tried


def _compare(
    backend: AttentionBackend,
    pools: tuple[KVCache, KVCache],
    kind: LayerKind,
    dtype: torch.dtype,
) -> None:
    layer = kind.layer
    generator = torch.Generator().manual_seed(0)
    computed, new = torch.tensor(_NUM_COMPUTED), torch.tensor(_NUM_NEW)
    block_size, device = pools[0].block_size, pools[0].device
    tables = _block_tables(block_size)
    # How a backend keeps keys and values is its own business, so it writes what it reads.
    for before, count in ((torch.zeros_like(computed), computed), (computed, new)):
        batch = build_paged_batch(tables, before, count, block_size, device)
        num_tokens = len(batch.slot_mapping)
        query, key, value = (
            torch.randn(num_tokens, heads, size, generator=generator).to(device, dtype)
            for heads, size in (
                (kind.num_heads, layer.key_dim),
                (layer.num_kv_heads, layer.key_dim),
                (layer.num_kv_heads, layer.value_dim),
            )
        )
        outputs = []
        for tried, pool in zip((reference, backend), pools, strict=True):
            key_pool, value_pool = pool.key_pools[0], pool.value_pools[0]
            tried.write_kv(key, value, key_pool, value_pool, batch)
            outputs.append(tried.paged_attention(query, key_pool, value_pool, batch, kind.options))
        error = float((outputs[0].float() - outputs[1].float()).abs().max())
        if not error <= _TOLERANCES[dtype]:
            raise BackendWrong(
                f"the output differs by {error:.2g} from the reference's, allowed"
                f" {_TOLERANCES[dtype]:g} in {dtype} over {pools[0].dtype}"
            )


def _block_tables(block_size: int) -> Tensor:
    """Shuffled blocks for the rows, [R, M]."""
    ends = [computed + new for computed, new in zip(_NUM_COMPUTED, _NUM_NEW, strict=True)]
    width = -(-max(ends) // block_size)
    blocks = torch.randperm(len(ends) * width, generator=torch.Generator().manual_seed(2))
    return blocks.view(len(ends), width)
