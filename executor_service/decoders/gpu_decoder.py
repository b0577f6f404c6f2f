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
    decoder_shape,
    linear_weights,
    release_weights,
    rotation,
    take_layers,
)
from executor_service.device import KVCache, release_cached_memory
from executor_service.model import LoadedModel
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
        self._vocab_size = loaded.vocab_size
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
        self, input_ids: Tensor, positions: Tensor, paged: PagedBatch, index: Tensor, cache: KVCache
    ) -> Tensor:
        rotation = self._rotation_at(positions)
        return self.run_with_rotation(input_ids, rotation, paged, index, cache)

    def run_with_rotation(
        self,
        input_ids: Tensor,
        rotation: tuple[Tensor, Tensor],
        paged: PagedBatch,
        index: Tensor,
        cache: KVCache,
    ) -> Tensor:
        write = _KVWrite(RotaryTables(*rotation), paged.slot_mapping, cache)
        hidden = functional.embedding(input_ids, self._embedding)  # [T, W]
        # Output not yet added to `hidden`: the next norm adds it in the same kernel.
        addend: Tensor | None = None
        for layer in range(len(self._layers)):
            hidden, query = self._before_attention(layer, hidden, addend, write)
            attended = self._attend(layer, query, paged, cache)
            hidden, addend = self._after_attention(layer, hidden, attended)
        assert addend is not None, "a model has layers"
        return self._read_out(hidden[index], addend[index])

    def _before_attention(
        self, layer: int, hidden: Tensor, addend: Tensor | None, write: _KVWrite
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
        heads = parts.qkv(normed).view(len(hidden), -1, shape.head_dim)  # [T, H + 2G, D]
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
        self, layer: int, hidden: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the rest of a layer after attention.

        Returns `hidden` plus the attention output, and the MLP output still to be added, [T, W]
        each.
        """
        parts = self._layers[layer]
        addend = parts.attention_output(attended.flatten(1))
        hidden, normed = add_rms_norm(hidden, addend, parts.mlp_norm, self._shape.epsilon)
        return hidden, parts.down(gated_product(parts.gate_up(normed)))

    def _read_out(self, hidden: Tensor, addend: Tensor) -> Tensor:
        """Returns logits, [S, V] float32, of `hidden` plus `addend`, [S, W] each."""
        _, last = add_rms_norm(hidden, addend, self._final_norm, self._shape.epsilon)
        logits: Tensor = self._head(last)[:, : self._vocab_size]
        return logits.float()

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
