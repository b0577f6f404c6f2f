"""Updates of adapters in plain torch, read from the memory that slots name, on the CPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from splitserve_kernels.adapter_tiles import RANK_MULTIPLE, SlotLinear, TokenTiles


def add_low_rank_in_torch(
    x: Tensor, output: Tensor, tiles: TokenTiles, linear: SlotLinear, bias: Tensor | None = None
) -> None:
    """`add_low_rank` for tests to which the kernels do not matter: interpreted, they take long."""
    for slot, start, count in tiles.tiles.T.tolist():
        tokens = tiles.order[start : start + count].long()
        first = 0
        for size, words in zip(linear.sizes, linear.words[slot].tolist(), strict=True):
            outputs = slice(first, first + size)
            own = 0.0 if bias is None else bias[outputs]
            if words[4] and count:
                output[tokens, outputs] = _changed(x[tokens], output[tokens, outputs], words, own)
            first += size


def _changed(x: Tensor, output: Tensor, words: list[int], own: Tensor | float) -> Tensor:
    down, up, gain, bias, rank, scale_bits = words
    size = output.shape[1]
    columns = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
    reduced = x.float() @ _at(down, (rank, x.shape[1]), x.dtype).float().T
    reduced *= torch.tensor(scale_bits, dtype=torch.int32).view(torch.float32)
    added = reduced @ _at(up, (size, columns), x.dtype)[:, :rank].float().T
    changed = output.float() - own + added
    if gain:
        changed *= _at(gain, (size,), torch.float32)
    changed += own
    if bias:
        changed += _at(bias, (size,), torch.float32)
    return changed.to(output.dtype)


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel()
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
