"""A decoder of our own in the place of a model of `transformers`, and its trial.

Shape letters: T input tokens, S rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from executor_service.attention_probe import PROBE_BLOCK_SIZE, num_probe_blocks, probe_steps
from executor_service.input_batch import InputBatch
from executor_service.kv_cache import KVCache
from executor_service.loaded_model import LoadedModel
from executor_service.self_check import check_replacement
from splitserve_kernels.paged_batch import PagedBatch


class Decoder(Protocol):
    """Computes tokens of many sequences on the pools of any cache of its model."""

    @property
    def num_bytes(self) -> int:
        """What its weights take."""
        ...

    def run(
        self, input_ids: Tensor, positions: Tensor, paged: PagedBatch, index: Tensor, cache: KVCache
    ) -> Tensor:
        """Logits [S, V] float32 of the tokens at `index` [S]; all tokens are written to the pools.

        `input_ids`, `positions`: [T] int64. `index`: [S] int64. The next call may overwrite them.
        """
        ...


_Decoder = TypeVar("_Decoder", bound=Decoder)


def try_decoder(
    loaded: LoadedModel,
    make: Callable[[], _Decoder],
    block_size: int = PROBE_BLOCK_SIZE,
    *,
    is_int8: bool = False,
) -> _Decoder:
    """What `make` makes of the parts of `loaded`, which is lost then.

    Raises ReplacementWrong if it computes something else than `loaded`; `is_int8` says that its
    weights are rounded. `block_size`: of the pools it is tried with, in the dtype of the model.
    """
    made: list[_Decoder] = []

    def compute(tokens: Tensor) -> Tensor:
        made.append(make())
        num_blocks = num_probe_blocks(tokens, block_size)
        cache = KVCache(loaded.layers, block_size, num_blocks, 0, loaded.dtype, loaded.device)

        def forward(input_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
            index = torch.arange(len(input_ids), device=loaded.device)
            return made[0].run(input_ids, positions, batch, index, cache)

        return probe_steps(tokens, forward, block_size)

    check_replacement(loaded, compute, is_int8=is_int8)
    return made[0]


class DecoderModel:
    """A Decoder and the pools it works on; see PagedModel."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache

    def logits(self, batch: InputBatch) -> Tensor:
        """See PagedModel."""
        return self._decoder.run(
            batch.input_ids[0], batch.position_ids[0], batch.paged, batch.logits_index, self._cache
        )
