"""Native sampling: logits to token ids.

Shape letters: S rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from operator import attrgetter

import torch
from torch import Tensor

from splitserve_kernels.cpu.library import CSamplingRows, NativeLibrary, pointer
from splitserve_kernels.draw_rows import COLUMN_NAMES, DrawRows

_columns_of = attrgetter(*COLUMN_NAMES)


def choose_tokens(library: NativeLibrary, logits: Tensor, rows: DrawRows) -> Tensor:
    """Chooses one token per row, [S] int32; -1 if logits hold NaN or +inf, or only -inf.

    `logits`: [S, V] float32, not changed. The arithmetic is that of `SamplingParams` in
    `executor.proto`.
    """
    tokens = torch.empty(logits.shape[0], dtype=torch.int32)
    library.call(
        "sample",
        torch.float32,
        pointer(logits),
        ctypes.c_int64(logits.stride(0)),
        ctypes.c_int32(logits.shape[0]),
        ctypes.c_int32(logits.shape[1]),
        ctypes.byref(draws_as_c(rows)),
        pointer(tokens),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return tokens


def draws_as_c(rows: DrawRows) -> CSamplingRows:
    """Returns `rows` as a C structure; the caller keeps `rows` alive."""
    return CSamplingRows(*[column.ctypes.data for column in _columns_of(rows)])
