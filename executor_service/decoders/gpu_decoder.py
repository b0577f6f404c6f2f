"""Decoder of the Llama kind for GPUs, in torch and Triton.

Compared with `transformers`, it computes queries, keys and values in one product, and gate and up
projection in another. It rotates and writes keys in one kernel, adds and normalises in one, and
multiplies with the activated gate in one. Tables hold the rotary embedding. It rounds where the
model rounds, except for the rotary embedding, which is float32 here and rounded once. Its kernel
launches depend on shapes alone, and it never waits for the device: a CUDA graph can record it.

Shape letters: T input tokens, S rows of logits, V vocabulary, H query heads, G key/value heads, D
head size, W width of the model, I width of the MLP, L longest sequence, R rotated dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor_service.decoders.decoder import try_decoder
from executor_service.decoders.gpu_linears import GpuLinear, GpuLinears, GpuQuantizedLinear
from executor_service.decoders.llama_config import (
    HEAD,
    LAYER_MATRICES,
    decoder_shape,
    linear_weights,
    release_weights,
    rotation,
    take_layers,
)
from executor_service.device import KVCache, release_cached_memory
from executor_service.model import (
    Adapter,
    AdapterSlots,
    ChooseAdding,
    InputBatch,
    LoadedModel,
    PassUpdates,
)
from executor_service.trials import try_rotary_write
from splitserve_kernels import reference
from splitserve_kernels.decoder_inputs import LayerWeights
from splitserve_kernels.gpu.kv_write import rotary_kv_write
from splitserve_kernels.gpu.launch import LayerPools, RotaryTables
from splitserve_kernels.gpu.layer_ops import add_rms_norm, gated_product, rms_norm
from splitserve_kernels.paged_batch import (
    AttentionBackend,
    AttentionOptions,
    PagedBatch,
)


def build_gpu_decoder(
    loaded: LoadedModel, backend: AttentionBackend, block_size: int
) -> GpuDecoder:
    """Takes `loaded` apart and returns the decoder that replaces it, attending by `backend`.

    `block_size`: of the trial's pools. Call it only if `why_not_llama` returns None. Raises
    TrialFailed if the decoder computes something else; the model may be lost then.
    """
    # The kernel has its own trial in the dtype of the pools: `try_decoder` uses that of the model.
    half = rotation(loaded, 0, 1)[0].shape[1]
    try_rotary_write(rotary_kv_write, loaded, block_size, half)

    def make(each: LoadedModel) -> GpuDecoder:
        # A cut in float32 attends by the reference: not every backend supports float32, and each
        # had its own trial.
        return GpuDecoder(each, backend if each is loaded else reference)

    decoder = try_decoder(loaded, make, block_size)
    # Torch would keep the model's freed memory cached.
    release_cached_memory(loaded.device)
    return decoder


# Matrices of a layer that are multiplied as one, as indexes of LAYER_MATRICES.
_FUSED = ((0, 1, 2), (3,), (4, 5), (6,))
_QKV, _ATTENTION_OUTPUT, _GATE_UP, _DOWN = range(len(_FUSED))


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of a layer. `qkv`: to (H + 2G) D. `gate_up`: to 2I.

    `head_norms`: [H + G, D] or None.
    """

    qkv: GpuLinear
    attention_output: GpuLinear
    gate_up: GpuLinear
    down: GpuLinear
    input_norm: Tensor
    mlp_norm: Tensor
    head_norms: Tensor | None
    options: AttentionOptions


@dataclass(frozen=True, slots=True)
class _KVWrite:
    """Rotation of queries and keys, and destination of keys and values. `slots`: [T] int64."""

    rotary: RotaryTables
    slots: Tensor
    cache: KVCache

    def pools(self, layer: int) -> LayerPools:
        """Returns the pools of a layer."""
        cache = self.cache
        return LayerPools(cache.key_pools[layer], cache.value_pools[layer], cache.scales[layer])


class GpuDecoder:
    """Decoder for GPUs, with its weights on the device of the model, in its dtype."""

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend) -> None:
        """Takes the weights out of `loaded`, layer by layer, so that memory holds them once.

        Afterwards `loaded.model` cannot run any more.
        """
        model: Any = loaded.model
        self._backend = backend
        self._num_outputs = loaded.num_outputs
        self._cosines, self._sines = rotation(loaded, 0, loaded.max_model_len)  # [L, R / 2]
        self._shape = decoder_shape(loaded, 2 * self._cosines.shape[1])
        self._embedding = model.model.embed_tokens.weight.detach()
        self._linears = GpuLinears(loaded.device, loaded.dtype)
        self._head = self._linears.joined(linear_weights(model.lm_head))
        self._final_norm = model.model.norm.weight.detach()
        self._layers = [
            self._fused(layer, options)
            for layer, options in zip(take_layers(loaded), loaded.layer_options, strict=True)
        ]
        release_weights(model)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and tables; tied ones count once."""
        tensors = [self._cosines, self._sines, self._embedding, self._final_norm]
        linears = [self._head]
        for layer in self._layers:
            linears += [layer.qkv, layer.attention_output, layer.gate_up, layer.down]
            tensors += [layer.input_norm, layer.mlp_norm]
            tensors += [] if layer.head_norms is None else [layer.head_norms]
        num_packed = 0
        for linear in linears:
            tensors += linear.parameters()
            if isinstance(linear, GpuQuantizedLinear):
                num_packed += linear.num_bytes
        plain: dict[int, int] = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        return num_packed + sum(plain.values())

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        paged: PagedBatch,
        index: Tensor,
        cache: KVCache,
        updates: PassUpdates | None = None,
    ) -> Tensor:
        rotation = self._rotation_at(positions)
        return self.run_with_rotation(input_ids, rotation, paged, index, cache, updates)

    def run_with_rotation(
        self,
        input_ids: Tensor,
        rotation: tuple[Tensor, Tensor],
        paged: PagedBatch,
        index: Tensor,
        cache: KVCache,
        updates: PassUpdates | None = None,
    ) -> Tensor:
        write = _KVWrite(RotaryTables(*rotation), paged.slot_mapping, cache)
        hidden = functional.embedding(input_ids, self._embedding)  # [T, W]
        if updates is not None:
            updates.change_embeddings(input_ids, hidden)
        # Output not yet added to `hidden`: the next norm adds it in the same kernel.
        addend: Tensor | None = None
        for layer in range(len(self._layers)):
            hidden, query = self._before_attention(layer, hidden, addend, write, updates)
            attended = self._attend(layer, query, paged, cache)
            hidden, addend = self._after_attention(layer, hidden, attended, updates)
        assert addend is not None, "a model has layers"
        return self._read_out(hidden[index], addend[index], updates)

    def _before_attention(
        self,
        layer: int,
        hidden: Tensor,
        addend: Tensor | None,
        write: _KVWrite,
        updates: PassUpdates | None,
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values of `layer`, and returns the query.

        Returns `hidden` plus `addend` [T, W], and the query [T, H, D].
        """
        parts, shape = self._layers[layer], self._shape
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        if addend is None:
            normed = rms_norm(hidden, parts.input_norm, shape.epsilon)
        else:
            hidden, normed = add_rms_norm(hidden, addend, parts.input_norm, shape.epsilon)
        qkv = _adapted(parts.qkv, normed, updates, layer, _QKV)
        heads = qkv.view(len(hidden), -1, shape.head_dim)  # [T, H + 2G, D]
        turned, value = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        if parts.head_norms is not None:
            turned = rms_norm(turned, parts.head_norms, shape.epsilon)
        query, key = torch.split(turned, [num_heads, num_kv_heads], dim=1)
        pools = write.pools(layer)
        return hidden, rotary_kv_write((query, key, value), write.rotary, pools, write.slots)

    def _attend(self, layer: int, query: Tensor, paged: PagedBatch, cache: KVCache) -> Tensor:
        """Attends with queries [T, H, D]. Returns [T, H, D]."""
        key_pool, value_pool = cache.key_pools[layer], cache.value_pools[layer]
        options, scales = self._layers[layer].options, cache.scales[layer]
        return self._backend.paged_attention(query, key_pool, value_pool, paged, options, scales)

    def _after_attention(
        self, layer: int, hidden: Tensor, attended: Tensor, updates: PassUpdates | None
    ) -> tuple[Tensor, Tensor]:
        """Computes the rest of a layer after attention.

        Returns `hidden` plus the attention output, and the MLP output still to be added, [T, W]
        each.
        """
        parts = self._layers[layer]
        attended = attended.flatten(1)
        addend = _adapted(parts.attention_output, attended, updates, layer, _ATTENTION_OUTPUT)
        hidden, normed = add_rms_norm(hidden, addend, parts.mlp_norm, self._shape.epsilon)
        product = gated_product(_adapted(parts.gate_up, normed, updates, layer, _GATE_UP))
        return hidden, _adapted(parts.down, product, updates, layer, _DOWN)

    def _read_out(self, hidden: Tensor, addend: Tensor, updates: PassUpdates | None) -> Tensor:
        """Returns logits, [S, V], of `hidden` plus `addend`, [S, W] each."""
        _, last = add_rms_norm(hidden, addend, self._final_norm, self._shape.epsilon)
        logits: Tensor = self._head(last)
        if updates is not None:
            updates.replace_head(last, logits, self._head.bias)
            head = len(self._layers) * len(_FUSED)
            updates.add(head, last, logits, self._head.bias, of_lines=True)
        return logits[:, : self._num_outputs]

    def _rotation_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Only unused positions exceed the tables; clamping avoids an access outside of them.
        indexes = positions.clamp(max=self._cosines.shape[0] - 1)
        return self._cosines[indexes], self._sines[indexes]

    def _fused(self, layer: LayerWeights, options: AttentionOptions) -> _Layer:
        return _Layer(
            qkv=self._linears.joined(layer.query, layer.key, layer.value),
            attention_output=self._linears.joined(layer.attention_output),
            gate_up=self._linears.joined(layer.gate, layer.up),
            down=self._linears.joined(layer.down),
            input_norm=layer.input_norm.detach(),
            mlp_norm=layer.mlp_norm.detach(),
            head_norms=self._head_norms(layer),
            options=options,
        )

    def _head_norms(self, layer: LayerWeights) -> Tensor | None:
        if layer.query_norm is None or layer.key_norm is None:
            return None
        query = layer.query_norm.detach().expand(self._shape.num_heads, -1)
        return torch.cat([query, layer.key_norm.detach().expand(self._shape.num_kv_heads, -1)])


def _adapted(
    linear: GpuLinear, x: Tensor, updates: PassUpdates | None, layer: int, fused: int
) -> Tensor:
    """Multiplies `x` with a matrix, `fused` of `layer`, and adds what adapters add."""
    output: Tensor = linear(x)
    if updates is not None:
        updates.add(layer * len(_FUSED) + fused, x, output, linear.bias)
    return output


class GpuDecoderModel:
    """A decoder for GPUs with its pools, and slots for adapters. An AdaptingModel."""

    def __init__(
        self, decoder: GpuDecoder, cache: KVCache, slots: AdapterSlots | None = None
    ) -> None:
        """`slots`: those of `decoder_slots`; None if no adapters are served."""
        self._decoder = decoder
        self._cache = cache
        self.slots = slots

    @property
    def takes_adapters(self) -> bool:
        return self.slots is not None

    def prepare_adapter(self, adapter: Adapter) -> None:
        """Gives `adapter` a slot. See `AdapterSlots.prepare`."""
        assert self.slots is not None, "adapters are served"
        self.slots.prepare(adapter)

    def logits(self, batch: InputBatch) -> Tensor:
        updates = None if self.slots is None else self.slots.updates_of(batch)
        return self._decoder.run(
            batch.input_ids[0],
            batch.position_ids[0],
            batch.paged,
            batch.logits_index,
            self._cache,
            updates,
        )


def decoder_slots(loaded: LoadedModel, choose_adding: ChooseAdding) -> AdapterSlots | None:
    """Returns slots for adapters of a decoder of `loaded`.

    Returns None if none are served, or if there are no kernels for them.
    """
    names = [
        [f"model.layers.{i}.{LAYER_MATRICES[each]}" for each in fused]
        for i in range(len(loaded.layers))
        for fused in _FUSED
    ]
    names.append([HEAD])
    targets, limits = loaded.adapter_targets, loaded.adapter_limits
    if limits is None or not all(name in targets for parts in names for name in parts):
        return None
    add = choose_adding()
    if add is None:
        return None
    layers = [[targets[name] for name in parts] for parts in names]
    return AdapterSlots(layers, limits, loaded.device, loaded.dtype, add)
