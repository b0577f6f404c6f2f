"""Writes quantised layers, by the packages of their formats or from the definitions of these.

Each function returns the tensors of a layer by the ends of their names, and the weights that they
stand for, [outputs, inputs] float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor
from torch.nn import functional

Layer = tuple[dict[str, Tensor], Tensor]

# Output of each code of an AWQ word, lowest bits first.
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_MAX_FLOAT8 = 448.0
# Values of bitsandbytes' 4-bit codes: quantiles of the normal distribution, and floats.
_NF4 = (
    -1.0, -0.6961928, -0.5250731, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
_FP4_OF_12 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in _FP4_OF_12)


def compressed_tensors_layer(
    weight: Tensor, weight_format: str, settings: Mapping[str, Any]
) -> Layer:
    """Returns a layer of compressed-tensors. `settings`: of `QuantizationArgs`."""
    arguments = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    extra = {}
    if arguments.strategy == "tensor_group":
        extra["global_scale"] = (_MAX_FLOAT8 * 6) / weight.abs().max().reshape(1)
    scales, zero_points = calculate_qparams(*_limits(weight, arguments), arguments, **extra)
    tensors = {"weight": weight, "weight_scale": scales, "weight_zero_point": zero_points}
    tensors |= {f"weight_{name}": tensor for name, tensor in extra.items()}
    compressor = BaseCompressor.get_value_from_registry(weight_format)
    parts = compressor.compress(tensors, scheme)
    return parts, compressor.decompress(dict(parts), scheme)["weight"].float()


def _limits(weight: Tensor, arguments: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Returns the smallest and largest weight of what shares a scale."""
    match arguments.strategy:
        case "tensor":
            parts = weight.reshape(1, -1)
        case "channel":
            parts = weight[:, None]
        case "block":
            blocks = _blocks(weight)
            return blocks.amin((1, 3)), blocks.amax((1, 3))
        case _:
            parts = weight.reshape(len(weight), -1, arguments.group_size)
    return parts.amin(-1), parts.amax(-1)


def _blocks(weight: Tensor) -> Tensor:
    """Returns a matrix in blocks of 128 x 128, padded with zeros."""
    padding = (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128)
    padded: Tensor = functional.pad(weight, padding)
    return padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)


def packed_along_first(codes: np.ndarray, num_bits: int) -> Tensor:
    """Packs codes [K, N] in words of 32 bits along K, without gaps."""
    words = np.zeros((-(-codes.shape[0] * num_bits // 32), codes.shape[1]), np.uint64)
    for index, row in enumerate(codes.astype(np.uint64)):
        word, shift = divmod(index * num_bits, 32)
        words[word] |= row << np.uint64(shift) & np.uint64(0xFFFFFFFF)
        if shift + num_bits > 32:
            words[word + 1] |= row >> np.uint64(32 - shift)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _rounded(
    weight: Tensor, num_bits: int, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes [K, N], zero points and scales [G, N] of integers with a zero per group."""
    numbers = weight.numpy().T
    num_groups, largest = int(groups.max()) + 1, 2**num_bits - 1
    codes = np.zeros(numbers.shape, np.int64)
    zeros = np.zeros((num_groups, numbers.shape[1]), np.int64)
    scales = np.zeros(zeros.shape, np.float16)
    for group in range(num_groups):
        own = numbers[groups == group]
        low, high = np.minimum(own.min(0), 0), np.maximum(own.max(0), 0)
        scales[group] = np.maximum((high - low) / largest, 1e-4)
        # A zero point of 0 cannot be stored less 1.
        zeros[group] = np.clip(np.round(-low / scales[group]), 1, largest)
        rounded = np.round(own / scales[group]) + zeros[group]
        codes[groups == group] = np.clip(rounded, 0, largest)
    return codes, zeros, scales


def gptq_layer(weight: Tensor, num_bits: int, groups: np.ndarray, *, subtracted: int = 1) -> Layer:
    """Returns a layer of GPTQ.

    `groups`: [inputs] group of each. `subtracted`: from the stored zero points, 1 in the first
    version of its checkpoints.
    """
    codes, zeros, scales = _rounded(weight, num_bits, groups)
    parts = {
        "qweight": packed_along_first(codes, num_bits),
        "qzeros": packed_along_first((zeros - subtracted).T, num_bits).T.contiguous(),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return parts, _from_codes(codes, zeros, scales, groups)


def awq_layer(weight: Tensor, group_size: int) -> Layer:
    """Returns a layer of AWQ, in the layout of its GEMM kernels."""
    groups = np.arange(weight.shape[1]) // group_size
    codes, zeros, scales = _rounded(weight, 4, groups)
    parts = {"scales": torch.from_numpy(scales)}
    for part, numbers in (("qweight", codes), ("qzeros", zeros)):
        ordered = numbers.reshape(len(numbers), -1, 8)[:, :, _AWQ_OUTPUTS].reshape(numbers.shape)
        parts[part] = packed_along_first(ordered.T, 4).T.contiguous()
    return parts, _from_codes(codes, zeros, scales, groups)


def _from_codes(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray
) -> Tensor:
    weights = (codes - zeros[groups]) * scales[groups].astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(weights.T, np.float32))


def float8_layer(weight: Tensor) -> Layer:
    """Returns a layer of 8-bit floats with one scale for a block of 128 x 128."""
    scales = _blocks(weight).abs().amax((1, 3)) / _MAX_FLOAT8
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def nf4_layer(weight: Tensor) -> Layer:
    """Returns a layer of bitsandbytes with quantiles of the normal distribution."""
    return _table_layer(weight, "nf4", _NF4)


def fp4_layer(weight: Tensor) -> Layer:
    """Returns a layer of bitsandbytes with floats of 4 bits."""
    return _table_layer(weight, "fp4", _FP4)


def _table_layer(weight: Tensor, quant_type: str, values: Sequence[float]) -> Layer:
    """Returns a layer of bitsandbytes with codes of a table of 16 values."""
    table = torch.tensor(values)
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = (blocks[..., None] / absmax[:, None, None] - table).abs().argmin(-1).to(torch.uint8)
    state = {"quant_type": quant_type, "blocksize": 64, "shape": list(weight.shape)}
    parts = {
        "weight": (codes.reshape(-1)[::2] << 4 | codes.reshape(-1)[1::2]).reshape(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{quant_type}": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return parts, (table[codes.int()] * absmax[:, None]).reshape(weight.shape)


def int8_layer(weight: Tensor) -> Layer:
    """Returns a layer of bitsandbytes with integers of 8 bits and a scale per output."""
    limits = weight.abs().amax(1)
    codes = (weight * (127 / limits[:, None])).round().to(torch.int8)
    return {"weight": codes, "SCB": limits}, codes.float() * limits[:, None] / 127
