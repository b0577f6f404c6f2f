"""Native decoder for models of the Llama kind, in place of `transformers`.

Shape letters: T input tokens, R rows that run on, m most tokens of such a row, K places between
layers, V vocabulary, W width of the model.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from executor_service.decoders.decoder import try_decoder
from executor_service.decoders.llama_config import (
    HEAD,
    LAYER_MATRICES,
    decoder_shape,
    linear_weights,
    release_weights,
    rotation,
    take_layers,
    why_not_llama,
)
from executor_service.device import KVCache
from executor_service.model import (
    AdaptedTokens,
    Adapter,
    InputBatch,
    LoadedModel,
    PassRows,
    QuantizedLinear,
    TakeStates,
)
from splitserve_kernels.cpu import (
    DTYPES,
    DecoderPools,
    NativeAdapter,
    NativeDecoder,
    NativeLibrary,
    RevealedStates,
    RunInput,
    StepAdapters,
)
from splitserve_kernels.decoder_inputs import RunRows
from splitserve_kernels.low_rank_update import AdapterWeights, LayerUpdates
from splitserve_kernels.paged_batch import PagedBatch

_log = logging.getLogger(__name__)

# Positions by which the table of the rotary embedding grows.
_ROTATION_STEP = 4096


def why_not_native(loaded: LoadedModel) -> str | None:
    """Returns why the native decoder cannot run a model; None if it can be tried."""
    if loaded.device.type != "cpu" or loaded.dtype not in DTYPES:
        return f"{loaded.dtype_name} on {loaded.device.type}"
    reason = why_not_llama(loaded)
    if reason is not None:
        return reason
    linears = (
        module
        for module in loaded.model.modules()
        if isinstance(module, nn.Linear | QuantizedLinear)
    )
    if any(module.in_features % 2 for module in linears):
        return "a matrix has an odd number of inputs"
    return None


def build_native_model(
    loaded: LoadedModel,
    library: NativeLibrary,
    *,
    is_int8: bool = False,
    is_exact: bool = False,
) -> NativeModel:
    """Takes `loaded` apart and returns the native model that replaces it.

    `is_int8`: rounds the weights. `is_exact`: activations are never rounded to 8 bits. Call it only
    if `why_not_native` returns None. Raises TrialFailed if the native model computes something
    else; the model is then lost.
    """
    native = try_decoder(
        loaded,
        lambda each: NativeModel(each, library, is_int8=is_int8, is_exact=is_exact),
        is_int8=is_int8,
    )
    native.log_dequantized()
    return native


def log_dequantized(loaded: LoadedModel, reason: str, num_layers: int) -> None:
    """Logs at WARNING that quantised layers run with plain weights."""
    _log.warning(
        "quantised_layers_dequantised model=%s num_layers=%d reason=%r price=%r",
        loaded.architecture,
        num_layers,
        reason,
        f"they take the memory and time of {loaded.dtype_name}",
    )


class NativeModel:
    """Decoder for CPUs: native, on packed weights, with the rotary embedding of its model."""

    def __init__(
        self,
        loaded: LoadedModel,
        library: NativeLibrary,
        *,
        is_int8: bool = False,
        is_exact: bool = False,
    ) -> None:
        """Takes the weights out of `loaded`, layer by layer, so that memory holds them once.

        Afterwards `loaded.model` cannot run any more. Call it only if `why_not_native` returns
        None.
        """
        model: Any = loaded.model
        self._loaded = loaded
        self._bound: tuple[weakref.ref[KVCache], DecoderPools] | None = None
        # An adapter's packed numbers are freed with it.
        self._adapters = weakref.WeakKeyDictionary[Adapter, NativeAdapter]()
        self._rotation = rotation(loaded, 0, _ROTATION_STEP)
        self._decoder = NativeDecoder(
            library,
            decoder_shape(loaded, 2 * self._rotation[0].shape[1]),
            take_layers(loaded),
            linear_weights(model.model.embed_tokens),
            model.model.norm.weight,
            linear_weights(model.lm_head),
            is_int8=is_int8,
            is_exact=is_exact,
        )
        # Each remaining tensor would keep the whole mapped file in memory.
        release_weights(model)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self._decoder.num_bytes

    def log_dequantized(self) -> None:
        """Logs quantised layers that kernels do not take, and why."""
        for reason, num_layers in self._decoder.dequantized.items():
            log_dequantized(self._loaded, reason, num_layers)

    @property
    def width(self) -> int:
        """Size W of the residual stream."""
        return self._decoder.width

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings of `token_ids` [T] int64, [T, W]."""
        return self._decoder.embed(token_ids)

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        paged: PagedBatch,
        index: Tensor,
        cache: KVCache,
        revealed: RevealedStates | None = None,
        adapted: AdaptedTokens | None = None,
    ) -> Tensor:
        rotation = self._rotation_up_to(paged.max_num_tokens)
        return self._run(input_ids, positions, rotation, paged, index, cache, revealed, adapted)

    def run_with_rotation(
        self,
        input_ids: Tensor,
        rotation: tuple[Tensor, Tensor],
        paged: PagedBatch,
        index: Tensor,
        cache: KVCache,
    ) -> Tensor:
        positions = torch.arange(len(input_ids))
        return self._run(input_ids, positions, rotation, paged, index, cache)

    def run_on(self, first: PassRows, rows: RunRows, cache: KVCache) -> npt.NDArray[np.int32]:
        """Returns the tokens [R, m] that `rows` get, as a RunningModel does.

        `first`: the pass with the rows' input tokens.
        """
        computed = first.num_computed_tokens
        run_input = RunInput(
            first.token_ids,
            computed.astype(np.int32),
            np.ascontiguousarray(first.block_tables, np.int32),
            self._step_adapters(first.adapted),
        )
        rotation = self._rotation_up_to(int((computed + rows.num_tokens).max()))
        pools = self._pools_of(cache)
        return self._decoder.run_on(run_input, rotation, pools, rows, self._loaded.vocab_size)

    def _run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        paged: PagedBatch,
        index: Tensor,
        cache: KVCache,
        revealed: RevealedStates | None = None,
        adapted: AdaptedTokens | None = None,
    ) -> Tensor:
        """Computes logits. `positions`: [T] int64, index of each token's angles in `rotation`."""
        logits = self._decoder.run(
            input_ids,
            positions,
            rotation,
            paged,
            self._pools_of(cache),
            index,
            revealed,
            self._step_adapters(adapted),
        )
        return logits[:, : self._loaded.num_outputs]

    def prepare_adapter(self, adapter: Adapter) -> NativeAdapter:
        """Returns the packed form of `adapter`, which is kept as long as `adapter`.

        It takes about the memory of `adapter` again. Raises RuntimeError or ValueError if a matrix
        of the adapter has another name or other sizes than the model's.
        """
        native = self._adapters.get(adapter)
        if native is None:
            native = self._decoder.pack_adapter(self._adapter_weights(adapter))
            self._adapters[adapter] = native
        return native

    def _adapter_weights(self, adapter: Adapter) -> AdapterWeights:
        updates = dict(adapter.updates)
        layers = [
            LayerUpdates(*(updates.pop(f"model.layers.{i}.{m}", None) for m in LAYER_MATRICES))
            for i in range(len(self._loaded.layers))
        ]
        head = updates.pop(HEAD, None)
        if updates:
            raise ValueError(f"the decoder has no {next(iter(updates))}")
        own_embedding, own_head = adapter.own_embedding, adapter.own_head
        return AdapterWeights(layers, head, adapter.embedding, own_embedding, own_head)

    def _step_adapters(self, adapted: AdaptedTokens | None) -> StepAdapters | None:
        if adapted is None:
            return None
        adapters = [self.prepare_adapter(adapter) for adapter in adapted.adapters]
        return StepAdapters(adapters, np.ascontiguousarray(adapted.of_token, np.int32))

    def _rotation_up_to(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of at least `num_positions`, [.., rotary_dim / 2] each."""
        cosines, sines = self._rotation
        known = cosines.shape[0]
        if num_positions > known:
            more = rotation(self._loaded, known, num_positions + _ROTATION_STEP)
            self._rotation = torch.cat([cosines, more[0]]), torch.cat([sines, more[1]])
        return self._rotation

    def _pools_of(self, cache: KVCache) -> DecoderPools:
        # A weak reference, so that the cache of a trial is freed.
        if self._bound is None or self._bound[0]() is not cache:
            pools = DecoderPools(cache.key_pools, cache.value_pools)
            self._bound = weakref.ref(cache), pools
        return self._bound[1]


class NativePagedModel:
    """A native model with its pools. A RunningModel and a RevealingModel.

    Each row may have an adapter.
    """

    takes_adapters = True

    def __init__(self, native: NativeModel, cache: KVCache) -> None:
        self._native = native
        self._cache = cache
        self._revealed: tuple[npt.NDArray[np.int32], TakeStates] | None = None

    def logits(self, batch: InputBatch) -> Tensor:
        token_ids, paged = batch.input_ids[0], batch.paged
        revealed = None
        if self._revealed is not None:
            layers, _ = self._revealed
            states = torch.empty(len(layers), len(token_ids), self._native.width)
            revealed = RevealedStates(layers, states)
        logits = self._native.run(
            token_ids,
            batch.position_ids[0],
            paged,
            batch.logits_index,
            self._cache,
            revealed,
            batch.rows.adapted,
        )
        if revealed is not None and self._revealed is not None:
            _, take = self._revealed
            take(revealed.states, paged.slot_mapping)
        return logits

    def prepare_adapter(self, adapter: Adapter) -> None:
        """Packs `adapter`, so that its first step is not delayed. See NativeModel."""
        self._native.prepare_adapter(adapter)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._native.embed(token_ids)

    def reveal(self, layers: Sequence[int], take: TakeStates) -> None:
        self._revealed = np.array(layers, np.int32), take

    @property
    def can_run(self) -> bool:
        # Revealed states go through Python after each pass.
        return self._revealed is None

    def can_run_adapted(self, adapters: Collection[Adapter]) -> bool:
        return True

    def decode_run(self, batch: InputBatch, rows: RunRows) -> Tensor:
        return torch.from_numpy(self._native.run_on(batch.rows, rows, self._cache))
