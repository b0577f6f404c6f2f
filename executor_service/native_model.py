"""Models of the Llama kind, run by the native decoder instead of `transformers`.

A model is recognised by its parts, not by its name, and then tried: what the parts do not tell (a
norm that adds one, a scaled residual) shows in its logits.

Shape letters: T input tokens, S rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.attention_probe import PROBE_BLOCK_SIZE, num_probe_blocks, probe_steps
from executor_service.input_batch import InputBatch
from executor_service.kv_cache import KVCache
from executor_service.loaded_model import LoadedModel
from executor_service.progress import show_progress
from executor_service.self_check import check_replacement
from splitserve_kernels.cpu.decoder import (
    DecoderPools,
    DecoderShape,
    LayerWeights,
    LinearWeights,
    NativeDecoder,
)
from splitserve_kernels.cpu.library import DTYPES, NativeLibrary
from splitserve_kernels.paged_batch import PagedBatch

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_MODEL_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_ACTIVATIONS = {"SiLU", "SiLUActivation"}
# The rotary embedding is tabulated for so many positions at a time.
_ROTATION_STEP = 4096


def why_not_native(loaded: LoadedModel) -> str | None:
    """What keeps a model from the native decoder; None if it can be tried."""
    model: Any = loaded.model
    if loaded.device.type != "cpu" or loaded.dtype not in DTYPES:
        return f"{loaded.dtype_name} on {loaded.device.type}"
    base = getattr(model, "model", None)
    if _parts(model) != {"model", "lm_head"} or base is None or _parts(base) != _MODEL_PARTS:
        return "the model has other parts"
    for layer in base.layers:
        attention_parts = _parts(getattr(layer, "self_attn", None))
        if (
            _parts(layer) != _LAYER_PARTS
            or attention_parts not in (_ATTENTION_PARTS, _ATTENTION_PARTS | _HEAD_NORMS)
            or _parts(layer.mlp) != _MLP_PARTS
        ):
            return "its layers have other parts"
        activation = type(layer.mlp.act_fn).__name__
        if activation not in _ACTIVATIONS:
            return f"its activation is {activation}"
        if not hasattr(layer.input_layernorm, "variance_epsilon"):
            return f"its norm is {type(layer.input_layernorm).__name__}"
    shapes = {(shape.key_dim, shape.value_dim, shape.num_kv_heads) for shape in loaded.layers}
    key_dim, value_dim, _ = next(iter(shapes))
    if len(shapes) > 1 or key_dim != value_dim or key_dim % 2:
        return "its heads differ in size, or have an odd one"
    if any(module.in_features % 2 for module in model.modules() if isinstance(module, nn.Linear)):
        return "a matrix has an odd number of inputs"
    return None


def build_native_model(
    loaded: LoadedModel, library: NativeLibrary, *, is_int8: bool = False
) -> NativeModel:
    """Takes `loaded` apart and returns what runs in its place, with weights rounded if `is_int8`.

    Call it only if `why_not_native` is None. Raises ReplacementWrong if it computes something else;
    the model is then lost.
    """
    built: list[NativeModel] = []

    def compute(tokens: Tensor) -> Tensor:
        native = NativeModel(loaded, library, is_int8=is_int8)
        built.append(native)
        probe_cache = KVCache(
            loaded.layers,
            PROBE_BLOCK_SIZE,
            num_probe_blocks(tokens),
            0,
            loaded.dtype,
            loaded.device,
        )

        pools = pools_of(probe_cache)

        def forward(input_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
            return native.run(input_ids, positions, batch, torch.arange(len(input_ids)), pools)

        return probe_steps(tokens, forward)

    check_replacement(loaded, compute, is_int8=is_int8)
    return built[0]


class NativeModel:
    """A decoder with packed weights; see NativeDecoder."""

    def __init__(
        self, loaded: LoadedModel, library: NativeLibrary, *, is_int8: bool = False
    ) -> None:
        """Takes the weights out of `loaded`, layer by layer, so that memory holds them once.

        Afterwards `loaded.model` cannot run any more. Call it only if `why_not_native` is None.
        """
        model: Any = loaded.model
        self._rotary = model.model.rotary_emb
        self._max_model_len = loaded.max_model_len
        self._rotation = self._compute_rotation(0, _ROTATION_STEP)
        self._vocab_size = loaded.vocab_size
        embedding, head = model.model.embed_tokens, model.lm_head
        self._decoder = NativeDecoder(
            library,
            self._shape(loaded),
            _layers(loaded),
            embedding.weight,
            model.model.norm.weight,
            LinearWeights(head.weight, head.bias),
            is_int8=is_int8,
        )
        self._dtype = loaded.dtype
        # Each tensor that is left would keep all of the mapped file.
        _release(model)

    @property
    def num_bytes(self) -> int:
        """What the weights take."""
        return self._decoder.num_bytes

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        paged: PagedBatch,
        index: Tensor,
        pools: DecoderPools,
    ) -> Tensor:
        """Logits [S, V] float32. `input_ids`, `positions`: [T] int64. `index`: [S] int64."""
        logits = self._decoder.run(
            input_ids,
            positions,
            self._rotation_up_to(paged.max_num_tokens),
            paged,
            pools,
            index,
        )
        return logits[:, : self._vocab_size]

    def _rotation_up_to(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of so many positions or more, [.., rotary_dim / 2] each."""
        cosines, sines = self._rotation
        known = cosines.shape[0]
        if num_positions > known:
            more = self._compute_rotation(known, num_positions + _ROTATION_STEP)
            self._rotation = torch.cat([cosines, more[0]]), torch.cat([sines, more[1]])
        return self._rotation

    def _compute_rotation(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        # Beyond the longest sequence the angles of some models would change for all positions.
        positions = torch.arange(start, min(end, self._max_model_len))[None]
        cosines, sines = self._rotary(torch.zeros(1, dtype=torch.float32), positions)
        # Both halves of a head are turned by the same angles.
        half = cosines.shape[-1] // 2
        return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()

    def _shape(self, loaded: LoadedModel) -> DecoderShape:
        model: Any = loaded.model
        layer, key = model.model.layers[0], loaded.layers[0]
        return DecoderShape(
            width=model.model.embed_tokens.weight.shape[1],
            mlp_width=layer.mlp.gate_proj.weight.shape[0],
            num_heads=layer.self_attn.q_proj.weight.shape[0] // key.key_dim,
            num_kv_heads=key.num_kv_heads,
            head_dim=key.key_dim,
            rotary_dim=2 * self._rotation[0].shape[1],
            epsilon=float(layer.input_layernorm.variance_epsilon),
            scale=float(layer.self_attn.scaling),
        )


class NativePagedModel:
    """A NativeModel and the pools it works on; see PagedModel."""

    def __init__(self, model: NativeModel, cache: KVCache) -> None:
        self._model = model
        self._pools = pools_of(cache)

    def logits(self, batch: InputBatch) -> Tensor:
        """See PagedModel."""
        return self._model.run(
            batch.input_ids[0], batch.position_ids[0], batch.paged, batch.logits_index, self._pools
        )


def pools_of(cache: KVCache) -> DecoderPools:
    """The pools of a cache that stays where it is."""
    return DecoderPools(cache.key_pools, cache.value_pools)


def _layers(loaded: LoadedModel) -> Iterator[LayerWeights]:
    model: Any = loaded.model
    layers = list(zip(model.model.layers, loaded.layer_windows, strict=True))
    for layer, window in show_progress(layers, "layers packed"):
        attention, mlp = layer.self_attn, layer.mlp
        yield LayerWeights(
            query=_linear(attention.q_proj),
            key=_linear(attention.k_proj),
            value=_linear(attention.v_proj),
            attention_output=_linear(attention.o_proj),
            gate=_linear(mlp.gate_proj),
            up=_linear(mlp.up_proj),
            down=_linear(mlp.down_proj),
            input_norm=layer.input_layernorm.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
            sliding_window=window,
        )
        _release(layer)


def _linear(module: nn.Linear) -> LinearWeights:
    return LinearWeights(module.weight, module.bias)


def _release(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def _parts(module: Any) -> set[str]:  # noqa: ANN401
    return set() if module is None else {name for name, _ in module.named_children()}
