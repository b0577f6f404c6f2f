"""Logits to tokens.

Shape letters: S rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve_kernels.cpu.library import CSamplingRows, NativeLibrary, pointer


@dataclass(frozen=True, slots=True)
class DrawRows:
    """How each row's token is chosen; all [S].

    `temperatures`: float32, 0 for the largest logit. `top_k`: int32, V or more for no limit.
    `top_p`: float64, 1 for no limit. `min_p`: float32, 0 for no limit. `seeds`, `positions`: int64,
    what the random number is a function of.
    """

    temperatures: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


def choose_tokens(library: NativeLibrary, logits: Tensor, rows: DrawRows) -> Tensor:
    """One token for each row, [S] int32; -1 where logits hold NaN or +inf, or -inf alone.

    `logits`: [S, V] float32, not changed. The arithmetic is that of `SamplingParams` in
    `executor.proto`.
    """
    tokens = torch.empty(logits.shape[0], dtype=torch.int32)
    c_rows = CSamplingRows(
        rows.temperatures.ctypes.data,
        rows.top_k.ctypes.data,
        rows.top_p.ctypes.data,
        rows.min_p.ctypes.data,
        rows.seeds.ctypes.data,
        rows.positions.ctypes.data,
    )
    library.call(
        "sample",
        torch.float32,
        pointer(logits),
        ctypes.c_int64(logits.stride(0)),
        ctypes.c_int32(logits.shape[0]),
        ctypes.c_int32(logits.shape[1]),
        ctypes.byref(c_rows),
        pointer(tokens),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return tokens
