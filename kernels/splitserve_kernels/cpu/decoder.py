"""Native decoder of the Llama family: one call per step.

Shape letters: T input tokens, H query heads, G key/value heads, D head size, W width of the model,
I width of the MLP, S rows of logits, V vocabulary, B block size, N blocks of the pool, M blocks of
the longest block table, R rows of a multi-token run, m most tokens of such a row, K positions
between layers.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve_kernels.cpu.group_weights import GroupPart, pack_groups
from splitserve_kernels.cpu.library import (
    CAttentionRows,
    CDecoder,
    CDecoderLayer,
    CDecoderRun,
    CDecoderStep,
    CGoesOn,
    CLinear,
    NativeLibrary,
    kv_format,
    pointer,
)
from splitserve_kernels.cpu.low_rank import (
    NativeAdapter,
    StepAdapters,
    pack_embedding_update,
    pack_update,
)
from splitserve_kernels.cpu.operations import (
    PackedLinear,
    WeightRows,
    pack,
    rows_as_c,
    unpack_outputs,
)
from splitserve_kernels.cpu.sampling import draws_as_c
from splitserve_kernels.decoder_inputs import (
    AfterToken,
    DecoderShape,
    LayerWeights,
    LinearWeights,
    RunRows,
)
from splitserve_kernels.low_rank_update import AdapterWeights
from splitserve_kernels.packed_weight import NotPackable
from splitserve_kernels.paged_batch import PagedBatch


class DecoderPools:
    """KV pools of all layers, [N, B, G, D] for keys and for values, as C arrays of pointers.

    8-bit pools have their scales in slots (KVScales).
    """

    def __init__(self, key_pools: Sequence[Tensor], value_pools: Sequence[Tensor]) -> None:
        """Stores pointers only: the caller keeps the pools alive. All have the same stride(0)."""
        self.keys = _pointers(key_pools)
        self.values = _pointers(value_pools)
        self.block_stride = key_pools[0].stride(0)
        self.block_size = key_pools[0].shape[1]
        self.format = kv_format(key_pools[0].dtype)


@dataclass(frozen=True, slots=True)
class RunInput:
    """First input of the rows of a multi-token run. All arrays are contiguous.

    `token_ids`: [R] int64, one input token each. `num_computed_tokens`: [R] int32, tokens before
    it. `block_tables`: [R, M] int32, with the slots of all tokens that are written. `adapted`: rows
    that have an adapter, None for none.
    """

    token_ids: npt.NDArray[np.int64]
    num_computed_tokens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    adapted: StepAdapters | None = None


@dataclass(frozen=True, slots=True)
class RevealedStates:
    """Output buffer for the residual stream before some layers.

    `layers`: [K] int32, layer indices; the number of layers stands for the state after the last
    one. `states`: [K, T, W] float32, contiguous, written.
    """

    layers: npt.NDArray[np.int32]
    states: Tensor


class NativeDecoder:
    """Decoder with packed weights: float32, bfloat16, int8, or codes of quantised checkpoints.

    Norms, sums and residual are float32.

    The logits of a sequence are bit-identical whatever shares its batch and however its tokens are
    divided into steps. `num_bytes`: size of the weights. `dequantized`: quantised matrices that
    became plain ones, by the reason.
    """

    def __init__(
        self,
        library: NativeLibrary,
        shape: DecoderShape,
        layers: Iterable[LayerWeights],
        embedding: LinearWeights,
        final_norm: Tensor,
        head: LinearWeights,
        *,
        is_int8: bool = False,
        is_exact: bool = False,
    ) -> None:
        """Copies all weights; takes the layers one by one.

        `embedding`: [V, W]; its codes are kept, and unpacked row by row. A tied `head` shares them.
        `is_int8`: rounds the matrices to integers, see `linear.pack`. `is_exact`: activations are
        not rounded to 8 bits where weights are codes; nor are they in float32.
        """
        self._library = library
        self._is_int8 = is_int8
        self._dtype = embedding.dtype
        self._is_exact = is_exact or self._dtype == torch.float32
        self.dequantized: Counter[str] = Counter()
        self._shape = shape
        self._logits = torch.empty(0)
        self._kept: list[object] = []  # objects that the C structures point to
        self.num_bytes = 0
        self._embedding, self._packed_embedding = self._embeddings(embedding)
        # Layers last: their source is freed layer by layer, and that of the other weights with the
        # first of them.
        self._head = self._read_out(embedding, head)
        c_layers = [self._layer(layer) for layer in layers]
        self._layers = (CDecoderLayer * len(c_layers))(*c_layers)
        self._final_norm = _norm(final_norm)
        packed = self._packed_embedding
        self._decoder = CDecoder(
            embedding=pointer(self._embedding),
            packed_embedding=CLinear() if packed is None else packed.as_c(),
            layers=ctypes.cast(self._layers, ctypes.c_void_p),
            head=self._head.as_c(),
            final_norm=pointer(self._final_norm),
            num_layers=len(c_layers),
            width=shape.width,
            mlp_width=shape.mlp_width,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rotary_dim=shape.rotary_dim,
            epsilon=shape.epsilon,
            scale=shape.scale,
        )

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: PagedBatch,
        pools: DecoderPools,
        logits_index: Tensor,
        revealed: RevealedStates | None = None,
        adapted: StepAdapters | None = None,
    ) -> Tensor:
        """Computes all tokens of `batch`, writes their keys and values, returns logits [S, V].

        `token_ids`, `positions`: [T] int64. `rotation`: cosines and sines of all positions up to
        the last one of the batch, [P, rotary_dim / 2] float32 each. `logits_index`: [S] int64,
        tokens of the batch. The result is float32; the next call overwrites it.
        """
        logits = self._logits_buffer(len(logits_index))
        step = CDecoderStep(
            token_ids=pointer(token_ids),
            positions=pointer(positions),
            slots=pointer(batch.slot_mapping),
            logits_index=pointer(logits_index),
            cosines=pointer(rotation[0]),
            sines=pointer(rotation[1]),
            rows=rows_as_c(batch),
            key_pools=ctypes.addressof(pools.keys),
            value_pools=ctypes.addressof(pools.values),
            block_stride=pools.block_stride,
            kv_format=pools.format,
            logits=pointer(logits),
            part_ns=pointer(self._library.part_ns),
            num_tokens=len(token_ids),
            num_logits=len(logits_index),
            block_size=pools.block_size,
            num_threads=torch.get_num_threads(),
        )
        if revealed is not None:
            step.revealed = revealed.layers.ctypes.data
            step.states = pointer(revealed.states)
            step.num_revealed = len(revealed.layers)
        _add_adapters(step, adapted)
        self._library.call("decode", self._dtype, ctypes.byref(self._decoder), ctypes.byref(step))
        return logits

    def run_on(
        self,
        first: RunInput,
        rotation: tuple[Tensor, Tensor],
        pools: DecoderPools,
        rows: RunRows,
        vocab_size: int,
    ) -> npt.NDArray[np.int32]:
        """Generates several tokens of all `rows` in one call: [R, m] int32, padded with -1.

        Each token is computed from the one before. A row ends after a stop token, and before logits
        with NaN, with +inf, or of -inf only. `rotation`: as for `run`, up to the last position that
        a row may reach. `vocab_size`: tokens are drawn from the first `vocab_size` logits. All rows
        end if `rows.after_token` says so.
        """
        tokens = np.full((len(rows), rows.max_num_tokens), -1, np.int32)
        goes_on = _goes_on(rows.after_token, tokens)
        step = CDecoderStep(
            token_ids=first.token_ids.ctypes.data,
            cosines=pointer(rotation[0]),
            sines=pointer(rotation[1]),
            rows=CAttentionRows(
                block_tables=first.block_tables.ctypes.data,
                num_computed=first.num_computed_tokens.ctypes.data,
                table_stride=first.block_tables.shape[1],
                num_rows=len(rows),
            ),
            key_pools=ctypes.addressof(pools.keys),
            value_pools=ctypes.addressof(pools.values),
            block_stride=pools.block_stride,
            kv_format=pools.format,
            logits=pointer(self._logits_buffer(len(rows))),
            part_ns=pointer(self._library.part_ns),
            block_size=pools.block_size,
            num_threads=torch.get_num_threads(),
        )
        _add_adapters(step, first.adapted)
        run = CDecoderRun(
            draws=draws_as_c(rows.draws),
            num_tokens=rows.num_tokens.ctypes.data,
            stop_offsets=rows.stop_offsets.ctypes.data,
            stop_token_ids=rows.stop_token_ids.ctypes.data,
            tokens=tokens.ctypes.data,
            max_num_tokens=rows.max_num_tokens,
            vocab_size=vocab_size,
            goes_on=goes_on,
        )
        arguments = (self._decoder, step, run)
        self._library.call("decode_run", self._dtype, *(ctypes.byref(each) for each in arguments))
        return tokens

    def pack_adapter(self, weights: AdapterWeights) -> NativeAdapter:
        """Returns the adapter as `run` and `run_on` take it. Copies all but `own_embedding`.

        Raises RuntimeError or ValueError if a matrix has other sizes than the decoder's.
        """
        shape, library, dtype = self._shape, self._library, self._dtype
        heads, kv_heads = (
            num_heads * shape.head_dim for num_heads in (shape.num_heads, shape.num_kv_heads)
        )
        qkv = _joined_places(heads, kv_heads, kv_heads)
        residual = _joined_places(shape.width)
        gate_up, _ = _interleaved_places(shape.mlp_width, library.panel // 2)
        linears = []
        for layer in weights.layers:
            linears += [
                pack_update(library, parts, places, num_inputs, dtype)
                for parts, places, num_inputs in (
                    ((layer.query, layer.key, layer.value), qkv, shape.width),
                    ((layer.attention_output,), residual, heads),
                    ((layer.gate, layer.up), gate_up, shape.width),
                    ((layer.down,), residual, shape.mlp_width),
                )
            ]
        logits = _joined_places(self._head.num_outputs)
        linears.append(pack_update(library, [weights.head], logits, shape.width, dtype))
        embedding = pack_embedding_update(library, weights.embedding, dtype)
        own_embedding = weights.own_embedding
        if own_embedding is not None:
            self._check_own(own_embedding)
            own_embedding = own_embedding.detach().to(dtype).contiguous()
        own_head = self._own_head(weights.own_head)
        return NativeAdapter(library, linears, embedding, own_embedding, own_head)

    def _own_head(self, own: Tensor | None) -> PackedLinear | None:
        if own is None:
            return None
        self._check_own(own)
        bias = self._head.bias
        rows = WeightRows.of(own.to(self._dtype))
        return pack(self._library, rows, None if bias is None else bias[: len(own)])

    def _check_own(self, own: Tensor) -> None:
        expected = (self._head.num_outputs, self._shape.width)
        if own.shape != expected:
            raise ValueError(f"weights of an adapter are {list(own.shape)}; allowed: {expected}")

    @property
    def width(self) -> int:
        """Size W of the residual stream."""
        return self._shape.width

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings of `token_ids` [T] int64, [T, W]."""
        if self._packed_embedding is not None:
            return unpack_outputs(self._library, self._packed_embedding, token_ids)
        assert self._embedding is not None
        return self._embedding[token_ids]

    def _embeddings(self, embedding: LinearWeights) -> tuple[Tensor | None, PackedLinear | None]:
        """Returns the embedding, [V, W], or its codes if kernels take them."""
        packed = self._quantized([embedding], [np.arange(embedding.num_outputs)])
        if packed is not None:
            self.num_bytes += packed.num_bytes
            return None, packed
        plain = embedding.dequantized().weight.detach()
        if embedding.stored is None:
            plain = plain.clone(memory_format=torch.contiguous_format)
        self.num_bytes += plain.nbytes
        return plain, None

    def _read_out(self, embedding: LinearWeights, head: LinearWeights) -> PackedLinear:
        """Packs the head. A tied one shares the numbers of the embedding that are in memory."""
        if not head.is_same_as(embedding):
            return self._joined(head)
        if self._embedding is not None:
            return self._joined(LinearWeights(self._embedding, head.bias))
        assert self._packed_embedding is not None
        return self._packed_embedding if head.bias is None else self._joined(head)

    def _logits_buffer(self, count: int) -> Tensor:
        # Fresh memory of this size would be zeroed by the system, page by page, in each step.
        if count > self._logits.shape[0] or self._logits.dim() == 1:
            self._logits = torch.empty(count, self._head.num_outputs)
        return self._logits[:count]

    def _layer(self, layer: LayerWeights) -> CDecoderLayer:
        norms = [
            None if norm is None else _norm(norm)
            for norm in (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        ]
        self._kept.append(norms)
        return CDecoderLayer(
            self._joined(layer.query, layer.key, layer.value).as_c(),
            self._joined(layer.attention_output).as_c(),
            self._interleaved(layer.gate, layer.up).as_c(),
            self._joined(layer.down).as_c(),
            *(pointer(norm) for norm in norms),
            pointer(None),
            layer.sliding_window or 0,
            0.0,
        )

    def _joined(self, *parts: LinearWeights) -> PackedLinear:
        """Packs matrices with the same input, outputs one after the other."""
        places = _joined_places(*(part.num_outputs for part in parts))
        return self._packed(parts, places, int(places[-1][-1]) + 1)

    def _interleaved(self, gate: LinearWeights, up: LinearWeights) -> PackedLinear:
        """Packs gate and up projection, half a panel of outputs of each in turn."""
        places, num_outputs = _interleaved_places(gate.num_outputs, self._library.panel // 2)
        return self._packed((gate, up), places, num_outputs)

    def _packed(
        self,
        parts: Sequence[LinearWeights],
        places: Sequence[npt.NDArray[np.int64]],
        num_outputs: int,
    ) -> PackedLinear:
        """Packs the outputs of `parts` at their places in a matrix."""
        bias = None
        if any(part.bias is not None for part in parts):
            bias = torch.zeros(num_outputs)
            for part, own in zip(parts, places, strict=True):
                if part.bias is not None:
                    bias[torch.from_numpy(own)] = part.bias.detach().float()
        packed = self._quantized(parts, places, num_outputs, bias)
        if packed is None:
            rows = [WeightRows.of(part.dequantized().weight) for part in parts]
            addresses = np.zeros(num_outputs, np.int64)
            for each, own in zip(rows, places, strict=True):
                addresses[own] = each.addresses
            sources = tuple(source for each in rows for source in each.sources)
            joined = WeightRows(addresses, sources)
            packed = pack(self._library, joined, bias, is_int8=self._is_int8)
        self._kept.append(packed)
        self.num_bytes += packed.num_bytes
        return packed

    def _quantized(
        self,
        parts: Sequence[LinearWeights],
        places: Sequence[npt.NDArray[np.int64]],
        num_outputs: int | None = None,
        bias: Tensor | None = None,
    ) -> PackedLinear | None:
        """Packs the codes of `parts`; None if kernels do not take them."""
        stored = [part.stored for part in parts if part.stored is not None]
        if not stored:
            return None
        try:
            if len(stored) < len(parts):
                raise NotPackable("only some of the layers multiplied together are quantised")
            groups = [
                GroupPart(weight, own.astype(np.int32))
                for weight, own in zip(stored, places, strict=True)
            ]
            size = num_outputs or len(places[0])
            return pack_groups(self._library, groups, size, bias, is_exact=self._is_exact)
        except NotPackable as error:
            self.dequantized[str(error)] += len(stored)
            return None


def _joined_places(*counts: int) -> list[npt.NDArray[np.int64]]:
    """Returns the places of the outputs of matrices that follow each other."""
    ends = np.cumsum(counts)
    return [np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _interleaved_places(count: int, half: int) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Returns the places of two matrices' outputs, `half` of each in turn, and the outputs."""
    index = np.arange(count)
    places = index + index // half * half
    return [places, places + half], 2 * -(-count // half) * half


def _add_adapters(step: CDecoderStep, adapted: StepAdapters | None) -> None:
    if adapted is not None:
        step.adapters = adapted.addresses.ctypes.data
        step.of_token = adapted.of_token.ctypes.data
        step.num_adapters = len(adapted.adapters)


def _norm(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.float32).contiguous().clone()


def _goes_on(
    after_token: AfterToken | None, tokens: npt.NDArray[np.int32]
) -> ctypes._CFunctionType:
    """Returns `after_token` for C, null for None. `tokens`: [R, m], which the run writes.

    The caller keeps the result alive.
    """
    if after_token is None:
        return CGoesOn()
    return CGoesOn(lambda num_passes: after_token(tokens[:, :num_passes]))


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
