"""Matrix products with codes of quantised weights against float64.

Shape letters: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from splitserve_kernels.cpu import (
    GroupPart,
    NativeLibrary,
    PackedLinear,
    WeightRows,
    linear,
    pack,
    pack_groups,
    unpack_outputs,
)
from splitserve_kernels.packed_weight import NotPackable, PackedWeight, StoredWeight
from tests.kernels.cpu.packed_weights import KINDS, NUM_INPUTS, random_weight

pytestmark = pytest.mark.cases(12)

# Relative to the size of an output, see _error: float32 sums, and scales of 11 bits.
TOLERANCE = 1e-5
# The same where rows are rounded to 127 steps.
ROUNDING = 0.05
NUM_OUTPUTS = 100


def _packed(
    library: NativeLibrary, weight: PackedWeight, *, is_exact: bool = False, has_bias: bool = True
) -> PackedLinear:
    num_outputs = weight.shape[0]
    outputs = np.arange(num_outputs, dtype=np.int32)
    bias = torch.arange(num_outputs) / 8 if has_bias else None
    parts = [GroupPart(StoredWeight.of(weight), outputs)]
    return pack_groups(library, parts, num_outputs, bias, is_exact=is_exact)


def _steps(num_rows: int, seed: int = 1) -> Tensor:
    """Rows [M, K] that rounding does not change: 127 steps on either side of 0, by group."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-127, 128, (num_rows, NUM_INPUTS // 32, 32), generator=generator)
    steps[..., 7] = 127
    sizes = torch.randint(-9, -3, (num_rows, NUM_INPUTS // 32, 1), generator=generator)
    return (steps * torch.exp2(sizes.float())).flatten(1)


def _error(actual: Tensor, rows: Tensor, weight: PackedWeight) -> float:
    """The largest error, relative to that of a sum of products of random sign."""
    wide, plain = rows.double(), weight.dequantized(torch.float32).double()
    expected = wide @ plain.T + torch.arange(len(plain)) / 8
    scale = wide.abs() @ plain.abs().T / NUM_INPUTS**0.5 + expected.abs()
    return float(((actual.double() - expected).abs() / scale).max())


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 97])
@pytest.mark.parametrize("kind", KINDS)
def test_linear_equals_float64_when_weights_are_codes(
    library: NativeLibrary, kind: str, num_rows: int
) -> None:
    weight, rows = random_weight(kind, NUM_OUTPUTS), _steps(num_rows)
    if weight.input_order is not None:
        rows = torch.empty_like(rows).index_copy_(1, weight.input_order, rows)
    assert _error(linear(library, _packed(library, weight), rows), rows, weight) <= TOLERANCE


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("float8")])
def test_linear_rounds_rows_to_127_steps_when_weights_are_codes(
    library: NativeLibrary, kind: str
) -> None:
    weight = random_weight(kind, NUM_OUTPUTS)
    rows = torch.randn(9, NUM_INPUTS, generator=torch.Generator().manual_seed(2))
    error = _error(linear(library, _packed(library, weight), rows), rows, weight)
    assert TOLERANCE < error <= ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_linear_does_not_round_rows_when_it_is_exact(library: NativeLibrary, kind: str) -> None:
    weight = random_weight(kind, NUM_OUTPUTS)
    rows = torch.randn(9, NUM_INPUTS, generator=torch.Generator().manual_seed(2))
    packed = _packed(library, weight, is_exact=True)
    assert _error(linear(library, packed, rows), rows, weight) <= TOLERANCE


@pytest.mark.parametrize("num_rows", [1, 9])
def test_linear_never_rounds_rows_when_weights_are_8_bit_floats(
    library: NativeLibrary, num_rows: int
) -> None:
    weight = random_weight("float8_blocks", NUM_OUTPUTS)
    rows = torch.randn(num_rows, NUM_INPUTS, generator=torch.Generator().manual_seed(2))
    assert _error(linear(library, _packed(library, weight), rows), rows, weight) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_outputs_are_dequantised_weights_when_outputs_repeat(
    library: NativeLibrary, kind: str
) -> None:
    weight = random_weight(kind, NUM_OUTPUTS)
    outputs = torch.tensor([0, 99, 17, 33, 17])

    found = unpack_outputs(library, _packed(library, weight), outputs)

    # Scales may be rounded to 11 bits.
    expected = weight.dequantized(torch.float32)[outputs]
    assert float((found - expected).abs().max()) <= 2.0**-11 * float(expected.abs().max())


@pytest.mark.parametrize("kind", ["4_bits", "8_bits", "halves_6_bits"])
def test_unpacked_outputs_are_rounded_once_in_bfloat16(library: NativeLibrary, kind: str) -> None:
    weight = replace(random_weight(kind, NUM_OUTPUTS), dtype=torch.bfloat16)

    found = unpack_outputs(library, _packed(library, weight), torch.arange(NUM_OUTPUTS))

    assert torch.equal(found, weight.dequantized())


@pytest.mark.parametrize("kind", ["4_bits", "8_bits", "halves_6_bits"])
def test_linear_equals_plain_weights_when_it_is_exact_in_bfloat16(
    library: NativeLibrary, kind: str
) -> None:
    weight = replace(random_weight(kind, NUM_OUTPUTS), dtype=torch.bfloat16)
    rows = torch.randn(9, NUM_INPUTS, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = _packed(library, weight, is_exact=True, has_bias=False)
    plain = pack(library, WeightRows.of(weight.dequantized()))
    assert torch.equal(linear(library, packed, rows), linear(library, plain, rows))


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("kind", ["4_bits", "act_order", "blocks_5_bits", "halves_6_bits"])
def test_linear_gives_the_same_bits_when_rows_of_codes_share_a_batch(
    library: NativeLibrary, kind: str, is_exact: bool
) -> None:
    packed = _packed(library, random_weight(kind, NUM_OUTPUTS), is_exact=is_exact)
    rows = torch.randn(7, NUM_INPUTS, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([linear(library, packed, row[None]) for row in rows])
    order = list(range(7)) * 15
    for length in (2, 5, 13, 105):
        assert torch.equal(linear(library, packed, rows[order[:length]]), alone[order[:length]])


@pytest.mark.usefixtures("num_threads")
def test_linear_gives_the_same_bits_when_threads_for_codes_are_more(
    library: NativeLibrary,
) -> None:
    weight, rows = random_weight("4_bits", 300), _steps(110)
    outputs = []
    for count in (1, 2):
        torch.set_num_threads(count)
        outputs.append(linear(library, _packed(library, weight), rows))
    assert torch.equal(*outputs)


def test_linear_says_nan_when_a_row_for_codes_is_nan(library: NativeLibrary) -> None:
    rows = _steps(9)
    rows[4, 63] = torch.nan
    output = linear(library, _packed(library, random_weight("4_bits", 70)), rows)
    assert bool(output[4].isnan().all())
    assert int(output.isnan().sum()) == 70


def test_pack_groups_joins_kinds_when_each_has_panels_of_its_own(library: NativeLibrary) -> None:
    kinds = ("4_bits", "halves_6_bits", "blocks_4_bits")
    weights = [random_weight(kind, 128, seed) for seed, kind in enumerate(kinds)]
    parts = [
        GroupPart(StoredWeight.of(weight), np.arange(128, dtype=np.int32) + 128 * index)
        for index, weight in enumerate(weights)
    ]
    joined, rows = pack_groups(library, parts, 3 * 128), _steps(5)
    apart = [linear(library, _packed(library, each, has_bias=False), rows) for each in weights]
    assert torch.equal(linear(library, joined, rows), torch.cat(apart, dim=1))


@pytest.mark.parametrize(
    ("kind", "num_bits"),
    [("3_bits", 4), ("5_bits", 6), ("8_bits", 8), ("blocks_5_bits", 6), ("halves_6_bits", 6)],
)
def test_codes_take_4_or_6_or_8_bits_in_memory(
    library: NativeLibrary, kind: str, num_bits: int
) -> None:
    weight = random_weight(kind, library.panel)
    packed = _packed(library, weight, has_bias=False)
    bits_per_weight = 8 * packed.panels.nbytes / (library.panel * weight.shape[1])
    # The numbers of a group of 32 take at most 32 bits.
    assert num_bits < bits_per_weight < num_bits + 1.01


def test_pack_groups_raises_when_kinds_share_a_panel(library: NativeLibrary) -> None:
    halves = np.array_split(np.arange(library.panel, dtype=np.int32), 2)
    parts = [
        GroupPart(StoredWeight.of(random_weight(kind, len(outputs))), outputs)
        for kind, outputs in zip(("4_bits", "8_bits"), halves, strict=True)
    ]
    with pytest.raises(NotPackable, match="multiplied together have different formats"):
        pack_groups(library, parts, library.panel)


def test_pack_groups_raises_when_inputs_are_in_other_orders(library: NativeLibrary) -> None:
    parts = [
        GroupPart(
            StoredWeight.of(random_weight("act_order", library.panel, seed)),
            np.arange(library.panel, dtype=np.int32) + seed * library.panel,
        )
        for seed in (0, 1)
    ]
    with pytest.raises(NotPackable, match="inputs in other orders"):
        pack_groups(library, parts, 2 * library.panel)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 24}, "groups have 24 inputs"),
        ({"values": torch.linspace(-1, 1, 16)}, "numbers of codes are no integers"),
    ],
)
def test_pack_groups_raises_when_kernels_do_not_take_weights(
    library: NativeLibrary, changes: dict[str, object], message: str
) -> None:
    weight = replace(random_weight("4_bits", 70), **changes)  # type: ignore[arg-type]
    with pytest.raises(NotPackable, match=message):
        _packed(library, weight)
