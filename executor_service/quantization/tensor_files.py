"""Tensors of a quantised checkpoint, read from its files when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_service.errors import ModelUnreadable
from executor_service.quantization.weight_format import WeightFormat
from splitserve_kernels.packed_weight import PackedExperts, PackedWeight, StoredWeight


@dataclass(slots=True)
class LazyTensor:
    """A tensor that is read, and dequantised, each time that it is indexed.

    `transformers` loads such objects one at a time, as it loads slices of safetensors files.
    `is_quantised`: whether it is dequantised. `stored`: returns the weights as they are packed;
    None if they are not. `stored_experts`: the same of a tensor of all experts, with one or two
    weights of each expert (see `SeparateExperts`). `was_read`: whether it was indexed.
    """

    read: Callable[[], Tensor]
    is_quantised: bool = False
    stored: Callable[[], StoredWeight | None] = lambda: None
    stored_experts: Callable[[], tuple[tuple[StoredWeight, ...], ...] | None] = lambda: None
    was_read: bool = field(default=False, init=False)

    def __getitem__(self, _: object) -> Tensor:
        """Returns the whole tensor."""
        self.was_read = True
        return self.read()


def lazy_weights(
    files: Sequence[Path], weight_format: WeightFormat, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Returns the tensors of a checkpoint by name, with one for each quantised layer.

    `dtype`: in which the layers compute. Reading may raise the errors of `WeightFormat.pack`.
    """
    plain: dict[str, LazyTensor] = {}
    layers: dict[str, dict[str, Callable[[], Tensor]]] = {}
    for name, read in _readers(files).items():
        found = weight_format.part_of(name)
        if found is None:
            plain[name] = LazyTensor(read)
        else:
            layers.setdefault(found[0], {})[found[1]] = read
    for name, parts in layers.items():
        if name in plain:
            raise ModelUnreadable(f"{name} is in the checkpoint as plain and as quantised tensor")
        plain[name] = _lazy_layer(name, parts, weight_format, dtype)
    return plain


def lazy_plain_weights(files: Sequence[Path]) -> dict[str, LazyTensor]:
    """Returns the tensors of a checkpoint by name."""
    return {name: LazyTensor(read) for name, read in _readers(files).items()}


def _lazy_layer(
    name: str,
    parts: Mapping[str, Callable[[], Tensor]],
    weight_format: WeightFormat,
    dtype: torch.dtype,
) -> LazyTensor:
    def pack() -> PackedWeight | PackedExperts | Tensor:
        return weight_format.pack(name, {part: get() for part, get in parts.items()}, dtype)

    def read() -> Tensor:
        packed = pack()
        return packed.dequantized() if isinstance(packed, PackedWeight | PackedExperts) else packed

    def read_rows(rows: slice) -> PackedWeight:
        packed = pack()
        assert isinstance(packed, PackedWeight), "the layer was packed before"
        is_whole = rows == slice(0, packed.shape[0]) and packed.rows_per_group == 1
        return packed if is_whole else packed.of_rows(rows)

    def stored() -> StoredWeight | None:
        packed = pack()
        if not isinstance(packed, PackedWeight):
            return None
        return StoredWeight(packed.shape, dtype, read_rows, is_read_whole=True)

    def read_expert(number: int, rows: slice) -> PackedWeight:
        packed = pack()
        assert isinstance(packed, PackedExperts), "the layer was packed before"
        return packed.experts[number].of_rows(rows)

    def stored_experts() -> tuple[tuple[StoredWeight, ...], ...] | None:
        packed = pack()
        if not isinstance(packed, PackedExperts):
            return None
        return tuple(
            (StoredWeight(each.shape, dtype, partial(read_expert, number), is_read_whole=True),)
            for number, each in enumerate(packed.experts)
        )

    return LazyTensor(
        read, is_quantised=len(parts) > 1, stored=stored, stored_experts=stored_experts
    )


def _readers(files: Sequence[Path]) -> dict[str, Callable[[], Tensor]]:
    """Returns a function for each tensor that reads it."""
    from safetensors import safe_open

    readers: dict[str, Callable[[], Tensor]] = {}
    for path in files:
        if path.suffix == ".safetensors":
            opened: Any = safe_open(path, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                readers[name] = partial(opened.get_tensor, name)
        else:
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            readers |= {name: partial(loaded.__getitem__, name) for name in loaded}
    return readers
