"""Linear layers whose quantised weights stay packed on a GPU.

Each kind of weights is tried once, on the first outputs of its first layer. Where a kernel does not
take weights or computes something else, the layer has dequantised weights; a warning says so once
for each reason.

Shape letters: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.decoders.llama_config import linear_weights
from executor_service.errors import TrialFailed, one_line
from executor_service.model import (
    LoadedModel,
    QuantizedLinear,
    plain_linear,
    probe_attention,
    rounded_to_float8,
    weights_bytes,
)
from executor_service.trials import Trial, try_replacement
from splitserve_kernels.decoder_inputs import LinearWeights
from splitserve_kernels.gpu.launch import why_unavailable
from splitserve_kernels.packed_weight import NotPackable, PackedWeight

# A product of decodes, and one of a prompt.
_NUM_TRIAL_ROWS = (3, 80)
_NUM_TRIAL_OUTPUTS = 256
# Allowed error before the result is rounded, in roundings of a typical result. Roundings of weights
# cancel each other: they add up to less than one.
_NUM_ROUNDINGS = 2
_MIN_TOLERANCE = 1e-4
_SCALED_MM = "scaled_mm"

_log = logging.getLogger(__name__)

# Multiplies [M, K] with weights and adds a bias: [M, N].
_Multiply = Callable[[Tensor, Any, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class _Part:
    """Weights in the layout of a kernel, and the kernel.

    `kind`: equal for weights that one trial is enough for.
    """

    weight: Any
    multiply: _Multiply
    num_outputs: int
    kind: Hashable


class GpuQuantizedLinear(nn.Module):
    """Linear layer with packed weights on a GPU, for inference only; `GpuLinears` makes it."""

    def __init__(self, in_features: int, parts: Sequence[_Part], bias: Tensor | None) -> None:
        """Concatenates the outputs of `parts`, [N] in all. `bias`: [N], or None."""
        super().__init__()
        sizes = [part.num_outputs for part in parts]
        self.in_features = in_features
        self.out_features = sum(sizes)
        self._parts = tuple(parts)
        self.bias = bias
        self._biases = [None] * len(parts) if bias is None else list(torch.split(bias, sizes))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and the bias."""
        biases = sum(bias.nbytes for bias in self._biases if bias is not None)
        return int(sum((part.weight.num_bytes for part in self._parts), biases))

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies `rows` [..., in_features]. Returns [..., out_features]."""
        flat = rows.reshape(-1, self.in_features)
        outputs = [
            part.multiply(flat, part.weight, bias)
            for part, bias in zip(self._parts, self._biases, strict=True)
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return output.view(*rows.shape[:-1], self.out_features)


GpuLinear = GpuQuantizedLinear | nn.Linear


class GpuLinears:
    """Maker of linear layers on `device`, for rows of `dtype`.

    Rows are rounded to 8 bits where the checkpoint was made for that, weights are 8-bit floats
    without groups and the device multiplies these.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        # Reasons against the kinds of weights that were tried; None for those that passed.
        self._tried: dict[Hashable, str | None] = {}
        self._warned: set[str] = set()

    def joined(self, *parts: LinearWeights) -> GpuLinear:
        """Returns one layer of `parts` with the same inputs, outputs one after the other.

        Plain weights of a single part are not copied. Beside plain weights, quantised ones are
        dequantised.
        """
        bias = None
        if any(part.bias is not None for part in parts):
            bias = torch.cat([self._bias(part) for part in parts])
        stored = [part.stored for part in parts if part.stored is not None]
        if len(stored) == len(parts):
            return self.layer([each.read(slice(0, each.shape[0])) for each in stored], bias)
        weights = [part.dequantized(self._device).weight.detach() for part in parts]
        return plain_linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def _bias(self, part: LinearWeights) -> Tensor:
        """Returns the bias, [N]; zeros if there is none."""
        if part.bias is None:
            return torch.zeros(part.num_outputs, dtype=self._dtype, device=self._device)
        return part.bias.detach()

    def layer(self, weights: Sequence[PackedWeight], bias: Tensor | None = None) -> GpuLinear:
        """Returns one layer of `weights` with the same inputs, outputs one after the other.

        Weights of one kind are multiplied by one kernel. All are dequantised if no kernel takes one
        of them. `bias`: [N] of all outputs; the layer has it on the device, in its dtype.
        """
        bias = None if bias is None else bias.detach().to(self._device, self._dtype)
        try:
            parts = [self._packed(weight) for weight in weights]
            reasons = [self._why_not(*pair) for pair in zip(parts, weights, strict=True)]
            reason = next((each for each in reasons if each is not None), None)
        except (ValueError, RuntimeError) as error:  # of packing, or too little memory
            reason = one_line(error)
        if reason is None:
            return GpuQuantizedLinear(weights[0].shape[1], _joined(parts), bias)
        if reason not in self._warned:
            self._warned.add(reason)
            message = "packed_layers_refused device=%s reason=%r: using dequantised weights"
            _log.warning(message, self._device.type, reason)
        return self._dequantized(weights, bias)

    def _dequantized(self, weights: Sequence[PackedWeight], bias: Tensor | None) -> nn.Linear:
        numbers = [each.on(self._device).dequantized(self._dtype) for each in weights]
        return plain_linear(torch.cat(numbers), bias)

    def _packed(self, weight: PackedWeight) -> _Part:
        """Returns `weight` in the layout of a kernel. Raises ValueError if none takes it."""
        reason = why_unavailable()
        if reason is not None:
            raise ValueError(reason)
        if weight.has_float8_inputs and self._dtype == torch.bfloat16:
            part = self._of_float8(weight)
            if part is not None:
                return part
        # The import needs Triton.
        from splitserve_kernels.gpu.quantized.gpu_weight import GpuPackedWeight
        from splitserve_kernels.gpu.quantized.linear import quantized_linear

        packed = GpuPackedWeight.pack(weight, self._device)
        return _Part(packed, quantized_linear, packed.num_outputs, packed.kind)

    def _of_float8(self, weight: PackedWeight) -> _Part | None:
        """Returns weights for a kernel that rounds rows; None if they are not for it."""
        from splitserve_kernels.gpu.quantized.scaled_mm import (
            ScaledMmWeight,
            scaled_mm_linear,
            why_no_scaled_mm,
        )

        if why_no_scaled_mm(self._device) is not None:
            return None
        try:
            packed = ScaledMmWeight.pack(weight, self._device)
        except NotPackable:
            return None
        return _Part(packed, scaled_mm_linear, packed.num_outputs, _SCALED_MM)

    def _why_not(self, part: _Part, weight: PackedWeight) -> str | None:
        """Returns why the kernel must not multiply with weights of its kind; None if it may."""
        if part.kind not in self._tried:
            self._tried[part.kind] = None
            try:
                self._try(weight.of_rows(slice(0, min(_NUM_TRIAL_OUTPUTS, weight.shape[0]))))
            except TrialFailed as error:
                self._tried[part.kind] = str(error)
        return self._tried[part.kind]

    @torch.inference_mode()
    def _try(self, weight: PackedWeight) -> None:
        """Multiplies random rows. Raises TrialFailed unless dequantised weights agree."""
        dense = weight.dequantized(torch.float32).to(self._device).double()
        part = self._packed(weight)
        is_rounded = part.kind == _SCALED_MM
        sizes = dense.norm(dim=1) / weight.shape[1] ** 0.5
        rounding = torch.finfo(self._dtype).eps

        def error_of(rows: Tensor, expected: Tensor, actual: Tensor) -> float:
            lengths = rows.double().norm(dim=1, keepdim=True)
            errors = (actual.double() - expected).abs() - rounding / 2 * expected.abs()
            return float((errors / (lengths * sizes).clamp(min=1e-30)).max())

        generator = torch.Generator().manual_seed(0)
        Trial(
            reference=lambda rows: (
                (rounded_to_float8(rows.float()).double() if is_rounded else rows.double())
                @ dense.T
            ),
            candidate=lambda rows: part.multiply(rows, part.weight, None),
            cases=(
                torch.randn(count, weight.shape[1], generator=generator).to(
                    self._device, self._dtype
                )
                for count in _NUM_TRIAL_ROWS
            ),
            error_of=error_of,
            allowed=max(_MIN_TOLERANCE, _NUM_ROUNDINGS * rounding),
            complaint=lambda error: f"products of packed weights are off by {error:.2g}",
        ).run()


def _joined(parts: Sequence[_Part]) -> Sequence[_Part]:
    """Returns one part for a single kernel launch if the weights allow it, else `parts`."""
    if len(parts) == 1:
        return parts
    are_scaled_mm = {part.kind == _SCALED_MM for part in parts}
    if len(are_scaled_mm) > 1:
        return parts
    from splitserve_kernels.gpu.quantized import gpu_weight, scaled_mm

    weights = [part.weight for part in parts]
    if are_scaled_mm.pop():
        weight: Any = scaled_mm.joined(weights)
    else:
        weight = gpu_weight.joined(weights)
    if weight is None:
        return parts
    return [_Part(weight, parts[0].multiply, weight.num_outputs, parts[0].kind)]


def pack_linears_on_gpu(loaded: LoadedModel) -> LoadedModel:
    """Puts layers with packed weights in place of the quantised ones of `loaded.model`.

    Returns the changed model. Raises TrialFailed if it then computes something else; it is lost in
    that case.
    """
    model: Any = loaded.model
    linears = GpuLinears(loaded.device, loaded.dtype)
    num_bytes = 0

    def compute(tokens: Tensor) -> Tensor:
        nonlocal num_bytes
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, QuantizedLinear):
                    layer = linears.joined(linear_weights(module))
                    setattr(parent, name, layer)
                    num_bytes += layer.num_bytes if isinstance(layer, GpuQuantizedLinear) else 0
        return probe_attention(model, tokens)[0]

    try_replacement(loaded, compute)
    return replace(loaded, weights_bytes=weights_bytes(model) + num_bytes)
