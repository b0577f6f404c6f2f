"""What is passed to flash-attn 2, and what it cannot do, by an imitation where it is missing."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from splitserve_kernels import reference
from splitserve_kernels.gpu.attention.flash_attention_2_op import (
    FlashAttention2Missing,
    load_flash_attention_2,
    why_no_flash_attention_2_device,
    why_not_flash_attention_2,
)
from splitserve_kernels.paged_batch import AttentionOptions, build_paged_batch
from tests.kernels.problems import Shape, assert_close, attend_by_oracle, make_problem
from tests.support.fakes import fake_flash_attn_2

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.attention import backend as triton_backend
from splitserve_kernels.gpu.attention.flash_attention_2 import FlashAttention2

pytestmark = pytest.mark.cases(6)

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
DECODES = ((0, 1), (255, 1), (256, 1), (700, 1))
PROMPTS = ((0, 150), (250, 20), (600, 5))
MIXED = ((511, 1), (3, 1), *PROMPTS)
# Rows without tokens may stand between others.
GAPS = ((9, 0), (0, 1), (70, 1), (300, 0), (260, 30))
SINKS = torch.tensor([-20.0, 0.5, 4.0, 30.0])


class _Counted:
    """The function, with the query starts of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.starts: list[list[int]] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        self.starts.append(named["cu_seqlens_q"].tolist())
        return self.function(*arguments, **named)


@pytest.fixture
def function() -> _Counted:
    if why_no_flash_attention_2_device() is None:
        try:
            return _Counted(load_flash_attention_2())
        except FlashAttention2Missing as error:
            pytest.skip(str(error))
    return _Counted(fake_flash_attn_2.flash_attn_varlen_func)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every prompt filled the device."""
    monkeypatch.setattr(triton_backend, "leaves_room", lambda *_: False)


CASES = [
    *(
        (Shape(4, 2, 64, 64, block_size, rows), AttentionOptions(0.3), dtype)
        for rows in (DECODES, PROMPTS, MIXED, GAPS)
        for block_size, dtype in ((256, BFLOAT16), (512, FLOAT16))
    ),
    *(
        (
            Shape(4, 2, 128, 128, 256, MIXED),
            AttentionOptions(0.1, sliding_window=window, sinks=sinks),
            BFLOAT16,
        )
        for window in (1, 50, 300, 10_000)
        for sinks in (None, SINKS)
    ),
    (Shape(4, 2, 256, 256, 256, MIXED), AttentionOptions(0.1, softcap=1.5), BFLOAT16),
    (Shape(4, 2, 64, 64, 256, MIXED), AttentionOptions(0.3, sinks=SINKS), FLOAT16),
]


@pytest.mark.cases(10)
@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(("shape", "options", "dtype"), CASES)
def test_flash_attention_2_equals_oracle(
    function: _Counted,
    shape: Shape,
    options: AttentionOptions,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(device, dtype))
    problem = make_problem(shape, device, dtype)
    expected = attend_by_oracle(problem, options)
    actual = FlashAttention2(function).paged_attention(
        problem.query, problem.key_pool, problem.value_pool, problem.batch, options
    )
    assert_close(actual, expected)
    # Decodes are not its business.
    num_decodes = problem.batch.num_decodes
    rest = problem.batch.query_starts[num_decodes:].tolist()
    assert function.starts == ([rest] if shape.rows[-1][1] > 1 else [])


def test_flash_attention_2_leaves_steps_to_triton_when_few_tokens_are_new(
    function: _Counted, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "leaves_room", lambda *_: True)
    options = AttentionOptions(0.3)
    problem = make_problem(Shape(4, 2, 64, 64, 256, MIXED), device, BFLOAT16)
    actual = FlashAttention2(function).paged_attention(
        problem.query, problem.key_pool, problem.value_pool, problem.batch, options
    )
    assert_close(actual, attend_by_oracle(problem, options))
    assert function.starts == []


@pytest.mark.usefixtures("full")
def test_flash_attention_2_reads_what_it_wrote_when_a_step_runs(
    function: _Counted, device: torch.device
) -> None:
    outputs = []
    for each in (reference, FlashAttention2(function)):
        problem = make_problem(Shape(4, 2, 64, 64, 256, MIXED), device, FLOAT16)
        generator = torch.Generator().manual_seed(3)
        key, value = torch.randn(2, problem.query.shape[0], 2, 64, generator=generator)
        pools = (problem.key_pool, problem.value_pool)
        each.write_kv(key.to(device, FLOAT16), value.to(device, FLOAT16), *pools, problem.batch)
        options = AttentionOptions(scale=0.3)
        outputs.append(each.paged_attention(problem.query, *pools, problem.batch, options))
    assert_close(outputs[1], outputs[0].float().cpu())


@pytest.mark.usefixtures("full")
def test_flash_attention_2_sees_new_lengths_when_a_batch_is_reused(
    function: _Counted, device: torch.device
) -> None:
    """As when a recorded step is replayed: the tensors of a batch are the same, with other rows."""
    options = AttentionOptions(scale=0.3)
    problem = make_problem(Shape(4, 2, 64, 64, 256, MIXED), device, BFLOAT16)
    attention = FlashAttention2(function)
    for shorter in range(3):
        problem.batch.num_computed_tokens[4] = 600 - 40 * shorter
        actual = attention.paged_attention(
            problem.query, problem.key_pool, problem.value_pool, problem.batch, options
        )
        assert_close(actual, attend_by_oracle(problem, options))


def test_flash_attention_2_returns_nothing_when_there_are_no_rows(
    function: _Counted, device: torch.device
) -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = build_paged_batch(none.view(0, 0), none, none, 256, device)
    pool = torch.zeros(2, 256, 2, 64, device=device, dtype=BFLOAT16)
    query = torch.empty(0, 4, 64, device=device, dtype=BFLOAT16)
    output = FlashAttention2(function).paged_attention(
        query, pool, pool, batch, AttentionOptions(scale=1.0)
    )
    assert output.shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("head_dims", "dtype", "kv_dtype", "block_size", "reason"),
    [
        ((128, 128), BFLOAT16, BFLOAT16, 256, None),
        ((80, 80), FLOAT16, FLOAT16, 512, None),
        ((256, 256), BFLOAT16, BFLOAT16, 256, None),
        ((128, 128), BFLOAT16, BFLOAT16, 16, "block_size 16: .* multiples of 256"),
        ((128, 128), torch.float32, torch.float32, 256, "torch.float32: .* float16 and bfloat16"),
        ((128, 128), BFLOAT16, torch.float8_e4m3fn, 256, "keys and values in torch.float8_e4m3fn"),
        ((192, 128), BFLOAT16, BFLOAT16, 256, "key head size 192 and value head size 128: .*equal"),
        ((100, 100), BFLOAT16, BFLOAT16, 256, "multiples of 8 up to 256"),
        ((512, 512), BFLOAT16, BFLOAT16, 256, "multiples of 8 up to 256"),
    ],
)
def test_rules_name_what_flash_attention_2_cannot_do(
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    reason: str | None,
) -> None:
    said = why_not_flash_attention_2(head_dims, dtype, kv_dtype, block_size)
    assert said is None if reason is None else re.search(reason, str(said))


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        (None, "there is no CUDA device"),
        ((7, 5), "flash-attn 2 requires compute capability 8.0 or later"),
        ((8, 0), None),
        ((12, 0), None),
    ],
)
def test_rules_name_the_device_when_it_is_older_than_ampere(
    capability: tuple[int, int] | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert why_no_flash_attention_2_device() == reason


def _old(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor) -> Tensor: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (None, "is not installed: module 'flash_attn' has no attribute 'flash_attn_varlen_func'"),
        (_old, "flash_attn_varlen_func has no argument block_table"),
    ],
    ids=["another package", "an old one"],
)
def test_load_names_what_is_missing(
    function: Callable[..., Tensor] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("flash_attn")
    if function is not None:
        module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    with pytest.raises(FlashAttention2Missing, match=reason):
        load_flash_attention_2()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'flash_attn'"), "is not installed: No module named"),
        (ImportError("flash_attn_2_cuda.so: undefined symbol: x\nmore"), "undefined symbol: x$"),
    ],
)
def test_load_names_the_error_when_the_package_cannot_be_imported(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(FlashAttention2Missing, match=reason):
        load_flash_attention_2()


def test_load_takes_the_function_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn_2)
    assert load_flash_attention_2() is fake_flash_attn_2.flash_attn_varlen_func
