"""A decoder of the Llama kind for GPUs, in torch and Triton.

Against the model of `transformers` it makes one product of queries, keys and values and one of gate
and up projection, turns and writes keys in one kernel, adds and normalises in one, multiplies with
what the gate says in one, and keeps tables of the rotary embedding. It
rounds where the model rounds, but for the rotary embedding, which is float32 here and rounded once.
What it launches depends on shapes alone, and it never waits for the device: a CUDA graph can record
it.

Shape letters: T input tokens, S rows of logits, V vocabulary, H query heads, G key/value heads, D
head size, W width of the model, I width of the MLP, L longest sequence, R turned dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor_service.decoders.decoder import try_decoder
from executor_service.decoders.llama_parts import (
    decoder_shape,
    linear_weights,
    release_weights,
    rotation,
    take_layers,
)
from executor_service.decoders.rotary_trial import try_rotary_write
from executor_service.device.errors import release_cached_memory
from executor_service.device.kv_cache import KVCache
from executor_service.model.loaded_model import LoadedModel
from splitserve_kernels import reference
from splitserve_kernels.decoder_weights import LayerWeights, LinearWeights
from splitserve_kernels.gpu.gated_product import gated_product
from splitserve_kernels.gpu.layer_pools import LayerPools
from splitserve_kernels.gpu.rms_norm import add_rms_norm, rms_norm
from splitserve_kernels.gpu.rotary_kv_write import RotaryTables, rotary_kv_write
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions, PagedBatch


def build_gpu_decoder(
    loaded: LoadedModel, backend: AttentionBackend, block_size: int
) -> GpuDecoder:
    """Takes `loaded` apart and returns what runs in its place, attending by `backend`.

    `block_size`: of the pools that it is tried on. Call it only if `why_not_llama` is None. Raises
    TrialFailed if it computes something else; the model may be lost then.
    """
    # The trial of the whole has pools in the dtype of the model.
    try_rotary_write(rotary_kv_write, loaded, block_size)

    def make(each: LoadedModel) -> GpuDecoder:
        # Not every backend attends in float32, and each was tried by itself.
        return GpuDecoder(each, backend if each is loaded else reference)

    decoder = try_decoder(loaded, make, block_size)
    # What the model let go of, torch would keep.
    release_cached_memory(loaded.device)
    return decoder


@dataclass(frozen=True, slots=True)
class _Layer:
    """`qkv`: to (H + 2G) D. `gate_up`: to 2I. `head_norms`: [H + G, D] or None."""

    qkv: LinearWeights
    attention_output: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    input_norm: Tensor
    mlp_norm: Tensor
    head_norms: Tensor | None
    options: AttentionOptions


class GpuDecoder:
    """The Decoder; its weights are on the device of the model, in its dtype."""

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
        self._head = _joined(linear_weights(model.lm_head))
        self._final_norm = model.model.norm.weight.detach()
        self._layers = [
            self._fused(layer, options)
            for layer, options in zip(take_layers(loaded), loaded.layer_options, strict=True)
        ]
        release_weights(model)

    @property
    def num_bytes(self) -> int:
        """What weights and tables take; tied ones count once."""
        tensors = [self._cosines, self._sines, self._embedding, self._final_norm]
        linears = [self._head]
        for layer in self._layers:
            linears += [layer.qkv, layer.attention_output, layer.gate_up, layer.down]
            tensors += [layer.input_norm, layer.mlp_norm]
            tensors += [] if layer.head_norms is None else [layer.head_norms]
        for linear in linears:
            tensors += [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def run(
        self, input_ids: Tensor, positions: Tensor, paged: PagedBatch, index: Tensor, cache: KVCache
    ) -> Tensor:
        # A position beyond the last is nobody's, and is not to be an access beyond the tables.
        places = positions.clamp(max=self._cosines.shape[0] - 1)
        rotation = self._cosines[places], self._sines[places]
        return self.run_with_rotation(input_ids, rotation, paged, index, cache)

    def run_with_rotation(
        self,
        input_ids: Tensor,
        rotation: tuple[Tensor, Tensor],
        paged: PagedBatch,
        index: Tensor,
        cache: KVCache,
    ) -> Tensor:
        rotary = RotaryTables(*rotation)
        epsilon = self._shape.epsilon
        hidden = functional.embedding(input_ids, self._embedding)  # [T, W]
        # What is still to be added to `hidden`: the next norm does it on the way.
        addend: Tensor | None = None
        pools = zip(cache.key_pools, cache.value_pools, strict=True)
        for layer, (key_pool, value_pool) in zip(self._layers, pools, strict=True):
            if addend is None:
                normed = rms_norm(hidden, layer.input_norm, epsilon)
            else:
                hidden, normed = add_rms_norm(hidden, addend, layer.input_norm, epsilon)
            layer_pools = LayerPools(key_pool, value_pool)
            addend = self._attend(layer, normed, rotary, paged, layer_pools)
            hidden, normed = add_rms_norm(hidden, addend, layer.mlp_norm, epsilon)
            addend = _apply(layer.down, gated_product(_apply(layer.gate_up, normed)))
        assert addend is not None, "a model has layers"
        _, last = add_rms_norm(hidden[index], addend[index], self._final_norm, epsilon)  # [S, W]
        return _apply(self._head, last)[:, : self._vocab_size].float()

    def _attend(
        self,
        layer: _Layer,
        hidden: Tensor,
        rotary: RotaryTables,
        paged: PagedBatch,
        pools: LayerPools,
    ) -> Tensor:
        """[T, W] -> [T, W]."""
        shape = self._shape
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        heads = _apply(layer.qkv, hidden).view(len(hidden), -1, shape.head_dim)  # [T, H + 2G, D]
        turned, value = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.head_norms is not None:
            turned = rms_norm(turned, layer.head_norms, shape.epsilon)
        query, key = torch.split(turned, [num_heads, num_kv_heads], dim=1)
        query = rotary_kv_write((query, key, value), rotary, pools, paged.slot_mapping)
        attended = self._backend.paged_attention(
            query, pools.key, pools.value, paged, layer.options
        )
        return _apply(layer.attention_output, attended.flatten(1))

    def _fused(self, layer: LayerWeights, options: AttentionOptions) -> _Layer:
        return _Layer(
            qkv=_joined(layer.query, layer.key, layer.value),
            attention_output=_joined(layer.attention_output),
            gate_up=_joined(layer.gate, layer.up),
            down=_joined(layer.down),
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


def _joined(*parts: LinearWeights) -> LinearWeights:
    """Matrices with the same input as one, outputs one after the other; a single one as it is."""
    weights = [part.weight.detach() for part in parts]
    if len(parts) == 1:
        bias = parts[0].bias
        return LinearWeights(weights[0], None if bias is None else bias.detach())
    biases = None
    if any(part.bias is not None for part in parts):
        biases = torch.cat([_bias(part) for part in parts])
    return LinearWeights(torch.cat(weights), biases)


def _bias(part: LinearWeights) -> Tensor:
    """[outputs]."""
    return part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.detach()


def _apply(linear: LinearWeights, numbers: Tensor) -> Tensor:
    return functional.linear(numbers, linear.weight, linear.bias)
