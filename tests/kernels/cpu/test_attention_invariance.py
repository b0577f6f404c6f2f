"""A token's attention is the same bits whatever shares its step and however its prompt was cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve_kernels import reference
from splitserve_kernels.cpu import NativeAttention, NativeLibrary
from splitserve_kernels.paged_batch import SLOT_SCALES, UNIT_SCALES, AttentionOptions
from tests.kernels.problems import (
    Shape,
    Tokens,
    assert_close,
    joined,
    make_batch,
    make_pools,
    make_tables,
    make_tokens,
    make_unwritten_problem,
)
from tests.support.covering import covering

pytestmark = pytest.mark.cases(10)

DTYPES = (torch.float32, torch.bfloat16)
# Of 8-bit pools with a scale per token and head; None for pools of the dtype of queries.
CODES = (None, torch.int8, torch.float8_e4m3fn)
# One whose blocks attention reads in place, and others that it copies.
SHAPES = (
    Shape(4, 2, 64, 64, 16, ()),
    Shape(6, 2, 32, 40, 3, ()),
    Shape(3, 1, 32, 32, 24, ()),
)
OPTIONS = (
    AttentionOptions(scale=0.3),
    AttentionOptions(scale=0.3, sliding_window=100, softcap=20.0),
)
LENGTH = 1100
_SETTINGS = settings(
    max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def _every_two(**options: Sequence[object]) -> pytest.MarkDecorator:
    """Cases in which every two of these options take every two of their values."""
    cases = [tuple(case.values()) for case in covering(options, strength=2)]
    return pytest.mark.parametrize(tuple(options), cases, ids=lambda value: str(value))


def _serve(
    library: NativeLibrary,
    shape: Shape,
    options: AttentionOptions,
    sequences: Sequence[Tokens],
    cuts: Sequence[Sequence[int]],
    codes: torch.dtype | None = None,
) -> list[Tensor]:
    """Outputs [L, H, E], served side by side.

    `cuts`: how many tokens each brings each time. `codes`: dtype of the pools, as in CODES.
    """
    scales = UNIT_SCALES if codes is None else SLOT_SCALES
    dtype = sequences[0].query.dtype
    lengths = [tokens.query.shape[0] for tokens in sequences]
    tables, num_blocks = make_tables(lengths, shape.block_size, seed=len(sequences))
    pools = make_pools(shape, num_blocks, codes or dtype, scales)
    backend, computed = NativeAttention(library), [0] * len(sequences)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for step in range(max(map(len, cuts))):
        new = [of_row[step] if step < len(of_row) else 0 for of_row in cuts]
        rows = list(zip(computed, new, strict=True))
        parts = [
            tokens.at(slice(start, start + count))
            for tokens, (start, count) in zip(sequences, rows, strict=True)
        ]
        batch, tokens = make_batch(tables, rows, shape.block_size), joined(parts)
        backend.write_kv(tokens.key, tokens.value, *pools, batch, scales)
        attended = backend.paged_attention(tokens.query, *pools, batch, options, scales)
        for output, part in zip(outputs, torch.split(attended, new), strict=True):
            output.append(part)
        computed = [start + count for start, count in rows]
    assert computed == lengths
    return [torch.cat(output) for output in outputs]


def _chunks(length: int, sizes: Sequence[int]) -> list[int]:
    """Takes `sizes` in turn until they add up to `length`."""
    chunks: list[int] = []
    while sum(chunks) < length:
        chunks.append(min(sizes[len(chunks) % len(sizes)], length - sum(chunks)))
    return chunks


@_every_two(shape=SHAPES, options=OPTIONS, dtype=DTYPES, codes=CODES)
@given(sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5))
@example(sizes=[1000, 1])
@_SETTINGS
def test_attention_gives_the_same_bits_when_a_prompt_is_cut(
    library: NativeLibrary,
    shape: Shape,
    options: AttentionOptions,
    dtype: torch.dtype,
    codes: torch.dtype | None,
    sizes: list[int],
) -> None:
    length = LENGTH if min(sizes) > 30 or sizes == [1000, 1] else 200
    tokens = make_tokens(shape, length, dtype, seed=7)
    (whole,) = _serve(library, shape, options, [tokens], [[length]], codes)
    (cut,) = _serve(library, shape, options, [tokens], [_chunks(length, sizes)], codes)
    assert torch.equal(whole, cut)


@_every_two(shape=SHAPES, options=OPTIONS, dtype=DTYPES, codes=CODES)
@given(lengths=st.lists(st.integers(1, 300), min_size=2, max_size=6), place=st.integers(0, 5))
@_SETTINGS
def test_attention_gives_the_same_bits_when_others_share_the_step(
    library: NativeLibrary,
    shape: Shape,
    options: AttentionOptions,
    dtype: torch.dtype,
    codes: torch.dtype | None,
    lengths: list[int],
    place: int,
) -> None:
    sequences = [make_tokens(shape, n, dtype, seed) for seed, n in enumerate(lengths)]
    cuts = [_chunks(length, [37 + length % 50]) for length in lengths]
    chosen = place % len(lengths)
    together = _serve(library, shape, options, sequences, cuts, codes)
    (alone,) = _serve(library, shape, options, [sequences[chosen]], [cuts[chosen]], codes)
    assert torch.equal(together[chosen], alone)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"blocks_of_{shape.block_size}")
def test_attention_gives_the_same_bits_when_threads_are_more(
    library: NativeLibrary, shape: Shape, dtype: torch.dtype
) -> None:
    sequences = [make_tokens(shape, n, dtype, seed=n) for n in (LENGTH, 40, 130)]
    cuts = [[LENGTH - 1, 1], [39, 1], [64, 66]]
    outputs = []
    for count in (1, 2):
        torch.set_num_threads(count)
        outputs.append(_serve(library, shape, OPTIONS[0], sequences, cuts))
    assert all(map(torch.equal, *outputs))


@pytest.mark.usefixtures("num_threads")
@_every_two(shape=SHAPES, window=(None, 100, 2500), dtype=DTYPES, codes=CODES)
def test_decodes_give_the_same_bits_when_threads_share_a_context(
    library: NativeLibrary,
    shape: Shape,
    dtype: torch.dtype,
    window: int | None,
    codes: torch.dtype | None,
) -> None:
    rows, options = ((4999, 1), (3071, 1), (39, 1)), AttentionOptions(0.3, sliding_window=window)
    problem = make_unwritten_problem(replace(shape, rows=rows), options, dtype)
    outputs = []
    for count in (1, 2, 16):
        torch.set_num_threads(count)
        outputs.append(problem.attend(NativeAttention(library), dtype, codes))
    assert_close(outputs[0], problem.attend(reference, torch.float32, codes))
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])
