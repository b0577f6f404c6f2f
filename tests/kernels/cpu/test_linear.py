"""Matrix products with packed weights against float64.

Shape letters: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve_kernels.cpu import (
    NativeAdapter,
    NativeLibrary,
    PackedLinear,
    StepAdapters,
    WeightRows,
    linear,
    linear_adapted,
    pack_update,
)
from splitserve_kernels.cpu import pack as pack_rows
from splitserve_kernels.low_rank_update import LowRankUpdate
from tests.support.covering import covering

pytestmark = pytest.mark.cases(12)

# Relative to the size of an output (see _check): in float32 the rounding of sums of up to 5000
# products, one after the other; in bfloat16 that of the result (2^-9), with as much for the sums.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-8}
DTYPES = tuple(TOLERANCES)
SHAPES = (
    (1, 1, 2),
    (2, 3, 6),
    (5, 17, 34),
    (6, 64, 64),
    (7, 65, 130),
    (13, 31, 1024),
    (192, 33, 1026),  # one block of rows; two of inputs
    (193, 100, 258),
    (8, 8, 4096),
    (200, 300, 4098),
    (3, 129, 5000),
)
_SETTINGS = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def pack(
    library: NativeLibrary, weight: Tensor, bias: Tensor | None = None, *, is_int8: bool = False
) -> PackedLinear:
    return pack_rows(library, WeightRows.of(weight), bias, is_int8=is_int8)


def _random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def _rounded(library: NativeLibrary, weight: Tensor) -> Tensor:
    """Weights [N, K] as they are packed: integers times the scale of an output, in float64.

    Of two integers that are equally near, either may be taken.
    """
    packed = pack(library, weight, is_int8=True)
    assert packed.scales is not None
    scales = packed.scales[: len(weight), None].double()
    steps = linear(library, packed, torch.eye(weight.shape[1], dtype=weight.dtype)).T / scales
    integers = steps.double().round()
    assert (steps - integers).abs().max() <= 127 * 2**-8
    assert integers.abs().amax(dim=1).tolist() == [127] * len(weight)
    assert float((weight.double() / scales - integers).abs().max()) <= 0.5 + 1e-4
    return integers * scales


def _check(
    library: NativeLibrary,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    has_bias: bool,
    is_int8: bool = False,
) -> None:
    num_rows, num_outputs, num_inputs = shape
    weight = _random(num_outputs, num_inputs, dtype=dtype, seed=1)
    rows = _random(num_rows, num_inputs, dtype=dtype, seed=2)
    bias = _random(num_outputs, dtype=dtype, seed=3) if has_bias else None
    actual = linear(library, pack(library, weight, bias, is_int8=is_int8), rows)
    if is_int8:
        weight = _rounded(library, weight)
    wide_bias = torch.zeros(num_outputs).double() if bias is None else bias.double()
    expected = rows.double() @ weight.double().T + wide_bias
    sizes = rows.double().abs() @ weight.double().abs().T + wide_bias.abs()
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    # A sum of K products of random sign is about sqrt(K) of them, not K.
    scale = sizes / num_inputs**0.5 + expected.abs()
    assert float(((actual.double() - expected).abs() / scale).max()) <= TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("shape", "dtype", "has_bias", "is_int8"),
    [
        tuple(case.values())
        for case in covering(
            {"shape": SHAPES, "dtype": DTYPES, "bias": (False, True), "int8": (False, True)},
            strength=2,
        )
    ],
)
def test_linear_equals_float64_when_shapes_are_odd(
    library: NativeLibrary,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    has_bias: bool,
    is_int8: bool,
) -> None:
    _check(library, shape, dtype, has_bias=has_bias, is_int8=is_int8)


@given(
    num_rows=st.integers(1, 200),
    num_outputs=st.integers(1, 300),
    num_words=st.integers(1, 2500),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    is_int8=st.booleans(),
)
@_SETTINGS
def test_linear_equals_float64_when_shapes_are_random(
    library: NativeLibrary,
    num_rows: int,
    num_outputs: int,
    num_words: int,
    has_bias: bool,
    dtype: torch.dtype,
    is_int8: bool,
) -> None:
    shape = (num_rows, num_outputs, 2 * num_words)
    _check(library, shape, dtype, has_bias=has_bias, is_int8=is_int8)


@pytest.mark.parametrize("num_inputs", [1, 3, 63, 2047, 2049, 4999])
def test_linear_equals_float64_when_inputs_are_odd_in_float32(
    library: NativeLibrary, num_inputs: int
) -> None:
    _check(library, (9, 70, num_inputs), torch.float32, has_bias=True)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    order=st.lists(st.integers(0, 6), min_size=1, max_size=130),
    num_inputs=st.sampled_from([2, 66, 1000, 2048, 2050, 4100]),
    is_int8=st.booleans(),
)
@example(order=list(range(7)) * 14, num_inputs=4100, is_int8=False)
@example(order=list(range(7)) * 14, num_inputs=4100, is_int8=True)
@_SETTINGS
def test_linear_gives_the_same_bits_when_rows_share_a_batch(
    library: NativeLibrary, dtype: torch.dtype, order: list[int], num_inputs: int, is_int8: bool
) -> None:
    bias = _random(75, dtype=dtype, seed=3)
    weight = _random(75, num_inputs, dtype=dtype, seed=1)
    weights = pack(library, weight, bias, is_int8=is_int8)
    rows = _random(7, num_inputs, dtype=dtype, seed=2)
    alone = torch.cat([linear(library, weights, row[None]) for row in rows])
    assert torch.equal(linear(library, weights, rows[order]), alone[order])


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gives_the_same_bits_when_threads_are_more(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    weight = _random(300, 2100, dtype=dtype, seed=1)
    rows = _random(250, 2100, dtype=dtype, seed=2)
    packed, outputs = pack(library, weight), []
    for count in (1, 2, 8):  # of few panels, the more threads have smaller blocks of rows
        torch.set_num_threads(count)
        outputs.append(linear(library, packed, rows))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_returns_nothing_when_there_are_no_rows(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    weights = pack(library, _random(5, 8, dtype=dtype, seed=1))
    assert linear(library, weights, torch.empty(0, 8, dtype=dtype)).shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_says_nan_when_a_row_is_nan(library: NativeLibrary, dtype: torch.dtype) -> None:
    rows = _random(9, 64, dtype=dtype, seed=2)
    rows[4, 63] = torch.nan
    output = linear(library, pack(library, _random(70, 64, dtype=dtype, seed=1)), rows)
    assert bool(output[4].isnan().all())
    assert int(output.isnan().sum()) == 70


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_takes_rows_when_they_are_strided(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    weight, rows = _random(20, 16, dtype=dtype, seed=1), _random(10, 32, dtype=dtype, seed=2)
    strided = rows[::2, ::2]
    weights = pack(library, weight.T.contiguous().T)
    assert torch.equal(
        linear(library, weights, strided),
        linear(library, pack(library, weight), strided.contiguous()),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_keeps_the_bias_when_weights_round_to_zero(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    weight = _random(70, 34, dtype=dtype, seed=1)
    weight[3] = 0
    rows, bias = _random(5, 34, dtype=dtype, seed=2), torch.arange(70.0)
    output = linear(library, pack(library, weight, bias, is_int8=True), rows)
    assert output[:, 3].tolist() == [3.0] * 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
def test_pack_makes_an_output_nan_when_a_weight_cannot_be_rounded(
    library: NativeLibrary, dtype: torch.dtype, poison: float
) -> None:
    weight = _random(70, 34, dtype=dtype, seed=1)
    weight[66, 5] = poison
    rows = _random(7, 34, dtype=dtype, seed=2)
    is_nan = linear(library, pack(library, weight, is_int8=True), rows).isnan()
    assert is_nan.nonzero().tolist() == [[row, 66] for row in range(7)]


# -- Rows with adapters ----------------------------------------------------------------------------


def _update(shape: tuple[int, int], rank: int, dtype: torch.dtype, seed: int) -> LowRankUpdate:
    num_outputs, num_inputs = shape
    return LowRankUpdate(
        _random(rank, num_inputs, dtype=dtype, seed=seed) / num_inputs**0.5,
        _random(num_outputs, rank, dtype=dtype, seed=seed + 1),
        0.5,
        _random(num_outputs, dtype=torch.float32, seed=seed + 2),
        1 + 0.1 * _random(num_outputs, dtype=torch.float32, seed=seed + 3),
    )


@pytest.mark.parametrize("shape", [(1, 17, 34), (7, 65, 130), (200, 100, 258)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapted_rows_equal_float64_and_keep_their_bits_alone(
    library: NativeLibrary, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_rows, num_outputs, num_inputs = shape
    weight = _random(num_outputs, num_inputs, dtype=dtype, seed=1)
    rows = _random(num_rows, num_inputs, dtype=dtype, seed=2)
    bias = _random(num_outputs, dtype=dtype, seed=3)
    packed = pack(library, weight, bias)
    updates = [_update((num_outputs, num_inputs), rank, dtype, rank) for rank in (40, 3)]
    outputs = np.arange(num_outputs)
    natives = [
        NativeAdapter(
            library,
            [pack_update(library, [update], [outputs], num_inputs, dtype)],
            None,
            None,
            None,
        )
        for update in updates
    ]
    of_row = (np.arange(num_rows, dtype=np.int32) % 3) - 1

    actual = linear_adapted(library, packed, rows, StepAdapters(natives, of_row))

    plain = linear(library, packed, rows)
    for row, index in enumerate(of_row.tolist()):
        if index < 0:
            assert torch.equal(actual[row], plain[row])
            continue
        alone = StepAdapters([natives[index]], np.zeros(1, np.int32))
        one = rows[row : row + 1]
        assert torch.equal(actual[row], linear_adapted(library, packed, one, alone)[0])
        update, wide = updates[index], rows[row].double()
        assert update.bias is not None
        assert update.gain is not None
        added = update.scale * update.up.double() @ (update.down.double() @ wide)
        expected = update.gain * (weight.double() @ wide + added) + bias.double() + update.bias
        error = float((actual[row].double() - expected).norm() / expected.norm())
        assert error <= TOLERANCES[dtype]
