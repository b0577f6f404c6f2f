"""Blocks of GGUF files, compared with the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from executor_service.quantization import BLOCK_TYPES, pack_blocks

NUM_ROWS, NUM_BLOCKS = 5, 3
# Bytes of a block at which its float16 numbers start.
FLOAT16_STARTS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}


def random_rows(type_name: str) -> np.ndarray:
    """Returns rows of random blocks, [rows, bytes] uint8; each code occurs, scales are finite."""
    random = np.random.default_rng(0)
    num_bytes = BLOCK_TYPES[type_name].num_bytes
    blocks = random.integers(0, 256, (NUM_ROWS, NUM_BLOCKS, num_bytes), dtype=np.uint8)
    for start in FLOAT16_STARTS.get(type_name, []):
        numbers = random.normal(0, 1, (NUM_ROWS, NUM_BLOCKS, 1)).astype(np.float16)
        blocks[:, :, start : start + 2] = numbers.view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, :, 0] = random.integers(110, 140, (NUM_ROWS, NUM_BLOCKS))
    return blocks.reshape(NUM_ROWS, -1)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_blocks_hold_the_numbers_that_gguf_reads(type_name: str) -> None:
    rows = random_rows(type_name)
    expected = quants.dequantize(rows, GGMLQuantizationType[type_name])

    packed = pack_blocks(type_name, torch.from_numpy(rows), torch.bfloat16)

    assert packed.shape == expected.shape
    np.testing.assert_array_equal(packed.dequantized(torch.float32).numpy(), expected)


@pytest.mark.parametrize("type_name", ["Q4_0", "MXFP4"])
def test_single_block_has_the_numbers_that_gguf_reads(type_name: str) -> None:
    kind = GGMLQuantizationType[type_name]
    data = quants.quantize(np.linspace(-1, 1, 32, dtype=np.float32)[None], kind)

    found = pack_blocks(type_name, torch.from_numpy(data), torch.float32).dequantized()

    np.testing.assert_array_equal(found.numpy(), quants.dequantize(data, kind))
