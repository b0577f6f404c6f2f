"""Columns of a draw on their way to the device in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.draw_rows import DrawRows
from splitserve_kernels.gpu.sampling.draw import DrawColumns, num_words, pack


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 9])
def test_columns_are_those_that_were_packed(num_rows: int) -> None:
    numbers = np.arange(num_rows)
    rows = DrawRows(
        temperatures=numbers.astype(np.float32) + 0.5,
        top_k=numbers.astype(np.int32) + 7,
        top_p=numbers / 3,
        min_p=(numbers / 7).astype(np.float32),
        seeds=numbers - 2**62,
        positions=numbers + 2**40,
    )
    words = np.full(num_words(num_rows), -1, np.int64)
    pack(rows, words)
    columns = DrawColumns.of_words(torch.from_numpy(words))
    for name in DrawRows.__slots__:
        column = getattr(columns, name)
        assert column[:num_rows].tolist() == getattr(rows, name).tolist()
        assert column[num_rows:].tolist() == [0] * (len(column) - num_rows)
        # A kernel is compiled again where a column is not aligned to 16 bytes.
        assert (column.data_ptr() - words.ctypes.data) % 16 == 0
