"""What is passed to flash-attn 3 and what it cannot do, by an imitation where it is missing."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType

import pytest
import torch

from splitserve_kernels import reference
from splitserve_kernels.gpu.attention.flash_attention_3_rules import (
    flash_attention_3,
    why_no_flash_attention_3,
    why_not_flash_attention_3,
)
from splitserve_kernels.paged_batch import AttentionOptions, build_paged_batch
from tests.kernels.gpu.problems import (
    Problem,
    Shape,
    assert_close,
    attend_by_oracle,
    make_problem,
)
from tests.support.fakes import fake_flash_attn_3

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.attention.flash_attention_3 import FlashAttention3
from splitserve_kernels.gpu.attention.rows_in_sight import rows_in_sight

IS_HERE = why_no_flash_attention_3() is None
DECODES = ((0, 1), (15, 1), (16, 1), (700, 1))
MIXED = ((511, 1), (3, 1), (0, 150), (30, 20), (600, 5))
# Rows without tokens may stand between others.
GAPS = ((9, 0), (0, 1), (70, 1), (300, 0))


@pytest.fixture
def backend() -> FlashAttention3:
    return FlashAttention3(flash_attention_3() if IS_HERE else fake_flash_attn_3)


def _assert_attends(
    backend: FlashAttention3,
    shape: Shape,
    options: AttentionOptions,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    problem = make_problem(shape, device, dtype)
    expected = attend_by_oracle(problem, options)
    if options.sliding_window is not None:
        _give_blocks_back(problem, shape, options.sliding_window)
    actual = backend.paged_attention(
        problem.query, problem.key_pool, problem.value_pool, problem.batch, options
    )
    assert_close(actual, expected)


def _give_blocks_back(problem: Problem, shape: Shape, window: int) -> None:
    """Those wholly behind the window; tables name them still, or nothing, and they are NaN."""
    for row, (computed, _) in enumerate(shape.rows):
        table = problem.batch.block_tables[row]
        num_behind = max(0, computed - window + 1) // shape.block_size
        for block in table[:num_behind].tolist():
            problem.key_pool[block] = torch.nan
            problem.value_pool[block] = torch.nan
        table[:num_behind:2] = -1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("rows", [DECODES, MIXED, GAPS])
def test_flash_attention_3_equals_oracle_when_rows_are_mixed(
    backend: FlashAttention3,
    rows: tuple[tuple[int, int], ...],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    shape = Shape(4, 2, 64, 64, block_size, rows)
    _assert_attends(backend, shape, AttentionOptions(scale=0.3), device, dtype)


@pytest.mark.parametrize("window", [16, 50, 129, 10_000])
@pytest.mark.parametrize("rows", [DECODES, MIXED])
def test_flash_attention_3_sees_the_window_alone_when_it_slides(
    backend: FlashAttention3,
    rows: tuple[tuple[int, int], ...],
    window: int,
    device: torch.device,
) -> None:
    options = AttentionOptions(scale=0.3, sliding_window=window)
    _assert_attends(backend, Shape(4, 2, 64, 64, 16, rows), options, device)


def test_flash_attention_3_equals_oracle_when_scores_are_capped(
    backend: FlashAttention3, device: torch.device
) -> None:
    options = AttentionOptions(0.3, softcap=1.5)
    _assert_attends(backend, Shape(4, 2, 64, 64, 16, MIXED), options, device)


def test_flash_attention_3_equals_oracle_when_values_are_narrower(
    backend: FlashAttention3, device: torch.device
) -> None:
    shape = Shape(4, 2, 192, 128, 16, ((70, 1), (0, 9)))
    _assert_attends(backend, shape, AttentionOptions(scale=0.1), device)


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


def test_flash_attention_3_raises_when_heads_have_sinks(
    backend: FlashAttention3, device: torch.device
) -> None:
    options = AttentionOptions(scale=1.0, sinks=torch.zeros(4))
    problem = make_problem(Shape(4, 2, 64, 64, 16, ((0, 1),)), device)
    with pytest.raises(ValueError, match="sinks"):
        backend.paged_attention(
            problem.query, problem.key_pool, problem.value_pool, problem.batch, options
        )


@pytest.mark.skipif(not IS_HERE, reason="flash-attn 3 is not here")
def test_imitation_has_the_signature_of_flash_attention_3() -> None:
    real, imitated = (
        list(inspect.signature(module.flash_attn_with_kvcache).parameters)
        for module in (flash_attention_3(), fake_flash_attn_3)
    )
    assert set(imitated) <= set(real)


def test_rows_in_sight_name_the_first_block_in_sight_when_others_lie_behind(
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
    ("head_dims", "dtype", "block_size", "window", "has_sinks", "reason"),
    [
        ((128, 128), torch.bfloat16, 16, None, False, None),
        ((256, 256), torch.float16, 1, 4096, False, None),
        ((192, 128), torch.bfloat16, 63, 63, False, None),
        ((64, 512), torch.bfloat16, 16, None, False, None),
        ((128, 128), torch.bfloat16, 64, None, False, "block_size 64: .* allowed: 1 to 63"),
        ((128, 128), torch.float32, 16, None, False, "torch.float32: .* float16 and bfloat16"),
        ((64, 64), torch.bfloat16, 16, None, True, "sinks"),
        ((64, 64), torch.bfloat16, 16, 15, False, "sliding window of 15 in blocks of 16"),
        ((576, 512), torch.bfloat16, 16, None, False, "key heads of 576 and value heads of 512"),
        ((100, 100), torch.bfloat16, 16, None, False, "key heads of 100"),
        ((128, 64), torch.bfloat16, 16, None, False, "no such pair"),
    ],
)
def test_rules_name_what_flash_attention_3_cannot_do(
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    block_size: int,
    window: int | None,
    has_sinks: bool,
    reason: str | None,
) -> None:
    said = why_not_flash_attention_3(
        head_dims, dtype, block_size, window=window, has_sinks=has_sinks
    )
    if reason is None:
        assert said is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(said)


def test_rules_name_the_module_when_flash_attention_3_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("flash_attn_interface", "flash_attn3", "flash_attn3.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    reason = why_no_flash_attention_3()
    assert reason is not None
    assert reason.startswith("flash-attn 3 is not installed: no module flash_attn_interface or")


def test_rules_take_the_build_of_the_hub_when_it_is_the_one_that_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = ModuleType("flash_attn3.flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn3", ModuleType("flash_attn3"))
    monkeypatch.setitem(sys.modules, "flash_attn3.flash_attn_interface", hub)
    assert flash_attention_3() is hub


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        (None, "there is no CUDA device"),
        ((8, 0), "flash-attn 3 is for compute capability 9.0"),
        ((10, 0), "flash-attn 3 is for compute capability 9.0"),
        ((9, 0), None),
    ],
)
def test_rules_name_the_device_when_it_is_no_hopper(
    capability: tuple[int, int] | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert why_no_flash_attention_3() == reason


def test_rules_name_the_error_when_flash_attention_3_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_name: str) -> ModuleType:
        raise ImportError("flash_attn_3/_C.abi3.so: undefined symbol: x\nmore")

    monkeypatch.setattr(importlib, "import_module", fail)
    expected = "flash-attn 3 cannot be imported: flash_attn_3/_C.abi3.so: undefined symbol: x"
    assert why_no_flash_attention_3() == expected
