"""What is passed to flash-attn, and what it cannot do; against an imitation where it is missing."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from splitserve_kernels import reference
from splitserve_kernels.gpu.attention.flash_attention_rules import (
    why_no_flash_attention,
    why_not_flash_attention,
)
from splitserve_kernels.paged_batch import AttentionOptions
from tests.kernels.gpu.problems import Shape, assert_close, attend_by_oracle, make_problem
from tests.support.fakes import fake_flash_attn

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.attention.flash_attention import FlashAttention

DECODES = ((0, 1), (255, 1), (256, 1), (700, 1))
MIXED = ((0, 300), (511, 1), (30, 20), (600, 5))
ACROSS_BLOCKS = ((0, 20), (511, 1), (250, 12))
# Rows without tokens may stand between others.
GAPS = ((9, 0), (0, 1), (70, 1), (300, 0))


@pytest.fixture
def backend() -> FlashAttention:
    if why_no_flash_attention() is None:
        return FlashAttention(importlib.import_module("flash_attn"))
    return FlashAttention(fake_flash_attn)


def _shape(rows: tuple[tuple[int, int], ...], head_dim: int = 32) -> Shape:
    return Shape(4, 2, head_dim, head_dim, 256, rows)


def _assert_attends(
    backend: FlashAttention, shape: Shape, options: AttentionOptions, dtype: torch.dtype
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = make_problem(shape, device, dtype)
    expected = attend_by_oracle(problem, options)
    for pool in (problem.key_pool, problem.value_pool):
        pool.nan_to_num_(nan=3.0)
    if options.sliding_window is not None:
        for row, (computed, _) in enumerate(shape.rows):
            num_behind = max(0, computed - options.sliding_window + 1)
            problem.batch.block_tables[row, : num_behind // shape.block_size] = -1
    actual = backend.paged_attention(
        problem.query, problem.key_pool, problem.value_pool, problem.batch, options
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 128])
@pytest.mark.parametrize("rows", [DECODES, MIXED, GAPS])
def test_flash_attention_equals_oracle_when_rows_are_mixed(
    backend: FlashAttention,
    rows: tuple[tuple[int, int], ...],
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    _assert_attends(backend, _shape(rows, head_dim), AttentionOptions(scale=0.3), dtype)


@pytest.mark.parametrize("window", [1, 9, 256, 10_000])
@pytest.mark.parametrize("rows", [DECODES, MIXED, GAPS])
def test_flash_attention_sees_the_window_alone_when_it_slides(
    backend: FlashAttention, rows: tuple[tuple[int, int], ...], window: int
) -> None:
    options = AttentionOptions(scale=0.3, sliding_window=window)
    _assert_attends(backend, _shape(rows), options, torch.float16)


@pytest.mark.parametrize("rows", [DECODES, MIXED])
def test_flash_attention_equals_oracle_when_scores_are_capped(
    backend: FlashAttention, rows: tuple[tuple[int, int], ...]
) -> None:
    _assert_attends(backend, _shape(rows), AttentionOptions(0.3, softcap=1.5), torch.float16)


def test_flash_attention_reads_what_it_wrote_when_a_step_runs(backend: FlashAttention) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    outputs = []
    for each in (reference, backend):
        problem = make_problem(_shape(ACROSS_BLOCKS), device, torch.float16)
        pools = [pool.nan_to_num_(nan=0.0) for pool in (problem.key_pool, problem.value_pool)]
        generator = torch.Generator().manual_seed(3)
        key, value = torch.randn(2, problem.query.shape[0], 2, 32, generator=generator)
        key, value = key.to(device, torch.float16), value.to(device, torch.float16)
        each.write_kv(key, value, pools[0], pools[1], problem.batch)
        outputs.append(
            each.paged_attention(
                problem.query, pools[0], pools[1], problem.batch, AttentionOptions(scale=0.3)
            )
        )
    assert_close(outputs[1], outputs[0].float().cpu())


def test_flash_attention_raises_when_heads_have_sinks(backend: FlashAttention) -> None:
    options = AttentionOptions(scale=1.0, sinks=torch.zeros(4))
    pool = torch.zeros(1, 256, 2, 8)
    problem = make_problem(_shape(((0, 1),)), torch.device("cpu"))
    with pytest.raises(ValueError, match="sinks"):
        backend.paged_attention(problem.query, pool, pool, problem.batch, options)


@pytest.mark.parametrize(
    ("head_dims", "dtype", "block_size", "has_sinks", "reason"),
    [
        ((128, 128), torch.bfloat16, 256, False, None),
        ((256, 256), torch.float16, 512, False, None),
        ((128, 128), torch.bfloat16, 16, False, "block_size 16: .* multiples of 256"),
        ((128, 128), torch.float32, 256, False, "torch.float32: .* float16 and bfloat16"),
        ((64, 64), torch.bfloat16, 256, True, "sinks"),
        ((192, 128), torch.bfloat16, 256, False, "key heads of 192 and value heads of 128"),
        ((264, 264), torch.bfloat16, 256, False, "heads of 264"),
        ((100, 100), torch.bfloat16, 256, False, "heads of 100"),
    ],
)
def test_rules_name_what_flash_attention_cannot_do(
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    block_size: int,
    has_sinks: bool,
    reason: str | None,
) -> None:
    said = why_not_flash_attention(head_dims, dtype, block_size, has_sinks=has_sinks)
    if reason is None:
        assert said is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(said)


def test_rules_name_the_package_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert why_no_flash_attention() == "flash_attn is not installed"


def test_rules_name_the_device_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_no_flash_attention() == "there is no CUDA device"


def test_rules_name_the_error_when_the_package_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_name: str) -> ModuleType:
        raise ImportError("libtorch.so: undefined symbol: x\nmore")

    monkeypatch.setattr(importlib, "import_module", fail)
    expected = "flash_attn cannot be imported: libtorch.so: undefined symbol: x"
    assert why_no_flash_attention() == expected
