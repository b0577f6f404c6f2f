"""What is passed to flash-attn 3 and what it cannot do, by an imitation where it is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from splitserve_kernels import reference
from splitserve_kernels.gpu.attention.flash_attention_3_op import (
    INSTALLED,
    FlashAttention3Missing,
    FlashAttention3Op,
    load_flash_attention_3,
    why_no_flash_attention_3_device,
    why_not_flash_attention_3,
)
from splitserve_kernels.paged_batch import AttentionOptions, KVScales, build_paged_batch
from tests.kernels.problems import (
    Problem,
    Shape,
    assert_close,
    attend_by_oracle,
    make_problem,
)
from tests.support.fakes import fake_flash_attn_3

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.attention.flash_attention_3 import FlashAttention3
from splitserve_kernels.gpu.attention.operator_support import rows_in_sight

pytestmark = pytest.mark.cases(8)

FLOAT8 = torch.float8_e4m3fn
DECODES = ((0, 1), (15, 1), (16, 1), (700, 1))
MIXED = ((511, 1), (3, 1), (0, 150), (30, 20), (600, 5))
# Rows without tokens may stand between others.
GAPS = ((9, 0), (0, 1), (70, 1), (300, 0))


class _CountingOp(FlashAttention3Op):
    def __init__(self, namespace: Any) -> None:  # noqa: ANN401
        super().__init__(namespace)
        self.num_metadata = 0
        # The query starts and the number of splits of each call.
        self.calls: list[tuple[list[int], int]] = []

    def forward(self, **arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        self.calls.append((arguments["cu_seqlens_q"].tolist(), arguments["num_splits"]))
        return super().forward(**arguments)

    def scheduler_metadata(self, **arguments: Any) -> Tensor:  # noqa: ANN401
        self.num_metadata += 1
        return super().scheduler_metadata(**arguments)


@pytest.fixture(params=sorted(fake_flash_attn_3.BUILDS))
def op(request: pytest.FixtureRequest) -> FlashAttention3Op:
    if why_no_flash_attention_3_device() is None:
        try:
            return load_flash_attention_3(INSTALLED)
        except FlashAttention3Missing as error:
            pytest.skip(str(error))
    return _CountingOp(fake_flash_attn_3.namespace(request.param))


@pytest.fixture
def backend(op: FlashAttention3Op) -> FlashAttention3:
    return FlashAttention3(op)


def _give_blocks_back(problem: Problem, shape: Shape, window: int) -> None:
    """Those wholly behind the window; tables name them still, or nothing, and they are NaN."""
    for row, (computed, _) in enumerate(shape.rows):
        table = problem.batch.block_tables[row]
        num_behind = max(0, computed - window + 1) // shape.block_size
        for block in table[:num_behind].tolist():
            problem.key_pool[block] = torch.nan
            problem.value_pool[block] = torch.nan
        table[:num_behind:2] = -1


FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
# Some take nearly nothing, some nearly everything, with keys few and many.
SINKS = torch.tensor([-20.0, 0.5, 4.0, 30.0])
CASES: list[tuple[Shape, AttentionOptions, torch.dtype]] = [
    *(
        (Shape(4, 2, 64, 64, block_size, rows), AttentionOptions(scale=0.3), dtype)
        for rows in (DECODES, MIXED, GAPS)
        for block_size in (1, 16, 48)
        for dtype in (FLOAT16, BFLOAT16)
    ),
    *(
        (
            Shape(4, 2, 64, 64, 16, rows),
            AttentionOptions(scale=0.3, sliding_window=window),
            BFLOAT16,
        )
        for rows in (DECODES, MIXED)
        for window in (16, 50, 129, 10_000)
    ),
    (Shape(4, 2, 64, 64, 16, MIXED), AttentionOptions(0.3, softcap=1.5), BFLOAT16),
    # Values are narrower than keys.
    (Shape(4, 2, 192, 128, 16, ((70, 1), (0, 9))), AttentionOptions(scale=0.1), BFLOAT16),
    *(
        (
            Shape(4, 2, 64, 64, 16, MIXED),
            AttentionOptions(scale=0.3, sliding_window=window, sinks=SINKS),
            dtype,
        )
        for window in (None, 50)
        for dtype in (FLOAT16, BFLOAT16)
    ),
]


@pytest.mark.cases(13)
@pytest.mark.parametrize(("shape", "options", "dtype"), CASES)
def test_flash_attention_3_equals_oracle(
    backend: FlashAttention3,
    shape: Shape,
    options: AttentionOptions,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(device, dtype))
    problem = make_problem(shape, device, dtype)
    expected = attend_by_oracle(problem, options)
    if options.sliding_window is not None:
        _give_blocks_back(problem, shape, options.sliding_window)
    actual = backend.paged_attention(
        problem.query, problem.key_pool, problem.value_pool, problem.batch, options
    )
    assert_close(actual, expected)


def test_flash_attention_3_reads_what_it_wrote_when_a_step_runs(
    backend: FlashAttention3, device: torch.device
) -> None:
    outputs = []
    for each in (reference, backend):
        problem = make_problem(Shape(4, 2, 64, 64, 16, MIXED), device, torch.float16)
        generator = torch.Generator().manual_seed(3)
        key, value = torch.randn(2, problem.query.shape[0], 2, 64, generator=generator)
        pools = (problem.key_pool, problem.value_pool)
        key, value = key.to(device, torch.float16), value.to(device, torch.float16)
        each.write_kv(key, value, *pools, problem.batch)
        options = AttentionOptions(scale=0.3)
        outputs.append(each.paged_attention(problem.query, *pools, problem.batch, options))
    assert_close(outputs[1], outputs[0].float().cpu())


def test_flash_attention_3_returns_nothing_when_there_are_no_rows(
    backend: FlashAttention3, device: torch.device
) -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = build_paged_batch(none.view(0, 0), none, none, 16, device)
    pool = torch.zeros(2, 16, 2, 64, device=device, dtype=torch.bfloat16)
    query = torch.empty(0, 4, 64, device=device, dtype=torch.bfloat16)
    output = backend.paged_attention(query, pool, pool, batch, AttentionOptions(scale=1.0))
    assert output.shape == (0, 4, 64)


def _narrow(problem: Problem, scales: KVScales) -> tuple[Problem, Problem]:
    """With float8 pools, and with what these stand for."""
    numbers = [
        (pool / scale).to(FLOAT8)
        for pool, scale in (
            (problem.key_pool, scales.key),
            (problem.value_pool, scales.value),
        )
    ]
    key, value = (pool.float() for pool in numbers)
    return problem.with_pools(*numbers), problem.with_pools(key * scales.key, value * scales.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [DECODES, MIXED])
def test_flash_attention_3_errs_by_rounding_when_pools_are_float8(
    backend: FlashAttention3,
    rows: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    scales = KVScales(key=0.02, value=0.3)
    problem = make_problem(Shape(4, 2, 64, 64, 16, rows), device, torch.bfloat16)
    # Rounded already: what is left are the weights, by 2^-4 of each at most.
    query = problem.query.to(FLOAT8).to(dtype)
    narrow, exact = _narrow(replace(problem, query=query), scales)
    options = AttentionOptions(scale=0.1)
    expected = attend_by_oracle(exact, options)
    actual = backend.paged_attention(
        query, narrow.key_pool, narrow.value_pool, narrow.batch, options, scales
    )
    assert actual.dtype == dtype
    error = (actual.float().cpu() - expected).square().mean().sqrt()
    assert 0 < error < 2.0**-4 * expected.square().mean().sqrt()


def test_flash_attention_3_schedules_once_when_layers_are_alike(
    op: FlashAttention3Op, backend: FlashAttention3, device: torch.device
) -> None:
    if not isinstance(op, _CountingOp):
        pytest.skip("the operator is real")
    plain, windowed = AttentionOptions(scale=0.3), AttentionOptions(scale=0.3, sliding_window=50)
    problem = make_problem(Shape(4, 2, 64, 64, 16, MIXED), device, torch.bfloat16)
    pools = [(problem.key_pool.clone(), problem.value_pool.clone()) for _ in range(4)]
    for num_passes in (1, 2):
        for (key_pool, value_pool), options in zip(pools, (plain, windowed) * 2, strict=True):
            backend.paged_attention(problem.query, key_pool, value_pool, problem.batch, options)
        # Of decodes and of other rows, each with and without the window.
        assert op.num_metadata == 4 * num_passes


def test_flash_attention_3_splits_the_keys_of_decodes_beside_a_prompt(
    op: FlashAttention3Op, backend: FlashAttention3, device: torch.device
) -> None:
    if not isinstance(op, _CountingOp):
        pytest.skip("the operator is real")
    problem = make_problem(Shape(4, 2, 64, 64, 16, MIXED), device, torch.bfloat16)
    backend.paged_attention(
        problem.query, problem.key_pool, problem.value_pool, problem.batch, AttentionOptions(0.3)
    )
    assert op.calls == [([0, 1, 2], 32), ([2, 152, 172, 177], 0)]


def test_flash_attention_3_sees_new_lengths_when_a_batch_is_reused(
    backend: FlashAttention3, device: torch.device
) -> None:
    """As when a recorded step is replayed: the tensors of a batch are the same, with other rows."""
    options = AttentionOptions(scale=0.3)
    problem = make_problem(Shape(4, 2, 64, 64, 16, DECODES), device, torch.bfloat16)
    for shorter in range(3):
        problem.batch.num_computed_tokens[3] = 700 - 40 * shorter
        actual = backend.paged_attention(
            problem.query, problem.key_pool, problem.value_pool, problem.batch, options
        )
        assert_close(actual, attend_by_oracle(problem, options))


def test_rows_in_sight_name_the_first_block_in_sight(
    device: torch.device,
) -> None:
    tables = torch.arange(3 * 300).view(3, 300).to(torch.int32)
    # Of windows of 40 tokens in blocks of 16: from positions 4761, 0 and 61 on.
    computed, new = torch.tensor([4800, 0, 100]), torch.tensor([0, 39, 5])
    batch = build_paged_batch(tables, computed, new, 16, device)
    lengths, in_sight = rows_in_sight(batch, 16, 40)
    assert lengths.tolist() == [4800, 39, 105]
    for row, first in enumerate((297, 0, 3)):
        assert set(in_sight[row, :first].tolist()) <= {300 * row + first}
        assert torch.equal(in_sight[row, first:], tables[row, first:].to(device))
    assert rows_in_sight(batch, 16, None)[1] is batch.block_tables


@pytest.mark.parametrize(
    ("head_dims", "kv_dtype", "reason"),
    [
        ((256, 256), torch.bfloat16, None),
        ((192, 128), torch.bfloat16, "does not support this pair before compute capability 9.0"),
        ((128, 128), FLOAT8, "supports torch.bfloat16 only, before compute capability 9.0"),
    ],
)
def test_rules_are_narrower_before_hopper(
    head_dims: tuple[int, int], kv_dtype: torch.dtype, reason: str | None
) -> None:
    said = why_not_flash_attention_3(head_dims, torch.bfloat16, kv_dtype, 16, None, (8, 6))
    assert said is None if reason is None else re.search(reason, str(said))


@pytest.mark.parametrize(
    ("head_dims", "dtype", "kv_dtype", "block_size", "window", "reason"),
    [
        ((128, 128), torch.bfloat16, torch.bfloat16, 16, None, None),
        ((256, 256), torch.float16, torch.float16, 1, None, None),
        ((64, 64), torch.bfloat16, torch.bfloat16, 63, 63, None),
        ((192, 128), torch.bfloat16, torch.bfloat16, 63, None, None),
        ((64, 512), torch.bfloat16, torch.bfloat16, 16, None, None),
        ((128, 128), torch.float16, FLOAT8, 16, None, None),
        ((128, 128), torch.bfloat16, torch.bfloat16, 64, None, "block_size 64: .*: 1 to 63"),
        ((128, 128), torch.float32, torch.float32, 16, None, "torch.float32: .* float16 and"),
        ((128, 128), torch.bfloat16, torch.float16, 16, None, "keys and values in torch.float16"),
        ((64, 64), torch.bfloat16, torch.bfloat16, 16, 15, "window of 15 with blocks of 16"),
        ((128, 128), torch.bfloat16, torch.bfloat16, 16, 99, "window and head size 128"),
        ((576, 512), torch.bfloat16, torch.bfloat16, 16, None, "key head size 576 and value"),
        ((100, 100), torch.bfloat16, torch.bfloat16, 16, None, "key head size 100"),
        ((128, 64), torch.bfloat16, torch.bfloat16, 16, None, "does not support"),
        ((72, 72), torch.bfloat16, FLOAT8, 16, None, "multiples of 16"),
        ((64, 512), torch.bfloat16, FLOAT8, 16, None, "does not support"),
    ],
)
def test_rules_name_what_flash_attention_3_cannot_do(
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    window: int | None,
    reason: str | None,
) -> None:
    said = why_not_flash_attention_3(head_dims, dtype, kv_dtype, block_size, window)
    assert said is None if reason is None else re.search(reason, str(said))
